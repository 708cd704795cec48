//! A microbatch's rows: which token of which sequence each row holds, and what attention is told of them.
//!
//! A *piece* is a run of one sequence's tokens that runs together: a suffix in a microbatch, a node, a
//! chunk of a prefix. A row holds an input token; its label is the next token of its sequence.
//! *Packed* rows stand one after another in one row of the batch; *padded* rows are a batch as wide
//! as its longest piece. Prefix and suffixes are laid out, and padded, apart (docs/method.md §9).
//!
//! # Invariants
//! - **L1** Every token of every piece has one row; its position is the dense run's.
//! - **L2** Padding comes last in its row of the batch, belongs to no piece and has no label: what is
//!   cut from boundary leaves is what [`Packed::pieces`] and [`Padded::lengths`] leave out.
//! - **L3** No attention segment crosses pieces, whatever their positions. Segments are never to be
//!   derived from position ids: neighbours whose positions happen to continue would merge.
//!
//! ```text
//!   pieces      a: 3 rows from 5   b: 2 rows from 5          multiple 4
//!   packed      a5 a6 a7 b5 b6 -- -- --                      suffix cu_seqlens 0 3 5 8
//!   padded      a5 a6 a7 --  /  b5 b6 -- --                  lengths 3 2
//! ```
//!
//! # Token budgets
//! `microbatch_tokens` counts rows of the packed layout before padding. A padded microbatch costs its padded
//! rows, `batch × width`: [`pack_padded`] packs under that cost.

mod packed;
mod packing;
mod padded;
mod piece;

use serde::{Deserialize, Serialize};

pub use packed::{Packed, Varlen};
pub use packing::{PaddedMicrobatch, pack_padded};
pub use padded::Padded;
pub use piece::check as check_pieces;
use piece::of_microbatch;
pub use piece::{Piece, Rows};

use crate::model::count;
use crate::{PlanError, Span};

/// Rows of one layout, padding included: each has an entry in a few arrays.
pub const ROWS_MAX: u64 = 1 << 24;
/// Labels of one microbatch: a row that several sequences share has one for each.
pub const LABELS_MAX: u64 = 1 << 26;
/// Rows are padded to a multiple of at most this.
pub const MULTIPLE_MAX: u32 = 1 << 12;
/// Sequence number of a row that is padding.
pub const PADDING: u32 = u32::MAX;

/// How a trainer numbers positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Positions {
    /// A token's position is its number in its sequence.
    #[default]
    Sequential,
    /// Several numbers a token, which images set (M-RoPE). Refused.
    MultiAxis,
}

/// On which side a trainer pads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PaddingSide {
    /// After the tokens.
    #[default]
    Right,
    /// Before the tokens. Refused.
    Left,
}

/// How rows are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LayoutOptions {
    /// Rows of each row of the batch are a multiple of this: 8 or 16 for kernels, the tensor-parallel
    /// size for sequence parallelism. 1 for none, at most [`MULTIPLE_MAX`].
    pub multiple: u32,
    /// How positions are numbered.
    pub positions: Positions,
    /// On which side padding stands.
    pub padding_side: PaddingSide,
}

impl Default for LayoutOptions {
    fn default() -> Self {
        let (positions, padding_side) = (Positions::default(), PaddingSide::default());
        Self { multiple: 1, positions, padding_side }
    }
}

/// Why pieces were not laid out.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A number outside its limits.
    #[error(transparent)]
    Count(#[from] PlanError),
    /// A piece that starts later than what it reads reaches.
    #[error("piece {piece} starts at position {seen} without a prefix; accepted: 0, or a prefix")]
    NoPrefix {
        /// Which piece.
        piece: usize,
        /// Its first position.
        seen: u64,
    },
    /// Labels that are not next tokens of the piece's rows.
    #[error(
        "piece {piece} has labels {}..{}; accepted: none, or within {}..{}",
        seen.begin, seen.end, accepted.begin, accepted.end
    )]
    Labels {
        /// Which piece.
        piece: usize,
        /// Its labels.
        seen: Span,
        /// Next tokens of its rows.
        accepted: Span,
    },
    /// An op that has no members.
    #[error("op {op} is no microbatch; accepted: a microbatch")]
    NoMicrobatch {
        /// Which op.
        op: u64,
    },
    /// A score whose rows are not one member's, or do not come right before its labels.
    #[error(
        "score {index} has rows {}..{} and labels from {first_label}; accepted: rows of one member, \
         each before its label",
        seen.begin, seen.end
    )]
    Score {
        /// Which score of the microbatch.
        index: usize,
        /// Its rows.
        seen: Span,
        /// Its first label.
        first_label: u64,
    },
    /// Positions that a suffix cannot continue by counting.
    #[error("multi-axis positions (M-RoPE): a suffix does not continue them by counting")]
    MultiAxisPositions,
    /// Positions that depend on how much longer the longest neighbour is.
    #[error("left padding: positions depend on the longest neighbour; accepted: right padding")]
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
