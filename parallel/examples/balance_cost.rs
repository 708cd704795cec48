//! Shares of 8 and 64 data-parallel ranks on forests like τ²-bench's, by several methods, as JSON.
//!
//! `cargo run --release -p dormouse-parallel --example balance_cost`
//!
//! A system prompt that every sequence shares, tasks with a first message, rollouts of a task, and
//! in each rollout a plan that grows by a turn (tool output, message, answer) with a leaf at every
//! turn: the answer with its reasoning, which later turns drop. Only lengths, from a generator with
//! a fixed seed. With 20,000 sequences that share 4,800 tokens, 10^8 dense tokens would be 200 a
//! sequence beyond the prompt and compress at least 24.9 times; so compression and contexts are
//! kept, and there are two batches: one of 20,000 sequences, one of 10^8 dense tokens.
#![allow(clippy::print_stdout, reason = "an example prints")]

use std::collections::BTreeSet;
use std::error::Error;
use std::time::Instant;

use dormouse_parallel::balance::{BalanceMethod, BalanceOptions, BalanceUnit, Shares, Workload};
use dormouse_schedule::cost::Rates;
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::{Machine, ModelShape, NodeId};
use serde_json::{Value, json};

const SYSTEM_TOKENS: u64 = 4_800;
const CONTEXT_TOKENS: u64 = 16_384;
const ROLLOUTS_PER_TASK: u64 = 8;
const SEED: u64 = 0x5eed;

/// A 1.7-billion-weight decoder: 28 layers of width 2,048, 16 heads, 8 of keys and values.
const MODEL: ModelShape = ModelShape {
    layers: 28,
    heads: 16,
    kv_heads: 8,
    head_dim: 128,
    dtype_bytes: 2,
    layer_linear_weights: 50_331_648,
    kv_linear_weights: 4_194_304,
    last_layer_prefix_weights: 4_194_304,
    head_weights: 311_164_928,
    saved_bytes_per_token_layer: 36_864,
};

/// 400 TFLOP/s reached, 50 GB/s from rank to rank, 1 ms an op.
const MACHINE: Machine = Machine {
    flops_per_s: 400_000_000_000_000,
    device_bytes: 0,
    sleep_bytes_per_s: 0,
    wake_bytes_per_s: 0,
    host_bytes: 0,
    nvme_write_bytes_per_s: 0,
    nvme_read_bytes_per_s: 0,
    link_bytes_per_s: 50_000_000_000,
    op_overhead_ns: 1_000_000,
    prefix_attention_flops_per_s: 0,
    causal_attention_flops_per_s: 0,
};

/// splitmix64: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn within(&mut self, least: u64, most: u64) -> u64 {
        least + self.next() % (most - least + 1)
    }
}

/// Parents and lengths of a forest's nodes, and the task of every leaf, up to the requested leaves or
/// dense tokens.
#[derive(Default)]
struct Shape {
    parents: Vec<u32>,
    lengths: Vec<u64>,
    groups: Vec<u32>,
    dense_tokens: u64,
}

impl Shape {
    fn tau2(leaves: usize, dense_tokens: u64) -> Self {
        let (mut shape, mut random) = (Self::default(), Random(SEED));
        let system = shape.node(NO_PARENT, SYSTEM_TOKENS);
        for task in 0.. {
            let first = random.within(150, 450);
            let task_node = shape.node(system, first);
            for _ in 0..ROLLOUTS_PER_TASK {
                let limit = random.within(9_000, CONTEXT_TOKENS);
                let (mut plan, mut context) = (task_node, SYSTEM_TOKENS + first);
                loop {
                    let (leaf, turn) = (random.within(200, 900), random.within(200, 750));
                    shape.leaf(plan, leaf, context, task);
                    if shape.groups.len() == leaves || shape.dense_tokens >= dense_tokens {
                        return shape;
                    }
                    // Room for the turn and for any leaf after it.
                    if context + turn + 900 > limit {
                        break;
                    }
                    plan = shape.node(plan, turn);
                    context += turn;
                }
            }
        }
        shape
    }

    fn node(&mut self, parent: u32, tokens: u64) -> u32 {
        self.parents.push(parent);
        self.lengths.push(tokens);
        self.parents.len() as u32 - 1
    }

    fn leaf(&mut self, parent: u32, tokens: u64, context: u64, group: u32) {
        self.node(parent, tokens);
        self.groups.push(group);
        self.dense_tokens += context + tokens;
    }
}

/// One batch: its forest, its groups.
struct Case {
    forest: Forest,
    groups: Vec<u32>,
}

