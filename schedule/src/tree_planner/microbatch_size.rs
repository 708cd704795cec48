//! The rows of a microbatch, if the options leave them open.
//!
//! The largest microbatches that fit leave no room for saved tensors: all sleep or are recomputed. Smaller
//! microbatches are more ops, but let tensors stay. So a few sizes are tried: halves of the largest, and the
//! largest with which every node keeps its tensors.

use crate::Residency;
use crate::limits::{MICROBATCH_HALVINGS_MAX, MICROBATCH_SIZE_NODES_MAX};
use crate::tree_planner::draft::Draft;
use crate::tree_planner::request::Request;
use crate::tree_planner::tree::PlanTree;
use crate::tree_planner::{fit, order};

/// Returns the rows with the least predicted cost, the largest of equals, and 1 if nothing fits. If the cost
/// of an op is unknown or the tree is too large to try sizes, returns the largest that fit.
pub(crate) fn choose(request: &Request<'_>, tree: &PlanTree, device: u64) -> u32 {
    let Some(most) = fit::most_rows(tree, device, &order::ANY) else { return 1 };
    let unknown = tree.model.kernels.is_none() || tree.model.op_s == 0.0;
    if unknown || tree.len() > MICROBATCH_SIZE_NODES_MAX {
        return most;
    }
    let least = (most >> MICROBATCH_HALVINGS_MAX).max(1);
    let awake = fit::most_rows(tree, device, &[Residency::Keep]).filter(|rows| *rows >= least);
    let halves = (0..=MICROBATCH_HALVINGS_MAX).map(|half| most >> half);
    let sizes = halves.filter(|rows| *rows > awake.unwrap_or(0)).chain(awake);
    let (mut best, mut best_s) = (most, f64::INFINITY);
    for microbatch_rows in sizes {
        let draft = Draft { request, tree, microbatch_rows, dense: &[] };
        if let Some(cost_s) = draft.cost_s(device, best_s) {
            (best, best_s) = (microbatch_rows, cost_s);
        }
    }
    best
}
