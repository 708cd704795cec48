//! Segments: the addresses of pools, the ranges in them, and their release.

use super::pools::{ArenaPhase, Pool, PoolKind};
use super::{POOL_SPARE, RangeKind, Record, State, bare_list, cached_list};
use crate::core::{Extent, Fit, NONE};
use crate::history::HistoryAction;

/// Smaller ranges are not trimmed to reuse their pages: two system calls cost more than they save.
const REUSE_BYTES_MIN: u64 = 256 << 10;

/// The purpose of a trim, which determines the ranges to trim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TrimPurpose {
    /// Room for the request on the ladder. Any range.
    ForRequest,
    /// The budget, or a call of `trim`. Any range.
    Release,
    /// The pages are reused within the budget. Only ranges that serve no requests: those of closed arenas, and
    /// whole spare segments.
    Reuse,
    /// The pages are mapped elsewhere. Any range, the least useful first: small, and free for long.
    Move,
    /// The pages were not used for long. Any range, but only pages that have been free since this time.
    Unused {
        /// The time.
        since: u64,
    },
}

/// A run of addresses of one pool.
#[derive(Debug)]
pub(super) struct Segment {
    /// Its place in the address space.
    pub(super) extent: Extent,
    /// Its pool.
    pub(super) pool: u32,
    /// Its first range, the same for the life of the segment.
    pub(super) first: u32,
    /// Units of blocks, and of ranges in transit.
    pub(super) used_units: u32,
    /// Units that are free and mapped.
    pub(super) cached_units: u32,
}

impl State {
    /// Returns a cached range of `pool` for `fit`.
    #[inline]
    pub(super) fn find_cached(&self, pool: u32, fit: Fit) -> Option<u32> {
        self.ranges.find(cached_list(pool), fit)
    }

    /// Takes a cached range of `pool` for `fit`.
    #[inline]
    pub(super) fn take_cached(&mut self, pool: u32, fit: Fit) -> Option<u32> {
        let index = if self.large.is_empty() {
            self.ranges.take(self.find_cached(pool, fit)?, fit)?
        } else {
            self.take_unsplit(pool, fit)?
        };
        self.cached_to_used(index);
        Some(index)
    }

    /// Takes pages to unmap: the upper whole pages of the largest cached range (within 1/32), as many as
    /// `target_bytes` needs. They stay counted until `finish_trim`. Only pages that are known to be quiet are taken;
    /// kept arenas are skipped.
    ///
    /// Largest first, because this needs the fewest device calls per byte, leaves the small ranges, which are
    /// reused most, and needs no clock (I6). Pages to move come from small ranges that were freed long ago:
    /// these rarely serve a request.
    pub(crate) fn begin_trim(&mut self, target_bytes: u64, purpose: TrimPurpose) -> Option<u32> {
        let quiet_at = self.quiet_at();
        let is_cold = purpose == TrimPurpose::Move;
        let mut found: Option<(u32, u32)> = None;
        for pool in 0..u32::try_from(self.pools.len()).unwrap_or(u32::MAX) {
            if !self.may_trim(pool, purpose) {
                continue;
            }
            let (list, page_units) = (cached_list(pool), self.geometry.page_units);
            let which = |index| self.quiet_pages(index, page_units, quiet_at).is_some();
            let index = if is_cold {
                self.ranges.cold_with_whole_page(list, page_units, which)
            } else {
                self.ranges.with_whole_page(list, page_units, which)
            };
            if let Some(index) = index {
                let units = self.ranges.units(index);
                let is_better = |(_, best)| if is_cold { units < best } else { units > best };
                if found.is_none_or(is_better) {
                    found = Some((index, units));
                }
            }
        }
        let least_bytes = if purpose == TrimPurpose::Reuse { REUSE_BYTES_MIN } else { 0 };
        let (index, _) = found.filter(|&(_, units)| self.bytes(units) >= least_bytes)?;
        let units = target_bytes.div_ceil(self.geometry.granule_bytes as u64);
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        let (start, units) = self.quiet_pages(index, units, quiet_at)?;
        let index = self.ranges.take_at(index, start, units)?;
        self.cached_to_used(index);
        self.record_mut(index).kind = RangeKind::Trimming;
        Some(index)
    }

