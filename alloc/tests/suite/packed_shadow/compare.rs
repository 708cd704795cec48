//! Everything that can be seen from outside, compared.

use super::super::common::pages_of;
use super::{Peaks, Shadow};
use dormouse_alloc::{BlockInfo, Stats};
use dormouse_device::AddressRange;

impl Shadow {
    pub(crate) fn compare(&mut self) {
        self.allocator.check().unwrap();
        assert_eq!(self.device.violations(), Vec::<String>::new());
        self.compare_pages();
        self.compare_figures();
        self.compare_blocks();
        self.compare_segments();
    }

    /// Awake bytes have pages and hold what their user wrote; asleep pages are gone.
    fn compare_pages(&self) {
        let mapped = self.device.mapped_pages();
        for it in self.blocks() {
            for part in it.awake_parts() {
                let other = self.device.first_other(part, it.tag);
                assert_eq!(other, None, "at {part:x?} of {:?}, tag {}", it.info, it.tag);
            }
            if it.info.asleep && it.info.pages.bytes > 0 {
                let is_gone = mapped[pages_of(it.info.pages)].iter().all(|&it| !it);
                assert!(is_gone, "{:?} is asleep with pages", it.info);
            }
        }
    }

    fn compare_figures(&mut self) {
        let stats = self.allocator.stats();
        let pending_bytes = stats.pending_bytes.current;
        if pending_bytes == 0 {
            let is_over = self.left.iter().all(|it| self.is_over(it));
            assert!(is_over, "something is no more pending than it is over");
            self.left.clear();
        }
        let busy: u64 =
            self.left.iter().filter(|it| !self.is_over(it)).map(|it| it.range.bytes as u64).sum();
        let left: u64 = self.left.iter().map(|it| it.range.bytes as u64).sum();
        assert!(busy <= pending_bytes && pending_bytes <= left, "{busy} {pending_bytes} {left}");
        self.compare_peaks(&stats);
        let awake_bytes: u64 = self.blocks().map(|it| it.awake_bytes()).sum();
        let asleep = self.blocks().filter(|it| it.info.asleep);
        let asleep_bytes: u64 = asleep.map(|it| it.info.pages.bytes as u64).sum();
        let mine = || self.blocks().filter(|it| !it.info.free_deferred);
        let requested: u64 = mine().map(|it| it.info.requested_bytes as u64).sum();
        let active_bytes = awake_bytes + pending_bytes;
        for (name, figure, expected) in [
            ("allocated", stats.allocated_bytes.current, self.allocated_bytes()),
            ("active", stats.active_bytes.current, active_bytes),
            ("asleep", stats.asleep_bytes.current, asleep_bytes),
            ("requested", stats.requested_bytes.current, requested),
            ("mapped", stats.mapped_bytes.current, self.mapped_bytes()),
            ("cached", stats.cached_bytes.current, self.device.mapped_bytes() - active_bytes),
            ("staged", stats.staged_bytes.current, self.staged_bytes),
            ("allocations", stats.allocations.current, mine().count() as u64),
            ("allocated in all", stats.allocations.added_total, u64::from(self.tags)),
            ("ooms", stats.ooms, self.ooms),
            ("budget", stats.budget_bytes, self.budget_bytes),
        ] {
            assert_eq!(figure, expected, "{name}: {stats:?}");
        }
    }

    fn compare_peaks(&self, stats: &Stats) {
        let Peaks { mapped_bytes, mapped_bytes_max, .. } = self.peaks;
        let mapped_peak = stats.mapped_bytes.peak;
        let seen = (mapped_bytes..=mapped_bytes_max).contains(&mapped_peak);
        assert!(seen, "{mapped_bytes} to {mapped_bytes_max}: {stats:?}");
        assert!(stats.active_bytes.peak >= self.peaks.allocated_bytes, "{stats:?}");
        for (name, peak, expected) in [
            ("allocated", stats.allocated_bytes.peak, self.peaks.allocated_bytes),
            ("interval", stats.allocated_interval_peak_bytes, self.peaks.interval_bytes),
            ("asleep", stats.asleep_bytes.peak, self.peaks.asleep_bytes),
            ("requested", stats.requested_bytes.peak, self.peaks.requested_bytes),
            ("allocations", stats.allocations.peak, self.peaks.blocks),
        ] {
            // Where there is a thread cache these are not exact: see `Stats`.
            let is_right = match (name, self.setup.thread_cache) {
                ("requested", true) => peak <= expected,
                ("allocations", true) => true,
                _ => peak == expected,
            };
            assert!(is_right, "{name}: {peak}, not {expected}");
        }
    }

    fn compare_blocks(&self) {
        let by_start = |block: &BlockInfo| block.range.start;
        let mut found = self.allocator.blocks();
        found.sort_by_key(by_start);
        let mut expected: Vec<BlockInfo> = self.blocks().map(|it| it.info).collect();
        expected.sort_by_key(by_start);
        assert_eq!(found, expected);
        for block in &expected {
            let seen = (!block.free_deferred).then_some(*block);
            let AddressRange { start, bytes } = block.range;
            for address in [start, start + bytes / 2, start + bytes - 1] {
                assert_eq!(self.allocator.lookup(address), seen);
            }
            assert_eq!(self.allocator.info(block.id).unwrap(), *block);
        }
        for left in self.left.iter().filter(|it| !self.is_over(it)) {
            assert_eq!(self.allocator.lookup(left.range.start), None);
        }
    }

    /// Segments do not overlap, and no pages lie outside of them.
    fn compare_segments(&self) {
        let mut segments = self.allocator.segments();
        segments.sort_by_key(|it| it.0.start);
        let apart = segments.windows(2).all(|it| it[0].0.end() <= it[1].0.start);
        assert!(apart, "{segments:x?}");
        let mut outside = self.device.mapped_pages();
        segments.iter().for_each(|it| outside[pages_of(it.0)].fill(false));
        assert!(!outside.contains(&true), "pages outside of every segment");
    }
}
