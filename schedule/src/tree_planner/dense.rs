//! Where sharing does not pay: trees, or the ends of trees, better run as separate leaves.
//!
//! A node that is shared costs two ops more than its leaves, and a microbatch that is not full; leaves
//! run separately run its rows once each. Under every node either is chosen, from the leaves up:
//! `shared(v) = run(v) + 2 ops + Σ min(shared(c), separate(c))`,
//! `separate(v) = leaves(v) · run(v) + Σ separate(c)`, the best of all choices of where sharing
//! stops. Microbatches are counted by rows, those of one node rounded up.

use crate::NodeId;
use crate::forest::Forest;
use crate::tree_planner::cost_model::CostModel;
use crate::tree_planner::scores::Scores;
use crate::tree_planner::tree::PlanTree;

#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    /// Seconds of its subtree, where it pays shared.
    best_s: f64,
    /// … all leaves separate.
    separate_s: f64,
    leaves: f64,
    /// Rows of the longest path from it.
    longest: u64,
    /// Rows that run in microbatches of its parent.
    rows_above: f64,
    /// Rows that run in its own microbatches.
    rows: f64,
}

/// By the forest's number, the tops of what runs separately. Nothing where the machine is not known.
pub(crate) fn tops(
    tree: &PlanTree,
    scores: &Scores,
    shape: &CostModel,
    microbatch_rows: u32,
    forest_nodes: usize,
) -> Option<Vec<bool>> {
    shape.flops_per_s.filter(|_| shape.op_s > 0.0)?;
    let mut sums = vec![Sums::default(); tree.len()];
    let mut tops = vec![false; forest_nodes];
    let mut any = false;
    for id in (0..tree.len()).rev() {
        let node = &tree.nodes[id];
        let (rows, scored) = (node.rows, scores.rows[id]);
        let leaf_s = shape.seconds(shape.leaf_flops(rows, scored))?;
        let mut own = sums[id];
        if tree.is_leaf(id) {
            let microbatch_s = shape.op_s * rows.count() as f64 / f64::from(microbatch_rows);
            let run_s = leaf_s + microbatch_s;
            let count = rows.count();
            own = Sums { best_s: run_s, separate_s: run_s, leaves: 1.0, longest: count, ..own };
            own.rows_above = count as f64;
        } else {
            own.longest += rows.count();
            let more = own.leaves * rows.count() as f64;
            own.separate_s += own.leaves * leaf_s + shape.op_s * more / f64::from(microbatch_rows);
            let microbatches = own.rows / f64::from(microbatch_rows);
            own.best_s += shape.seconds(shape.node_flops(rows, scored))?
                + shape.op_s * (2.0 + microbatches.ceil() - microbatches);
            // A microbatch above may need one more op for them.
            if own.separate_s + shape.op_s < own.best_s && own.longest <= microbatch_rows.into() {
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

/// By the forest's number, every node that shares rows and none of whose ancestors does; but where
/// a leaf with all its rows would not fit a microbatch. Nothing where there is none.
pub(crate) fn all(forest: &Forest, microbatch_rows: u64) -> Option<Vec<bool>> {
    let mut tops = vec![false; forest.nodes().len()];
    let mut mark = |top: NodeId| {
        // Its rows begin at 0, so a leaf has as many as they end after.
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
