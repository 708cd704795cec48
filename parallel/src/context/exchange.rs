//! What a context group exchanges while a microbatch runs, and when.
//!
//! A layer's attention needs K and V of all ranks: the prefix's, which are there before the microbatch
//! begins, so that a gather can be issued a whole layer ahead; and the microbatch's own, which exist only
//! once the layer has made them. Backward turns both round: gradients go back to the owners.
//!
//! ```text
//!   forward     layer l−1 ─────────────────► layer l: K, V made ► attention
//!   prefix      issue gather l ░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░░► due
//!   own                                              issue ░░░░░► due
//! ```

use serde::{Deserialize, Serialize};

/// Bytes of K and V per row on one rank (its tensor-parallel share of the heads).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvShape {
    /// Decoder layers.
    pub layers: u32,
    /// Bytes of one row's K and V in one layer.
    pub row_bytes: u64,
    /// Bytes of one row's gK and gV in one layer, as they are sent: FP32 keeps N additions exact.
    pub gradient_row_bytes: u64,
}

/// How long a gathered layer is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gathered {
    /// Until the layer's backward: nothing is sent twice, every layer's view is alive at once.
    #[default]
    Kept,
    /// Until the layer's forward is done; gathered again for its backward.
    Again,
}

/// When gradients of the prefix go to its owners.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduced {
    /// After each layer's backward, in every microbatch: every rank accumulates its own shard only.
    #[default]
    EachMicrobatch,
    /// Once, after the last microbatch: every rank accumulates the whole prefix meanwhile.
    BeforeC,
}

/// Choices that trade bytes sent for bytes held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvExchangeOptions {
    /// How long a gathered layer is kept.
    pub gathered: Gathered,
    /// When gradients of the prefix are reduced.
    pub reduced: Reduced,
}

/// Forward or backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// From the first layer to the last.
    Forward,
    /// From the last layer to the first.
    Backward,
}

/// A moment of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpEdge {
    /// It begins.
    Begin,
    /// Forward: its own K and V exist.
    KvMade,
    /// Its attention begins.
    Attention,
    /// Its attention is done; backward: gradients of K and V exist.
    AttentionDone,
    /// Backward: its K and V projections begin.
    Projections,
    /// It is done.
    End,
}

/// A moment of a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Forward or backward.
    pub pass: Pass,
    /// Which layer.
    pub layer: u32,
    /// Which moment of it.
    pub edge: OpEdge,
}

/// The payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvTransferKind {
    /// The prefix's K and V, from their owners to all.
    GatherPrefix,
    /// The microbatch's own K and V, from their owners to all.
    GatherOwn,
    /// gK and gV of the prefix, summed at their owners.
    ReducePrefix,
    /// gK and gV of the microbatch's own rows, summed at their owners.
    ReduceOwn,
}

/// One collective of the context group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvTransfer {
    /// Which layer.
    pub layer: u32,
    /// The payload.
    pub kind: KvTransferKind,
    /// Earliest moment to issue it.
    pub issue: Mark,
    /// Moment that waits for it.
    pub due: Mark,
    /// Bytes each rank receives, padding included.
    pub received_bytes: u64,
}

/// One layer's K and V of one side, by rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flow {
    /// Bytes of K and V each rank owns, padding cut: what a gather is kept of.
    pub kv_bytes_from: Vec<u64>,
    /// Bytes of gK and gV that end at each rank, padding cut.
    pub gradient_bytes_to: Vec<u64>,
    /// Bytes of K and V each rank sends: equal, so with padding.
    pub kv_bytes_sent: u64,
    /// Bytes of gK and gV each rank ends up with: equal, so with padding.
    pub gradient_bytes_sent: u64,
}

/// Exchanges of a context-parallel group for one microbatch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvExchange {
    /// The prefix's K and V of one layer; all layers are alike.
    pub prefix: Flow,
    /// The microbatch's own.
    pub own: Flow,
    /// A microbatch's collectives, in the order in which every rank issues them.
    pub transfers: Vec<KvTransfer>,
    /// Collectives after the last microbatch: issued by marks of its backward, due by marks of C.
    pub before_c: Vec<KvTransfer>,
    /// Bytes one rank receives for one microbatch, `before_c` apart.
    pub microbatch_bytes: u64,
    /// Most bytes of gathered K and V on one rank.
    pub gathered_peak_bytes: u64,
    /// Most bytes of gK and gV of gathered views on one rank, its own shard's accumulator apart.
    pub gradient_peak_bytes: u64,
}
