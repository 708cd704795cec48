//! What a trainer is told to do.

use serde::{Deserialize, Serialize};

/// Names one op of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OpId(pub u64);

/// Names one node of a plan. A flat group has one, number 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NodeId(pub u32);

/// Half-open run of tokens or rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// First.
    pub begin: u64,
    /// One past the last.
    pub end: u64,
}

impl Span {
    /// How many.
    #[must_use]
    pub const fn count(self) -> u64 {
        self.end - self.begin
    }
}

/// One suffix in a wave.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Which response.
    pub sequence: u32,
    /// Its rows in the packed wave.
    pub rows: Span,
    /// Position of its first row, as the dense run numbers it.
    pub first_position: u64,
    /// Its input tokens within `[P[-1]] + S_i[:-1]`.
    pub tokens: Span,
    /// Its weight in the loss.
    pub weight: f64,
}

/// What an op is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
#[non_exhaustive]
pub enum OpKind {
    /// Phase A: run the node's prompt tokens forward, keeping the graph.
    PrefixForward {
        /// Which node.
        node: NodeId,
        /// Prompt tokens to run.
        tokens: Span,
    },
    /// Phase B: run the members forward and backward in one packed row.
    Wave {
        /// Which node they read.
        node: NodeId,
        /// The suffixes, in sequence order.
        members: Vec<Member>,
        /// Whether it is the node's last wave: its backward is next.
        last: bool,
    },
    /// Phase C: run the node backward from its accumulators.
    NodeBackward {
        /// Which node.
        node: NodeId,
        /// Layers to wake ahead of need.
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
}
