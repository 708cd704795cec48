//! Statistics, modelled on torch's.

/// One statistic: current value, peak and total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// Current value.
    pub current: u64,
    /// Highest value since the start or the last `reset_peaks`.
    pub peak: u64,
    /// Sum of all increases.
    pub added_total: u64,
}

impl Amount {
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

    /// Raises the peak to the current value.
    #[inline]
    pub(crate) fn touch(&mut self) {
        self.peak = self.peak.max(self.current);
    }

    fn reset_peak(&mut self) {
        self.peak = self.current;
    }
}

/// Memory statistics of an allocator. All `_bytes` except `requested_bytes` are whole granules.
///
/// In torch's statistics *reserved* is `mapped_bytes`, `num_alloc_retries` is `retries` and `num_ooms`
/// is `ooms`; *allocated*, *active* and *inactive split* have the same names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Awake blocks that are not freed.
    pub allocated_bytes: Amount,
    /// Their highest value since the start or the last `begin_interval`.
    pub allocated_interval_peak_bytes: u64,
    /// Awake blocks, including those with a deferred free and those that are pending.
    pub active_bytes: Amount,
    /// Asleep blocks, those with a deferred free included. They hold no pages.
    pub asleep_bytes: Amount,
    /// The part of `active_bytes` that is freed but possibly still used by other streams.
    pub pending_bytes: Amount,
    /// Number of pending blocks.
    pub pending_blocks: Amount,
    /// Requested bytes of the blocks that are not freed, awake or asleep. With
    /// [`crate::Config::thread_cache`] the peak of small blocks is taken when most of their
    /// `allocated_bytes` are allocated.
    pub requested_bytes: Amount,
    /// All pages held: active, cached, staged and in transit. The budget limits this value.
    pub mapped_bytes: Amount,
    /// Free mapped ranges.
    pub cached_bytes: Amount,
    /// The part of `cached_bytes` in segments that also contain memory in use.
    pub inactive_split_bytes: Amount,
    /// Reserved for blocks about to wake (`reserve_awake`).
    pub staged_bytes: Amount,
    /// Number of blocks that are not freed, awake or asleep; `added_total` counts all allocations. With
    /// `thread_cache` the peak may include blocks that were just freed into the thread cache.
    pub allocations: Amount,
    /// Number of segments.
    pub segments: Amount,
    /// Number of arenas that are open, or closed but not empty.
    pub arenas: Amount,
    /// Limit of `mapped_bytes`.
    pub budget_bytes: u64,
    /// Successful map calls of the device.
    pub maps: u64,
    /// Successful unmap calls of the device.
    pub unmaps: u64,
    /// Failed unmap calls of the device; the ranges stayed cached.
    pub unmap_refusals: u64,
    /// Waits for a stream to free memory (never by `free`).
    pub stream_waits: u64,
    /// Cached ranges of one stream that were unmapped for a request of another.
    pub cross_stream_trims: u64,
    /// Events that the device failed to record, query or wait for. The memory concerned stayed pending
    /// or cached.
    pub event_refusals: u64,
    /// Requests (for a block or for room to wake) that ran the out-of-memory ladder, with any result.
    pub retries: u64,
    /// Calls of [`crate::Reclaim`].
    pub reclaims: u64,
    /// Requests that failed with [`crate::AllocError::OutOfMemory`].
    pub ooms: u64,
}

/// What the pools of one kind hold, those of small or those of large blocks: a part of [`Stats`] at one moment. Counted by a
/// walk over large blocks and free ranges, so no peaks and totals are known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// The part of [`Stats::allocated_bytes`].
    pub allocated_bytes: u64,
    /// The part of [`Stats::active_bytes`].
    pub active_bytes: u64,
    /// The part of [`Stats::requested_bytes`].
    pub requested_bytes: u64,
    /// The part of [`Stats::mapped_bytes`]. Staged bytes are those of large blocks.
    pub mapped_bytes: u64,
    /// The part of [`Stats::inactive_split_bytes`].
    pub inactive_split_bytes: u64,
    /// The part of [`Stats::allocations`].
    pub allocations: u64,
    /// The part of [`Stats::pending_blocks`].
    pub pending_blocks: u64,
    /// The part of [`Stats::segments`].
    pub segments: u64,
    /// Number of ranges in `inactive_split_bytes`, blocks of the thread cache included.
    pub inactive_splits: u64,
}

