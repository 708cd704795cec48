//! Packing suffixes into microbatches under a row budget.

use std::cmp::Reverse;

/// Packs suffixes into microbatches of at most `budget` rows: first-fit decreasing, ties by index, within 11/9 of
/// the fewest microbatches (plus two thirds). Members are in sequence order, and microbatches in the order of
/// their first member. A suffix longer than the budget gets its own microbatch (I3). `rows` are above 0.
pub fn pack(rows: &[u64], budget: u64) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_unstable_by_key(|&index| (Reverse(rows[index]), index));
    let mut rooms = FreeRows::new(rows.len(), budget);
    let mut microbatches: Vec<Vec<usize>> = Vec::new();
    for index in order {
        // Suffixes longer than the budget come first and find no room.
        let microbatch = rooms.first_with(rows[index]).unwrap_or(microbatches.len());
        if microbatch == microbatches.len() {
            microbatches.push(Vec::new());
        }
        microbatches[microbatch].push(index);
        rooms.take(microbatch, rows[index]);
    }
    for members in &mut microbatches {
        members.sort_unstable();
    }
    microbatches.sort_unstable_by_key(|members| members.first().copied());
    microbatches
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
