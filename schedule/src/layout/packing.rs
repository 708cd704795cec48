//! Packs pieces into padded microbatches.
//!
//! A padded microbatch of n pieces, the longest w wide, costs `n · w` rows. For any packing, ordered by width, giving
//! each microbatch its number of the longest remaining pieces makes none wider. Hence some optimal packing cuts
//! the pieces, sorted by length, into runs.
//!
//! A run from j may extend to `reach(j)`, which does not decrease with j. So the fewest microbatches are found
//! greedily. The last run `j..i` of an optimal cut of i pieces starts at a j that needs one microbatch fewer. Its
//! cost grows by w(j) per piece, less for later j, so the best j does not decrease with i: divide and conquer
//! finds all of a level in `n · log n` steps.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use super::{LayoutError, MULTIPLE_MAX};
use crate::limits::{RESPONSES_MAX, TOKENS_MAX};
use crate::model::count;

/// Pieces that run as one padded batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PaddedMicrobatch {
    /// Numbers of the pieces, in order.
    pub members: Vec<u32>,
    /// Rows of each piece, including padding.
    pub width: u64,
}

/// Returns the fewest microbatches of at most `budget_rows` padded rows, and of those the fewest padded rows. A
/// piece wider than the budget gets its own microbatch. Members are in order, and microbatches in the order of
/// their first member.
///
/// # Errors
/// [`LayoutError::Count`] for too few or too many pieces or rows of a piece, a budget of 0, or a multiple outside 1
/// to [`MULTIPLE_MAX`].
pub fn pack_padded(
    rows: &[u64],
    budget_rows: u64,
    multiple: u32,
) -> Result<Vec<PaddedMicrobatch>, LayoutError> {
    count("pieces", rows.len() as u64, 1, RESPONSES_MAX as u64)?;
    count("budget_rows", budget_rows, 1, u64::MAX)?;
    count("multiple", multiple, 1, MULTIPLE_MAX)?;
    for rows in rows {
        count("rows of a piece", *rows, 1, TOKENS_MAX)?;
    }
    let mut order: Vec<u32> = (0..rows.len() as u32).collect();
    order.sort_unstable_by_key(|&piece| (Reverse(rows[piece as usize]), piece));
    let width = |piece: &u32| rows[*piece as usize].next_multiple_of(multiple.into());
    let widths: Vec<u64> = order.iter().map(width).collect();
    let mut microbatches = Vec::new();
    let mut end = order.len();
    let begins = Cuts::of(&widths, budget_rows).begins;
    while end > 0 {
        let begin = begins[end];
        let mut members = order[begin..end].to_vec();
        members.sort_unstable();
        microbatches.push(PaddedMicrobatch { members, width: widths[begin] });
        end = begin;
    }
    microbatches.sort_unstable_by_key(|microbatch| microbatch.members.first().copied());
    Ok(microbatches)
}

/// The optimal cuts of the first i pieces, for every i.
struct Cuts<'a> {
    widths: &'a [u64],
    budget: u64,
    /// Total rows.
    rows: Vec<u64>,
    /// Start of the last run.
    begins: Vec<usize>,
}

impl<'a> Cuts<'a> {
    fn of(widths: &'a [u64], budget: u64) -> Self {
        let count = widths.len();
        let mut cuts =
            Self { widths, budget, rows: vec![0; count + 1], begins: vec![0; count + 1] };
        // A level is the range of i that need the same number of microbatches; the first is 0 pieces.
        let (mut from, mut to) = (0, 0);
        while to < count {
            let end = cuts.reach(to);
            cuts.level(to + 1, end, from, to);
            (from, to) = (to + 1, end);
        }
        cuts
    }

    /// Returns the furthest end of a run from `begin`, at least one piece.
    fn reach(&self, begin: usize) -> usize {
        let pieces = (self.budget / self.widths[begin]).max(1);
        self.widths.len().min(begin + usize::try_from(pieces).unwrap_or(usize::MAX - begin))
    }

    /// Fills `first..=last`, whose last runs begin in `from..=to`. The depth of the stack is logarithmic.
    fn level(&mut self, first: usize, last: usize, from: usize, to: usize) {
        let mut open = vec![(first, last, from, to)];
        while let Some((first, last, from, to)) = open.pop() {
            let middle = usize::midpoint(first, last);
            let mut best = (u64::MAX, to);
            for begin in from..=to {
                if self.reach(begin) < middle {
                    continue;
                }
                let rows = self.rows[begin] + self.widths[begin] * (middle - begin) as u64;
                if rows < best.0 {
                    best = (rows, begin);
                }
            }
            (self.rows[middle], self.begins[middle]) = best;
            if middle > first {
                open.push((first, middle - 1, from, best.1));
            }
            if middle < last {
                open.push((middle + 1, last, best.1, to));
            }
        }
    }
}