/// Identifies a watch of the peak of `allocated_bytes` ([`crate::Allocator::watch_peak`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeakWatch(u64);

/// Peaks of `allocated_bytes` before the latest reset, begin of an interval or look of a watch. `Stats` has the
/// peak since then, for all: an allocation raises one peak.
#[derive(Clone, Debug, Default)]
pub(crate) struct EarlierPeaks {
    since_reset: u64,
    in_interval: u64,
    /// By watch, since its last look. A few: one for each prefix that is not closed.
    watched: Vec<(PeakWatch, u64)>,
    last_watch: u64,
}

impl EarlierPeaks {
    /// Resets every peak but that of the interval.
    pub(crate) fn reset(&mut self, stats: &mut Stats) {
        self.close(stats);
        self.since_reset = 0;
        stats.reset_peaks();
    }

    /// Begins an interval. Other peaks stay.
    pub(crate) fn begin_interval(&mut self, stats: &mut Stats) {
        self.close(stats);
        self.in_interval = 0;
    }

    /// Begins a watch.
    pub(crate) fn watch(&mut self, stats: &mut Stats) -> PeakWatch {
        self.close(stats);
        self.last_watch += 1;
        let watch = PeakWatch(self.last_watch);
        self.watched.push((watch, stats.allocated_bytes.current));
        watch
    }

    /// Returns the peak since the last look of this watch; the current value if it has ended.
    pub(crate) fn look(&mut self, watch: PeakWatch, stats: &mut Stats) -> u64 {
        self.close(stats);
        let current = stats.allocated_bytes.current;
        let found = self.watched.iter_mut().find(|(its, _)| *its == watch);
        found.map_or(current, |(_, peak)| std::mem::replace(peak, current))
    }

    /// Ends a watch.
    pub(crate) fn unwatch(&mut self, watch: PeakWatch) {
        self.watched.retain(|(its, _)| *its != watch);
    }

    /// Takes over the peak of the statistics, which begins anew.
    fn close(&mut self, stats: &mut Stats) {
        let peak = stats.allocated_bytes.peak;
        let watched = self.watched.iter_mut().map(|(_, peak)| peak);
        for earlier in watched.chain([&mut self.since_reset, &mut self.in_interval]) {
            *earlier = peak.max(*earlier);
        }
        stats.allocated_bytes.reset_peak();
    }

    /// Returns the statistics with both peaks.
    pub(crate) fn complete(&self, mut stats: Stats) -> Stats {
        let later = stats.allocated_bytes.peak;
        stats.allocated_interval_peak_bytes = later.max(self.in_interval);
        stats.allocated_bytes.peak = later.max(self.since_reset);
        stats
    }
}

impl Stats {
    /// Returns the figures of one kind of pool: the totals minus `other`, those of the other kind.
    pub(crate) const fn beside(&self, other: &PoolStats, inactive_splits: u64) -> PoolStats {
        const fn rest(all: Amount, other: u64) -> u64 {
            all.current.saturating_sub(other)
        }
        PoolStats {
            allocated_bytes: rest(self.allocated_bytes, other.allocated_bytes),
            active_bytes: rest(self.active_bytes, other.active_bytes),
            requested_bytes: rest(self.requested_bytes, other.requested_bytes),
            mapped_bytes: rest(self.mapped_bytes, other.mapped_bytes),
            inactive_split_bytes: rest(self.inactive_split_bytes, other.inactive_split_bytes),
            allocations: rest(self.allocations, other.allocations),
            pending_blocks: rest(self.pending_blocks, other.pending_blocks),
            segments: rest(self.segments, other.segments),
            inactive_splits,
        }
    }

    fn reset_peaks(&mut self) {
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
