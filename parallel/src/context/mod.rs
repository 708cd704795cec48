//! Context-parallel shards of a prefix, and of a microbatch, and what ranks exchange for them.
//!
//! The rows of a packed row of the batch are cut into equal chunks, and each rank of the context
//! group holds as many chunks as any other. Keys and values are gathered, layer by layer, so any
//! rank can hold any chunk: which one decides only how even attention's work is. Prefix and microbatches
//! are sharded apart, each balanced by itself (docs/method.md §9).
//!
//! # Invariants
//! - **C1** Every row has one rank; every rank has as many rows as any other, padding included, and
//!   its padding comes last.
//! - **C2** A pair is counted by the rank that has its query: `first_position + t + 1` for a piece's
//!   row t, its prefix and its own causal past.
//!
//! ```text
//!   8 chunks, 4 ranks      contiguous  0 0 1 1 2 2 3 3      early rows see little: rank 3 works most
//!                          zigzag      0 1 2 3 3 2 1 0      even for one causal piece
//!                          balanced    by each chunk's pairs: even for microbatches of many pieces
//! ```

mod cut;
mod exchange;
mod transfers;

use serde::{Deserialize, Serialize};

pub use exchange::{
    Flow, Gathered, KvExchange, KvExchangeOptions, KvShape, KvTransfer, KvTransferKind, Mark,
    OpEdge, Pass, Reduced,
};

use dormouse_schedule::layout::LayoutError;
use dormouse_schedule::{PlanError, Span};

/// Maximum number of ranks in a context-parallel group.
pub const CONTEXT_RANKS_MAX: u32 = 1 << 12;
/// Maximum number of chunks per rank.
pub const CHUNKS_MAX: u32 = 1 << 8;

/// How chunks are assigned to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ShardCut {
    /// One chunk per rank, in order.
    Contiguous,
    /// Two chunks each, number r and number `2 · ranks − 1 − r`: what ring kernels expect, and even
    /// for one causal piece.
    Zigzag,
    /// So many chunks each, dealt by pairs: in each round the chunk with most goes to the rank with
    /// fewest so far. With two it is the best pairing there is, and zigzag for one whole piece.
    Balanced {
        /// Chunks of one rank, 2 to [`CHUNKS_MAX`].
        chunks: u32,
    },
}

/// Options of sharding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardOptions {
    /// Ranks of the context group, 1 to [`CONTEXT_RANKS_MAX`].
    pub ranks: u32,
    /// Assignment of chunks to ranks.
    pub cut: ShardCut,
    /// A chunk's rows are a multiple of this: the tensor-parallel size where sequence parallelism
    /// cuts a rank's rows again. 1 for none.
    pub multiple: u32,
}

/// Consecutive rows of one piece on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRun {
    /// Piece number.
    pub piece: u32,
    /// Its rows in the whole packed row.
    pub rows: Span,
    /// Their rows on the rank.
    pub local: Span,
    /// Their positions.
    pub positions: Span,
    /// Keys of its own piece that its last row sees, the rows before this run included. A kernel
    /// with fewer queries than keys aligns its causal mask at the end.
    pub own_keys: u64,
}

/// The rows of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Its rows, in order.
    pub runs: Vec<ShardRun>,
    /// Rows that are not padding.
    pub rows: u64,
    /// Rows at its end that are padding.
    pub padding_rows: u64,
    /// Query–key pairs of a layer that it computes, its padding's not counted.
    pub pairs: u64,
}

/// A packed row cut for a context group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Shards {
    /// The shard of each rank.
    pub ranks: Vec<Shard>,
    /// Rows of every rank, padding included.
    pub rank_rows: u64,
    /// Total rows without padding.
    pub rows: u64,
    /// Pairs of the busiest rank divided by the mean; 1 is even.
    pub imbalance: f64,
}

/// An error of context sharding.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ContextError {
    /// A number is out of range.
    #[error(transparent)]
    Count(#[from] PlanError),
    /// Invalid pieces.
    #[error(transparent)]
    Pieces(#[from] LayoutError),
    /// Prefix and microbatch have different numbers of shards.
    #[error("the microbatch has {microbatch} shards; accepted: {prefix}, as the prefix has")]
    Groups {
        /// Shards of the prefix.
        prefix: usize,
        /// Shards of the microbatch.
        microbatch: usize,
    },
}
