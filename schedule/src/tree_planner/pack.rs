//! Packing suffixes into microbatches under a row budget.

use std::cmp::Reverse;

/// Groups suffix indices into microbatches: first-fit decreasing by rows, ties by index, which is within
/// 11/9 of the fewest microbatches possible (and two thirds of a microbatch). Members of a microbatch come in sequence
/// order, and microbatches in the order of their first member, so that the result reads as the group does.
///
/// A suffix longer than the budget gets a microbatch of its own (I3). No suffix is empty.
pub fn pack(rows: &[u64], budget: u64) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_unstable_by_key(|&index| (Reverse(rows[index]), index));
    let mut rooms = FreeRows::new(rows.len(), budget);
    let mut microbatches: Vec<Vec<usize>> = Vec::new();
    for index in order {
        // The longest come first: none but they are longer than every room, an empty microbatch's too.
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

/// Room left in each microbatch, opened or not. Finding the first microbatch with room takes as many steps as
/// the number of microbatches has bits: at the limit of responses, trying each microbatch would take hours.
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

    /// The first microbatch with room for `rows`.
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

    /// Takes `rows` of a microbatch's room, or all there is.
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
