//! Counters of transfers, one set per direction.

use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};

use super::CopyStats;
use dormouse_storage::sync::{Mutex, lock};
use dormouse_timeline::rate_bytes_per_s;

/// Bytes after which the recent throughput replaces the one measured at the start.
const LATE_BYTES_MIN: u64 = 64 << 20;
/// Bytes without a pause that a peak throughput needs; less measures the clock.
const BEST_BYTES_MIN: u64 = 256 << 10;
/// Bytes after which the earlier half counts half, so that a changed link shows within a few GiB.
const LATE_BYTES_MAX: u64 = 1 << 30;

/// Transfers in one direction.
#[derive(Debug, Default)]
pub(crate) struct Copies(Mutex<Busy>);

impl Copies {
    /// Counts a completed transfer that took `ns` with no other beside it.
    pub(crate) fn add(&self, bytes: u64, ns: u64) {
        let mut busy = lock(&self.0);
        busy.note_whole(bytes);
        busy.add(bytes, ns);
    }

    /// Starts a transfer.
    pub(crate) fn begin(&self, now_ns: u64) {
        lock(&self.0).begin(now_ns);
    }

    /// Ends a transfer, however it ended; `moved_bytes` were transferred.
    pub(crate) fn end(&self, now_ns: u64, moved_bytes: u64) {
        lock(&self.0).end(now_ns, moved_bytes);
    }

    /// Counts a completed transfer.
    pub(crate) fn note_whole(&self, bytes: u64) {
        lock(&self.0).note_whole(bytes);
    }

    /// Returns the completed transfers, and the time in which at least one was in progress.
    pub(crate) fn stats(&self) -> CopyStats {
        lock(&self.0).whole
    }

    /// Returns bytes per second while busy; 0 if nothing moved.
    pub(crate) fn bytes_per_s(&self) -> u64 {
        let busy = lock(&self.0);
        rate_bytes_per_s(busy.moved_bytes, busy.whole.busy_ns)
    }

    /// Returns bytes per second of the fastest busy period of at least [`BEST_BYTES_MIN`]; 0 if there was
    /// none.
    pub(crate) fn best_bytes_per_s(&self) -> u64 {
        lock(&self.0).best_bytes_per_s
    }

    /// Returns recent bytes per second; 0 before [`LATE_BYTES_MIN`] have moved.
    pub(crate) fn late_bytes_per_s(&self) -> u64 {
        let busy = lock(&self.0);
        let is_enough = busy.late_bytes >= LATE_BYTES_MIN;
        if is_enough { rate_bytes_per_s(busy.late_bytes, busy.late_ns) } else { 0 }
    }
}

/// Busy time of a direction. Transfers overlap: the sum of their times would understate the link.
#[derive(Debug, Default)]
struct Busy {
    /// Completed transfers, and the busy time of all.
    whole: CopyStats,
    under_way: u32,
    /// Counted up to here, while any is in progress.
    since_ns: u64,
    /// Bytes of all transfers, failed ones included.
    moved_bytes: u64,
    /// The recent part of both.
    late_bytes: u64,
    late_ns: u64,
    /// The part of both since the link was last idle.
    turn_bytes: u64,
    turn_ns: u64,
    best_bytes_per_s: u64,
}

impl Busy {
    fn note_whole(&mut self, bytes: u64) {
        self.whole.copies += 1;
        self.whole.bytes += bytes;
    }

    fn begin(&mut self, now_ns: u64) {
        if self.under_way == 0 {
            self.since_ns = now_ns;
        }
        self.under_way += 1;
    }

    fn end(&mut self, now_ns: u64, moved_bytes: u64) {
        let ns = now_ns.saturating_sub(self.since_ns);
        self.since_ns = self.since_ns.max(now_ns);
        self.under_way = self.under_way.saturating_sub(1);
        self.add(moved_bytes, ns);
    }

