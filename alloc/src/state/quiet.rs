//! Quiet pages: free pages that no queued work uses any more.
//!
//! Time is the number of frees. A range has the time at which the last part of it was freed. A stream has a time up to
//! which it is through: the work that it had queued before these frees is complete. What was freed up to the least time
//! of all streams is quiet: another stream may use a block until it is freed without being recorded as a user, if the
//! block's own stream waits for it later. While a stream is marked, pages have times of their own: what is
//! free in one range was freed at different times. Otherwise this would be work at each free for nothing, until a caller
//! asks what has been unused: from then on pages always have times.

use std::cmp::Reverse;

use super::{RangeKind, State, StreamSet, TrimPurpose, cached_list};
use crate::core::LargePages;

/// Streams that were found busy are marked each time this part of the maximum use was freed, but at least a page: 1/32.
const MARK_DIVISOR: u64 = 32;
/// If pages have no times: no page is freed later.
const NEVER: u64 = u64::MAX;

/// What is known of a stream.
#[derive(Clone, Copy, Debug, Default)]
struct StreamQuiet {
    /// The work that it had queued before the frees up to this time is complete.
    quiet_at: u64,
    is_marked: bool,
    /// Its first mark is due.
    is_due: bool,
    /// The device does not know it any more.
    is_gone: bool,
}

/// The times of pages and streams.
#[derive(Debug)]
pub(super) struct Quiet {
    /// Binary logarithm of the units of a page.
    page_log: u32,
    /// By page: when a part of it was last freed while pages had times. Empty if the device is not stream-ordered.
    freed_at: Vec<u64>,
    /// By slot.
    streams: Vec<StreamQuiet>,
    /// Number of marked streams.
    marked: u32,
    /// Bytes to be freed until the next marks are due.
    bytes_to_mark: u64,
    /// When the times of pages began: pages that were freed before have no time of their own. `NEVER`: they have none.
    timed_from: u64,
    /// Pages keep their times when no stream is marked.
    keeps_times: bool,
    is_mark_due: bool,
}

impl Quiet {
    /// Times of `units` of addresses in pages of `page_units`, a power of two. No times for 0 units.
    pub(super) fn new(units: u32, page_units: u32) -> Self {
        let page_log = page_units.trailing_zeros();
        let freed_at = vec![0; (units >> page_log) as usize];
        Self {
            page_log,
            freed_at,
            streams: Vec::new(),
            marked: 0,
            bytes_to_mark: 0,
            timed_from: NEVER,
            keeps_times: false,
            is_mark_due: false,
        }
    }

    /// Adds a stream. It may have used what is free by now.
    pub(super) fn add_stream(&mut self) {
        self.streams.push(StreamQuiet::default());
    }

    /// Whether pages have times.
    #[inline]
    pub(super) const fn is_timing(&self) -> bool {
        self.timed_from != NEVER
    }

    /// Whether the device does not know the stream any more.
    pub(super) fn is_gone(&self, slot: u32) -> bool {
        self.streams.get(slot as usize).is_some_and(|stream| stream.is_gone)
    }

    /// Returns the streams that the device knows, with their slots.
    fn known(&self) -> impl Iterator<Item = (u32, &StreamQuiet)> {
        (0_u32..).zip(&self.streams).filter(|(_, stream)| !stream.is_gone)
    }

    /// Returns the least time of those streams that `which` accepts; the last time there is without one.
    fn least_at(&self, which: impl Fn(u32) -> bool) -> u64 {
        let times = self.known().filter(|&(slot, _)| which(slot));
        times.map(|(_, stream)| stream.quiet_at).min().unwrap_or(u64::MAX)
    }

    /// Sets the time of all pages that `units` from `start` on have a part in, if pages have times.
    pub(super) fn note_freed(&mut self, start: u32, units: u32, bytes: u64, now: u64) {
        if !self.is_timing() {
            return;
        }
        self.count_to_mark(bytes);
        let (first, last) = (start >> self.page_log, (start + units - 1) >> self.page_log);
        if let Some(pages) = self.freed_at.get_mut(first as usize..=last as usize) {
            pages.fill(now);
        }
    }

    /// As `note_freed`, for a free before the last one.
    fn note_freed_at(&mut self, start: u32, units: u32, bytes: u64, freed_at: u64) {
        if !self.is_timing() {
            return;
        }
        self.count_to_mark(bytes);
        let (first, last) = (start >> self.page_log, (start + units - 1) >> self.page_log);
        let pages = self.freed_at.get_mut(first as usize..=last as usize);
        pages.unwrap_or_default().iter_mut().for_each(|page| *page = freed_at.max(*page));
    }

