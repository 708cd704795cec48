//! The most rows of a microbatch that fit, and what to say where nothing does.

use crate::tree_planner::cost_model::CostModel;
use crate::tree_planner::microbatches::SubtreePart;
use crate::tree_planner::order::{LeastMemory, PeakParts};
use crate::tree_planner::tree::PlanTree;
use crate::{Op, PlanError, Remedy, Residency};

/// The leaves of one node.
#[derive(Clone, Copy, Debug, Default)]
struct Leaves {
    count: u64,
    rows: u64,
    bytes: u64,
    longest_bytes: u64,
}

impl Leaves {
    /// At most what the largest microbatch needs under a budget of rows.
    fn microbatch_bytes(&self, microbatch_rows: u64, row_bytes: u64) -> u64 {
        self.longest_bytes.max(microbatch_rows.saturating_mul(row_bytes)).min(self.bytes)
    }

    /// Adds microbatches that need no less than those the leaves will be packed in.
    fn add_to(&self, parts: &mut PeakParts, microbatch_rows: u64, row_bytes: u64) {
        if self.count == 0 {
            return;
        }
        let bytes = self.microbatch_bytes(microbatch_rows, row_bytes);
        parts.add(bytes, SubtreePart::Microbatch(0));
        // One alone is one microbatch, however long.
        if self.count > 1 && self.rows > microbatch_rows {
            parts.add(bytes, SubtreePart::Microbatch(1));
        }
    }
}

/// The most rows of a microbatch with which the plan that needs least fits `device` bytes, of those in
/// which every node has one of `choices`, counting every microbatch as full; none if one row is too many.
pub(crate) fn most_rows(
    tree: &PlanTree,
    scored: &[u64],
    shape: &CostModel,
    device: u64,
    choices: &[Residency],
) -> Option<u32> {
    let mut leaves = vec![Leaves::default(); tree.len() + 1];
    for leaf in (0..tree.len()).filter(|id| tree.is_leaf(*id)) {
        let rows = tree.nodes[leaf].rows.count();
        let bytes = shape.leaf_bytes(rows, scored[leaf]);
        let own = &mut leaves[tree.above(leaf)];
        own.count += 1;
        own.rows += rows;
        own.bytes = own.bytes.saturating_add(bytes);
        own.longest_bytes = own.longest_bytes.max(bytes);
    }
    let fits = |rows: u32| {
        let add = |node: usize, parts: &mut PeakParts| {
            leaves[node].add_to(parts, rows.into(), shape.row_bytes());
        };
        LeastMemory::of(tree, scored, shape, choices, add).bytes <= device
    };
    let most = leaves.iter().map(|own| own.rows).max().unwrap_or(0);
    let most = u32::try_from(most.max(1)).unwrap_or(u32::MAX);
    if fits(most) {
        return Some(most);
    }
    let (mut least, mut too_many) = (0, most);
    while too_many - least > 1 {
        let rows = least + (too_many - least) / 2;
        if fits(rows) {
            least = rows;
        } else {
            too_many = rows;
        }
    }
    (least > 0).then_some(least)
}

/// Says which of `ops` needs most of a tier that has too little.
pub(crate) fn too_little(
    tier: &'static str,
    ops: &[Op],
    budget_bytes: u64,
    remedy: Remedy,
    bytes: impl Fn(&Op) -> u64,
) -> PlanError {
    let mut needs = (crate::OpId(0), 0);
    for op in ops {
        if bytes(op) > needs.1 {
            needs = (op.id, bytes(op));
        }
    }
    PlanError::DoesNotFit { tier, op: needs.0, needed_bytes: needs.1, budget_bytes, remedy }
}