impl Case {
    fn batch(&self) -> Workload<'_> {
        Workload { forest: &self.forest, groups: &self.groups, logit_rows: &[] }
    }

    fn shares(&self, options: &BalanceOptions) -> Result<Value, Box<dyn Error>> {
        let start = Instant::now();
        let shares = Shares::new(&self.batch(), options)?;
        let seconds = start.elapsed().as_secs_f64();
        let microbatches = shares.shares.iter().map(|share| share.features.microbatches);
        Ok(json!({
            "imbalance": rounded(shares.imbalance),
            "limit": rounded(shares.limit),
            "over_limit": rounded(shares.largest_ps as f64 / shares.limit_ps as f64),
            "largest_s": rounded(shares.largest_ps as f64 * 1e-12),
            "exchanges": shares.exchanges.len(),
            "exchanged_bytes": shares.exchanges.iter().map(|e| e.kv_bytes + e.gradient_bytes).sum::<u64>(),
            "microbatches_most": microbatches.clone().max(),
            "microbatches_least": microbatches.min(),
            "collective_ops": shares.collective_order.kinds.len(),
            "ops_most": shares.collective_order.own.iter().map(Vec::len).max(),
            "plan_s": rounded(seconds),
        }))
    }

    /// Imbalance of shares made with one set of rates at other rates: with sharing, and as a dense run.
    fn priced(&self, options: &BalanceOptions, rates: &Rates) -> Result<Value, Box<dyn Error>> {
        let shares = Shares::new(&self.batch(), options)?;
        let nodes = rates.node_costs_ps(&self.forest, &[], options.microbatch_tokens)?;
        let even = nodes.iter().sum::<u64>() as f64 / f64::from(options.ranks);
        let dense = shares.shares.iter().map(|share| {
            let of = |sequence: &u32| {
                let path = self.forest.path(self.forest.endings()[*sequence as usize].node);
                path.map(|id| nodes[id.0 as usize]).sum::<u64>()
            };
            share.sequences.iter().map(of).sum::<u64>()
        });
        let leaves: Vec<NodeId> = self.forest.leaves().collect();
        let costs = shares.shares.iter().map(|share| {
            let runs = share.leaves.iter().flat_map(|run| run.begin as usize..run.end as usize);
            let paths = runs.flat_map(|leaf| self.forest.path(leaves[leaf])).map(|id| id.0);
            paths.collect::<BTreeSet<u32>>().into_iter().map(|id| nodes[id as usize]).sum::<u64>()
        });
        let ratio = |cost: Option<u64>| {
            cost.map(|cost| rounded(cost as f64 / even)).ok_or("no rank has a share")
        };
        Ok(json!({
            "imbalance": ratio(costs.max())?,
            "imbalance_were_it_run_dense": ratio(dense.max())?,
        }))
    }

    fn report(&self, ranks: u32) -> Result<Value, Box<dyn Error>> {
        let rates = Rates::counted(&MODEL, &MACHINE)?;
        let ours = BalanceOptions {
            ranks,
            method: BalanceMethod::Contiguous,
            unit: BalanceUnit::Leaf,
            exchange: false,
            ops_hold_collectives: false,
            microbatch_tokens: 16_384,
            rates,
            model: MODEL,
            machine: MACHINE,
        };
        let by_tokens = BalanceOptions { rates: Rates { rows: 1e-9, ..Rates::default() }, ..ours };
        let longest = BalanceOptions { method: BalanceMethod::LongestFirst, ..ours };
        Ok(json!({
            "contiguous_recompute": self.shares(&ours)?,
            "contiguous_exchange": self.shares(&BalanceOptions { exchange: true, ..ours })?,
            "contiguous_exchange_collectives":
                self.shares(&BalanceOptions { exchange: true, ops_hold_collectives: true, ..ours })?,
            "contiguous_whole_groups_exchange":
                self.shares(&BalanceOptions { exchange: true, unit: BalanceUnit::Group, ..ours })?,
            "greedy_in_order": self.shares(&BalanceOptions { method: BalanceMethod::Greedy, ..ours })?,
            "contiguous_by_tokens_only": self.priced(&by_tokens, &rates)?,
            "longest_first_sequences": self.priced(&longest, &rates)?,
            "longest_first_groups": self.priced(&BalanceOptions { unit: BalanceUnit::Group, ..longest }, &rates)?,
        }))
    }
}

fn rounded(value: f64) -> f64 {
    (value * 1e5).round() / 1e5
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut report = serde_json::Map::new();
    for (name, leaves, dense_tokens) in
        [("tau2_20000_sequences", 20_000, u64::MAX), ("tau2_100m_tokens", usize::MAX, 100_000_000)]
    {
        let shape = Shape::tau2(leaves, dense_tokens);
        let forest = Forest::from_nodes(&shape.parents, &shape.lengths)?;
        let (dense, tree) = (forest.dense_tokens(), forest.tree_tokens());
        let case = Case { forest, groups: shape.groups };
        let value = json!({
            "sequences": case.groups.len(),
            "nodes": case.forest.nodes().len(),
            "groups": case.groups.last().map(|last| last + 1),
            "dense_tokens": dense,
            "tree_tokens": tree,
            "compression": rounded(dense as f64 / tree as f64),
            "ranks_8": case.report(8)?,
            "ranks_64": case.report(64)?,
        });
        report.insert(name.to_owned(), value);
    }
    println!("{}", serde_json::to_string_pretty(&report)?);
    Ok(())
}