    /// Returns start and units of the last whole pages of range `index`, `units` rounded up to whole large pages.
    pub(super) fn last_pages(&self, index: u32, units: u32) -> Option<(u32, u32)> {
        let page_units = self.geometry.page_units;
        let (first, all_units) = self.ranges.whole_pages(index, page_units);
        let units = units.max(1).checked_next_multiple_of(page_units).unwrap_or(u32::MAX);
        let start = self.large.floor(first + all_units - units.min(all_units));
        (all_units > 0).then_some((start, first + all_units - start))
    }

    /// Whether the cached ranges of `pool` may be trimmed.
    pub(super) fn may_trim(&self, pool: u32, purpose: TrimPurpose) -> bool {
        let Pool { phase, family, stream, .. } = self.pools[pool as usize];
        let serves = phase == ArenaPhase::Open && family != POOL_SPARE;
        let stays = self.keeps(pool)
            || self.quiet.is_gone(stream)
            || (purpose == TrimPurpose::Reuse && serves);
        !stays
    }

    /// Ends a successful trim of `index`. Returns its bytes.
    pub(crate) fn finish_trim(&mut self, index: u32) -> u64 {
        let bytes = self.range_bytes(index);
        self.large.remove(self.ranges.start(index), self.ranges.units(index));
        self.stats.mapped_bytes.remove(bytes);
        self.stats.unmaps += 1;
        let pages = (self.ranges.start(index), self.ranges.units(index));
        self.note_pages(index, HistoryAction::Unmapped, pages);
        self.give(index, false);
        bytes
    }

    /// Ends a failed trim of `index`: it is cached again. Its pages were not used meanwhile.
    pub(crate) fn cancel_trim(&mut self, index: u32) {
        self.give_unused(index, true);
    }

    /// Caches the parts of the used range `index` before and after `units` from `start` on. Returns the rest.
    /// Both splits were promised to the caller.
    pub(super) fn give_ends(&mut self, index: u32, start: u32, units: u32) -> u32 {
        let mut middle = index;
        let head_units = start - self.ranges.start(index);
        if head_units > 0
            && let Some(rest) = self.ranges.split_used(index, head_units)
        {
            self.record_mut(rest);
            self.give(index, true);
            middle = rest;
        }
        if units < self.ranges.units(middle)
            && let Some(tail) = self.ranges.split_used(middle, units)
        {
            self.record_mut(tail);
            self.give(tail, true);
        }
        middle
    }

    /// Frees a range: cached if it has pages, else bare. Its slot gets the next generation, and its segment is
    /// released if nothing is left in it.
    #[inline]
    pub(super) fn give(&mut self, index: u32, has_pages: bool) {
        if has_pages && self.quiet.is_timing() {
            self.note_freed(index);
        }
        self.give_unused(index, has_pages);
    }

    /// As `give`, for a range with pages whose free had a number of its own before.
    pub(super) fn give_freed_at(&mut self, index: u32, freed_at: u64) {
        self.note_freed_at(index, freed_at);
        let start = self.ranges.start(index);
        let segment = self.segments[self.ranges.owner(index) as usize].as_ref();
        let list = segment.map(|segment| cached_list(segment.pool));
        let joins = |&at: &u32| at != NONE && list.is_some() && self.ranges.list(at) == list;
        let before = Some(self.ranges.before(index)).filter(joins);
        let after = Some(self.ranges.after(index)).filter(joins);
        let times = [before, after].into_iter().flatten().map(|at| self.ranges.freed_at(at));
        let freed_at = times.fold(freed_at, u64::max);
        self.give_unused(index, true);
        // Its segment may be gone.
        let whole = before.unwrap_or(index);
        let is_there = self.ranges.list(whole).is_some_and(|it| it % 2 == 0);
        if is_there && self.ranges.start(whole) <= start {
            self.ranges.set_freed_at(whole, freed_at);
        }
    }

