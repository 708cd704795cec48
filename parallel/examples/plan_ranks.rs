//! Measures the time and memory to plan a step of 4,096 ranks; prints one line of JSON.
//!
//! `cargo run --release -p dormouse-parallel --example plan_ranks`
//!
//! 64 replicas of 8 pipeline stages of 8 tensor-parallel ranks, whose lists are those of their stage.
//! The batch has 16 groups a replica: a prompt and 16 responses. All in one process: the shares of the
//! replicas, then of every replica its part of the forest, a plan of each group, and the lists of all
//! stages. Each rank of a trainer plans its own replica alone (`replica_seconds`).
//!
//! Lists are those that the adapter of Megatron asks for (python/dormouse/megatron/stage.py): groups as one stream,
//! prompts in as many chunks as an estimate chooses, what a row holds on each stage, and the room of each. The room
//! is too small for the first lists, so the planner searches again with fewer groups and microbatches in flight.
//!
//! `as_one` assigns whole groups, their prompts whole, to replicas by the ends of their lists, in more room.
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::error::Error;
use std::ops::RangeInclusive;
use std::time::Instant;

use dormouse_parallel::balance::{BalanceMethod, BalanceOptions, BalanceUnit, Shares, Workload};
use dormouse_parallel::pipeline::{Pipeline, PipelineOrder, StageBytes, Stages};
use dormouse_schedule::cost::Rates;
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::{Loss, Machine, ModelShape, Plan, PlanOptions, Scoring};
use serde_json::json;

const TENSOR_PARALLEL: u32 = 8;
const STAGES: u32 = 8;
const REPLICAS: u32 = 64;
const GROUPS: usize = 16;
const RESPONSES: usize = 16;
const PROMPT_TOKENS: RangeInclusive<u64> = 1_024..=32_768;
const RESPONSE_TOKENS: RangeInclusive<u64> = 256..=2_048;
const MICROBATCH_TOKENS: u32 = 2_048;
/// Most first lists hold 20 to 60 GB.
const STAGE_ROOM_BYTES: u64 = 6_000_000_000;
/// The longest prompt alone needs 8.4 GB where it is whole.
const WHOLE_ROOM_BYTES: u64 = 20_000_000_000;
/// Gradients of a stage's parameters, in FP32.
const GRADIENT_BYTES: u64 = 2_000_000_000;
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

/// A pipeline of a forest's groups as the adapter of Megatron asks for it, with whole prompts.
fn pipeline(forest: &Forest, room_bytes: u64) -> Result<Pipeline, Box<dyn Error>> {
    let found = Pipeline::of_plans(&plans(forest)?, STAGES, 1)?;
    let row = found.row_bytes;
    let layer_bytes = MODEL.saved_bytes_per_token_layer;
    let own = StageBytes {
        boundary: row.boundary,
        prefix_asleep: row.prefix_saved,
        prefix_working: layer_bytes,
        microbatch_saved: row.microbatch_saved,
        microbatch_working: layer_bytes,
        fixed: GRADIENT_BYTES,
        ..StageBytes::default()
    };
    Ok(Pipeline {
        order: PipelineOrder::Stream,
        chunks: 1,
        chunk_rows_min: MICROBATCH_TOKENS,
        stage_bytes: vec![own; STAGES as usize],
        stage_room_bytes: vec![room_bytes; STAGES as usize],
        ..found
    })
}

/// The number of chunks as `chosen` of python/dormouse/megatron/chunks.py estimates it.
fn chosen_chunks(pipeline: &Pipeline) -> u32 {
    /// A backward pass takes about twice as long as a forward pass.
    const BACKWARD_OVER_FORWARD: f64 = 2.0;
    /// Share of all work by which each further chunk makes it longer.
    const PART_SHARE: f64 = 0.01;
    const CHUNKS_MAX: u64 = 16;
    let prompts: Vec<u64> = pipeline.groups.iter().map(|group| group.prefix_rows).collect();
    let microbatches = || pipeline.groups.iter().flat_map(|group| &group.microbatches);
    let work = prompts.iter().sum::<u64>() + microbatches().map(|it| it.rows).sum::<u64>();
    let longest = prompts.iter().max().copied().unwrap_or(1);
    let [first, last] = [prompts.first(), prompts.last()].map(|rows| rows.copied().unwrap_or(1));
    let ends = [microbatches().next(), microbatches().last()];
    let [first_microbatch, last_microbatch] = ends.map(|it| it.map_or(1, |it| it.rows) as f64);
    let most = |prompt: u64| (prompt / u64::from(MICROBATCH_TOKENS)).max(1);
    let rows = |count: u64| {
        let chunk = |prompt: u64| prompt as f64 / count.min(most(prompt)) as f64;
        let fills = (chunk(first).max(first_microbatch) + chunk(longest)) / 2.0;
        let drains = (chunk(last).max(last_microbatch) + chunk(longest)) / 2.0;
        let waits = f64::from(STAGES - 1) * (fills + BACKWARD_OVER_FORWARD * drains);
        let parts = 1.0 + PART_SHARE * (count - 1) as f64;
        (1.0 + BACKWARD_OVER_FORWARD) * work as f64 * parts + waits
    };
    let counts = 1..=most(longest).min(CHUNKS_MAX);
    counts.min_by(|a, b| rows(*a).total_cmp(&rows(*b))).unwrap_or(1) as u32
}

/// The lists of all stages of the replica that computes `sequences`.
fn replica(forest: &Forest, sequences: &[u32]) -> Result<Stages, Box<dyn Error>> {
    let found = pipeline(&forest.part_of_sequences(sequences)?.forest, STAGE_ROOM_BYTES)?;
    Ok(Pipeline { chunks: chosen_chunks(&found), ..found }.plan()?)
}

/// Replicas and stages planned as one.
fn as_one() -> Result<serde_json::Value, Box<dyn Error>> {
    let (forest, _) = batch()?;
    let begin = Instant::now();
    let found = pipeline(&forest, WHOLE_ROOM_BYTES)?.plan_replicas(REPLICAS)?;
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

/// The lists of all replicas, and the seconds of the one that takes longest.
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
    let mut found = Vec::new();
    for _ in 0..RUNS {
        let begin = Instant::now();
        let (stages, longest) = all()?;
        seconds.push(begin.elapsed().as_secs_f64());
        replica_seconds.push(longest);
        found = stages;
    }
    for each in [&mut seconds, &mut replica_seconds] {
        each.sort_by(f64::total_cmp);
    }
    let lists = || found.iter().flat_map(|all| &all.stages);
    let reports = || found.iter().map(|all| all.report);
    println!(
        "{}",
        json!({
            "ranks": TENSOR_PARALLEL * STAGES * REPLICAS,
            "replicas": REPLICAS,
            "stages": STAGES,
            "tensor_parallel": TENSOR_PARALLEL,
            "groups": REPLICAS as usize * GROUPS,
            "sequences": REPLICAS as usize * GROUPS * RESPONSES,
            "ops": lists().map(|stage| stage.ops.len()).sum::<usize>(),
            "chunks": reports().map(|report| report.chunks).max(),
            "lists_tried": reports().map(|report| report.tried).max(),
            "stage_peak_bytes": lists().map(|stage| stage.peak.bytes).max(),
            "step_ms": reports().map(|report| report.makespan_ns / 1_000_000).max(),
            "seconds": seconds[RUNS / 2],
            "replica_seconds": replica_seconds[RUNS / 2],
            "peak_bytes": peak_bytes()?,
            "as_one": as_one()?,
        })
    );
    Ok(())
}
