//! What a block has beside what was asked for, and blocks that the thread cache may have.

use super::super::common::{BASE, PAGE, key};
use super::life::overlaps;
use super::ops::Setup;
use super::{GONE_MAX, Gone, Peaks, Shadow};
use dormouse_alloc::{AllocError, BlockInfo, Request, WHOLE_PAGES_DIVISOR};
use dormouse_device::{AddressRange, Fill};

/// The largest block that the thread cache keeps, in granules.
const SMALL_GRANULES_MAX: usize = 2048;
/// Sizes up to this number of granules have a class each; above, 16 steps per doubling.
const EXACT_GRANULES: usize = 32;

impl Setup {
    /// Whether the block has its pages to itself: half a page or less shares its page all the same.
    pub(super) fn is_whole(&self, request: &Request) -> bool {
        request.whole_pages && request.bytes > PAGE / WHOLE_PAGES_DIVISOR
    }

    /// Where the space begins: with a large page.
    pub(super) fn space_start(&self) -> usize {
        BASE.next_multiple_of(self.large_pages * PAGE)
    }

    /// Whether a block wakes to large pages: from two of them on, if pages move.
    pub(super) fn wakes_large(&self, block: AddressRange) -> bool {
        self.moves_pages && self.large_pages > 1 && block.bytes >= 2 * self.large_pages * PAGE
    }

    /// Whether it is a request that the thread cache may meet, and whose block it may keep.
    pub(super) fn is_small(&self, request: &Request) -> bool {
        let Request { bytes, align, arena, scope, tag, fill, whole_pages, .. } = *request;
        let is_plain = arena.is_none() && scope == 0 && tag == 0 && !whole_pages;
        let is_short = bytes <= SMALL_GRANULES_MAX * self.granule_bytes;
        let is_loose = align <= self.granule_bytes && fill == Fill::Any;
        self.thread_cache && is_plain && is_short && is_loose
    }

    /// The size of the block that `request` gets; `None` where that is no number.
    pub(super) fn block_bytes(&self, request: &Request) -> Option<usize> {
        let unit_bytes = if self.is_whole(request) { PAGE } else { self.granule_bytes };
        let bytes = request.bytes.checked_next_multiple_of(unit_bytes)?;
        let granules = bytes / self.granule_bytes;
        if !self.is_small(request) || granules <= EXACT_GRANULES {
            return Some(bytes);
        }
        // From 33 to 64 granules in steps of 2, to 128 of 4, and so on.
        let step = (granules - 1).ilog2() - EXACT_GRANULES.ilog2() + 1;
        Some(granules.next_multiple_of(1 << step) * self.granule_bytes)
    }

    /// Whether a block of `bytes` may be what `request` gets, for which one of `block_bytes` is made
    /// where the thread cache has none: it may have one that is a little larger.
    pub(super) fn may_be(&self, bytes: usize, block_bytes: usize, request: &Request) -> bool {
        let is_little = bytes > block_bytes && bytes * 4 <= block_bytes * 5;
        bytes == block_bytes || (self.is_small(request) && is_little)
    }
}

impl Gone {
    pub(super) const fn new(info: &BlockInfo) -> Self {
        Self { id: info.id, start: info.range.start }
    }
}

impl Shadow {
    /// A stream's key. Where there are no streams any will do: mostly the calling thread's.
    pub(super) fn key(&self, stream: usize, salt: usize) -> u64 {
        if self.is_ordered() || salt % 4 == 3 { key(stream) } else { 0 }
    }

    /// A block has been freed: what named it names nothing.
    pub(super) fn note_gone(&mut self, info: &BlockInfo) {
        let gone = Gone::new(info);
        self.must_be_gone(&gone);
        self.gone.push(gone);
        if self.gone.len() > GONE_MAX {
            self.gone.remove(0);
        }
    }

    /// A block is handed out. Only one that the thread cache has kept as it was has the id it had.
    pub(super) fn note_back(&mut self, info: &BlockInfo, is_small: bool) {
        let start = info.range.start;
        let is_right = |it: &Gone| it.id != info.id || (is_small && it.start == start);
        assert!(self.gone.iter().all(is_right), "{info:?} again");
        self.gone.retain(|it| it.id != info.id);
    }

    /// A block that was freed is found by nothing, and cannot be freed again.
    pub(super) fn must_be_gone(&self, gone: &Gone) {
        let Gone { id, start } = *gone;
        let stale = |result: Result<(), AllocError>| {
            assert!(matches!(result, Err(AllocError::StaleBlock { .. })), "{id:?}: {result:?}");
        };
        stale(self.allocator.unclaim(id));
        stale(self.allocator.finish_free(id));
        stale(self.allocator.set_asleep(id));
        stale(self.allocator.set_awake(id));
        stale(self.allocator.info(id).map(drop));
        // Where it was there may be another by now.
        let at = AddressRange::new(start, 1);
        if self.blocks().any(|it| overlaps(it.info.range, at)) {
            return;
        }
        assert_eq!(self.allocator.lookup(start), None);
        let key = self.key(0, 0);
        for result in [
            self.allocator.free(start, key).map(drop),
            self.allocator.claim(start, 1).map(drop),
            self.allocator.record_stream(start, key),
        ] {
            assert!(matches!(result, Err(AllocError::NotABlock { .. })), "{start:x}: {result:?}");
        }
    }

    /// What was asked for and is in users' hands is what peaks are made of.
    pub(super) fn allocated_bytes(&self) -> u64 {
        self.blocks().filter(|it| !it.info.free_deferred).map(|it| it.awake_bytes()).sum()
    }

    pub(super) fn note_peak(&mut self) {
        let now = self.now();
        let Peaks { allocated_bytes, requested_bytes, asleep_bytes, .. } = self.peaks;
        self.peaks = Peaks {
            allocated_bytes: allocated_bytes.max(now.allocated_bytes),
            requested_bytes: requested_bytes.max(now.requested_bytes),
            asleep_bytes: asleep_bytes.max(now.asleep_bytes),
            mapped_bytes: self.peaks.mapped_bytes.max(now.mapped_bytes),
            blocks: self.peaks.blocks.max(now.blocks),
            mapped_bytes_max: self.peaks.mapped_bytes_max.max(now.mapped_bytes_max),
            interval_bytes: self.peaks.interval_bytes.max(now.interval_bytes),
        };
    }

    pub(super) fn reset_peaks(&mut self) {
        self.allocator.reset_peaks();
        self.peaks = Peaks { interval_bytes: self.peaks.interval_bytes, ..self.now() };
    }

    pub(super) fn begin_interval(&mut self) {
        self.allocator.begin_interval();
        self.peaks.interval_bytes = self.now().interval_bytes;
    }

    /// What would be the peaks if they were reset now.
    fn now(&self) -> Peaks {
        let mine = || self.blocks().filter(|it| !it.info.free_deferred);
        let asleep = self.blocks().filter(|it| it.info.asleep);
        let mapped_bytes = self.mapped_bytes();
        Peaks {
            allocated_bytes: self.allocated_bytes(),
            requested_bytes: mine().map(|it| it.info.requested_bytes as u64).sum(),
            asleep_bytes: asleep.map(|it| it.info.pages.bytes as u64).sum(),
            mapped_bytes,
            blocks: mine().count() as u64,
            mapped_bytes_max: mapped_bytes.max(self.budget_bytes),
            interval_bytes: self.allocated_bytes(),
        }
    }
}
