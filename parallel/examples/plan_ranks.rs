//! Measures the time and memory to plan a step of 4,096 ranks; prints one line of JSON.
//!
//! `cargo run --release -p dormouse-parallel --example plan_ranks`
//!
//! 64 replicas of 8 pipeline stages of 8 tensor-parallel ranks, whose lists are those of their stage.
//! The batch has 16 groups a replica: a prompt and 16 responses. All in one process: the shares of the
//! replicas, then of every replica its part of the forest, a plan of each group, and the lists of all
//! stages. Each rank of a trainer plans its own replica alone (`replica_seconds`).
//!
//! `as_one` assigns whole groups to replicas by the ends of their lists, with room for 20 GB on each stage.
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::ops::RangeInclusive;
use std::time::Instant;

use dormouse_parallel::balance::{BalanceMethod, BalanceOptions, BalanceUnit, Shares, Workload};
use dormouse_parallel::pipeline::{Pipeline, Stages};
use dormouse_schedule::cost::Rates;
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::{Loss, Machine, ModelShape, Plan, PlanOptions, Scoring};
use serde_json::json;

const TENSOR_PARALLEL: u32 = 8;
const STAGES: u32 = 8;
const REPLICAS: u32 = 64;
const GROUPS: usize = 16;
const RESPONSES: usize = 16;
const PROMPT_TOKENS: RangeInclusive<u64> = 256..=2_048;
const RESPONSE_TOKENS: RangeInclusive<u64> = 256..=8_192;
const MICROBATCH_TOKENS: u32 = 8_192;
const STAGE_ROOM_BYTES: u64 = 20_000_000_000;
const RUNS: usize = 3;

/// One of eight tensor-parallel parts of a 32-billion-weight decoder: 64 layers of width 5,120.
const MODEL: ModelShape = ModelShape {
    layers: 64,
    heads: 5,
    kv_heads: 1,
    head_dim: 128,
    dtype_bytes: 2,
    layer_linear_weights: 60_948_480,
    kv_linear_weights: 1_310_720,
    last_layer_prefix_weights: 1_310_720,
    head_weights: 97_239_040,
    saved_bytes_per_token_layer: 22_000,
};

/// 400 TFLOP/s reached, 25 GB/s to and from pinned memory.
fn machine() -> Machine {
    Machine {
        flops_per_s: 400_000_000_000_000,
        sleep_bytes_per_s: 25_000_000_000,
        wake_bytes_per_s: 25_000_000_000,
        ..Machine::default()
    }
}

/// The forest of a batch, and the number of each sequence's group. From a generator with a fixed seed.
fn batch() -> Result<(Forest, Vec<u32>), Box<dyn Error>> {
    let mut state = 1_u64;
    let mut random = |range: &RangeInclusive<u64>| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        range.start() + (state >> 33) % (range.end() - range.start() + 1)
    };
    let (mut parents, mut lengths, mut groups) = (Vec::new(), Vec::new(), Vec::new());
    for group in 0..REPLICAS * GROUPS as u32 {
        let root = u32::try_from(parents.len())?;
        parents.push(NO_PARENT);
        lengths.push(random(&PROMPT_TOKENS));
        for _ in 0..RESPONSES {
            parents.push(root);
            lengths.push(random(&RESPONSE_TOKENS));
            groups.push(group);
        }
    }
    Ok((Forest::from_nodes(&parents, &lengths)?, groups))
}

fn shares(forest: &Forest, groups: &[u32]) -> Result<Shares, Box<dyn Error>> {
    let options = BalanceOptions {
        ranks: REPLICAS,
        method: BalanceMethod::Contiguous,
        unit: BalanceUnit::Leaf,
        exchange: false,
        ops_hold_collectives: false,
        microbatch_tokens: MICROBATCH_TOKENS,
        rates: Rates::counted(&MODEL, &machine())?,
        model: MODEL,
        machine: machine(),
    };
    Ok(Shares::new(&Workload { forest, groups, logit_rows: &[] }, &options)?)
}

