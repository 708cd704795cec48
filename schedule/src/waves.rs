//! Packing suffixes into waves under a row budget.

use std::cmp::Reverse;

/// Groups suffix indices into waves: first-fit decreasing by rows, ties by index, which is within
/// 11/9 of the fewest waves possible (and two thirds of a wave). Members of a wave come in sequence
/// order, and waves in the order of their first member, so that the result reads as the group does.
///
/// A suffix longer than the budget gets a wave of its own (I3). No suffix is empty.
pub(crate) fn pack(rows: &[u64], budget: u64) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_unstable_by_key(|&index| (Reverse(rows[index]), index));
    let mut rooms = Rooms::new(rows.len(), budget);
    let mut waves: Vec<Vec<usize>> = Vec::new();
    for index in order {
        // The longest come first: none but they are longer than every room, an empty wave's too.
        let wave = rooms.first_with(rows[index]).unwrap_or(waves.len());
        if wave == waves.len() {
            waves.push(Vec::new());
        }
        waves[wave].push(index);
        rooms.take(wave, rows[index]);
    }
    for members in &mut waves {
        members.sort_unstable();
    }
    waves.sort_unstable_by_key(|members| members.first().copied());
    waves
}

/// Room left in each wave, opened or not. Finding the first wave with room takes as many steps as
/// the number of waves has bits: at the limit of responses, trying each wave would take hours.
///
/// ```text
///   most:   [ _ | 9 | 5 9 | 0 5 3 9 ]   a binary heap's numbering; each inner number is the
///                 └─┬─┘   └───┬───┘     larger of the two below it, the last row is the waves
/// ```
#[derive(Debug)]
struct Rooms {
    most: Vec<u64>,
    leaves: usize,
}

impl Rooms {
    fn new(waves: usize, room: u64) -> Self {
        let leaves = waves.max(1).next_power_of_two();
        Self { most: vec![room; 2 * leaves], leaves }
    }

    /// The first wave with room for `rows`.
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

    /// Takes `rows` of a wave's room, or all there is.
    fn take(&mut self, wave: usize, rows: u64) {
        let mut at = self.leaves + wave;
        self.most[at] = self.most[at].saturating_sub(rows);
        while at > 1 {
            at /= 2;
            self.most[at] = self.most[2 * at].max(self.most[2 * at + 1]);
        }
    }
}

#[cfg(test)]
#[path = "waves_tests.rs"]
mod tests;
