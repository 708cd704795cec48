//! Result of balancing.

use serde::{Deserialize, Serialize};

use super::collective_order::{CollectiveOrder, PassKind};
use dormouse_schedule::cost::Features;
use dormouse_schedule::{NodeId, Span};

/// Version of the JSON form. Within a version, fields are only added.
pub const SHARES_VERSION: u32 = 1;

/// The share of one rank. May be empty.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankShare {
    /// Leaves, as runs in depth-first order; a contiguous share has at most one run.
    pub leaves: Vec<Span>,
    /// Sequences, by leaf, then by number.
    pub sequences: Vec<u32>,
    /// Features of its sub-forest: all nodes on paths of its leaves, and its microbatches.
    pub features: Features,
    /// Time spent computing and exchanging, in picoseconds.
    pub busy_ps: u64,
    /// Finish time of its last op, waits for other ranks included, in picoseconds.
    pub finish_ps: u64,
    /// Time of its share if it computed every node itself, in picoseconds.
    #[serde(default)]
    pub alone_ps: u64,
    /// Dummy microbatches, if ops contain collectives.
    pub dummy_microbatches: u32,
    /// Dummy forwards.
    pub dummy_forwards: u32,
    /// Dummy backwards.
    pub dummy_backwards: u32,
}

/// How ranks obtain a shared node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ExchangeMode {
    /// `from` computes the node, sends K and V to `to`, and receives their gradients.
    Send,
    /// Each rank computes a part of the rows and gathers K and V of the others.
    Divide,
}

/// One exchanged node. Ranks that share a node without an exchange each compute it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixExchange {
    /// The node; has at least one row. Its ancestors are exchanged or computed before it; if ops contain
    /// collectives, all ancestors with rows are exchanged.
    pub node: NodeId,
    /// Exchange mode.
    pub transfer: ExchangeMode,
    /// The rank that computes the node, or the first of those that divide it.
    pub from: u32,
    /// The other ranks; a single one for `Send`.
    pub to: Span,
    /// Bytes of K and V of all rows, transferred after its forward.
    pub kv_bytes: u64,
    /// Bytes of their gradients, transferred before its backward.
    pub gradient_bytes: u64,
    /// Its [`Collective::PrefixForward`] in [`Shares::collectives`].
    pub forward_at: u32,
    /// Its [`Collective::PrefixBackward`].
    pub backward_at: u32,
}

/// A collective, at the same position in every rank's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
#[non_exhaustive]
pub enum Collective {
    /// Forward of an exchanged node, then its K and V. If ops contain collectives, ranks that compute
    /// none of it run a dummy forward, not counted in `dummy_forwards`; likewise for its backward.
    PrefixForward {
        /// Index into [`Shares::exchanges`].
        exchange: u32,
    },
    /// An op that all ranks run, if ops contain collectives.
    Op {
        /// Kind of the op.
        op: PassKind,
    },
    /// Gradients of K and V of an exchanged node, then its backward.
    PrefixBackward {
        /// Index into [`Shares::exchanges`].
        exchange: u32,
    },
    /// Reduction of parameter gradients, once at the end.
    ParameterGradients,
}

/// The shares of all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shares {
    /// [`SHARES_VERSION`].
    pub version: u32,
    /// One per rank.
    pub shares: Vec<RankShare>,
    /// Cost of the whole forest on one rank, in picoseconds.
    pub uncut_ps: u64,
    /// Latest finish time of any rank, in picoseconds.
    pub largest_ps: u64,
    /// `largest_ps` divided by an even share of `uncut_ps`; 1 is perfect.
    pub imbalance: f64,
    /// Lower bound on `largest_ps` for these units, in picoseconds. Without exchange it includes what any
    /// assignment must recompute; with exchange it is an even share or the largest unit.
    pub limit_ps: u64,
    /// `limit_ps` divided by an even share of `uncut_ps`.
    pub limit: f64,
    /// Numbers of the groups with sequences on more than one rank.
    #[serde(default)]
    pub cut_groups: Vec<u32>,
    /// Exchanged nodes, in the order of their forwards.
    pub exchanges: Vec<PrefixExchange>,
    /// All collectives, in order.
    pub collectives: Vec<Collective>,
    /// The order of ops, if ops contain collectives; empty otherwise.
    pub collective_order: CollectiveOrder,
}
