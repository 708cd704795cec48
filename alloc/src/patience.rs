//! How often requests wait for streams that do not end.
//!
//! A stream may wait for a message that its peer sends only after this rank has sent one, which the host has yet to do.
//! Such a wait ends by its limit, [`BRIEF_WAIT_MAX`]. After the n-th of them the next 4ⁿ waits are left out, so a
//! program that always has them loses a few seconds, and one whose peer was late waits again soon. A thousand waits that
//! end make n one less.

use std::time::Duration;

/// The limit of the waits for other streams by one request or wake that fits into the budget.
pub(crate) const BRIEF_WAIT_MAX: Duration = Duration::from_secs(2);
/// From this many on, waits without an end leave out the same number: 4⁸.
const UNENDED_MAX: u32 = 8;
/// Waits that end and make up for one that did not.
const ENDED_PER_UNENDED: u32 = 1_000;

/// Which brief waits are left out.
#[derive(Debug, Default)]
pub(crate) struct Patience {
    /// Brief waits that reached their limit and are not made up for, up to [`UNENDED_MAX`].
    unended: u32,
    /// Waits that ended, up to [`ENDED_PER_UNENDED`].
    ended: u32,
    /// Waits that are still to be left out.
    left_out: u64,
}

impl Patience {
    /// Whether the next wait may be made. Counts one that is left out.
    pub(crate) fn may_wait(&mut self) -> bool {
        let may_wait = self.left_out == 0;
        self.left_out = self.left_out.saturating_sub(1);
        may_wait
    }

    /// Counts a wait that ended.
    pub(crate) fn note_ended(&mut self) {
        self.ended += 1;
        if self.ended == ENDED_PER_UNENDED {
            self.ended = 0;
            self.unended = self.unended.saturating_sub(1);
        }
    }

    /// Counts a wait that reached its limit. Returns how many are left out now.
    pub(crate) fn note_unended(&mut self) -> u64 {
        self.unended = (self.unended + 1).min(UNENDED_MAX);
        self.left_out = 4_u64.pow(self.unended);
        self.left_out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of the waits made, out of `asked`, if none ends.
    fn made(asked: u64) -> Vec<u64> {
        let mut patience = Patience::default();
        let mut made = Vec::new();
        for number in 1..=asked {
            if patience.may_wait() {
                patience.note_unended();
                made.push(number);
            }
        }
        made
    }

    #[test]
    fn waits_without_an_end_become_rare() {
        assert_eq!(made(100_000), [1, 6, 23, 88, 345, 1_370, 5_467, 21_852, 87_389]);
        let rare = made(1_000_000);
        let gaps = rare.windows(2).skip(UNENDED_MAX as usize).map(|pair| pair[1] - pair[0]);
        assert!(gaps.clone().count() > 10 && gaps.into_iter().all(|gap| gap == 65_537));
    }

    /// Of 1,000,000 waits every `every`-th that is made does not end. Returns the number of these.
    fn unended_of(every: u64) -> usize {
        let (mut patience, mut made, mut unended) = (Patience::default(), 0, 0);
        for _ in 0..1_000_000 {
            if patience.may_wait() {
                made += 1;
                if made % every == 0 {
                    patience.note_unended();
                    unended += 1;
                } else {
                    patience.note_ended();
                }
            }
        }
        unended
    }

    #[test]
    fn waits_that_end_make_up_for_rare_ones_only() {
        assert_eq!([1, 10, 100].map(|every| unended_of(every) < 30), [true; 3]);
        // Nearly all waits are made.
        assert_eq!(unended_of(5_000), 199);
    }

    #[test]
    fn waits_that_end_are_all_made() {
        let mut patience = Patience::default();
        assert!((0..1_000).all(|_| patience.may_wait()));
        patience.note_unended();
        assert_eq!((0..1_000).filter(|_| !patience.may_wait()).count(), 4);
    }
}