    fn count_to_mark(&mut self, bytes: u64) {
        if self.marked > 0 {
            self.bytes_to_mark = self.bytes_to_mark.saturating_sub(bytes);
            self.is_mark_due |= self.bytes_to_mark == 0;
        }
    }

    /// Returns when the whole pages `start`, `units` of a range were freed: each of them, if pages have times, or all
    /// at the time of their range. Those of a large page were freed with the last of them.
    fn times(
        &self,
        (start, units): (u32, u32),
        large: &LargePages,
        range_freed_at: u64,
    ) -> impl DoubleEndedIterator<Item = u64> + ExactSizeIterator {
        let first = start >> self.page_log;
        let count = if self.freed_at.is_empty() { 0 } else { units >> self.page_log };
        (0..count).map(move |at| {
            if !self.is_timing() {
                return range_freed_at;
            }
            let one = ((first + at) << self.page_log, 1 << self.page_log);
            self.last_time(large.around(one.0).unwrap_or(one), range_freed_at)
        })
    }

    /// Returns when the last of the pages `start`, `units` of a range was freed, if pages have times.
    fn last_time(&self, (start, units): (u32, u32), range_freed_at: u64) -> u64 {
        let first = (start >> self.page_log) as usize;
        let pages = self.freed_at.get(first..first + (units >> self.page_log) as usize);
        let last = pages.unwrap_or_default().iter().copied().max().unwrap_or(NEVER);
        last.max(self.timed_from).min(range_freed_at)
    }
}

impl State {
    /// The logical time of frees.
    pub(crate) const fn frees(&self) -> u64 {
        self.ranges.frees()
    }

    /// Whether streams must be queried before anything counts as quiet: one was busy the last time, or the device did
    /// not know it, and a new stream may have its handle.
    pub(crate) fn must_query_streams(&self) -> bool {
        self.quiet.marked > 0 || self.quiet.streams.iter().any(|stream| stream.is_gone)
    }

    /// Returns the time up to which all that was freed is quiet.
    pub(crate) fn quiet_at(&self) -> u64 {
        self.quiet.least_at(|_| true)
    }

    /// Returns the streams, except those in `except`, that may have work left that was queued before the last free.
    pub(crate) fn streams_behind(&self, except: StreamSet) -> StreamSet {
        let (mut behind, now) = (StreamSet::EMPTY, self.frees());
        let all = (0_u32..).zip(&self.quiet.streams).filter(|(_, stream)| stream.quiet_at < now);
        all.filter(|&(slot, _)| !except.contains(slot)).for_each(|(slot, _)| behind.insert(slot));
        behind
    }

    /// Sets the time of the pages of range `index`, which is about to be freed.
    #[cold]
    pub(super) fn note_freed(&mut self, index: u32) {
        let (start, units) = (self.ranges.start(index), self.ranges.units(index));
        let (bytes, now) = (self.bytes(units), self.frees() + 1);
        self.quiet.note_freed(start, units, bytes, now);
    }

    /// As `note_freed`, for a free that had number `freed_at`. Other parts of its pages may have been freed since.
    pub(super) fn note_freed_at(&mut self, index: u32, freed_at: u64) {
        let (start, units) = (self.ranges.start(index), self.ranges.units(index));
        let bytes = self.bytes(units);
        self.quiet.note_freed_at(start, units, bytes, freed_at);
    }

    /// Records that a stream is through with what it had queued before free number `frees`.
    pub(crate) fn note_quiet(&mut self, slot: u32, frees: u64) {
        if let Some(stream) = self.quiet.streams.get_mut(slot as usize) {
            stream.quiet_at = stream.quiet_at.max(frees);
        }
    }

    /// Records that a stream was idle. It is not marked until it is found busy.
    pub(crate) fn note_idle(&mut self, slot: u32) {
        let quiet = &mut self.quiet;
        let Some(stream) = quiet.streams.get_mut(slot as usize) else { return };
        stream.is_gone = false;
        if stream.is_marked {
            (stream.is_marked, stream.is_due) = (false, false);
            quiet.marked -= 1;
            if quiet.marked == 0 && !quiet.keeps_times {
                quiet.timed_from = NEVER;
            }
        }
    }

