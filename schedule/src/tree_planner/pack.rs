//! Packing suffixes into microbatches under a row budget.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// How many smaller numbers of microbatches than first-fit decreasing's are tried.
const FEWER_TRIES_MAX: usize = 4;

/// Packs suffixes into microbatches of at most `budget` rows: no more than first-fit decreasing needs, which is
/// within 11/9 of the fewest (plus two thirds). Of as many, none is larger than the largest of first-fit decreasing,
/// which sets the peak of phase B: suffixes are spread where that makes it smaller.
///
/// Members are in sequence order, and microbatches in the order of their first member. A suffix longer than the
/// budget gets its own microbatch (I3). `rows` are above 0.
pub fn pack(rows: &[u64], budget: u64) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_unstable_by_key(|&index| (Reverse(rows[index]), index));
    let longer = order.partition_point(|&index| rows[index] > budget);
    let (alone, order) = order.split_at(longer);
    let mut microbatches = pack_decreasing(rows, order, budget);
    microbatches.extend(alone.iter().map(|&index| vec![index]));
    for members in &mut microbatches {
        members.sort_unstable();
    }
    microbatches.sort_unstable_by_key(|members| members.first().copied());
    microbatches
}

/// Packs the suffixes of `order`, whose rows descend and are within the budget.
fn pack_decreasing(rows: &[u64], order: &[usize], budget: u64) -> Vec<Vec<usize>> {
    let dense = first_fit(rows, order, budget);
    let total = order.iter().fold(0, |sum: u64, &index| sum.saturating_add(rows[index]));
    let fewest = total.div_ceil(budget.max(1)) as usize;
    (fewest..dense.len())
        .take(FEWER_TRIES_MAX)
        .find_map(|count| spread(rows, order, budget, count))
        .or_else(|| spread(rows, order, largest(rows, &dense).saturating_sub(1), dense.len()))
        .unwrap_or(dense)
}

/// Puts each suffix into the first microbatch with room for it.
fn first_fit(rows: &[u64], order: &[usize], budget: u64) -> Vec<Vec<usize>> {
    let mut rooms = FreeRows::new(order.len(), budget);
    let mut microbatches: Vec<Vec<usize>> = Vec::new();
    for &index in order {
        let microbatch = rooms.first_with(rows[index]).unwrap_or(microbatches.len());
        if microbatch == microbatches.len() {
            microbatches.push(Vec::new());
        }
        microbatches[microbatch].push(index);
        rooms.take(microbatch, rows[index]);
    }
    microbatches
}

/// Puts each suffix into the smallest of `count` microbatches, ties by number. `None` if one would exceed `limit` rows.
fn spread(rows: &[u64], order: &[usize], limit: u64, count: usize) -> Option<Vec<Vec<usize>>> {
    let mut microbatches = vec![Vec::new(); count];
    let mut smallest: BinaryHeap<_> = (0..count).map(|number| Reverse((0_u64, number))).collect();
    for &index in order {
        let Reverse((own, number)) = smallest.pop()?;
        let own = own.checked_add(rows[index]).filter(|own| *own <= limit)?;
        microbatches[number].push(index);
        smallest.push(Reverse((own, number)));
    }
    Some(microbatches)
}

/// Returns the rows of the largest microbatch.
fn largest(rows: &[u64], microbatches: &[Vec<usize>]) -> u64 {
    let of = |members: &Vec<usize>| members.iter().map(|&index| rows[index]).sum();
    microbatches.iter().map(of).max().unwrap_or(0)
}

/// Rows left in each microbatch, as a segment tree: the first with room is found in O(log n).
///
/// ```text
///   most:   [ _ | 9 | 5 9 | 0 5 3 9 ]   a binary heap's numbering; each inner number is the
///                 └─┬─┘   └───┬───┘     larger of the two below it, the last row is the microbatches
/// ```
#[derive(Debug)]
struct FreeRows {
    most: Vec<u64>,
    leaves: usize,
}

impl FreeRows {
    fn new(microbatches: usize, room: u64) -> Self {
        let leaves = microbatches.max(1).next_power_of_two();
        Self { most: vec![room; 2 * leaves], leaves }
    }

    /// Returns the first microbatch with room for `rows`.
    fn first_with(&self, rows: u64) -> Option<usize> {
        let mut at = 1;
        if self.most[at] < rows {
            return None;
        }
        while at < self.leaves {
            at *= 2;
            if self.most[at] < rows {
                at += 1;
            }
        }
        Some(at - self.leaves)
    }

    /// Takes `rows` from a microbatch, or all that is left.
    fn take(&mut self, microbatch: usize, rows: u64) {
        let mut at = self.leaves + microbatch;
        self.most[at] = self.most[at].saturating_sub(rows);
        while at > 1 {
            at /= 2;
            self.most[at] = self.most[2 * at].max(self.most[2 * at + 1]);
        }
    }
}

#[cfg(test)]
#[path = "pack_tests.rs"]
mod tests;
