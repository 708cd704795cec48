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
    Edge, Exchange, ExchangeOptions, Flow, Gathered, KvShape, Mark, Pass, Reduced, Transfer,
    TransferKind,
};

use dormouse_schedule::layout::LayoutError;
use dormouse_schedule::{PlanError, Span};

/// Ranks of a context group.
pub const CONTEXT_RANKS_MAX: u32 = 1 << 12;
/// Chunks of one rank.
pub const CHUNKS_MAX: u32 = 1 << 8;

/// Which chunks a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Cut {
    /// One chunk each, in order.
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

/// How rows are sharded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardOptions {
    /// Ranks of the context group, 1 to [`CONTEXT_RANKS_MAX`].
    pub ranks: u32,
    /// Which chunks each holds.
    pub cut: Cut,
    /// A chunk's rows are a multiple of this: the tensor-parallel size where sequence parallelism
    /// cuts a rank's rows again. 1 for none.
    pub multiple: u32,
}

/// Rows of one piece that stand together on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// Which piece.
    pub piece: u32,
    /// Its rows in the whole packed row.
    pub rows: Span,
    /// Where they stand on the rank.
    pub local: Span,
    /// Their positions.
    pub positions: Span,
    /// Keys of its own piece that its last row sees, the rows before this run included. A kernel
    /// with fewer queries than keys aligns its causal mask at the end.
    pub own_keys: u64,
}

/// What one rank holds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Its rows, in order.
    pub runs: Vec<Run>,
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
    /// What each rank holds.
    pub ranks: Vec<Shard>,
    /// Rows of every rank, padding included.
    pub rank_rows: u64,
    /// Rows in all, without padding.
    pub rows: u64,
    /// Pairs of the busiest rank over the mean: 1 is even.
    pub imbalance: f64,
}

/// Why nothing was sharded, or exchanged.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ContextError {
    /// A number outside its limits.
    #[error(transparent)]
    Count(#[from] PlanError),
    /// Pieces that are none.
    #[error(transparent)]
    Pieces(#[from] LayoutError),
    /// Prefix and microbatch cut for different groups.
    #[error("the microbatch has {microbatch} shards; accepted: {prefix}, as the prefix has")]
    Groups {
        /// Shards of the prefix.
        prefix: usize,
        /// Shards of the microbatch.
        microbatch: usize,
    },
}
