//! Seconds: what runs, what waits, and what each choice for a node costs.
//!
//! A node's layers leave while its forward and the first part of its subtree run, and come back
//! while the last part and its backward run. The links' time in those parts goes first to the nodes
//! in them, as if all slept; what is left is the lead of the bound in `stall`. So the stall
//! of a node does not depend on what is chosen for others, and errs towards too long.

use crate::Residency;
use crate::cost::BACKWARD_SHARE;
use crate::tree_planner::cost_model::CostModel;
use crate::tree_planner::microbatches::{EdgeParts, Microbatches, SubtreePart};
use crate::tree_planner::tree::PlanTree;

/// What a byte asleep costs beside stalls, so that none sleeps for nothing: 1 s per 10^15.
const BYTE_ASLEEP_S: f64 = 1e-15;
/// Where seconds are unknown, a byte asleep costs 1 and a byte recomputed so much.
const BYTE_RECOMPUTED: f64 = 1e6;

/// Seconds the two stalls of a sleeping node last.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Stalls {
    /// In its forward, waiting for layers to leave.
    pub(crate) sleep_s: Option<f64>,
    /// In its backward, waiting for layers to come back.
    pub(crate) wake_s: Option<f64>,
}

/// By node, what it costs to choose otherwise than to keep.
#[derive(Clone, Debug)]
pub(crate) struct ResidencyCosts {
    asleep: Vec<f64>,
    again: Vec<f64>,
    pub(crate) stalls: Vec<Stalls>,
}

/// Seconds a part of a subtree runs, and bytes it would move each way if all in it slept.
#[derive(Clone, Copy, Debug, Default)]
struct Interval {
    seconds: f64,
    bytes: f64,
}

impl Interval {
    fn lead_s(&self, bytes_per_s: Option<f64>) -> f64 {
        let busy_s = bytes_per_s.map_or(0.0, |rate| self.bytes / rate);
        (self.seconds - busy_s).max(0.0)
    }
}

impl ResidencyCosts {
    pub(crate) fn new(
        tree: &PlanTree,
        items: &Microbatches,
        scored: &[u64],
        shape: &CostModel,
        ends: &[EdgeParts],
    ) -> Self {
        let count = tree.len();
        let mut costs = Self {
            asleep: vec![0.0; count],
            again: vec![0.0; count],
            stalls: vec![Stalls::default(); count],
        };
        let mut parts = vec![Interval::default(); count];
        for node in (0..count).rev() {
            if tree.is_leaf(node) {
                continue;
            }
            let rows = tree.nodes[node].rows;
            let saved = shape.keeping(rows.count(), scored[node]).saved as f64;
            let Some(train_s) = shape.seconds(shape.node_flops(rows, scored[node])) else {
                costs.asleep[node] = saved;
                costs.again[node] = BYTE_RECOMPUTED * saved;
                continue;
            };
            let part_of = |item: SubtreePart| match item {
                SubtreePart::Node(node) => parts[node as usize],
                SubtreePart::Microbatch(microbatch) => {
                    let run_s = shape.seconds(items.microbatch(microbatch).flops).unwrap_or(0.0);
                    Interval { seconds: run_s + shape.op_s, bytes: 0.0 }
                }
            };
            let mut whole = Interval { seconds: train_s + 2.0 * shape.op_s, bytes: saved };
            for item in items.under(tree, node) {
                let part = part_of(item);
                whole.seconds += part.seconds;
                whole.bytes += part.bytes;
            }
            let end = |item: Option<SubtreePart>| item.map(part_of).unwrap_or_default();
            let (first, last) = (end(ends[node].first), end(ends[node].last));
            let stalls = Stalls {
                sleep_s: shape.sleep_stall_s(
                    rows,
                    scored[node],
                    first.lead_s(shape.sleep_bytes_per_s),
                ),
                wake_s: shape.wake_stall_s(rows, scored[node], last.lead_s(shape.wake_bytes_per_s)),
            };
            parts[node] = whole;
            costs.stalls[node] = stalls;
            costs.asleep[node] = saved * BYTE_ASLEEP_S
                + stalls.sleep_s.unwrap_or(0.0)
                + stalls.wake_s.unwrap_or(0.0);
            costs.again[node] = again_s(train_s, shape);
        }
        costs
    }

    pub(crate) fn of(&self, node: usize, residency: Residency) -> f64 {
        match residency {
            Residency::Keep => 0.0,
            Residency::Sleep => self.asleep[node],
            Residency::Recompute => self.again[node],
        }
    }
}

/// Seconds of a forward that runs again, of a node that trains for so long.
fn again_s(train_s: f64, shape: &CostModel) -> f64 {
    (1.0 - BACKWARD_SHARE) * train_s + shape.op_s
}
