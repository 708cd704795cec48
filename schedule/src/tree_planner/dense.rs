//! Subtrees that are faster without sharing.
//!
//! A shared node costs a forward and a backward, and a partly filled microbatch; separate leaves run its rows once
//! each. The choice is made from the leaves up:
//! `shared(v) = run(v) + overhead + Σ min(shared(c), separate(c))`,
//! `separate(v) = leaves(v) · run(v) + Σ separate(c)`. This is optimal for microbatches counted by rows, those
//! of one node rounded up.

use crate::NodeId;
use crate::cost::PASSES;
use crate::forest::Forest;
use crate::tree_planner::tree::PlanTree;

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// Seconds of the subtree, with sharing where it pays.
    best_s: f64,
    /// Seconds of the subtree with all leaves separate.
    separate_s: f64,
    leaves: f64,
    /// Rows of the longest path below and including the node.
    longest: u64,
    /// Rows that run in microbatches of the parent.
    rows_above: f64,
    /// Rows that run in the node's microbatches.
    rows: f64,
}

/// Returns the tops of the subtrees that run separately, by the forest's number; `None` if there are none or
/// the machine is unknown.
pub(crate) fn tops(
    tree: &PlanTree,
    microbatch_rows: u32,
    forest_nodes: usize,
) -> Option<Vec<bool>> {
    let model = &tree.model;
    model.kernels.filter(|_| model.op_s > 0.0)?;
    let passes_s = PASSES * model.op_s;
    let mut sums = vec![Sums::default(); tree.len()];
    let mut tops = vec![false; forest_nodes];
    let mut any = false;
    for id in (0..tree.len()).rev() {
        let node = &tree.nodes[id];
        let count = tree.rows(id);
        let leaf_s = model.seconds(tree.leaf_flops(id))?;
        let mut own = sums[id];
        if tree.is_leaf(id) {
            let run_s = leaf_s + passes_s * count as f64 / f64::from(microbatch_rows);
            own = Sums { best_s: run_s, separate_s: run_s, leaves: 1.0, longest: count, ..own };
            own.rows_above = count as f64;
        } else {
            own.longest += count;
            let more = own.leaves * count as f64;
            own.separate_s += own.leaves * leaf_s + passes_s * more / f64::from(microbatch_rows);
            let microbatches = own.rows / f64::from(microbatch_rows);
            own.best_s += model.seconds(tree.node_flops(id))?
                + passes_s * (1.0 + microbatches.ceil() - microbatches);
            // The microbatches above may need one more.
            if own.separate_s + passes_s < own.best_s && own.longest <= microbatch_rows.into() {
                (tops[node.origin.0 as usize], any) = (true, true);
                own.best_s = own.separate_s;
                own.rows_above = own.leaves * own.longest as f64;
            }
        }
        if let Some(parent) = node.parent {
            let above = &mut sums[parent.0 as usize];
            above.best_s += own.best_s;
            above.separate_s += own.separate_s;
            above.leaves += own.leaves;
            above.longest = above.longest.max(own.longest);
            above.rows += own.rows_above;
        }
    }
    any.then_some(tops)
}

/// Returns the topmost nodes that share rows, by the forest's number, without those of which a separate leaf
/// would not fit a microbatch; `None` if there are none.
pub(crate) fn all(forest: &Forest, microbatch_rows: u64) -> Option<Vec<bool>> {
    let mut tops = vec![false; forest.nodes().len()];
    let mut mark = |top: NodeId| {
        // Rows begin at 0, so the end is the number of rows.
        let mut below = top.0..forest.node(top).subtree_end;
        let fits = |id: u32| forest.node(NodeId(id)).rows().end <= microbatch_rows;
        tops[top.0 as usize] = !forest.is_leaf(top) && below.all(fits);
    };
    for root in forest.roots() {
        // A root of one token has no rows to share.
        if forest.node(root).rows().count() > 0 {
            mark(root);
        } else {
            forest.children(root).for_each(&mut mark);
        }
    }
    tops.contains(&true).then_some(tops)
}
