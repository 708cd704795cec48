//! The packed layout: pieces in one row of the batch.

use serde::{Deserialize, Serialize};

use super::{LayoutError, LayoutOptions, Piece, ROWS_MAX, Rows, check_pieces};
use crate::model::count;
use crate::{NodeId, Span};

/// Arguments of a variable-length attention kernel: segment i has queries
/// `cu_seqlens_q[i]..cu_seqlens_q[i + 1]` and keys `cu_seqlens_k[i]..cu_seqlens_k[i + 1]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Varlen {
    /// Rows before each segment, and the total.
    pub cu_seqlens_q: Vec<i32>,
    /// Keys before each segment, and the total.
    pub cu_seqlens_k: Vec<i32>,
    /// Rows of the longest segment.
    pub max_seqlen_q: i32,
    /// Maximum keys of a segment.
    pub max_seqlen_k: i32,
}

impl Varlen {
    fn new() -> Self {
        Self { cu_seqlens_q: vec![0], cu_seqlens_k: vec![0], ..Self::default() }
    }

    /// Appends a segment. The caller checks that totals fit 31 bits.
    fn push(&mut self, rows: u64, keys: u64) {
        let (rows, keys) = (rows as i32, keys as i32);
        self.cu_seqlens_q.push(self.cu_seqlens_q.last().map_or(rows, |end| end + rows));
        self.cu_seqlens_k.push(self.cu_seqlens_k.last().map_or(keys, |end| end + keys));
        self.max_seqlen_q = self.max_seqlen_q.max(rows);
        self.max_seqlen_k = self.max_seqlen_k.max(keys);
    }
}

/// Pieces in one row of the batch, with padding at its end.
///
/// Attention is two calls whose outputs are merged (docs/method.md §3): `prefix`, unmasked, and `suffix`,
/// causal. Padding is its own segment in `suffix` and part of the last segment of `prefix`, so its output is
/// finite; it has no label, so its gradient is zero. A prefix segment without keys has output 0 and
/// log-sum-exp −∞.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Packed {
    /// Contents of each row.
    pub rows: Rows,
    /// Padding rows at the end.
    pub padding_rows: u64,
    /// Rows of each piece, which boundary leaves keep.
    pub pieces: Vec<Span>,
    /// Keys that each piece reads of its prefix.
    pub prefix_keys: Vec<u32>,
    /// Segments of each piece over its own keys, causal.
    pub suffix: Varlen,
    /// Segments of neighbouring pieces with the same prefix over its keys, unmasked. Keys of segments are
    /// concatenated, each prefix from its first key.
    pub prefix: Varlen,
    /// Node whose path each segment of `prefix` reads.
    pub prefix_nodes: Vec<Option<NodeId>>,
}

impl Packed {
    /// Lays out pieces in their order. Neighbouring pieces with the same prefix read its keys once.
    ///
    /// # Errors
    /// [`LayoutError`] for refused options, an invalid piece, more than [`ROWS_MAX`] rows, or more prefix keys than
    /// fit 31 bits.
    pub fn of(pieces: &[Piece], options: &LayoutOptions) -> Result<Self, LayoutError> {
        options.check()?;
        let wanted = check_pieces(pieces, ROWS_MAX)?;
        let padded = wanted.next_multiple_of(options.multiple.into());
        count("rows with padding", padded, 1, ROWS_MAX)?;
        let padding_rows = padded - wanted;
        let mut packed = Self { padding_rows, suffix: Varlen::new(), ..Self::default() };
        let mut begin = 0;
        for piece in pieces {
            packed.rows.push(piece, 0);
            packed.pieces.push(Span { begin, end: begin + piece.rows });
            packed.prefix_keys.push(piece.first_position as u32);
            packed.suffix.push(piece.rows, piece.rows);
            begin += piece.rows;
        }
        packed.rows.pad(padding_rows);
        if padding_rows > 0 {
            packed.suffix.push(padding_rows, padding_rows);
        }
        packed.read_prefixes(pieces)?;
        Ok(packed)
    }

    fn read_prefixes(&mut self, pieces: &[Piece]) -> Result<(), LayoutError> {
        let mut segments: Vec<(Option<NodeId>, u64, u64)> = Vec::new();
        for piece in pieces {
            match segments.last_mut() {
                Some((node, keys, rows))
                    if (*node, *keys) == (piece.prefix, piece.first_position) =>
                {
                    *rows += piece.rows;
                }
                _ => segments.push((piece.prefix, piece.first_position, piece.rows)),
            }
        }
        if let Some((_, _, rows)) = segments.last_mut() {
            *rows += self.padding_rows;
        }
        let keys: u64 = segments.iter().map(|(_, keys, _)| keys).sum();
        count("prefix keys", keys, 0, i32::MAX as u64)?;
        self.prefix = Varlen::new();
        for (node, keys, rows) in segments {
            self.prefix.push(rows, keys);
            self.prefix_nodes.push(node);
        }
        Ok(())
    }
}
