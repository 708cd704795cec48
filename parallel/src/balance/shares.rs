//! Who computes what, what it costs, what is exchanged.

use serde::{Deserialize, Serialize};

use super::lockstep::{Kind, Lockstep};
use dormouse_schedule::cost::Features;
use dormouse_schedule::{NodeId, Span};

/// Version of the JSON form. Fields are only added within a version.
pub const SHARES_VERSION: u32 = 1;

/// One rank's share. Empty where there are fewer units than ranks, or fewer ranks do.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Its leaves, as runs in depth-first order; a contiguous share has one run at most.
    pub leaves: Vec<Span>,
    /// Its sequences, by leaf, then number.
    pub sequences: Vec<u32>,
    /// What its sub-forest holds: every node on a path of its leaves, and its microbatches.
    pub features: Features,
    /// What it computes and exchanges, picoseconds.
    pub busy_ps: u64,
    /// Until its last op ends, waiting for other ranks included.
    pub finish_ps: u64,
    /// Dummy microbatches it runs where ops hold collectives.
    pub dummy_microbatches: u32,
    /// Dummy node forwards, likewise.
    pub dummy_forwards: u32,
    /// Dummy node backwards, likewise.
    pub dummy_backwards: u32,
}

/// How a node shared by ranks comes to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Transfer {
    /// `from` computes it, sends K and V to `to`, and is sent their gradients.
    Send,
    /// All of them compute a part of its rows each, and gather the others' K and V.
    Divide,
}

/// One node exchanged. Ranks that share a node and are in no exchange each compute it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exchange {
    /// Which node; it has rows. Those above it are exchanged too, earlier, or computed by each rank
    /// before it; where ops hold collectives, all above it that have rows are exchanged.
    pub node: NodeId,
    /// How.
    pub transfer: Transfer,
    /// The rank that computes it, or the first of those that divide it.
    pub from: u32,
    /// The other ranks, as a run: one where it is sent.
    pub to: Span,
    /// K and V of all its rows, bytes, after its forward.
    pub kv_bytes: u64,
    /// Their gradients, bytes, before its backward.
    pub gradient_bytes: u64,
    /// Its [`Collective::NodeForward`] in [`Shares::collectives`].
    pub forward_at: u32,
    /// Its [`Collective::PrefixBackward`].
    pub backward_at: u32,
}

/// Something ranks do together, at the same place in every rank's order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
#[non_exhaustive]
pub enum Collective {
    /// Forward of an exchanged node, then its K and V. Where ops hold collectives, ranks that compute
    /// none of it run a dummy forward, which `dummy_forwards` does not count; so with its backward.
    NodeForward {
        /// Which of [`Shares::exchanges`].
        exchange: u32,
    },
    /// An op all ranks run, where ops hold collectives.
    Op {
        /// Of this kind.
        op: Kind,
    },
    /// Gradients of an exchanged node's K and V, then its backward.
    PrefixBackward {
        /// Which of [`Shares::exchanges`].
        exchange: u32,
    },
    /// Gradients of the parameters, once, at the end.
    ParameterGradients,
}

/// Shares of all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shares {
    /// [`SHARES_VERSION`].
    pub version: u32,
    /// One a rank.
    pub shares: Vec<Share>,
    /// The whole forest on one rank, picoseconds.
    pub uncut_ps: u64,
    /// The last rank's finish.
    pub largest_ps: u64,
    /// `largest_ps` over an even part of `uncut_ps`: 1 is perfect.
    pub imbalance: f64,
    /// No shares of these units end sooner: a lower bound on `largest_ps`. Without exchange it
    /// counts what must be computed more than once, however leaves are assigned; with exchange, an
    /// even part, or the unit that no cutting helps.
    pub limit_ps: u64,
    /// `limit_ps` over an even part of `uncut_ps`.
    pub limit: f64,
    /// Groups with sequences on more than one rank, by number, where groups are given.
    #[serde(default)]
    pub cut_groups: Vec<u32>,
    /// Nodes exchanged, in the order of their forwards.
    pub exchanges: Vec<Exchange>,
    /// Everything ranks do together, in order.
    pub collectives: Vec<Collective>,
    /// Where ops hold collectives, each rank's own ops among them; else empty.
    pub lockstep: Lockstep,
}
