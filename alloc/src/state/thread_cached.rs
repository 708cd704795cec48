//! Small blocks that may be in the thread cache: their entries in the ownership table, and their removal.

use super::{Need, State};
use crate::AllocError;
use crate::history::HistoryAction;
use crate::stats::{Amount, Stats};
use crate::thread_cache::{CachedBlock, NewBlock, Ownership, ThreadCache, ThreadShard};
use crate::types::Request;

impl State {
    /// Returns the ownership entry of a registered block.
    #[inline]
    pub(super) fn ownership_of(&self, index: u32) -> Option<Ownership> {
        if !self.records[index as usize].is_registered {
            return None;
        }
        self.thread_cache.as_ref()?.ownership().get(self.ranges.start(index))
    }

    /// Whether the thread cache owns block `index`.
    #[inline]
    pub(super) fn is_in_cache(&self, index: u32) -> bool {
        self.ownership_of(index).is_some_and(Ownership::is_in_cache)
    }

    /// Returns the requested bytes of block `index`.
    pub(super) fn requested_bytes(&self, index: u32) -> usize {
        match self.ownership_of(index) {
            Some(word) => self.address_range(index).bytes - word.slack_bytes() as usize,
            None => self.records[index as usize].requested_bytes,
        }
    }

    /// Registers a new block if it may go to the thread cache.
    #[inline]
    pub(super) fn register(&mut self, index: u32, request: &Request, need: &Need) {
        if need.is_small {
            self.register_small(index, request);
        }
    }

    fn register_small(&mut self, index: u32, request: &Request) {
        // Without stream order a key is only reported; the thread cache serves only key 0.
        let has_its_key = self.is_stream_ordered || request.stream == 0;
        let stream = self.stream_of(index);
        let is_served = has_its_key && ThreadCache::serves(stream);
        if let Some(thread_cache) = self.thread_cache.as_ref().filter(|_| is_served) {
            self.records[index as usize].is_registered = true;
            let made = NewBlock {
                unit: self.ranges.start(index),
                units: self.ranges.units(index),
                index,
                generation: self.records[index as usize].generation,
                stream,
            };
            thread_cache.register(&made, request.bytes);
        }
    }

    /// Removes a user's block from the ownership table, so that the state owns it. `false` if another thread
    /// has just freed it.
    #[inline]
    pub(super) fn hold(&mut self, index: u32) -> bool {
        !self.records[index as usize].is_registered || self.take_registered(index)
    }

    /// As `hold`, with an error.
    pub(super) fn take_ownership_or_refuse(&mut self, index: u32) -> Result<(), AllocError> {
        let address = self.address_range(index).start;
        if self.hold(index) { Ok(()) } else { Err(AllocError::NotABlock { address }) }
    }

    fn take_registered(&mut self, index: u32) -> bool {
        let Some(thread_cache) = &self.thread_cache else { return false };
        let (unit, ownership) = (self.ranges.start(index), thread_cache.ownership());
        let Some(word) = ownership.get(unit).filter(|it| it.is_allocated()) else { return false };
        if !ownership.remove(unit, word) {
            return false;
        }
        let bytes = self.range_bytes(index);
        let record = &mut self.records[index as usize];
        record.is_registered = false;
        record.requested_bytes = bytes as usize - word.slack_bytes() as usize;
        true
    }