    fn add(&mut self, bytes: u64, ns: u64) {
        self.moved_bytes += bytes;
        self.whole.busy_ns += ns;
        self.turn_bytes += bytes;
        self.turn_ns += ns;
        if self.under_way == 0 {
            let (bytes, ns) = (mem::take(&mut self.turn_bytes), mem::take(&mut self.turn_ns));
            if bytes >= BEST_BYTES_MIN {
                self.best_bytes_per_s = self.best_bytes_per_s.max(rate_bytes_per_s(bytes, ns));
            }
        }
        self.late_bytes += bytes;
        self.late_ns += ns;
        if self.late_bytes > LATE_BYTES_MAX {
            (self.late_bytes, self.late_ns) = (self.late_bytes / 2, self.late_ns / 2);
        }
    }
}

/// Transfers by direction.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) device_to_host: Copies,
    pub(crate) host_to_device: Copies,
    pub(crate) nvme_write: Copies,
    pub(crate) nvme_read: Copies,
    /// Requests to the file that were answered with bytes, of regions alone.
    pub(crate) answers: AtomicU64,
}

impl Counters {
    /// Returns a figure that changes while regions sleep or wake.
    pub(crate) fn progress(&self) -> u64 {
        let copies = [&self.device_to_host, &self.host_to_device].map(|link| link.stats().copies);
        copies.iter().sum::<u64>() + self.answers.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    fn moved_bytes(copies: &Copies) -> u64 {
        lock(&copies.0).moved_bytes
    }

    #[test]
    fn overlapping_transfers_count_their_time_once() {
        let copies = Copies::default();
        copies.begin(10);
        copies.begin(20);
        copies.end(40, 100);
        assert_eq!((copies.stats().busy_ns, moved_bytes(&copies)), (30, 100));
        copies.begin(50);
        copies.end(60, 7);
        copies.end(70, 200);
        assert_eq!((copies.stats().busy_ns, moved_bytes(&copies)), (60, 307));
        // Nothing is under way from 70 to 100.
        copies.begin(100);
        copies.end(101, 1);
        assert_eq!(copies.stats().busy_ns, 61);
        copies.add(5, 9);
        assert_eq!((copies.stats().busy_ns, moved_bytes(&copies)), (70, 313));
        assert_eq!(copies.bytes_per_s(), rate_bytes_per_s(313, 70));
        assert_eq!((copies.stats().copies, copies.stats().bytes), (1, 5), "whole ones alone");
    }

    #[test]
    fn the_best_rate_is_that_of_a_busy_period() {
        let (copies, whole) = (Copies::default(), BEST_BYTES_MIN);
        copies.add(whole - 1, 1);
        assert_eq!(copies.best_bytes_per_s(), 0, "too little to tell");
        // Two that overlap end one upon the other: not the second alone, in a tenth of the time.
        copies.begin(0);
        copies.begin(5);
        copies.end(90, whole);
        copies.end(100, whole);
        assert_eq!(copies.best_bytes_per_s(), rate_bytes_per_s(2 * whole, 100));
        copies.add(whole, 51);
        assert_eq!(copies.best_bytes_per_s(), rate_bytes_per_s(2 * whole, 100));
        copies.add(whole, 49);
        assert_eq!(copies.best_bytes_per_s(), rate_bytes_per_s(whole, 49));
    }

    #[test]
    fn the_recent_rate_follows_a_change_of_the_link() {
        let copies = Copies::default();
        copies.add(LATE_BYTES_MIN - 1, SECOND_NS);
        assert_eq!(copies.late_bytes_per_s(), 0, "too little to tell");
        copies.add(1, 0);
        assert_eq!(copies.late_bytes_per_s(), LATE_BYTES_MIN);
        // As fast for long, then four times slower.
        for _ in 0..100 {
            copies.add(LATE_BYTES_MIN, SECOND_NS);
        }
        assert_eq!(copies.late_bytes_per_s(), LATE_BYTES_MIN);
        for _ in 0..2 * LATE_BYTES_MAX / LATE_BYTES_MIN {
            copies.add(LATE_BYTES_MIN, 4 * SECOND_NS);
        }
        let (late, slow) = (copies.late_bytes_per_s(), LATE_BYTES_MIN / 4);
        assert!(late < slow + slow / 5, "{late} of {slow}");
    }
}
