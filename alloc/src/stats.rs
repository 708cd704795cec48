//! Figures of use, after the ones torch's users know.

/// One figure that goes up and down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Now.
    pub current: u64,
    /// The highest since the start or the last `reset_peaks`.
    pub peak: u64,
    /// Sum of all increases since the start.
    pub added_total: u64,
}

impl Amount {
    /// Sum of all decreases since the start.
    #[must_use]
    pub const fn removed_total(&self) -> u64 {
        self.added_total - self.current
    }

    #[inline]
    pub(crate) fn add(&mut self, value: u64) {
        self.current += value;
        self.added_total += value;
        self.peak = self.peak.max(self.current);
    }

    #[inline]
    pub(crate) fn remove(&mut self, value: u64) {
        debug_assert!(self.current >= value, "{value} taken from {}", self.current);
        self.current = self.current.wrapping_sub(value);
    }

    /// The peak is what it is now, where it was less.
    #[inline]
    pub(crate) fn touch(&mut self) {
        self.peak = self.peak.max(self.current);
    }

    /// The figure moves from `before` to `after` as one step.
    #[inline]
    pub(crate) fn shift(&mut self, before: u64, after: u64) {
        if after >= before {
            self.add(after - before);
        } else {
            self.remove(before - after);
        }
    }

    fn reset_peak(&mut self) {
        self.peak = self.current;
    }
}

/// What an allocator holds. All `_bytes` are whole granules except `requested_bytes`.
///
/// Torch's words: *allocated* is the same, *active* is the same, *reserved* is `mapped_bytes`,
/// *inactive split* is the same, `num_alloc_retries` is `retries`, `num_ooms` is `ooms`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Awake blocks in their users' hands.
    pub allocated_bytes: Amount,
    /// Awake blocks, including those with a deferred free and those that are pending.
    pub active_bytes: Amount,
    /// Asleep blocks, those with a deferred free included. They hold no pages.
    pub asleep_bytes: Amount,
    /// The part of `active_bytes` that is freed, but may still be used by other streams.
    pub pending_bytes: Amount,
    /// How many blocks that is.
    pub pending_blocks: Amount,
    /// What users asked for in the blocks in their hands, awake or asleep. With
    /// [`crate::Config::thread_cache`] small blocks come and go without the state: its peak may miss
    /// the part of theirs that was not there when most *bytes* of theirs were out.
    pub requested_bytes: Amount,
    /// Pages held in all: active, cached, staged and in transit. The budget limits this one.
    pub mapped_bytes: Amount,
    /// Free ranges that are still mapped.
    pub cached_bytes: Amount,
    /// The part of `cached_bytes` that shares a segment with something in use.
    pub inactive_split_bytes: Amount,
    /// Promised to blocks about to wake (`reserve_awake`), not yet theirs.
    pub staged_bytes: Amount,
    /// Blocks in their users' hands, awake or asleep. `added_total` counts the allocations. With
    /// `thread_cache` its peak may count blocks that had just gone back to a thread cache.
    pub allocations: Amount,
    /// Segments carved from the address space.
    pub segments: Amount,
    /// Arenas open, or closed with blocks still in them.
    pub arenas: Amount,
    /// The limit of `mapped_bytes`.
    pub budget_bytes: u64,
    /// Device map calls that succeeded.
    pub maps: u64,
    /// Device unmap calls that succeeded.
    pub unmaps: u64,
    /// Unmap calls the device refused; the range stayed cached.
    pub unmap_refusals: u64,
    /// Waits for the work of a stream to end, done to make room (never by `free`).
    pub stream_waits: u64,
    /// Ranges cached for one stream that were unmapped to serve a request of another.
    pub cross_stream_trims: u64,
    /// Events the device refused to record, to ask about or to wait for. What they were to show
    /// the end of was left as it was: pending, or cached.
    pub event_refusals: u64,
    /// Requests (for a block or for room to wake) that did not fit at first and went down the
    /// ladder, however it ended.
    pub retries: u64,
    /// Calls of [`crate::Reclaim`].
    pub reclaims: u64,
    /// Requests refused with [`crate::AllocError::OutOfMemory`].
    pub ooms: u64,
}

impl Stats {
    pub(crate) fn reset_peaks(&mut self) {
        for amount in [
            &mut self.allocated_bytes,
            &mut self.active_bytes,
            &mut self.asleep_bytes,
            &mut self.pending_bytes,
            &mut self.pending_blocks,
            &mut self.requested_bytes,
            &mut self.mapped_bytes,
            &mut self.cached_bytes,
            &mut self.inactive_split_bytes,
            &mut self.staged_bytes,
            &mut self.allocations,
            &mut self.segments,
            &mut self.arenas,
        ] {
            amount.reset_peak();
        }
    }
}
