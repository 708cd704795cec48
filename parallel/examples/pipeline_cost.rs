//! Bubbles of one pipeline run in several ways, as JSON: `cargo run --release -p dormouse-parallel
//! --example pipeline_cost`.
//!
//! The case: 4 stages, 4 groups of 8 microbatches, each prefix as costly as 5 microbatches, backward twice forward.
//! `ideal` has no overhead; `real` gives every op 2 % of a microbatch's forward and every transfer 5 %. Then
//! a large plan, and a run of the simulator.

use std::time::Instant;

use dormouse_parallel::pipeline::{
    MemoryBounds, Pipeline, PipelineError, PipelineGroup, PipelineMicrobatch, PipelineOrder,
    PipelineRates, StageShare,
};
use dormouse_parallel::simulate::{BlockSleep, SimulatedRank, SimulatedStep, Tier, World};
use dormouse_schedule::Machine;
use serde_json::json;

/// A microbatch's forward on a whole stage.
const MICROBATCH_NS: u64 = 1_000_000;
const PREFIX_MICROBATCHES: u64 = 5;

fn pipeline(
    virtual_stages: u32,
    order: PipelineOrder,
    chunks: u32,
    rates: PipelineRates,
) -> Pipeline {
    let forward_ns = MICROBATCH_NS / u64::from(virtual_stages);
    let microbatch = PipelineMicrobatch { rows: 1024, forward_ns, backward_ns: 2 * forward_ns };
    let share = |ns: u64| StageShare { linear_ns: PREFIX_MICROBATCHES * ns, pairs_ns: 0 };
    let group = PipelineGroup {
        prefix_rows: 4096,
        forward: share(forward_ns),
        backward: share(2 * forward_ns),
        microbatches: vec![microbatch; 8],
    };
    Pipeline {
        stages: 4,
        virtual_stages,
        groups: vec![group; 4],
        order,
        chunks,
        bounds: MemoryBounds { live_groups_max: 2, in_flight_max: 8 },
        rates,
        ..Pipeline::default()
    }
}

fn main() -> Result<(), PipelineError> {
    let ways = [
        ("whole prefix", PipelineOrder::GroupByGroup, 1),
        ("prefix in 8 chunks", PipelineOrder::GroupByGroup, 8),
        ("whole prefix, one stream", PipelineOrder::Stream, 1),
        ("8 chunks, one stream", PipelineOrder::Stream, 8),
        ("chunks chosen, one stream", PipelineOrder::Stream, 0),
    ];
    let real = PipelineRates {
        op_overhead_ns: MICROBATCH_NS / 50,
        transfer_latency_ns: MICROBATCH_NS / 20,
        ..PipelineRates::default()
    };
    let mut rows = Vec::new();
    for (machine, rates) in [("ideal", PipelineRates::default()), ("real", real)] {
        for virtual_stages in [1, 2] {
            for blocking in [false, true] {
                for (way, order, chunks) in ways {
                    let case =
                        Pipeline { blocking, ..pipeline(virtual_stages, order, chunks, rates) };
                    let begin = Instant::now();
                    let stages = case.plan()?;
                    let seconds = begin.elapsed().as_secs_f64();
                    stages.check(&case)?;
                    let peak = |of: fn(&dormouse_parallel::pipeline::StagePeak) -> u32| {
                        stages.stages.iter().map(|stage| of(&stage.peak)).max()
                    };
                    rows.push(json!({
                        "machine": machine,
                        "virtual_stages": virtual_stages,
                        "blocking": blocking,
                        "way": way,
                        "bubble": stages.report.bubble,
                        "bubble_bound": stages.report.bubble_bound,
                        "chunks": stages.report.chunks,
                        "live_groups": peak(|peak| peak.live_groups),
                        "in_flight": peak(|peak| peak.in_flight),
                        "tried": stages.report.tried,
                        "plan_seconds": seconds,
                    }));
                }
            }
        }
    }
    println!("{:#}", json!({ "cases": rows, "large": large()?, "simulated": simulated() }));
    Ok(())
}

/// A plan of many ops, replayed as ranks.
fn large() -> Result<serde_json::Value, PipelineError> {
    let mut case = pipeline(1, PipelineOrder::Stream, 8, PipelineRates::default());
    let group = case.groups[0].clone();
    (case.stages, case.groups) =
        (16, vec![PipelineGroup { microbatches: vec![group.microbatches[0]; 32], ..group }; 128]);
    case.bounds.in_flight_max = 32;
    let begin = Instant::now();
    let stages = case.plan()?;
    let plan_seconds = begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    stages.check(&case)?;
    let check_seconds = begin.elapsed().as_secs_f64();
    Ok(json!({
        "stages": 16,
        "ops": stages.stages.iter().map(|stage| stage.ops.len()).sum::<usize>(),
        "bubble": stages.report.bubble,
        "tried": stages.report.tried,
        "plan_seconds": plan_seconds,
        "check_seconds": check_seconds,
    }))
}

/// A rank whose blocks sleep and wake, a step for each: three events a block.
fn simulated() -> serde_json::Value {
    const BLOCKS: u32 = 350_000;
    let rate = 1_000_000_000;
    let machine = Machine {
        device_bytes: 1 << 12,
        sleep_bytes_per_s: rate,
        wake_bytes_per_s: rate,
        ..Machine::default()
    };
    let down = |block| SimulatedStep {
        compute_ns: 70,
        allocates: vec![block],
        sleeps: vec![BlockSleep { block, tier: Tier::Host }],
        ..SimulatedStep::default()
    };
    let up = |block| SimulatedStep {
        compute_ns: 90,
        needs: vec![block],
        frees: vec![block],
        wakes: block.checked_sub(8).into_iter().collect(),
        ..SimulatedStep::default()
    };
    let steps = (0..BLOCKS).map(down).chain((0..BLOCKS).rev().map(up)).collect();
    let block_bytes = (0..BLOCKS).map(|block| 40 + u64::from(block % 64)).collect();
    let rank = SimulatedRank { machine, block_bytes, steps };
    let world = World { ranks: vec![rank], ..World::default() };
    let begin = Instant::now();
    let events = world.run().map(|timeline| {
        timeline.ranks.iter().map(|rank| rank.steps.len() + rank.copies.len()).sum::<usize>()
    });
    let seconds = begin.elapsed().as_secs_f64();
    json!({ "events": events.ok(), "seconds": seconds })
}
