//! Quiet pages: free pages that no queued work uses any more.
//!
//! Time is the number of frees. A range has the time at which the last part of it was freed, and a stream a time up
//! to which all that was freed on it is quiet. While a stream is marked, its pages have times of their own: what
//! is free in one range was freed at different times. On other streams this would be work at each free for nothing,
//! until a caller asks what has been unused: from then on the pages of every stream have times.

use std::cmp::Reverse;

use super::{RangeKind, State, StreamSet, TrimPurpose, cached_list};
use crate::core::LargePages;

/// A stream that was found busy is marked each time this part of the maximum use was freed on it, but at
/// least a page: 1/32.
const MARK_DIVISOR: u64 = 32;
/// Of a stream that is not marked, or whose pages have no times. More bytes are never freed, and no later.
const NEVER: u64 = u64::MAX;

/// The times of a stream.
#[derive(Clone, Copy, Debug)]
struct StreamTimes {
    /// What was freed up to this time is quiet.
    quiet_at: u64,
    /// Bytes to be freed until the next mark is due.
    bytes_to_mark: u64,
    /// When the times of its pages began: pages that were freed before have no time of their own.
    timed_from: u64,
}

impl StreamTimes {
    const fn is_marked(&self) -> bool {
        self.bytes_to_mark != NEVER
    }

    /// Whether its pages have times.
    const fn is_timed(&self) -> bool {
        self.timed_from != NEVER
    }
}

/// The times of pages and streams.
#[derive(Debug)]
pub(super) struct Quiet {
    /// Binary logarithm of the units of a page.
    page_log: u32,
    /// By page: when a part of it was last freed on a stream with times. Empty if the device is not
    /// stream-ordered.
    freed_at: Vec<u64>,
    /// By slot.
    streams: Vec<StreamTimes>,
    /// Number of streams with times.
    timed: u32,
    /// Streams keep their times when they are no longer marked.
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
            timed: 0,
            keeps_times: false,
            is_mark_due: false,
        }
    }

    pub(super) fn add_stream(&mut self) {
        self.streams.push(StreamTimes { quiet_at: 0, bytes_to_mark: NEVER, timed_from: NEVER });
    }

    /// Whether the pages of a stream have times.
    #[inline]
    pub(super) const fn is_timing(&self) -> bool {
        self.timed > 0
    }

    /// Sets the time of all pages that `units` from `start` on have a part in, if their stream has times.
    pub(super) fn note_freed(&mut self, start: u32, units: u32, bytes: u64, slot: u32, now: u64) {
        let stream = self.streams.get_mut(slot as usize).filter(|stream| stream.is_timed());
        let Some(stream) = stream else { return };
        if stream.is_marked() {
            stream.bytes_to_mark = stream.bytes_to_mark.saturating_sub(bytes);
            self.is_mark_due |= stream.bytes_to_mark == 0;
        }
        let (first, last) = (start >> self.page_log, (start + units - 1) >> self.page_log);
        if let Some(pages) = self.freed_at.get_mut(first as usize..=last as usize) {
            pages.fill(now);
        }
    }

    /// Returns when the whole pages `start`, `units` of a stream were freed: each of them, if it has times, or all
    /// at the time of their range. Those of a large page were freed with the last of them.
    fn times(
        &self,
        (start, units): (u32, u32),
        large: &LargePages,
        stream: StreamTimes,
        range_freed_at: u64,
    ) -> impl DoubleEndedIterator<Item = u64> + ExactSizeIterator {
        let first = start >> self.page_log;
        let count = if self.freed_at.is_empty() { 0 } else { units >> self.page_log };
        (0..count).map(move |at| {
            if !stream.is_timed() {
                return range_freed_at;
            }
            let one = ((first + at) << self.page_log, 1 << self.page_log);
            self.last_time(large.around(one.0).unwrap_or(one), stream)
        })
    }

    /// Returns when the last of the pages `start`, `units` of a stream with times was freed.
    fn last_time(&self, (start, units): (u32, u32), stream: StreamTimes) -> u64 {
        let first = (start >> self.page_log) as usize;
        let pages = self.freed_at.get(first..first + (units >> self.page_log) as usize);
        let last = pages.unwrap_or_default().iter().copied().max().unwrap_or(NEVER);
        last.max(stream.timed_from)
    }
}

