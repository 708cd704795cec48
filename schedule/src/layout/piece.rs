//! Pieces, and the contents of rows.

use serde::{Deserialize, Serialize};

use super::{LayoutError, PADDING};
use crate::limits::TOKENS_MAX;
use crate::model::count;
use crate::{NodeId, Span};

/// Consecutive tokens of one sequence that run together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Its sequence.
    pub sequence: u32,
    /// Position of its first row, which is the number of prefix keys it reads.
    pub first_position: u64,
    /// Number of rows, at least 1.
    pub rows: u64,
    /// Node whose path holds the keys before its first row, if there are any.
    pub prefix: Option<NodeId>,
    /// Positions of the scored tokens. A row whose next token is not scored has no label.
    pub labels: Span,
}

/// Checks pieces of at most `rows_max` rows together and returns the total number of rows.
///
/// # Errors
/// `Count` for a number out of range, `NoPrefix` for a piece that begins past position 0 without a
/// prefix, and `Labels` for labels outside the piece's rows.
pub fn check(pieces: &[Piece], rows_max: u64) -> Result<u64, LayoutError> {
    count("pieces", pieces.len() as u64, 1, rows_max)?;
    let mut rows = 0;
    for (index, piece) in pieces.iter().enumerate() {
        count("rows of a piece", piece.rows, 1, TOKENS_MAX)?;
        count("first position of a piece", piece.first_position, 0, TOKENS_MAX - piece.rows)?;
        if piece.prefix.is_none() && piece.first_position > 0 {
            return Err(LayoutError::NoPrefix { piece: index, seen: piece.first_position });
        }
        let (seen, first) = (piece.labels, piece.first_position + 1);
        let accepted = Span { begin: first, end: first + piece.rows };
        if seen.begin > seen.end
            || (seen.begin < seen.end && (seen.begin < first || seen.end > accepted.end))
        {
            return Err(LayoutError::Labels { piece: index, seen, accepted });
        }
        rows += piece.rows; // at most `rows_max` terms below 2^28
    }
    count("rows", rows, 1, rows_max)?;
    Ok(rows)
}

/// The contents of rows, and the row that predicts each scored token.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rows {
    /// Sequence of each row; [`PADDING`] for padding.
    pub sequences: Vec<u32>,
    /// Position of each row: the index of its input token in its sequence. Padding counts from 0, within any rotary
    /// table.
    pub positions: Vec<u32>,
    /// The row that predicts each scored token, piece after piece.
    pub label_rows: Vec<u32>,
    /// The sequence of each scored token.
    pub label_sequences: Vec<u32>,
    /// The position of each scored token in its sequence.
    pub label_positions: Vec<u32>,
}

impl Rows {
    /// Appends the rows of a checked piece, then padding.
    pub(super) fn push(&mut self, piece: &Piece, padding: u64) {
        let first_row = self.sequences.len() as u64;
        for row in 0..piece.rows {
            self.sequences.push(piece.sequence);
            self.positions.push((piece.first_position + row) as u32);
        }
        for position in piece.labels.begin..piece.labels.end {
            self.label_rows.push((first_row + position - 1 - piece.first_position) as u32);
            self.label_sequences.push(piece.sequence);
            self.label_positions.push(position as u32);
        }
        self.pad(padding);
    }

    pub(super) fn pad(&mut self, padding: u64) {
        self.sequences.extend((0..padding).map(|_| PADDING));
        self.positions.extend((0..padding).map(|row| row as u32));
    }
}