    /// Settles the thread cache before a block with `bytes` of pages is subtracted from the statistics, if the
    /// block may not be counted yet or a peak is near.
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
            self.settle_thread_cache();
        }
    }

    /// Adds the counts of the thread cache to the statistics.
    pub(crate) fn settle_thread_cache(&mut self) {
        if let Some(thread_cache) = &self.thread_cache {
            self.thread_cache_bytes = thread_cache.settle(&mut self.stats);
        }
    }

    /// Returns all statistics, those of the thread cache included.
    pub(crate) fn settled_stats(&mut self) -> Stats {
        self.settle_thread_cache();
        self.earlier_peaks.complete(self.stats)
    }

    /// Settles the thread cache if, with `bytes` and `requested_bytes` more, it may have reached a peak.
    #[inline]
    pub(super) fn settle_near_peak(&mut self, bytes: u64, requested_bytes: u64) {
        let Stats { allocated_bytes: allocated, requested_bytes: requested, .. } = &self.stats;
        let is_near = |amount: &Amount, more: u64| {
            amount.current + more + self.thread_cache_bytes > amount.peak
        };
        let is_near = is_near(allocated, bytes) || is_near(requested, requested_bytes);
        if self.thread_cache.is_some() && is_near {
            self.settle_thread_cache();
        }
    }

    /// Allocates a block of `bytes` from the thread cache while the history is on, and records it. Returns its first
    /// unit.
    #[cold]
    #[inline(never)]
    pub(crate) fn allocate_recorded(
        &mut self,
        shard: ThreadShard,
        bytes: usize,
        stream: u64,
    ) -> Option<u32> {
        let thread_cache = self.thread_cache.as_ref().filter(|_| !self.is_thread_cache_closed)?;
        // Not 0, and at most the largest class.
        let cached = thread_cache.allocate_recorded(shard, bytes as u32, stream)?;
        self.record_allocated(cached.word.index(), &Request { stream, ..Request::new(bytes) });
        Some(cached.unit)
    }

    /// Frees the block that starts at `unit` into the thread cache while the history is on, and records it. `false` if
    /// it is not cacheable or its bin is full.
    #[cold]
    #[inline(never)]
    pub(crate) fn free_recorded(&mut self, unit: u32, stream: u64) -> bool {
        let thread_cache = self.thread_cache.as_ref().filter(|_| !self.is_thread_cache_closed);
        let Some(thread_cache) = thread_cache else { return false };
        let Some(index) = self.starts.at(unit) else { return false };
        let is_freed = thread_cache.free_recorded(unit as usize, stream);
        if is_freed {
            self.record_block(index, HistoryAction::Freed);
        }
        is_freed
    }

    /// Empties the thread cache: its blocks become free ranges. Returns their bytes.
    pub(crate) fn flush_thread_cache(&mut self) -> u64 {
        self.drain_thread_cache(false)
    }

    /// Empties and closes the thread cache, so that it serves nothing beyond the budget.
    pub(crate) fn close_thread_cache(&mut self) {
        self.is_thread_cache_closed = true;
        self.drain_thread_cache(true);
    }

    /// Reopens the thread cache, once the mapped bytes are within the budget.
    #[cold]
    pub(crate) fn open_thread_cache(&mut self) {
        self.is_thread_cache_closed = false;
        if let Some(thread_cache) = self.thread_cache.as_ref().filter(|_| self.history.is_none()) {
            thread_cache.open();
        }
    }

    pub(super) fn drain_thread_cache(&mut self, is_shut: bool) -> u64 {
        let Some(thread_cache) = self.thread_cache.clone() else { return 0 };
        let kept = thread_cache.drain(is_shut);
        // After the drain, so that all its blocks are counted.
        self.settle_thread_cache();
        kept.into_iter().map(|kept| self.release_cached(kept)).sum()
    }

    /// Frees a block of the thread cache. Its bytes are counted as cached.
    fn release_cached(&mut self, CachedBlock { unit, word }: CachedBlock) -> u64 {
        let index = word.index();
        let left = self
            .thread_cache
            .as_ref()
            .is_some_and(|thread_cache| thread_cache.ownership().remove(unit, word));
        debug_assert!(
            left,
            "block {index} of the thread cache is not in the ownership table: {word:?}"
        );
        let bytes = self.range_bytes(index);
        self.stats.cached_bytes.remove(bytes);
        self.stats.inactive_split_bytes.remove(bytes);
        self.starts.remove(unit);
        self.give(index, true);
        bytes
    }
}
