//! Measures the time and memory to build forests; prints one line of JSON.
//!
//! `forest_cost [SEQUENCES [i32|i64]]`, default 20000 i64. Compresses rollouts like those of τ²-bench
//! (`support/rollouts.rs`) from their ids and reports the median of five runs and the peak bytes allocated.
//! The optimum is counted independently: sequences sorted by plain comparison, and the tokens that each
//! adds to the previous one. Also measured: one pass that only reads the ids, adding sequences one at a
//! time, 64 parts, and a forest of 1,000,000 nodes from lengths.
#![allow(clippy::print_stdout, reason = "its output")]
#![expect(unsafe_code, reason = "an allocator that counts")]

#[path = "support/counting.rs"]
mod counting;
#[path = "support/rollouts.rs"]
mod rollouts;

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use counting::Counting;
use dormouse_schedule::PlanError;
use dormouse_schedule::forest::{Forest, GrowingForest, NO_PARENT, TokenInt};
use rollouts::{Random, VOCAB, rollouts};

#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

const SEQUENCES: usize = 20_000;
const RUNS: usize = 5;
const PARTS: usize = 64;
const NODES: usize = 1_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let sequences = arguments.next().map_or(Ok(SEQUENCES), |count| count.parse())?;
    let mut measured = match arguments.next().as_deref() {
        None | Some("i64") => measure::<i64>(sequences)?,
        Some("i32") => measure::<i32>(sequences)?,
        Some(other) => return Err(format!("width {other}; accepted: i32, i64").into()),
    };
    let (parents, lengths) = shape(NODES);
    let (_, seconds) = median(|| Forest::from_nodes(&parents, &lengths))?;
    measured["lengths_nodes"] = NODES.into();
    measured["lengths_seconds"] = seconds.into();
    println!("{measured}");
    Ok(())
}

fn measure<I>(sequences: usize) -> Result<serde_json::Value, PlanError>
where
    I: TokenInt + TryFrom<u32>,
{
    let (ids, offsets) = rollouts::<I>(sequences);
    let input_bytes = size_of_val(ids.as_slice()) + size_of_val(offsets.as_slice());
    let read = || Ok(ids.iter().fold(0_i64, |sum, id| sum.wrapping_add((*id).into())));
    let (_, read_seconds) = median(read)?;
    let from_ids = || Forest::from_ids(&ids, &offsets, &[], VOCAB);
    let (forest, seconds) = median(from_ids)?;
    let (again, bytes) = ALLOCATOR.peak_of(from_ids);
    drop(again?);
    let optimum = optimum(&ids, &offsets);
    let grow = || {
        let mut growing = GrowingForest::new(VOCAB)?;
        for pair in offsets.windows(2) {
            growing.add(&ids[pair[0] as usize..pair[1] as usize], 0)?;
        }
        Ok(growing)
    };
    let (growing, grow_seconds) = median(grow)?;
    let (again, grow_bytes) = ALLOCATOR.peak_of(grow);
    drop(again?);
    let (grown, freeze_seconds) = median(|| Ok(growing.freeze()))?;
    let order = forest.sequences_by_ending();
    let parts = || {
        let part = |own| forest.part_of_sequences(own);
        order.chunks(order.len().div_ceil(PARTS)).map(part).collect::<Result<Vec<_>, _>>()
    };
    let (parts, parts_seconds) = median(parts)?;
    let part_tokens: u64 = parts.iter().map(|part| part.forest.tree_tokens()).sum();
    Ok(serde_json::json!({
        "sequences": sequences,
        "ids": ids.len(),
        "id_bytes": size_of::<I>(),
        "read_seconds": read_seconds,
        "plan_ids_seconds": seconds,
        "plan_ids_bytes": bytes,
        "plan_ids_memory_ratio": (input_bytes + bytes) as f64 / input_bytes as f64,
        "nodes": forest.nodes().len(),
        "leaves": forest.leaves().count(),
        "tree_tokens": forest.tree_tokens(),
        "optimum_tokens": optimum,
        "compression": forest.compression(),
        "tree_compression_over_optimum": optimum as f64 / forest.tree_tokens() as f64,
        "grow_seconds": grow_seconds,
        "grow_bytes": grow_bytes,
        "freeze_seconds": freeze_seconds,
        "grown_is_built": grown == forest,
        "parts": parts.len(),
        "parts_seconds": parts_seconds,
        "parts_tokens_over_tree": part_tokens as f64 / forest.tree_tokens() as f64,
    }))
}

/// Returns the result of `work` and its median seconds.
fn median<T>(work: impl Fn() -> Result<T, PlanError>) -> Result<(T, f64), PlanError> {
    let mut seconds = Vec::with_capacity(RUNS);
    for _ in 1..RUNS {
        let begin = Instant::now();
        drop(black_box(work()?));
        seconds.push(begin.elapsed().as_secs_f64());
    }
    let begin = Instant::now();
    let made = black_box(work()?);
    seconds.push(begin.elapsed().as_secs_f64());
    seconds.sort_by(f64::total_cmp);
    Ok((made, seconds[RUNS / 2]))
}

/// Returns the tokens of the smallest possible forest.
fn optimum<I: TokenInt>(ids: &[I], offsets: &[u64]) -> u64 {
    let of = |pair: &[u64]| &ids[pair[0] as usize..pair[1] as usize];
    let mut sequences: Vec<&[I]> = offsets.windows(2).map(of).collect();
    sequences.sort_unstable();
    let first = sequences.first().map_or(0, |first| first.len());
    let new = |pair: &[&[I]]| {
        let shared = pair[0].iter().zip(pair[1]).take_while(|(a, b)| a == b).count();
        pair[1].len() - shared
    };
    (first + sequences.windows(2).map(new).sum::<usize>()) as u64
}

/// Parents and lengths of a forest whose paths have about twenty nodes.
fn shape(nodes: usize) -> (Vec<u32>, Vec<u64>) {
    let mut random = Random(2);
    let (mut parents, mut path) = (Vec::with_capacity(nodes), Vec::new());
    for id in 0..nodes as u32 {
        // One node in four has a parent further up the path.
        if random.below(4) == 0 && !path.is_empty() {
            path.truncate(random.below(path.len() + 1));
        }
        parents.push(path.last().copied().unwrap_or(NO_PARENT));
        path.push(id);
    }
    let lengths = parents.iter().map(|_| 1 + random.below(512) as u64).collect();
    (parents, lengths)
}
