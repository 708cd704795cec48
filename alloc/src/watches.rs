//! The statistics of an allocator, and watches of its peak.

use crate::allocator::Allocator;
use crate::stats::{PeakWatch, PoolStats, Stats};
use dormouse_device::Device;

impl<D: Device> Allocator<D> {
    /// Returns a consistent snapshot of the statistics.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.state.lock().state.settled_stats()
    }

    /// As [`Self::stats`], with the parts of the pools of small and of large blocks. Requests wait while all blocks are
    /// walked.
    #[must_use]
    pub fn stats_by_kind(&self) -> (Stats, [PoolStats; 2]) {
        self.state.lock().state.stats_by_kind()
    }

    /// Begins an interval: its peak becomes the current value, other peaks stay.
    pub fn begin_interval(&self) {
        self.change(|state| {
            state.settle_thread_cache();
            state.earlier_peaks.begin_interval(&mut state.stats);
        });
    }

    /// Begins a watch of the peak of allocated bytes, whatever others reset.
    #[must_use = "a watch has to end"]
    pub fn watch_peak(&self) -> PeakWatch {
        self.change(|state| {
            state.settle_thread_cache();
            state.earlier_peaks.watch(&mut state.stats)
        })
    }

    /// Returns the peak of allocated bytes since the last look of this watch, or its begin. Takes time proportional
    /// to the number of watches.
    pub fn watched_peak(&self, watch: PeakWatch) -> u64 {
        self.change(|state| {
            state.settle_thread_cache();
            state.earlier_peaks.look(watch, &mut state.stats)
        })
    }

    /// Ends a watch.
    pub fn unwatch_peak(&self, watch: PeakWatch) {
        self.change(|state| state.earlier_peaks.unwatch(watch));
    }
}
