//! The rows of a microbatch: the token of each row, and the metadata of attention.
//!
//! A *piece* is consecutive tokens of one sequence that run together: a suffix, a node, a chunk of a prefix. A row
//! holds an input token; its label is the next token of its sequence. *Packed* pieces stand in one row of the
//! batch; *padded* pieces are a batch as wide as the longest. Prefix and suffixes are laid out and padded
//! separately (docs/method.md §9).
//!
//! # Invariants
//! - **L1** Every token of every piece has one row; its position is that of the dense run.
//! - **L2** Padding comes last in its row of the batch, belongs to no piece and has no label. Boundary leaves keep
//!   the rows that [`Packed::pieces`] and [`Padded::lengths`] name.
//! - **L3** No attention segment crosses pieces. Do not derive segments from position ids: neighbours with
//!   consecutive positions would merge.
//!
//! ```text
//!   pieces      a: 3 rows from 5   b: 2 rows from 5          multiple 4
//!   packed      a5 a6 a7 b5 b6 -- -- --                      suffix cu_seqlens 0 3 5 8
//!   padded      a5 a6 a7 --  /  b5 b6 -- --                  lengths 3 2
//! ```
//!
//! `microbatch_tokens` counts rows of the packed layout before padding. A padded microbatch costs `batch × width`
//! rows: [`pack_padded`] packs under that cost.

mod packed;
mod packing;
mod padded;
mod piece;

use serde::{Deserialize, Serialize};

pub use packed::{Packed, Varlen};
pub use packing::{PaddedMicrobatch, pack_padded};
pub use padded::Padded;
pub use piece::check as check_pieces;
pub use piece::{Piece, Rows};

use crate::model::count;
use crate::{PlanError, Span};

/// Maximum rows of a layout, including padding.
pub const ROWS_MAX: u64 = 1 << 24;
/// Maximum of [`LayoutOptions::multiple`].
pub const MULTIPLE_MAX: u32 = 1 << 12;
/// Sequence number of padding rows.
pub const PADDING: u32 = u32::MAX;

/// The numbering of positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    /// The index of a token in its sequence.
    #[default]
    Sequential,
    /// Several numbers per token, set by images (M-RoPE). Refused.
    MultiAxis,
}

/// The side of padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PaddingSide {
    /// After the tokens.
    #[default]
    Right,
    /// Before the tokens. Refused.
    Left,
}

/// The options of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LayoutOptions {
    /// Each row of the batch is padded to a multiple of this: 8 or 16 for kernels, the tensor-parallel size for
    /// sequence parallelism, 1 for no padding. At most [`MULTIPLE_MAX`].
    pub multiple: u32,
    /// The numbering of positions.
    pub positions: Positions,
    /// The side of padding.
    pub padding_side: PaddingSide,
}

impl Default for LayoutOptions {
    fn default() -> Self {
        let (positions, padding_side) = (Positions::default(), PaddingSide::default());
        Self { multiple: 1, positions, padding_side }
    }
}

/// An error of a layout.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A number outside its limits.
    #[error(transparent)]
    Count(#[from] PlanError),
    /// A piece without a prefix that starts after position 0.
    #[error("piece {piece} starts at position {seen} without a prefix; accepted: 0, or a prefix")]
    NoPrefix {
        /// Index of the piece.
        piece: usize,
        /// Its first position.
        seen: u64,
    },
    /// Labels that are not the next tokens of the piece's rows.
    #[error(
        "piece {piece} has labels {}..{}; accepted: none, or within {}..{}",
        seen.begin, seen.end, accepted.begin, accepted.end
    )]
    Labels {
        /// Index of the piece.
        piece: usize,
        /// Its labels.
        seen: Span,
        /// The next tokens of its rows.
        accepted: Span,
    },
    /// Positions that do not continue by counting.
    #[error("positions are multi_axis (M-RoPE); accepted: sequential")]
    MultiAxisPositions,
    /// Positions that depend on the longest piece of the batch.
    #[error("padding side is left; accepted: right")]
    LeftPadding,
}

impl LayoutOptions {
    fn check(&self) -> Result<(), LayoutError> {
        if self.positions == Positions::MultiAxis {
            return Err(LayoutError::MultiAxisPositions);
        }
        if self.padding_side == PaddingSide::Left {
            return Err(LayoutError::LeftPadding);
        }
        Ok(count("multiple", self.multiple, 1, MULTIPLE_MAX)?)
    }
}
