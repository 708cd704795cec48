//! Measures the seconds to plan a batch of a million nodes given as lengths.
//!
//! `cargo run --release -p dormouse-schedule --example plan_cost [nodes]` prints one line of JSON:
//! the best of a few runs without memory limit, with a short device, and with a short device and host.
//! Each has figures of the plan, so that results of two machines can be compared.
#![allow(clippy::unwrap_used, reason = "an example fails by panicking")]

#[path = "../tests/suite/batch.rs"]
mod batch;

use std::time::Instant;

use batch::Batch;
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::*;

const NODES: u32 = 1_000_000;
const ROOT_TOKENS: u64 = 4_800;
const DEPTH_MAX: usize = 12;
const RUNS: usize = 3;

/// One root, then turns of 20 to 419 tokens below the previous one or below one of its ancestors.
fn turns(nodes: u32) -> (Vec<u32>, Vec<u64>) {
    // A linear congruential generator: the same forest everywhere.
    let mut state = 1_u64;
    let mut random = |below: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let (mut parents, mut lengths) = (vec![NO_PARENT], vec![ROOT_TOKENS]);
    let mut path = vec![0];
    for id in 1..nodes {
        let up = if path.len() >= DEPTH_MAX { 1 + random(4) } else { random(3) };
        path.truncate((path.len() - (up as usize).min(path.len())).max(1));
        parents.push(*path.last().unwrap());
        lengths.push(20 + random(400));
        path.push(id);
    }
    (parents, lengths)
}

fn batch(nodes: u32, device_bytes: u64, host_bytes: u64) -> Batch {
    let (parents, lengths) = turns(nodes);
    let forest = Forest::from_nodes(&parents, &lengths).unwrap();
    let scored = |sequence: usize| Scoring {
        loss: Loss::From(ROOT_TOKENS),
        weight: 1.0 / (1.0 + sequence as f64),
    };
    Batch {
        scoring: (0..forest.endings().len()).map(scored).collect(),
        forest,
        options: PlanOptions {
            vocab: 151_936,
            microbatch_rows: 2_048,
            block_rows: 2_048,
            device_bytes,
            host_bytes,
            last_layer_dead: true,
            model: ModelShape {
                layers: 28,
                heads: 16,
                kv_heads: 8,
                head_dim: 128,
                dtype_bytes: 2,
                layer_linear_weights: 48_000_000,
                kv_linear_weights: 4_194_304,
                last_layer_prefix_weights: 4_194_304,
                head_weights: 311_164_928,
                saved_bytes_per_token_layer: 70_000,
            },
            machine: Some(Machine {
                flops_per_s: 400_000_000_000_000,
                sleep_bytes_per_s: 250_000_000_000,
                wake_bytes_per_s: 250_000_000_000,
                op_overhead_ns: 200_000,
                ..Machine::default()
            }),
            ..PlanOptions::default()
        },
    }
}

/// Returns the fastest of a few runs and figures of its plan.
fn time(batch: &Batch) -> serde_json::Value {
    let mut best = f64::INFINITY;
    let mut plan = None;
    for _ in 0..RUNS {
        drop(plan.take());
        let start = Instant::now();
        let made = batch.plan();
        best = best.min(start.elapsed().as_secs_f64());
        plan = Some(made);
    }
    let plan = match plan.unwrap() {
        Ok(plan) => plan,
        Err(error) => return serde_json::json!({ "seconds": best, "refused": error.to_string() }),
    };
    let count = |residency| plan.nodes().iter().filter(|it| it.residency == residency).count();
    let scores: usize = plan.ops().iter().map(|op| op.scores.len()).sum();
    serde_json::json!({
        "seconds": best,
        "ops": plan.ops().len(),
        "scores": scores,
        "sleep": count(Residency::Sleep),
        "recompute": count(Residency::Recompute),
        "prediction": plan.predict(),
    })
}

fn main() {
    let nodes = std::env::args().nth(1).map_or(NODES, |text| text.parse().unwrap());
    let json = serde_json::json!({
        "nodes": nodes,
        "plan_nodes_seconds": time(&batch(nodes, 0, 0)),
        "device_short": time(&batch(nodes, 10_500_000_000, 0)),
        "device_and_host_short": time(&batch(nodes, 10_500_000_000, 3_000_000_000)),
    });
    println!("{json}");
}