    /// Records that a stream was found busy: it is marked from now on.
    pub(crate) fn note_busy(&mut self, slot: u32) {
        let (now, quiet) = (self.frees(), &mut self.quiet);
        let Some(stream) = quiet.streams.get_mut(slot as usize) else { return };
        stream.is_gone = false;
        if !stream.is_marked {
            (stream.is_marked, stream.is_due) = (true, true);
            quiet.is_mark_due = true;
            quiet.marked += 1;
            if quiet.marked == 1 {
                quiet.bytes_to_mark = 0;
            }
            if !quiet.is_timing() {
                quiet.timed_from = now;
            }
        }
    }

    /// Records that the device does not know a stream any more, until an answer says otherwise: a new stream may have
    /// its handle. It holds no other stream's pages up. Its own stay: nothing tells when its last work is over.
    pub(crate) fn note_gone(&mut self, slot: u32) {
        self.note_idle(slot);
        if let Some(stream) = self.quiet.streams.get_mut(slot as usize) {
            stream.is_gone = true;
        }
    }

    /// From now on pages have times, and huge blocks pools of their own.
    pub(crate) fn keep_times(&mut self) {
        self.separate_huge();
        let (now, quiet) = (self.frees(), &mut self.quiet);
        quiet.keeps_times = true;
        if !quiet.is_timing() {
            quiet.timed_from = now;
        }
    }

    /// Whether a stream is to be marked.
    #[inline]
    pub(crate) const fn is_mark_due(&self) -> bool {
        self.quiet.is_mark_due
    }

    /// Returns the streams to be marked, and the number of the last free, which their marks come behind.
    pub(crate) fn take_due_marks(&mut self) -> (StreamSet, u64) {
        let page_bytes = self.bytes(self.geometry.page_units);
        let quiet = &mut self.quiet;
        let are_all_due = quiet.bytes_to_mark == 0;
        if are_all_due {
            quiet.bytes_to_mark = (self.high_bytes / MARK_DIVISOR).max(page_bytes);
        }
        let mut due = StreamSet::EMPTY;
        let marked = (0_u32..).zip(&mut quiet.streams).filter(|(_, stream)| stream.is_marked);
        for (slot, stream) in marked.filter(|(_, stream)| are_all_due || stream.is_due) {
            stream.is_due = false;
            due.insert(slot);
        }
        quiet.is_mark_due = false;
        (due, self.frees())
    }

    /// Whether the pages `start`, `units` of range `index` were freed up to time `quiet_at`.
    pub(super) fn are_quiet(&self, index: u32, start: u32, units: u32, quiet_at: u64) -> bool {
        let range_freed_at = self.ranges.freed_at(index);
        let mut times = self.quiet.times((start, units), &self.large, range_freed_at);
        range_freed_at <= quiet_at || times.all(|freed_at| freed_at <= quiet_at)
    }

    /// Returns start and units of the last pages of range `index` that were freed up to time `quiet_at`: `units_max`,
    /// rounded up to whole pages, or those below them.
    pub(super) fn quiet_pages(
        &self,
        index: u32,
        units_max: u32,
        quiet_at: u64,
    ) -> Option<(u32, u32)> {
        let range_freed_at = self.ranges.freed_at(index);
        if range_freed_at <= quiet_at {
            return self.last_pages(index, units_max);
        }
        let pages = self.ranges.whole_pages(index, self.geometry.page_units);
        let mut times = self.quiet.times(pages, &self.large, range_freed_at);
        let end = times.rposition(|freed_at| freed_at <= quiet_at)? + 1;
        let page_log = self.quiet.page_log;
        let most = (units_max.max(1).div_ceil(1 << page_log) - 1) as usize;
        // The last one has been taken.
        let before = times.rev().take(most).take_while(|&freed_at| freed_at <= quiet_at);
        // Both are at most the units of the range.
        let (end, count) = (u32::try_from(end).ok()?, u32::try_from(before.count() + 1).ok()?);
        let start = self.large.floor(pages.0 + ((end - count) << page_log));
        Some((start, pages.0 + (end << page_log) - start))
    }

