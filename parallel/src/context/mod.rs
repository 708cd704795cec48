//! Context-parallel shards of a prefix and of a microbatch, and the exchanges between ranks.
//!
//! A packed row is cut into equal chunks, and each rank of the context group holds the same number of
//! chunks. K and V are gathered layer by layer, so any rank can hold any chunk; the assignment only affects
//! the balance of attention. Prefix and microbatches are sharded and balanced separately
//! (docs/method.md §9).
//!
//! # Invariants
//! - **C1** Every row is on one rank; all ranks have the same number of rows, including padding, which comes
//!   last.
//! - **C2** A pair is counted by the rank that has its query: `first_position + t + 1` for a piece's
//!   row t, its prefix and its own causal past.
//!
//! ```text
//!   8 chunks, 4 ranks      contiguous  0 0 1 1 2 2 3 3      early rows see few keys: rank 3 has the most work
//!                          zigzag      0 1 2 3 3 2 1 0      even for one causal piece
//!                          balanced    by each chunk's pairs: even for microbatches of many pieces
//! ```

mod cut;
mod exchange;
mod transfers;

use serde::{Deserialize, Serialize};

pub use exchange::{
    Flow, Gathered, KvExchange, KvExchangeOptions, KvPrice, KvShape, KvTransfer, KvTransferKind,
    KvWay, Mark, OpEdge, Pass, Reduced,
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
    /// Chunks r and `2 · ranks − 1 − r` on rank r: the layout of ring kernels, even for one causal piece.
    Zigzag,
    /// `chunks` per rank, dealt by query–key pairs: in each round the chunk with the most goes to the rank
    /// with the fewest. With two chunks it is the optimal pairing, and zigzag for one whole piece.
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
    /// The rows of a chunk are a multiple of this: the tensor-parallel size with sequence parallelism, else 1.
    pub multiple: u32,
}

/// Consecutive rows of one piece on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRun {
    /// Piece number.
    pub piece: u32,
    /// Rows within the packed row.
    pub rows: Span,
    /// Rows within the rank.
    pub local: Span,
    /// Positions.
    pub positions: Span,
    /// Keys of its own piece that the last row sees, including rows before this run. A kernel with fewer
    /// queries than keys aligns its causal mask at the end.
    pub own_keys: u64,
}

/// The rows of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Runs in order.
    pub runs: Vec<ShardRun>,
    /// Rows without padding.
    pub rows: u64,
    /// Padding rows at the end.
    pub padding_rows: u64,
    /// Query–key pairs per layer, without padding.
    pub pairs: u64,
}

/// A packed row cut for a context group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Shards {
    /// The shard of each rank.
    pub ranks: Vec<Shard>,
    /// Rows per rank, including padding.
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
    #[error("the microbatch has {microbatch} shards; accepted: {prefix}, as for the prefix")]
    Groups {
        /// Shards of the prefix.
        prefix: usize,
        /// Shards of the microbatch.
        microbatch: usize,
    },
}
