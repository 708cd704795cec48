//! The cost of each residency of each node, in seconds.
//!
//! Layers of a node leave during its forward and the first part of its subtree, and return during the last
//! part and its backward. Link time in those parts is first given to the nodes in them, as if all slept; the
//! rest is the lead of the stall bound. So the stall of a node does not depend on the choices for others, and
//! errs towards too long.

use crate::Residency;
use crate::cost::{BACKWARD_SHARE, PASSES};
use crate::tree_planner::microbatches::{EdgeParts, Microbatches, SubtreePart};
use crate::tree_planner::tree::PlanTree;

/// Cost of a byte asleep in addition to stalls, so that no byte sleeps without need.
const BYTE_ASLEEP_S: f64 = 1e-15;
/// Cost of a recomputed byte if rates are unknown; a byte asleep then costs 1.
const BYTE_RECOMPUTED: f64 = 1e6;

/// The stalls of a sleeping node, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Stalls {
    /// In its forward, until layers have left.
    pub(crate) sleep_s: Option<f64>,
    /// In its backward, until layers have returned.
    pub(crate) wake_s: Option<f64>,
}

/// The costs of sleeping and recomputing, by node.
#[derive(Clone, Debug)]
pub(crate) struct ResidencyCosts {
    asleep: Vec<f64>,
    again: Vec<f64>,
    pub(crate) stalls: Vec<Stalls>,
}

/// Run time of a part of a subtree, and the bytes it would move each way if all its nodes slept.
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
    pub(crate) fn new(tree: &PlanTree, items: &Microbatches, ends: &[EdgeParts]) -> Self {
        let (count, model) = (tree.len(), &tree.model);
        let mut costs = Self {
            asleep: vec![0.0; count],
            again: vec![0.0; count],
            stalls: vec![Stalls::default(); count],
        };
        let mut parts = vec![Interval::default(); count];
        for node in tree.inner_nodes().rev() {
            let saved = tree.node_bytes(node).saved as f64;
            let Some(train_s) = model.seconds(tree.node_flops(node)) else {
                costs.asleep[node] = saved;
                costs.again[node] = BYTE_RECOMPUTED * saved;
                continue;
            };
            let part_of = |item: SubtreePart| match item {
                SubtreePart::Node(node) => parts[node as usize],
                SubtreePart::Microbatch(microbatch) => {
                    let run_s = model.seconds(items.microbatch(microbatch).flops).unwrap_or(0.0);
                    Interval { seconds: run_s + PASSES * model.op_s, bytes: 0.0 }
                }
            };
            let mut whole = Interval { seconds: train_s + PASSES * model.op_s, bytes: saved };
            for part in items.under(tree, node).map(part_of) {
                whole.seconds += part.seconds;
                whole.bytes += part.bytes;
            }
            let lead_s = |item: Option<SubtreePart>, bytes_per_s| {
                item.map(part_of).unwrap_or_default().lead_s(bytes_per_s)
            };
            let (rows, scored) = (tree.nodes[node].rows, tree.scored_rows(node));
            let sleep_lead_s = lead_s(ends[node].first, model.sleep_bytes_per_s);
            let wake_lead_s = lead_s(ends[node].last, model.wake_bytes_per_s);
            let stalls = Stalls {
                sleep_s: model.sleep_stall_s(rows, scored, sleep_lead_s),
                wake_s: model.wake_stall_s(rows, scored, wake_lead_s),
            };
            parts[node] = whole;
            costs.stalls[node] = stalls;
            costs.asleep[node] = saved * BYTE_ASLEEP_S
                + stalls.sleep_s.unwrap_or(0.0)
                + stalls.wake_s.unwrap_or(0.0);
            costs.again[node] = (1.0 - BACKWARD_SHARE) * train_s + model.op_s;
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