    /// As `give`, for a range whose pages have not been used since they were last freed.
    #[inline]
    fn give_unused(&mut self, index: u32, has_pages: bool) {
        let (owner, units) = (self.ranges.owner(index), self.ranges.units(index));
        let (cached_units, list) = if has_pages {
            (units, cached_list as fn(u32) -> u32)
        } else {
            (0, bare_list as fn(u32) -> u32)
        };
        let cached_bytes = self.bytes(cached_units);
        let record = self.record_mut(index);
        *record = Record { generation: record.generation.wrapping_add(1), ..Record::NOTHING };
        let Some(segment) = &mut self.segments[owner as usize] else { return };
        let pool = segment.pool;
        let cached_before_units = segment.cached_units;
        segment.used_units -= units;
        segment.cached_units += cached_units;
        let is_in_use = segment.used_units > 0;
        self.stats.cached_bytes.add(cached_bytes);
        self.ranges.give(index, list(pool));
        if is_in_use {
            self.stats.inactive_split_bytes.add(cached_bytes);
        } else {
            self.stats.inactive_split_bytes.remove(self.bytes(cached_before_units));
            self.settle_segment(owner);
            self.retire_pool(pool);
        }
    }

    /// Moves a segment of the right size from the spare pool of its stream to `pool`, except to a kept arena:
    /// any stream may replay its graph, and queued work of this stream may still use the segment.
    pub(super) fn adopt_spare(&mut self, pool: u32, fit: Fit) -> bool {
        if self.keeps(pool) {
            return false;
        }
        let stream = self.pools[pool as usize].stream;
        let Some(units) = self.segment_units_for(fit) else { return false };
        let fitting = (stream, units, 0)..=(stream, units, u32::MAX);
        let Some(&key) = self.spare.range(fitting).next() else { return false };
        self.spare.remove(&key);
        let spare = self.member(POOL_SPARE, stream, PoolKind::Large);
        self.move_segment(key.2, pool);
        self.retire_pool(spare);
        true
    }

    /// Returns the pool of range `index`.
    pub(super) fn pool_at(&self, index: u32) -> u32 {
        self.segments[self.ranges.owner(index) as usize].as_ref().map_or(POOL_SPARE, |it| it.pool)
    }

    /// Adds a segment of new addresses for `fit` to `pool`: a multiple of the configured size, or just enough
    /// if the address space has no more.
    pub(super) fn carve_segment(&mut self, pool: u32, fit: Fit) -> bool {
        let Some(units) = self.segment_units_for(fit) else { return false };
        // Whole pages too: the next segment begins where this one ends.
        let just_enough = fit.units.saturating_add(fit.align_units - 1);
        let just_enough =
            just_enough.checked_next_multiple_of(self.geometry.page_units).unwrap_or(u32::MAX);
        let extent = self.space.allocate(units, 1).or_else(|| self.space.allocate(just_enough, 1));
        let Some(extent) = extent else { return false };
        let index = self.segments_vacant.pop().unwrap_or_else(|| {
            self.segments.push(None);
            // Limited by the number of ranges: each segment has at least one.
            u32::try_from(self.segments.len() - 1).unwrap_or(NONE)
        });
        let (start, units) = (extent.start_units(), extent.units());
        let Some(first) = self.ranges.add_segment(start, units, index, bare_list(pool)) else {
            // Not expected: `attempt` has checked the limit.
            self.segments_vacant.push(index);
            let _ = self.space.free(extent);
            return false;
        };
        let segment = Segment { extent, pool, first, used_units: 0, cached_units: 0 };
        self.segments[index as usize] = Some(segment);
        self.pools[pool as usize].segments += 1;
        self.stats.segments.add(1);
        true
    }

    /// Removes the addresses behind the last segment from the space, for good. Returns the units that are left.
    pub(crate) fn cut_space(&mut self) -> u32 {
        self.is_cut = true;
        self.geometry.units = self.space.cut();
        self.geometry.units
    }

    /// Returns the units of a segment for `fit`; `None` if they overflow.
    fn segment_units_for(&self, fit: Fit) -> Option<u32> {
        let enough = fit.units.checked_add(fit.align_units - 1)?;
        enough.checked_next_multiple_of(self.geometry.segment_units)
    }