/// A plan of each group of a forest.
fn plans(forest: &Forest) -> Result<Vec<Plan>, Box<dyn Error>> {
    let options = PlanOptions {
        vocab: 151_936,
        microbatch_rows: MICROBATCH_TOKENS,
        always_share: true,
        runtime_residency: true,
        model: MODEL,
        machine: Some(machine()),
        ..PlanOptions::default()
    };
    let nodes = forest.nodes();
    let mut roots: Vec<usize> =
        (0..nodes.len()).filter(|node| nodes[*node].parent.is_none()).collect();
    roots.push(nodes.len());
    let plan = |ends: &[usize]| -> Result<Plan, Box<dyn Error>> {
        let lengths: Vec<u64> =
            nodes[ends[0]..ends[1]].iter().map(|node| node.tokens.count()).collect();
        let mut parents = vec![0; lengths.len()];
        parents[0] = NO_PARENT;
        let group = Forest::from_nodes(&parents, &lengths)?;
        let scoring = Scoring { loss: Loss::From(lengths[0]), weight: 1.0 };
        Ok(Plan::new(&group, &vec![scoring; group.endings().len()], &options)?)
    };
    roots.windows(2).map(plan).collect()
}

/// A pipeline of a forest's groups. As the adapter of Megatron: prefixes whole.
fn pipeline(forest: &Forest) -> Result<Pipeline, Box<dyn Error>> {
    Ok(Pipeline { chunks: 1, ..Pipeline::of_plans(&plans(forest)?, STAGES, 1)? })
}

/// The lists of all stages of the replica that computes `sequences`.
fn replica(forest: &Forest, sequences: &[u32]) -> Result<Stages, Box<dyn Error>> {
    Ok(pipeline(&forest.part_of_sequences(sequences)?.forest)?.plan()?)
}

/// Replicas and stages planned as one.
fn as_one() -> Result<serde_json::Value, Box<dyn Error>> {
    let (forest, _) = batch()?;
    let begin = Instant::now();
    let stage_room_bytes = vec![STAGE_ROOM_BYTES; STAGES as usize];
    let found = Pipeline { stage_room_bytes, ..pipeline(&forest)? }.plan_replicas(REPLICAS)?;
    let seconds = begin.elapsed().as_secs_f64();
    let peaks = found.replicas.iter().flat_map(|replica| &replica.stages.stages);
    Ok(json!({
        "seconds": seconds,
        "step_ms": found.makespan_ns / 1_000_000,
        "bound_ms": found.bound_ns / 1_000_000,
        "changes_tried": found.tried,
        "stage_peak_bytes": peaks.map(|stage| stage.peak.bytes).max(),
    }))
}

fn all() -> Result<(Vec<Stages>, f64), Box<dyn Error>> {
    let (forest, groups) = batch()?;
    let shares = shares(&forest, &groups)?;
    let (mut stages, mut longest) = (Vec::new(), 0.0_f64);
    for share in &shares.shares {
        let begin = Instant::now();
        stages.push(replica(&forest, &share.sequences)?);
        longest = longest.max(begin.elapsed().as_secs_f64());
    }
    Ok((stages, longest))
}

/// Returns the most resident bytes of this process so far.
fn peak_bytes() -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib: u64 =
        line.ok_or("/proc/self/status has no VmHWM")?.trim_end_matches("kB").trim().parse()?;
    Ok(kib << 10)
}

fn main() -> Result<(), Box<dyn Error>> {
    let (mut seconds, mut replica_seconds) = (Vec::new(), Vec::new());
    let (mut ops, mut step_ns) = (0, 0);
    for _ in 0..RUNS {
        let begin = Instant::now();
        let (stages, longest) = all()?;
        seconds.push(begin.elapsed().as_secs_f64());
        replica_seconds.push(longest);
        ops = stages.iter().flat_map(|all| &all.stages).map(|stage| stage.ops.len()).sum();
        step_ns = stages.iter().map(|all| all.report.makespan_ns).max().unwrap_or(0);
    }
    for each in [&mut seconds, &mut replica_seconds] {
        each.sort_by(f64::total_cmp);
    }
    println!(
        "{}",
        json!({
            "ranks": TENSOR_PARALLEL * STAGES * REPLICAS,
            "replicas": REPLICAS,
            "stages": STAGES,
            "tensor_parallel": TENSOR_PARALLEL,
            "groups": REPLICAS as usize * GROUPS,
            "sequences": REPLICAS as usize * GROUPS * RESPONSES,
            "ops": ops,
            "step_ms": step_ns / 1_000_000,
            "seconds": seconds[RUNS / 2],
            "replica_seconds": replica_seconds[RUNS / 2],
            "peak_bytes": peak_bytes()?,
            "as_one": as_one()?,
        })
    );
    Ok(())
}
