//! The quantities that determine the cost of an op, a node, a share or a step.
//!
//! The features of a set of nodes are the sum over its nodes, so the cost of a share follows from prefix sums
//! in depth-first order.

use serde::{Deserialize, Serialize};

use crate::forest::{Forest, Node};
use crate::model::count;
use crate::{NodeId, PlanError};

/// Number of features.
pub const FEATURES: usize = 9;

/// Defines [`PerFeature`] and the order of its fields in arrays.
macro_rules! features {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Names of the features, in the order of [`PerFeature::to_array`].
        pub const FEATURE_NAMES: [&str; FEATURES] = [$(stringify!($name)),*];

        /// A number for each feature.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(default)]
        pub struct PerFeature<T: Default> {
            $($(#[$doc])* pub $name: T),*
        }

        impl<T: Default> PerFeature<T> {
            /// Returns the numbers in the order of [`FEATURE_NAMES`].
            pub fn to_array(self) -> [T; FEATURES] {
                [$(self.$name),*]
            }

            /// Creates it from numbers in the order of [`FEATURE_NAMES`].
            pub fn from_array([$($name),*]: [T; FEATURES]) -> Self {
                Self { $($name),* }
            }
        }
    };
}

features! {
    /// Steps: the cost of a step without content. All ranks pay it, so shares leave it out.
    steps,
    /// Nodes with children: each is an op forward and an op backward.
    nodes,
    /// Leaves: each is a member of a microbatch.
    leaves,
    /// Microbatches. Leaves share them, so no node has any of its own.
    microbatches,
    /// Rows run forward and backward.
    rows,
    /// Rows of nodes with children: those that run forward twice if all nodes are recomputed.
    forward_only_rows,
    /// Pairs of a query and a key of the prefix, per layer.
    prefix_pairs,
    /// Causal pairs of a query and a key of the same node, per layer, including the diagonal.
    causal_pairs,
    /// Rows with logits.
    logit_rows,
}

/// Counts. Sums saturate at 64 bits.
pub type Features = PerFeature<u64>;

impl Features {
    /// Returns the features of a node, `logit_rows` of whose rows have logits.
    #[must_use]
    pub fn of_node(node: &Node, is_leaf: bool, logit_rows: u64) -> Self {
        let rows = node.rows();
        let (before, count) = (rows.begin, rows.count());
        Self {
            nodes: u64::from(!is_leaf),
            leaves: u64::from(is_leaf),
            rows: count,
            forward_only_rows: if is_leaf { 0 } else { count },
            prefix_pairs: count.saturating_mul(before),
            causal_pairs: count.saturating_mul(count + 1) / 2,
            logit_rows,
            ..Self::default()
        }
    }

    /// Returns the sum.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        let (ours, theirs) = (self.to_array(), other.to_array());
        Self::from_array(std::array::from_fn(|i| ours[i].saturating_add(theirs[i])))
    }
}

/// Returns the rows of a node with logits. `given` has one number for each node; if it is empty, all rows
/// have logits except those of roots with children, which are prompts.
///
/// # Errors
/// `Count` for a wrong number of entries, or more rows than the node has.
pub fn logit_rows_of(forest: &Forest, given: &[u64], id: NodeId) -> Result<u64, PlanError> {
    let nodes = forest.nodes().len();
    let node = forest.node(id);
    let rows = node.rows().count();
    if given.is_empty() {
        let is_prompt = node.parent.is_none() && !forest.is_leaf(id);
        return Ok(if is_prompt { 0 } else { rows });
    }
    if given.len() != nodes {
        let accepted = format!("0 or {nodes}, one for each node");
        let seen = given.len() as u64;
        return Err(PlanError::Count { what: "logit row counts", seen, accepted });
    }
    let seen = given[id.0 as usize];
    count("rows with logits of a node", seen, 0, rows)?;
    Ok(seen)
}
