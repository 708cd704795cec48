//! Packing pieces into padded microbatches.
//!
//! A padded microbatch of n pieces, the longest w wide, costs `n · w` rows. Whatever microbatches are chosen, in
//! order of width: giving the first microbatch its number of the longest pieces, the second its number of
//! the next, and so on, makes no microbatch wider, so neither the number of microbatches nor the rows in all grow.
//! Hence some best packing cuts the pieces, sorted by length, into runs.
//!
//! Sorted, a run from j may reach to `reach(j)`, which does not fall as j grows. So fewest microbatches are
//! found greedily, and i pieces need no fewer than i − 1 do. A best cut of i pieces ends in a run
//! `j..i` such that j pieces need one microbatch fewer. A run's cost from j grows by w(j) a piece, the less
//! the later j is: the best j never falls as i grows, and halving finds all of a level in
//! `n · log n` steps.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use super::padded::padded_width;
use super::{LayoutError, MULTIPLE_MAX};
use crate::limits::{RESPONSES_MAX, TOKENS_MAX};
use crate::model::count;

/// Pieces that run as one padded batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PaddedMicrobatch {
    /// Which pieces, by number, in order.
    pub members: Vec<u32>,
    /// Rows of each, padding included.
    pub width: u64,
}

/// The fewest microbatches of at most `budget_rows` padded rows, and of those the fewest padded rows in all.
/// A piece wider than the budget gets a microbatch of its own. Members come in order, and microbatches in the
/// order of their first member.
///
/// # Errors
/// [`LayoutError::Count`] for no pieces or too many, a piece of no rows or too many, a budget of 0, a
/// multiple outside 1 to [`MULTIPLE_MAX`].
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
    let widths: Vec<u64> =
        order.iter().map(|&piece| padded_width(rows[piece as usize], multiple)).collect();
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

/// Best cuts of the first i pieces, for every i.
struct Cuts<'a> {
    widths: &'a [u64],
    budget: u64,
    /// Rows in all.
    rows: Vec<u64>,
    /// Where the last run begins.
    begins: Vec<usize>,
}

impl<'a> Cuts<'a> {
    fn of(widths: &'a [u64], budget: u64) -> Self {
        let count = widths.len();
        let mut cuts =
            Self { widths, budget, rows: vec![0; count + 1], begins: vec![0; count + 1] };
        // A level is a run of i that need as many microbatches; the first holds only no pieces at all.
        let (mut from, mut to) = (0, 0);
        while to < count {
            let end = cuts.reach(to);
            cuts.level(to + 1, end, from, to);
            (from, to) = (to + 1, end);
        }
        cuts
    }

    /// How far a run from `begin` may reach; always a piece.
    fn reach(&self, begin: usize) -> usize {
        let pieces = (self.budget / self.widths[begin]).max(1);
        self.widths.len().min(begin + usize::try_from(pieces).unwrap_or(usize::MAX - begin))
    }

    /// Fills `first..=last`, whose last runs begin in `from..=to`. The stack halves: its depth is
    /// the logarithm of the level's length.
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
