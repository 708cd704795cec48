//! Small blocks that may be in the front: what the ledger says of them, and taking them out of it.

use super::{Need, State};
use crate::AllocError;
use crate::front::{Front, Kept, Made, Word};
use crate::stats::{Amount, Stats};
use crate::types::Request;

impl State {
    /// The entry of a block that is in the ledger.
    #[inline]
    pub(super) fn entry_of(&self, index: u32) -> Option<Word> {
        if !self.records[index as usize].is_entered {
            return None;
        }
        self.front.as_ref()?.ledger().get(self.ranges.start(index))
    }

    /// Whether block `index` is the front's, not a user's.
    #[inline]
    pub(super) fn is_in_front(&self, index: u32) -> bool {
        self.entry_of(index).is_some_and(Word::is_in_front)
    }

    /// Bytes that the user of block `index` asked for.
    pub(super) fn requested_bytes(&self, index: u32) -> usize {
        match self.entry_of(index) {
            Some(word) => self.address_range(index).bytes - word.unasked_bytes() as usize,
            None => self.records[index as usize].requested_bytes,
        }
    }

    /// Enters a block that has just been made, where it is one for the front.
    #[inline]
    pub(super) fn enter(&mut self, index: u32, request: &Request, need: &Need) {
        if need.is_small {
            self.enter_small(index, request);
        }
    }

    fn enter_small(&mut self, index: u32, request: &Request) {
        // Where streams are nothing, a key is only reported: the front does not tell them apart.
        let has_its_key = self.is_stream_ordered || request.stream == 0;
        let stream = self.stream_of(index);
        let is_served = has_its_key && Front::serves(stream);
        if let Some(front) = self.front.as_ref().filter(|_| is_served) {
            self.records[index as usize].is_entered = true;
            let made = Made {
                unit: self.ranges.start(index),
                units: self.ranges.units(index),
                index,
                generation: self.records[index as usize].generation,
                stream,
            };
            front.enter(&made, request.bytes);
        }
    }

    /// Takes the block of a user out of the ledger: it is the state's from here on. `false` where it
    /// was freed at this very moment: then it is no block any more.
    #[inline]
    pub(super) fn hold(&mut self, index: u32) -> bool {
        !self.records[index as usize].is_entered || self.hold_entered(index)
    }

    /// The same, or what to say of it.
    pub(super) fn hold_or_refuse(&mut self, index: u32) -> Result<(), AllocError> {
        let address = self.address_range(index).start;
        if self.hold(index) { Ok(()) } else { Err(AllocError::NotABlock { address }) }
    }

    fn hold_entered(&mut self, index: u32) -> bool {
        let Some(front) = &self.front else { return false };
        let (unit, ledger) = (self.ranges.start(index), front.ledger());
        let Some(word) = ledger.get(unit).filter(|it| it.is_users()) else { return false };
        if !ledger.leave(unit, word) {
            return false;
        }
        let bytes = self.range_bytes(index);
        let record = &mut self.records[index as usize];
        record.is_entered = false;
        record.requested_bytes = bytes as usize - word.unasked_bytes() as usize;
        true
    }

    /// Before a block with `bytes` of pages leaves the figures: the front may have handed it out
    /// since they were last settled, or be near the peak.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "once for each block")]
    pub(super) fn settle_before_removal(&mut self, bytes: u64, requested_bytes: u64) {
        let Stats { allocated_bytes, requested_bytes: requested, allocations, .. } = &self.stats;
        let is_counted = allocated_bytes.current >= bytes
            && requested.current >= requested_bytes
            && allocations.current > 0;
        if is_counted {
            self.settle_near_peak(0, 0);
        } else {
            self.settle_front();
        }
    }

    /// Adds to the figures what the front did.
    pub(crate) fn settle_front(&mut self) {
        if let Some(front) = &self.front {
            self.front_bytes = front.settle(&mut self.stats);
        }
    }

    /// The same, where it matters: before `bytes` more or fewer are active, and `requested_bytes` of
    /// them asked for, and the front may have been, or come to be, where either peak is.
    #[inline]
    pub(super) fn settle_near_peak(&mut self, bytes: u64, requested_bytes: u64) {
        let Stats { allocated_bytes: allocated, requested_bytes: requested, .. } = &self.stats;
        let is_near =
            |amount: &Amount, more: u64| amount.current + more + self.front_bytes > amount.peak;
        let is_near = is_near(allocated, bytes) || is_near(requested, requested_bytes);
        if self.front.is_some() && is_near {
            self.settle_front();
        }
    }

    /// Empties the front: its blocks are free ranges. Returns their bytes.
    pub(crate) fn empty_front(&mut self) -> u64 {
        self.drain_front(false)
    }

    /// The same, and it stays empty: nothing is handed out past the budget.
    pub(crate) fn shut_front(&mut self) {
        self.is_front_shut = true;
        self.drain_front(true);
    }

    /// What is held fits into the budget: the front may have blocks.
    #[cold]
    pub(crate) fn open_front(&mut self) {
        self.is_front_shut = false;
        if let Some(front) = &self.front {
            front.open();
        }
    }

    fn drain_front(&mut self, is_shut: bool) -> u64 {
        let Some(front) = self.front.clone() else { return 0 };
        let kept = front.drain(is_shut);
        // After that: it has to know of all that was drained.
        self.settle_front();
        kept.into_iter().map(|kept| self.release_kept(kept)).sum()
    }

    /// Frees a block of the front, which its figures count as cached.
    fn release_kept(&mut self, Kept { unit, word }: Kept) -> u64 {
        let index = word.index();
        let left = self.front.as_ref().is_some_and(|front| front.ledger().leave(unit, word));
        debug_assert!(left, "block {index} of the front is not in the ledger: {word:?}");
        let bytes = self.range_bytes(index);
        self.stats.cached_bytes.remove(bytes);
        self.stats.inactive_split_bytes.remove(bytes);
        self.starts.remove(unit);
        self.give(index, true);
        bytes
    }
}
