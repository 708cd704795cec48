//! What a trainer is told to do.

use serde::{Deserialize, Serialize};

/// Names one op of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OpId(pub u64);

/// Names one node of a plan. A flat group has one, number 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u32);

impl NodeId {
    /// No node: what a microbatch reads whose members share nothing.
    pub const NONE: Self = Self(u32::MAX);
}

/// Half-open run of tokens or rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// First.
    pub begin: u64,
    /// One past the last.
    pub end: u64,
}

impl Span {
    /// How many; none where it ends before it begins.
    #[must_use]
    pub const fn count(self) -> u64 {
        self.end.saturating_sub(self.begin)
    }
}

/// One suffix in a microbatch: the rows of a leaf.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Which response: of several that share all the leaf's rows, one.
    pub sequence: u32,
    /// Its rows in the packed microbatch.
    pub rows: Span,
    /// Position of its first row, as the dense run numbers it.
    pub first_position: u64,
    /// Its input tokens within `[P[-1]] + S_i[:-1]`.
    pub tokens: Span,
    /// The sequence's weight in the loss; which rows carry loss, an op's scores say.
    pub weight: f64,
    /// Its leaf.
    #[serde(default)]
    pub node: NodeId,
}

/// Rows that carry loss: row `rows.begin + k` of the op has label `first_label + k` of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Whose labels.
    pub sequence: u32,
    /// Rows of the op: a microbatch's packed rows, or the node's, counted from its first.
    pub rows: Span,
    /// Position of the first label in the sequence.
    pub first_label: u64,
    /// The sequence's weight in the loss.
    pub weight: f64,
}

/// What becomes of the tensors a node saves for its backward while its subtree runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Residency {
    /// They stay on the device.
    #[default]
    Keep,
    /// They leave the device layer by layer in the forward and come back in the backward.
    Sleep,
    /// There are none: the node runs forward without a graph, and again before its backward.
    Recompute,
}

/// What an op is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum OpKind {
    /// Phase A: run the node's tokens forward; its residency says whether its graph is kept.
    PrefixForward {
        /// Which node.
        node: NodeId,
        /// Positions of the tokens to run: the node's rows.
        tokens: Span,
    },
    /// Phase B: run the members forward and backward in one packed row.
    Microbatch {
        /// Which node they read, with all its ancestors; [`NodeId::NONE`] where they share nothing.
        node: NodeId,
        /// The leaves, in the order of their numbers: sequence order.
        members: Vec<Member>,
        /// Whether it is the node's last microbatch: its backward is next.
        last: bool,
    },
    /// Phase C: run the node forward a second time, now with its graph; its backward is next.
    ForwardAgain {
        /// Which node.
        node: NodeId,
        /// Positions of the tokens to run.
        tokens: Span,
    },
    /// Phase C: run the node backward from its accumulators and its own losses, adding into its
    /// ancestors' accumulators; its own, its K and V and its graph are released with the end.
    PrefixBackward {
        /// Which node.
        node: NodeId,
        /// Layers to wake ahead of need; 0 where nothing sleeps.
        wake_window_layers: u32,
    },
    /// Nothing is left.
    Done,
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Op {
    /// Its name.
    pub id: OpId,
    /// What it is.
    #[serde(flatten)]
    pub kind: OpKind,
    /// The node whose K and V it reads, with those of all that node's ancestors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reads: Option<NodeId>,
    /// Of the node that runs, where one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<Residency>,
    /// The sleeping node whose last layers have left when this op ends, the last of the first part
    /// of its subtree. Where that is all of the subtree (one microbatch, or one child, as blocks have), no
    /// op has this or the next: the window that leaves beside the first part and comes back beside
    /// the last stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asleep: Option<NodeId>,
    /// The sleeping node whose first window of layers comes back from the beginning of this op, the
    /// first of the last part of its subtree: its last microbatch where its children ran before, else the
    /// forward of the child that runs last. Bytes of ops count the window from here to its backward.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waking: Option<NodeId>,
    /// The labels it scores, by member, then by sequence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scores: Vec<Score>,
    /// Bytes of device memory at its most, of what the plan makes.
    #[serde(default)]
    pub device_bytes: u64,
    /// Bytes asleep in host memory at its most.
    #[serde(default)]
    pub host_bytes: u64,
}
