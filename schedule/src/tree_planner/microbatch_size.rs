//! Rows of a microbatch, where the plan is free to choose them.
//!
//! The most that fit leave nothing for what nodes save: all of it sleeps or runs twice. Smaller microbatches
//! are more ops, and let some or all of it stay. So a few sizes are tried, from the most that fit
//! down by halves to the most beside which every node keeps: there only ops are left to pay for.

use crate::Residency;
use crate::limits::{MICROBATCH_HALVINGS_MAX, MICROBATCH_SIZE_NODES_MAX};
use crate::tree_planner::cost_model::CostModel;
use crate::tree_planner::draft::{Draft, ScoredTree};
use crate::tree_planner::request::Request;
use crate::tree_planner::{fit, order};

/// The rows with which nodes and microbatches are predicted to cost least, the most of equals; one where
/// none fit. The most that fit where it is not known what an op costs, or where there are so many
/// nodes that choosing for them again takes long.
pub(crate) fn choose(
    request: &Request<'_>,
    shape: &CostModel,
    laid: &ScoredTree,
    device: u64,
) -> u32 {
    let (tree, scored) = (&laid.tree, &laid.scores.rows[..]);
    let fitting = |choices: &[Residency]| fit::most_rows(tree, scored, shape, device, choices);
    let Some(most) = fitting(&order::ANY) else { return 1 };
    let unknown = shape.flops_per_s.is_none() || shape.op_s == 0.0;
    if unknown || tree.len() > MICROBATCH_SIZE_NODES_MAX {
        return most;
    }
    let least = (most >> MICROBATCH_HALVINGS_MAX).max(1);
    let awake = fitting(&[Residency::Keep]).filter(|rows| *rows >= least);
    let halves = (0..=MICROBATCH_HALVINGS_MAX).map(|half| most >> half);
    let sizes = halves.filter(|rows| *rows > awake.unwrap_or(0)).chain(awake);
    let (mut best, mut best_s) = (most, f64::INFINITY);
    for microbatch_rows in sizes {
        let draft = Draft { request, shape, laid, microbatch_rows, dense: &[] };
        if let Some(cost_s) = draft.cost_s(device, best_s) {
            (best, best_s) = (microbatch_rows, cost_s);
        }
    }
    best
}
