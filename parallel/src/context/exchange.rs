//! Exchanges of a context group while a microbatch runs.
//!
//! A layer's attention needs K and V of all ranks. The prefix's exist before the microbatch begins, so their
//! gather is issued one layer ahead; the microbatch's own exist once the layer has computed them. In the
//! backward, gradients return to the owners. A ring passes each rank's block by in the layer that reads it, and
//! holds two.
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
    /// Bytes of one row's gK and gV in one layer, as sent: those of FP32 accumulators, or fewer if each rank
    /// sends what it has and the owner adds in FP32.
    pub gradient_row_bytes: u64,
    /// Bytes of their FP32 accumulators, which go round a ring, or wait for C on every rank; none:
    /// `gradient_row_bytes`.
    #[serde(default)]
    pub accumulator_row_bytes: Option<u64>,
}

/// Lifetime of a gathered layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gathered {
    /// Until the layer's backward: nothing is sent twice, all layers are alive at once.
    #[default]
    Kept,
    /// Until the end of the layer's forward; gathered again for its backward.
    Again,
}

/// When gradients of the prefix are reduced at their owners.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduced {
    /// After each layer's backward in every microbatch: each rank accumulates only its shard.
    #[default]
    EachMicrobatch,
    /// Once, after the last microbatch: each rank accumulates the whole prefix.
    BeforeC,
}

/// Options that trade communication for memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvExchangeOptions {
    /// Lifetime of a gathered layer.
    pub gathered: Gathered,
    /// When gradients of the prefix are reduced.
    pub reduced: Reduced,
    /// Bytes that a rank has for what [`KvPrice::held_bytes`] counts; none: enough for all of it.
    #[serde(default)]
    pub room_bytes: Option<u64>,
    /// The way; none: chosen by the prices.
    #[serde(default)]
    pub way: Option<KvWay>,
}

/// How K and V of all ranks meet the queries of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvWay {
    /// All are gathered on every rank; gradients go straight to their owners.
    #[default]
    AllGather,
    /// Each rank's go round the others in both passes, in the backward with accumulators of their gradients,
    /// which end at their owner.
    Ring,
}

/// What a way costs one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvPrice {
    /// The way.
    pub way: KvWay,
    /// Bytes received per microbatch, without `before_c`.
    pub received_bytes: u64,
    /// Peak bytes of K and V that are gathered or pass by, and of their gradients.
    pub held_bytes: u64,
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
    /// Begin of the layer.
    Begin,
    /// Forward: own K and V exist.
    KvMade,
    /// Begin of attention.
    Attention,
    /// End of attention; backward: gradients of K and V exist.
    AttentionDone,
    /// Backward: begin of the K and V projections.
    Projections,
    /// End of the layer.
    End,
}

/// A moment of a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// Forward or backward.
    pub pass: Pass,
    /// Layer number.
    pub layer: u32,
    /// Moment within the layer.
    pub edge: OpEdge,
}

/// Kind of a collective.
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
    /// The prefix's K and V, round the ring.
    RingPrefix,
    /// The microbatch's own K and V, round the ring.
    RingOwn,
    /// Accumulators of the prefix's gK and gV, round the ring to their owners.
    ReturnPrefix,
    /// Those of the microbatch's own rows.
    ReturnOwn,
}

/// One collective of the context group: of a ring, all hops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvTransfer {
    /// Layer number.
    pub layer: u32,
    /// Kind.
    pub kind: KvTransferKind,
    /// Earliest moment to issue it.
    pub issue: Mark,
    /// Latest moment at which it must be done.
    pub due: Mark,
    /// Bytes each rank receives, including padding.
    pub received_bytes: u64,
}

/// Bytes of one layer's K and V, by rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flow {
    /// Bytes of K and V that each rank owns, without padding.
    pub kv_bytes_from: Vec<u64>,
    /// Bytes of gK and gV reduced at each rank, without padding.
    pub gradient_bytes_to: Vec<u64>,
    /// Bytes of K and V that each rank sends, with padding.
    pub kv_bytes_sent: u64,
    /// Bytes of gK and gV reduced at each rank, with padding.
    pub gradient_bytes_sent: u64,
    /// Bytes of the accumulators of each rank's rows, with padding.
    pub accumulator_bytes: u64,
}

/// Exchanges of a context-parallel group for one microbatch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvExchange {
    /// K and V of the prefix in one layer.
    pub prefix: Flow,
    /// K and V of the microbatch in one layer.
    pub own: Flow,
    /// The way asked for. Otherwise the one with the fewest received bytes among those that `room_bytes`
    /// holds; if it holds none, the one with the fewest held bytes.
    pub way: KvWay,
    /// Both ways. Everything below is of `way`.
    pub prices: Vec<KvPrice>,
    /// Collectives of a microbatch, in issue order.
    pub transfers: Vec<KvTransfer>,
    /// Collectives after the last microbatch: issued at marks of its backward, due at marks of phase C.
    pub before_c: Vec<KvTransfer>,
    /// Bytes one rank receives per microbatch, without `before_c`.
    pub microbatch_bytes: u64,
    /// Peak bytes of K and V on one rank that are gathered, or pass by.
    pub gathered_peak_bytes: u64,
    /// Peak bytes of gK and gV of these on one rank, without its shard's accumulator.
    pub gradient_peak_bytes: u64,
}
