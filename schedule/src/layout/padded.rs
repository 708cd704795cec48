//! The padded layout: a row of the batch for each piece.

use serde::{Deserialize, Serialize};

use super::{LayoutError, LayoutOptions, Piece, ROWS_MAX, Rows, check_pieces};
use crate::NodeId;
use crate::model::count;

/// Pieces as a batch as wide as the longest, with padding at their ends. Row `i · width + c` is column c of
/// piece i.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Padded {
    /// Contents of each row, piece after piece.
    pub rows: Rows,
    /// Number of pieces.
    pub batch: u64,
    /// Rows of each piece, including padding.
    pub width: u64,
    /// Rows of each piece without padding: the keys that a kernel may see, and the rows that boundary leaves keep.
    pub lengths: Vec<u32>,
    /// Keys that each piece reads of its prefix.
    pub prefix_keys: Vec<u32>,
    /// Node whose path holds these keys.
    pub prefix_nodes: Vec<Option<NodeId>>,
    /// Total padding rows.
    pub wasted_rows: u64,
}

impl Padded {
    /// Lays out pieces in their order.
    ///
    /// # Errors
    /// [`LayoutError`] for refused options, an invalid piece, or more than [`ROWS_MAX`] rows including padding.
    pub fn of(pieces: &[Piece], options: &LayoutOptions) -> Result<Self, LayoutError> {
        options.check()?;
        let wanted = check_pieces(pieces, ROWS_MAX)?;
        let longest = pieces.iter().map(|piece| piece.rows).max().unwrap_or(0);
        let batch = pieces.len() as u64;
        let width = longest.next_multiple_of(options.multiple.into());
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
}
