//! What is counted of an op, a node, a share or a measured step.
//!
//! Every feature of a set of nodes is the sum over its nodes, so the cost of a share is known from
//! sums along the depth-first order (see `balance`).

use serde::{Deserialize, Serialize};

use crate::forest::{Forest, Node};
use crate::{NodeId, PlanError};

/// Counts. Sums stop at the largest 64-bit number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Features {
    /// Measured steps, 1 for each: what a step costs whatever it holds. No node has any.
    pub steps: u64,
    /// Nodes that have children: each is an op forward and an op backward.
    pub nodes: u64,
    /// Nodes that have none: each is a member of a microbatch.
    pub leaves: u64,
    /// Microbatches. No node has any by itself: leaves share them.
    pub microbatches: u64,
    /// Rows run, forward and backward.
    pub rows: u64,
    /// Rows of nodes that have children: run forward once more where nodes are recomputed.
    pub forward_only_rows: u64,
    /// Rows times tokens of ancestors: pairs of a query and a key of the prefix, per layer.
    pub prefix_pairs: u64,
    /// Pairs of a query and a key of the same node, per layer: causal, the diagonal included.
    pub causal_pairs: u64,
    /// Rows that have logits.
    pub logit_rows: u64,
}

impl Features {
    /// Of one node, `logit_rows` of whose rows have logits.
    #[must_use]
    pub const fn of_node(node: &Node, is_leaf: bool, logit_rows: u64) -> Self {
        let rows = node.rows();
        let (before, count) = (rows.begin, rows.count());
        Self {
            steps: 0,
            nodes: !is_leaf as u64,
            leaves: is_leaf as u64,
            microbatches: 0,
            rows: count,
            forward_only_rows: if is_leaf { 0 } else { count },
            prefix_pairs: count.saturating_mul(before),
            causal_pairs: count.saturating_mul(count + 1) / 2,
            logit_rows,
        }
    }

    /// Of a whole forest computed once, in `microbatches` microbatches of one step.
    ///
    /// # Errors
    /// As [`logit_rows_of`].
    pub fn of_forest(
        forest: &Forest,
        logit_rows: &[u64],
        microbatches: u64,
    ) -> Result<Self, PlanError> {
        let mut sum = Self { steps: 1, microbatches, ..Self::default() };
        for id in 0..forest.nodes().len() as u32 {
            let id = NodeId(id);
            let rows = logit_rows_of(forest, logit_rows, id)?;
            sum = sum.plus(Self::of_node(forest.node(id), forest.is_leaf(id), rows));
        }
        Ok(sum)
    }

    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let (ours, theirs) = (self.to_array(), other.to_array());
        Self::from_array(std::array::from_fn(|i| ours[i].saturating_add(theirs[i])))
    }
}

/// Rows of a node that have logits: as given, one number a node; where none are given, every row
/// but those of roots, which are prompts.
///
/// # Errors
/// `Count` for numbers that are not one a node, or above the node's rows.
pub fn logit_rows_of(forest: &Forest, given: &[u64], id: NodeId) -> Result<u64, PlanError> {
    let nodes = forest.nodes().len();
    let node = forest.node(id);
    let rows = node.rows().count();
    if given.is_empty() {
        return Ok(if node.parent.is_some() { rows } else { 0 });
    }
    if given.len() != nodes {
        return Err(PlanError::Count {
            what: "logit row counts",
            seen: given.len() as u64,
            accepted: format!("{nodes}, one a node, or none"),
        });
    }
    let seen = given[id.0 as usize];
    if seen > rows {
        return Err(PlanError::Count {
            what: "rows with logits of a node",
            seen,
            accepted: format!("0 to {rows}, the rows of node {}", id.0),
        });
    }
    Ok(seen)
}
