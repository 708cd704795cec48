//! Pieces as a batch, each in a row of its own.

use serde::{Deserialize, Serialize};

use super::{LayoutError, LayoutOptions, Piece, ROWS_MAX, Rows, check_pieces, of_microbatch};
use crate::model::count;
use crate::{NodeId, Op};

/// Pieces as a batch as wide as the longest; padding at each one's end.
///
/// Row `i · width + c` is column c of piece i.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Padded {
    /// What stands in each row, piece after piece.
    pub rows: Rows,
    /// Pieces.
    pub batch: u64,
    /// Rows of each.
    pub width: u64,
    /// Rows of each piece that are not padding: how many of its own keys a kernel may see, and what
    /// boundary leaves keep.
    pub lengths: Vec<u32>,
    /// Keys each piece reads of its prefix.
    pub prefix_keys: Vec<u32>,
    /// Node whose path they come from.
    pub prefix_nodes: Vec<Option<NodeId>>,
    /// Rows that are padding, in all.
    pub wasted_rows: u64,
}

impl Padded {
    /// Lays pieces out in their order.
    ///
    /// # Errors
    /// [`LayoutError`]: options that are refused, a piece that is not one, or more than [`ROWS_MAX`]
    /// rows, padding included.
    pub fn of(pieces: &[Piece], options: &LayoutOptions) -> Result<Self, LayoutError> {
        options.check()?;
        let wanted = check_pieces(pieces, ROWS_MAX)?;
        let longest = pieces.iter().map(|piece| piece.rows).max().unwrap_or(0);
        let (batch, width) = (pieces.len() as u64, padded_width(longest, options.multiple));
        count("rows with padding", batch * width, 1, ROWS_MAX)?;
        let mut padded = Self { batch, width, ..Self::default() };
        for piece in pieces {
            padded.rows.push(piece, width - piece.rows);
            padded.lengths.push(piece.rows as u32);
            padded.prefix_keys.push(piece.first_position as u32);
            padded.prefix_nodes.push(piece.prefix);
        }
        padded.wasted_rows = batch * width - wanted;
        Ok(padded)
    }

    /// Lays out the members of a plan's microbatch, with the labels that it scores.
    ///
    /// # Errors
    /// As [`Padded::of`]; `NoMicrobatch` for another op, `Score` for one that is of no member's rows,
    /// `Count` for more than [`LABELS_MAX`](super::LABELS_MAX) labels.
    pub fn of_microbatch(op: &Op, options: &LayoutOptions) -> Result<Self, LayoutError> {
        let mut padded = Self::of(&of_microbatch(op)?, options)?;
        let width = padded.width;
        padded.rows.score(op, |member| member as u64 * width)?;
        Ok(padded)
    }
}

/// Rows of each piece of a batch whose longest has `longest`.
pub(super) fn padded_width(longest: u64, multiple: u32) -> u64 {
    longest.next_multiple_of(multiple.into())
}
