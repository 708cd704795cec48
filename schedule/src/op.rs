//! Ops and nodes of a plan.

use serde::{Deserialize, Serialize};

/// Identifies an op of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OpId(pub u64);

/// Identifies a node of a forest or plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u32);

impl NodeId {
    /// No node: read by a microbatch whose members share nothing.
    pub const NONE: Self = Self(u32::MAX);
}

/// A half-open range of tokens or rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// First.
    pub begin: u64,
    /// One past the last.
    pub end: u64,
}

impl Span {
    /// Returns its length, 0 if it ends before it begins.
    #[must_use]
    pub const fn count(self) -> u64 {
        self.end.saturating_sub(self.begin)
    }
}

/// One suffix in a microbatch: the rows of a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Its sequence; one of them if several share all rows of the leaf.
    pub sequence: u32,
    /// Its rows in the packed microbatch.
    pub rows: Span,
    /// Position of its first row in the dense run.
    pub first_position: u64,
    /// Its input tokens within `[P[-1]] + S_i[:-1]`.
    pub tokens: Span,
    /// The sequence's weight in the loss. The op's scores list the rows that carry loss.
    pub weight: f64,
    /// Its leaf.
    #[serde(default)]
    pub node: NodeId,
}

/// Rows that carry loss: row `rows.begin + k` of the op predicts label `first_label + k` of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// The sequence of the labels.
    pub sequence: u32,
    /// Rows of the op: packed rows of a microbatch, or rows of the node counted from its first.
    pub rows: Span,
    /// Position of the first label in the sequence.
    pub first_label: u64,
    /// The sequence's weight in the loss.
    pub weight: f64,
}

/// Where the tensors that a node saves for its backward are while its subtree runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Residency {
    /// On the device.
    #[default]
    Keep,
    /// Asleep: they leave the device layer by layer in the forward and come back in the backward.
    Sleep,
    /// Nowhere: the node runs forward without a graph, and again before its backward.
    Recompute,
}

/// The kind of an op.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum OpKind {
    /// Phase A: run the node's tokens forward. The residency states whether its graph is kept.
    PrefixForward {
        /// The node.
        node: NodeId,
        /// Positions of the tokens to run: the node's rows.
        tokens: Span,
    },
    /// Phase B: run the members forward and backward in one packed row.
    Microbatch {
        /// The node that the members read, with all its ancestors; [`NodeId::NONE`] if they share nothing.
        node: NodeId,
        /// The leaves, in ascending order.
        members: Vec<Member>,
        /// Microbatches of the node still to come, plus 1 if other children run after the last of them.
        /// At 0 the node's backward is next.
        microbatches_left: u32,
    },
    /// Phase C: run the node forward a second time, with its graph. Its backward is next.
    ForwardAgain {
        /// The node.
        node: NodeId,
        /// Positions of the tokens to run.
        tokens: Span,
    },
    /// Phase C: run the node backward from its accumulators and its own losses, adding into its
    /// ancestors' accumulators. Its own accumulators, K, V and graph are released at the end.
    PrefixBackward {
        /// The node.
        node: NodeId,
        /// Layers to wake ahead of need; 0 if nothing sleeps.
        wake_window_layers: u32,
    },
    /// The end of the plan.
    Done,
}

/// One step of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Op {
    /// Its id: ids count up from 0.
    pub id: OpId,
    /// Its kind.
    #[serde(flatten)]
    pub kind: OpKind,
    /// The node whose K and V it reads, together with those of all ancestors of that node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads: Option<NodeId>,
    /// Residency of the node that runs, if one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<Residency>,
    /// The sleeping node whose last layers have left when this op, the last of the first part of its
    /// subtree, ends. If the subtree has a single part (one microbatch, or one child as in a chain of
    /// blocks), the window stays, and no op has this field or `waking` set to the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asleep: Option<NodeId>,
    /// The sleeping node whose first window of layers starts to wake with this op, the first of the last
    /// part of its subtree. Bytes of ops include the window from here to the node's backward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waking: Option<NodeId>,
    /// The labels it scores, ordered by member, then by sequence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scores: Vec<Score>,
    /// Peak device memory in bytes of what the plan counts.
    #[serde(default)]
    pub device_bytes: u64,
    /// Peak bytes asleep in host memory.
    #[serde(default)]
    pub host_bytes: u64,
}

/// A node of a plan. Nodes are numbered depth first. Without blocks, dense subtrees and nodes without rows
/// the numbers are the forest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanNode {
    /// Its parent, a smaller number; `None` if it reads nothing.
    pub parent: Option<NodeId>,
    /// Positions of its rows; never empty. Row `r` predicts token `r + 1`.
    pub rows: Span,
    /// One past the last node of its subtree.
    pub subtree_end: u32,
    /// A sequence that contains its tokens.
    pub sequence: u32,
    /// The forest's node that it is, is a block of, or ends in.
    pub origin: NodeId,
    /// Where its saved tensors are; `keep` for a leaf, whose backward is in its microbatch.
    pub residency: Residency,
}