impl State {
    /// The logical time of frees.
    pub(crate) const fn frees(&self) -> u64 {
        self.ranges.frees()
    }

    /// Sets the time of the pages of range `index`, which is about to be freed.
    #[cold]
    pub(super) fn note_freed(&mut self, index: u32) {
        let (start, units) = (self.ranges.start(index), self.ranges.units(index));
        let (bytes, slot, now) = (self.bytes(units), self.stream_of(index), self.frees() + 1);
        self.quiet.note_freed(start, units, bytes, slot, now);
    }

    /// Records that what was freed on a stream up to time `frees` is quiet.
    pub(crate) fn note_quiet(&mut self, slot: u32, frees: u64) {
        if let Some(stream) = self.quiet.streams.get_mut(slot as usize) {
            stream.quiet_at = stream.quiet_at.max(frees);
        }
    }

    /// Records that a stream was idle. It is not marked until it is found busy.
    pub(crate) fn note_idle(&mut self, slot: u32) {
        let stream = self.quiet.streams.get_mut(slot as usize);
        if let Some(stream) = stream.filter(|stream| stream.is_marked()) {
            stream.bytes_to_mark = NEVER;
            if !self.quiet.keeps_times {
                stream.timed_from = NEVER;
                self.quiet.timed -= 1;
            }
        }
    }

    /// Records that a stream was found busy: its frees are marked from now on.
    pub(crate) fn note_busy(&mut self, slot: u32) {
        let now = self.frees();
        let stream = self.quiet.streams.get_mut(slot as usize);
        if let Some(stream) = stream.filter(|stream| !stream.is_marked()) {
            stream.bytes_to_mark = 0;
            self.quiet.is_mark_due = true;
            if !stream.is_timed() {
                stream.timed_from = now;
                self.quiet.timed += 1;
            }
        }
    }