    /// Returns all ranges of a segment, by address.
    pub(super) fn ranges_in(&self, segment: &Segment) -> impl Iterator<Item = u32> {
        let after = |&index: &u32| Some(self.ranges.after(index)).filter(|&it| it != NONE);
        std::iter::successors(Some(segment.first), after)
    }

    /// Releases all free segments of `pool`.
    pub(super) fn settle_pool(&mut self, pool: u32) {
        for index in (0_u32..).take(self.segments.len()) {
            if self.segments[index as usize].as_ref().is_some_and(|it| it.pool == pool) {
                self.settle_segment(index);
            }
        }
    }

    /// Releases a segment with nothing in use: without pages to the address space; with pages from a closed
    /// pool to the spare pool of its stream.
    fn settle_segment(&mut self, index: u32) {
        let Some(segment) = &self.segments[index as usize] else { return };
        if segment.used_units > 0 {
            return;
        }
        let pool = segment.pool;
        if segment.cached_units == 0 {
            self.return_segment(index);
        } else if self.pools[pool as usize].phase == ArenaPhase::Closed && !self.keeps(pool) {
            let stream = self.pools[pool as usize].stream;
            let spare = self.member(POOL_SPARE, stream, PoolKind::Large);
            self.move_segment(index, spare);
        }
    }

    fn return_segment(&mut self, index: u32) {
        let Some(segment) = self.segments[index as usize].take() else { return };
        let removed = self.ranges.remove_segment(segment.first);
        debug_assert!(removed, "a bare, free segment is one range");
        let pool = &mut self.pools[segment.pool as usize];
        pool.segments -= 1;
        self.spare.remove(&(pool.stream, segment.extent.units(), index));
        let freed = self.space.free(segment.extent);
        debug_assert!(freed.is_ok(), "segments come from the space");
        self.segments_vacant.push(index);
        self.stats.segments.remove(1);
    }

    /// Moves a segment without blocks to another pool of its stream. Cached ranges stay cached. A range that
    /// is being unmapped joins the pool of its segment later, in `give`.
    fn move_segment(&mut self, index: u32, pool: u32) {
        let Some(segment) = &mut self.segments[index as usize] else { return };
        let (old, units, mut range) = (segment.pool, segment.extent.units(), segment.first);
        segment.pool = pool;
        while range != NONE {
            match self.ranges.list(range) {
                Some(list) if list == cached_list(old) => {
                    self.ranges.refile(range, cached_list(pool));
                }
                Some(_) => self.ranges.refile(range, bare_list(pool)),
                None => {
                    let kind = self.records[range as usize].kind;
                    debug_assert_eq!(kind, RangeKind::Trimming, "range {range} of a free segment");
                }
            }
            range = self.ranges.after(range);
        }
        self.pools[old as usize].segments -= 1;
        let pool = &mut self.pools[pool as usize];
        pool.segments += 1;
        if pool.family == POOL_SPARE {
            self.spare.insert((pool.stream, units, index));
        }
    }

    /// Counts a cached range that has just been taken as used.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "once for each block")]
    pub(super) fn cached_to_used(&mut self, index: u32) {
        let (owner, units) = (self.ranges.owner(index), self.ranges.units(index));
        let bytes = self.bytes(units);
        self.stats.cached_bytes.remove(bytes);
        let Some(segment) = &mut self.segments[owner as usize] else { return };
        let was_in_use = segment.used_units > 0;
        segment.used_units += units;
        segment.cached_units -= units;
        if was_in_use {
            self.stats.inactive_split_bytes.remove(bytes);
        } else {
            // The rest of it now shares the segment with a range in use.
            let split_units = segment.cached_units;
            let split_bytes = self.bytes(split_units);
            self.stats.inactive_split_bytes.add(split_bytes);
        }
    }

    /// Counts a bare range that has just been taken as used.
    pub(super) fn bare_to_used(&mut self, index: u32) {
        let (owner, units) = (self.ranges.owner(index), self.ranges.units(index));
        let Some(segment) = &mut self.segments[owner as usize] else { return };
        let was_in_use = segment.used_units > 0;
        segment.used_units += units;
        if !was_in_use {
            let split_units = segment.cached_units;
            self.stats.inactive_split_bytes.add(self.bytes(split_units));
        }
    }
}