    /// Takes pages to unmap that have been free since time `since`, at most `bytes_max` in at most `parts_max` parts,
    /// the longest runs first: those of large blocks, whose pages are large. They stay counted until `finish_trim`. Only
    /// pages that are known to be quiet are taken; kept arenas are skipped.
    ///
    /// A page that a block has used since was freed later, and what was mapped for nothing counts as freed then.
    pub(crate) fn begin_unused(
        &mut self,
        since: u64,
        bytes_max: u64,
        parts_max: usize,
    ) -> Vec<u32> {
        let mut runs = Vec::new();
        let latest = since.min(self.quiet_at());
        for pool in 0..u32::try_from(self.pools.len()).unwrap_or(u32::MAX) {
            if !self.may_trim(pool, TrimPurpose::Unused { since }) {
                continue;
            }
            for index in self.ranges.no_smaller(cached_list(pool), self.geometry.page_units) {
                self.add_runs(&mut runs, index, latest);
            }
        }
        runs.sort_unstable_by_key(|&(index, start, units)| (Reverse(units), index, start));
        let mut left_units = u32::try_from(bytes_max / self.bytes(1)).unwrap_or(u32::MAX);
        let mut parts = Vec::new();
        for (index, start, units) in runs {
            let end = start + units;
            let start = self.large.ceil(start.max(end.saturating_sub(left_units)));
            let start = start.next_multiple_of(self.geometry.page_units);
            if start < end {
                left_units -= end - start;
                parts.push((index, start, end - start));
            }
            if left_units < self.geometry.page_units || parts.len() == parts_max {
                break;
            }
        }
        // `take_at` leaves the index to the rest below the part, so the parts of a range are taken from its end.
        parts.sort_unstable_by_key(|&(index, start, _)| (index, Reverse(start)));
        let mut taken = Vec::new();
        for (index, start, units) in parts {
            let Some(part) = self.ranges.take_at(index, start, units) else { break };
            self.cached_to_used(part);
            self.record_mut(part).kind = RangeKind::Trimming;
            taken.push(part);
        }
        taken
    }

    /// Adds the runs of whole pages of range `index` that were freed up to time `latest`: range, start and units.
    fn add_runs(&self, runs: &mut Vec<(u32, u32, u32)>, index: u32, latest: u64) {
        let (mut at, units) = self.ranges.whole_pages(index, self.geometry.page_units);
        let (end, range_freed_at) = (at + units, self.ranges.freed_at(index));
        if range_freed_at <= latest || !self.quiet.is_timing() {
            if units > 0 && range_freed_at <= latest {
                runs.push((index, at, units));
            }
            return;
        }
        while at < end {
            let one = (at, self.geometry.page_units);
            let (start, units) = self.large.around(at).unwrap_or(one);
            at = start + units;
            if self.quiet.last_time((start, units), range_freed_at) > latest {
                continue;
            }
            match runs.last_mut() {
                Some((last, from, run)) if *last == index && *from + *run == start => *run += units,
                _ => runs.push((index, start, units)),
            }
        }
    }

    /// Returns what to wait for until `bytes` of pages are quiet: streams, and the number of the free that each is to
    /// be through with. The pages are those that were freed first. Waits are for the stream `only` or for all streams,
    /// not for those in `except`: pages that these may use are not counted. Returns nothing if no wait makes more pages
    /// quiet.
    pub(crate) fn ends_of_pages(
        &self,
        bytes: u64,
        purpose: TrimPurpose,
        only: Option<u32>,
        except: StreamSet,
    ) -> Vec<(u32, u64)> {
        let page_units = self.geometry.page_units;
        let is_waited_for = |slot| only.is_none_or(|only| only == slot) && !except.contains(slot);
        let (quiet_at, latest) =
            (self.quiet_at(), self.quiet.least_at(|slot| !is_waited_for(slot)));
        if latest <= quiet_at {
            return Vec::new();
        }
        let mut pages = Vec::new();
        for pool in 0..u32::try_from(self.pools.len()).unwrap_or(u32::MAX) {
            if !self.may_trim(pool, purpose) {
                continue;
            }
            for index in self.ranges.no_smaller(cached_list(pool), page_units) {
                let whole = self.ranges.whole_pages(index, page_units);
                let times = self.quiet.times(whole, &self.large, self.ranges.freed_at(index));
                pages.extend(times.filter(|&freed_at| quiet_at < freed_at && freed_at <= latest));
            }
        }
        let count = bytes.div_ceil(self.bytes(page_units)).min(pages.len() as u64) as usize;
        let Some(last) = count.checked_sub(1) else { return Vec::new() };
        let (_, &mut freed_at, _) = pages.select_nth_unstable(last);
        let behind = self.quiet.known().filter(|(_, stream)| stream.quiet_at < freed_at);
        behind.map(|(slot, _)| (slot, freed_at)).collect()
    }
}