    /// From now on the pages of all known streams have times.
    pub(crate) fn keep_times(&mut self) {
        let now = self.frees();
        self.quiet.keeps_times = true;
        for stream in self.quiet.streams.iter_mut().filter(|stream| !stream.is_timed()) {
            stream.timed_from = now;
            self.quiet.timed += 1;
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
        let step_bytes = (self.high_bytes / MARK_DIVISOR).max(page_bytes);
        let mut due = StreamSet::EMPTY;
        for (slot, stream) in (0_u32..).zip(&mut self.quiet.streams) {
            if stream.bytes_to_mark == 0 {
                stream.bytes_to_mark = step_bytes;
                due.insert(slot);
            }
        }
        self.quiet.is_mark_due = false;
        (due, self.frees())
    }

    /// Whether all of the range `index` of whole pages is known to be quiet.
    pub(crate) fn is_known_quiet(&self, index: u32) -> bool {
        let units = self.ranges.units(index);
        self.quiet_pages(index, u32::MAX).is_some_and(|(_, quiet_units)| quiet_units == units)
    }

    /// Whether the pages `start`, `units` of range `index` are known to be quiet.
    pub(super) fn are_quiet(&self, index: u32, start: u32, units: u32) -> bool {
        let stream = self.quiet.streams.get(self.stream_of(index) as usize);
        stream.is_some_and(|&stream| {
            let range_freed_at = self.ranges.freed_at(index);
            let mut times = self.quiet.times((start, units), &self.large, stream, range_freed_at);
            times.all(|freed_at| freed_at <= stream.quiet_at)
        })
    }

    /// Returns start and units of the last quiet pages of range `index`, up to `units_max` of them.
    pub(super) fn quiet_pages(&self, index: u32, units_max: u32) -> Option<(u32, u32)> {
        let stream = *self.quiet.streams.get(self.stream_of(index) as usize)?;
        let pages = self.ranges.whole_pages(index, self.geometry.page_units);
        let range_freed_at = self.ranges.freed_at(index);
        let mut times = self.quiet.times(pages, &self.large, stream, range_freed_at);
        let end = times.rposition(|freed_at| freed_at <= stream.quiet_at)? + 1;
        let most = (units_max >> self.quiet.page_log).saturating_sub(1) as usize;
        // The last one has been taken.
        let before = times.rev().take(most).take_while(|&freed_at| freed_at <= stream.quiet_at);
        // Both are at most the units of the range.
        let (end, count) = (u32::try_from(end).ok()?, u32::try_from(before.count() + 1).ok()?);
        let page_log = self.quiet.page_log;
        let start = self.large.floor(pages.0 + ((end - count) << page_log));
        Some((start, pages.0 + (end << page_log) - start))
    }

    /// Takes pages to unmap that have been free since time `since`, at most `bytes_max` in at most `parts_max` parts,
    /// the longest runs first: those of large blocks, whose pages are large. They stay counted until `finish_trim`. Of
    /// the streams in `busy`, only pages that are known to be quiet are taken; kept arenas are skipped.
    ///
    /// A page that a block has used since was freed later, and what was mapped for nothing counts as freed then.
    pub(crate) fn begin_unused(
        &mut self,
        since: u64,
        bytes_max: u64,
        parts_max: usize,
        busy: StreamSet,
    ) -> Vec<u32> {
        let mut runs = Vec::new();
        for (pool, it) in (0_u32..).zip(&self.pools) {
            if !self.may_trim(pool, TrimPurpose::Unused { since }) {
                continue;
            }
            let Some(&stream) = self.quiet.streams.get(it.stream as usize) else { continue };
            let latest = if busy.contains(it.stream) { since.min(stream.quiet_at) } else { since };
            for index in self.ranges.no_smaller(cached_list(pool), self.geometry.page_units) {
                self.add_runs(&mut runs, index, stream, latest);
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
    fn add_runs(
        &self,
        runs: &mut Vec<(u32, u32, u32)>,
        index: u32,
        stream: StreamTimes,
        latest: u64,
    ) {
        let (mut at, units) = self.ranges.whole_pages(index, self.geometry.page_units);
        let end = at + units;
        if !stream.is_timed() {
            // All pages have the time of their range.
            if units > 0 && self.ranges.freed_at(index) <= latest {
                runs.push((index, at, units));
            }
            return;
        }
        while at < end {
            let one = (at, self.geometry.page_units);
            let (start, units) = self.large.around(at).unwrap_or(one);
            at = start + units;
            if self.quiet.last_time((start, units), stream) > latest {
                continue;
            }
            match runs.last_mut() {
                Some((last, from, run)) if *last == index && *from + *run == start => *run += units,
                _ => runs.push((index, start, units)),
            }
        }
    }

    /// Returns what to wait for until `bytes` of pages are quiet: streams, each with the number of its free. They
    /// are the pages that were freed first, of the stream `only` or of all streams, not counting `except`.
    /// Returns nothing if all free pages are quiet.
    pub(crate) fn ends_of_pages(
        &self,
        bytes: u64,
        purpose: TrimPurpose,
        only: Option<u32>,
        except: StreamSet,
    ) -> Vec<(u32, u64)> {
        let page_units = self.geometry.page_units;
        let mut pages = Vec::new();
        for (pool, it) in (0_u32..).zip(&self.pools) {
            let is_counted = only.is_none_or(|slot| slot == it.stream);
            if !is_counted || except.contains(it.stream) || !self.may_trim(pool, purpose) {
                continue;
            }
            let Some(&stream) = self.quiet.streams.get(it.stream as usize) else { continue };
            for index in self.ranges.no_smaller(cached_list(pool), page_units) {
                let whole = self.ranges.whole_pages(index, page_units);
                let range_freed_at = self.ranges.freed_at(index);
                let times = self.quiet.times(whole, &self.large, stream, range_freed_at);
                let busy = times.filter(|&freed_at| freed_at > stream.quiet_at);
                pages.extend(busy.map(|freed_at| (freed_at, it.stream)));
            }
        }
        let count = bytes.div_ceil(self.bytes(page_units)).min(pages.len() as u64) as usize;
        let Some(last) = count.checked_sub(1) else { return Vec::new() };
        pages.select_nth_unstable(last);
        let mut ends: Vec<(u32, u64)> = Vec::new();
        for &(freed_at, slot) in &pages[..count] {
            match ends.iter_mut().find(|(known, _)| *known == slot) {
                Some((_, end)) => *end = freed_at.max(*end),
                None => ends.push((slot, freed_at)),
            }
        }
        ends
    }
}
