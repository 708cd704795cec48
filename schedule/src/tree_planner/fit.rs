//! The largest microbatch that fits, and the error if none does.

use crate::tree_planner::microbatches::SubtreePart;
use crate::tree_planner::order::{LeastMemory, PeakParts};
use crate::tree_planner::tree::PlanTree;
use crate::{Op, OpId, PlanError, Remedy, Residency, bisect};

/// The leaves of one node.
#[derive(Clone, Copy, Debug, Default)]
struct Leaves {
    count: u64,
    rows: u64,
    bytes: u64,
    longest_bytes: u64,
}

impl Leaves {
    /// Adds microbatches that need no less than those the leaves will be packed in.
    fn add_to(&self, parts: &mut PeakParts, microbatch_rows: u64, row_bytes: u64) {
        if self.count == 0 {
            return;
        }
        let full_bytes = microbatch_rows.saturating_mul(row_bytes);
        let bytes = self.longest_bytes.max(full_bytes).min(self.bytes);
        parts.add(bytes, SubtreePart::Microbatch(0));
        // A single leaf is one microbatch of any length.
        if self.count > 1 && self.rows > microbatch_rows {
            parts.add(bytes, SubtreePart::Microbatch(1));
        }
    }
}

/// Returns the maximum rows of a microbatch with which the plan of least memory fits `device` bytes, if every
/// node has one of `choices`. Every microbatch counts as full. `None` if one row does not fit.
pub(crate) fn most_rows(tree: &PlanTree, device: u64, choices: &[Residency]) -> Option<u32> {
    let mut leaves = vec![Leaves::default(); tree.len() + 1];
    for leaf in (0..tree.len()).filter(|id| tree.is_leaf(*id)) {
        let bytes = tree.leaf_bytes(leaf);
        let own = &mut leaves[tree.above(leaf)];
        own.count += 1;
        own.rows += tree.rows(leaf);
        own.bytes = own.bytes.saturating_add(bytes);
        own.longest_bytes = own.longest_bytes.max(bytes);
    }
    let fits = |rows: u32| {
        let add = |node: usize, parts: &mut PeakParts| {
            leaves[node].add_to(parts, rows.into(), tree.model.leaf_bytes(1, 1));
        };
        LeastMemory::of(tree, choices, add).bytes <= device
    };
    let most = leaves.iter().map(|own| own.rows).max().unwrap_or(0);
    let most = u32::try_from(most.max(1)).unwrap_or(u32::MAX);
    if fits(most) {
        return Some(most);
    }
    let too_many = bisect(1, most.into(), |rows| !fits(rows as u32));
    (too_many > 1).then_some(too_many as u32 - 1)
}

/// Returns the error for a tier that is too small, with the op that needs the most of it.
pub(crate) fn too_little(
    tier: &'static str,
    ops: &[Op],
    budget_bytes: u64,
    remedy: Remedy,
    bytes: impl Fn(&Op) -> u64,
) -> PlanError {
    let ops = ops.iter().map(|op| (bytes(op), op.id));
    let most = ops.rev().max_by_key(|(bytes, _)| *bytes);
    let (needed_bytes, op) = most.unwrap_or((0, OpId(0)));
    PlanError::DoesNotFit { tier, op, needed_bytes, budget_bytes, remedy }
}
