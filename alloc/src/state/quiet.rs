//! Quiet pages: free pages that no queued work uses any more.
//!
//! Time is the number of frees. Each page has the time at which a part of it was last freed, and each stream a
//! time up to which all that was freed on it is quiet. Only the pages of a stream-ordered device have times.

use super::{State, StreamSet, TrimPurpose, cached_list};

/// A stream that was found busy is marked each time this part of the maximum use was freed on it, but at
/// least a page: 1/32.
const MARK_DIVISOR: u64 = 32;
/// Of a stream that is not marked. More bytes are never freed.
const NEVER: u64 = u64::MAX;

/// The times of a stream.
#[derive(Clone, Copy, Debug)]
struct StreamTimes {
    /// What was freed up to this time is quiet.
    quiet_at: u64,
    /// Bytes to be freed until the next mark is due.
    bytes_to_mark: u64,
}

/// The times of pages and streams.
#[derive(Debug)]
pub(super) struct Quiet {
    /// Binary logarithm of the units of a page.
    page_log: u32,
    /// By page. Empty if the device is not stream-ordered.
    freed_at: Vec<u64>,
    /// By slot.
    streams: Vec<StreamTimes>,
    is_mark_due: bool,
}

impl Quiet {
    /// Times of `units` of addresses in pages of `page_units`, a power of two. No times for 0 units.
    pub(super) fn new(units: u32, page_units: u32) -> Self {
        let page_log = page_units.trailing_zeros();
        let freed_at = vec![0; (units >> page_log) as usize];
        Self { page_log, freed_at, streams: Vec::new(), is_mark_due: false }
    }

    pub(super) fn add_stream(&mut self) {
        self.streams.push(StreamTimes { quiet_at: 0, bytes_to_mark: NEVER });
    }

    /// Sets the time of all pages that `units` from `start` on have a part in.
    #[inline]
    pub(super) fn note_freed(&mut self, start: u32, units: u32, bytes: u64, slot: u32, now: u64) {
        let (first, last) = (start >> self.page_log, (start + units - 1) >> self.page_log);
        if let Some(pages) = self.freed_at.get_mut(first as usize..=last as usize) {
            pages.fill(now);
        }
        if let Some(stream) = self.streams.get_mut(slot as usize)
            && stream.bytes_to_mark != NEVER
        {
            stream.bytes_to_mark = stream.bytes_to_mark.saturating_sub(bytes);
            self.is_mark_due |= stream.bytes_to_mark == 0;
        }
    }

    fn quiet_at(&self, slot: u32) -> u64 {
        self.streams.get(slot as usize).map_or(0, |stream| stream.quiet_at)
    }

    /// Returns start and units of the last quiet pages among the whole pages `start`, `units`, up to
    /// `units_max` of them.
    fn last_run(
        &self,
        (start, units): (u32, u32),
        units_max: u32,
        slot: u32,
    ) -> Option<(u32, u32)> {
        let first = start >> self.page_log;
        let pages =
            self.freed_at.get(first as usize..(first + (units >> self.page_log)) as usize)?;
        let quiet_at = self.quiet_at(slot);
        let end = pages.iter().rposition(|&freed_at| freed_at <= quiet_at)? + 1;
        let most = (units_max >> self.page_log) as usize;
        let run = pages[..end].iter().rev().take(most);
        let pages = run.take_while(|&&freed_at| freed_at <= quiet_at).count();
        // Both are at most `units`.
        let (end, pages) = (u32::try_from(end).ok()?, u32::try_from(pages).ok()?);
        Some((start + ((end - pages) << self.page_log), pages << self.page_log))
    }
}

impl State {
    /// The logical time of frees.
    pub(crate) const fn frees(&self) -> u64 {
        self.ranges.frees()
    }

    /// Records that what was freed on a stream up to time `frees` is quiet.
    pub(crate) fn note_quiet(&mut self, slot: u32, frees: u64) {
        if let Some(stream) = self.quiet.streams.get_mut(slot as usize) {
            stream.quiet_at = stream.quiet_at.max(frees);
        }
    }

    /// Records that a stream was idle after time `frees`. It is not marked until it is found busy.
    pub(crate) fn note_idle(&mut self, slot: u32, frees: u64) {
        self.note_quiet(slot, frees);
        if let Some(stream) = self.quiet.streams.get_mut(slot as usize) {
            stream.bytes_to_mark = NEVER;
        }
    }

    /// Records that a stream was found busy: its frees are marked from now on.
    pub(crate) fn note_busy(&mut self, slot: u32) {
        if let Some(stream) = self.quiet.streams.get_mut(slot as usize)
            && stream.bytes_to_mark == NEVER
        {
            stream.bytes_to_mark = 0;
            self.quiet.is_mark_due = true;
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

    /// Returns start and units of the last quiet pages of range `index`, up to `units_max` of them.
    pub(super) fn quiet_pages(&self, index: u32, units_max: u32) -> Option<(u32, u32)> {
        let pages = self.ranges.whole_pages(index, self.geometry.page_units);
        self.quiet.last_run(pages, units_max, self.stream_of(index))
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
            let quiet_at = self.quiet.quiet_at(it.stream);
            for index in self.ranges.no_smaller(cached_list(pool), page_units) {
                let (start, units) = self.ranges.whole_pages(index, page_units);
                let first = start >> self.quiet.page_log;
                let times = self.quiet.freed_at.iter().skip(first as usize);
                let times = times.take((units >> self.quiet.page_log) as usize);
                let busy = times.filter(|&&freed_at| freed_at > quiet_at);
                pages.extend(busy.map(|&freed_at| (freed_at, it.stream)));
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
