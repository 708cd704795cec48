//! Ranges that tile lines of units, with free ranges in size-class lists. All operations are O(1).
//!
//! A *line* is a contiguous run of units with an owner number (a segment, or a whole file). Its ranges
//! form a chain in address order. A range is used or free; a free range is in one of several *lists* (a
//! pool's cached ranges, a pool's bare ranges, ...). Free neighbours of the same list are always one range
//! (I1); those of different lists stay separate.
//!
//! Lists come in pairs. A range of an even list is filed under its size. A range of the next, odd list is
//! filed under its *reach*: its own size plus its neighbours in the even list. (Once a bare range is mapped,
//! it can serve together with the cached ranges around it.) Even lists change often and odd lists are
//! searched rarely, so the classes of an odd list are updated only before a search (`settle_reach`).
//!
//! The lower of two merged ranges, and the lower part of a split one, keep their index: the first range of
//! a line has the same index as long as the line exists.

mod filing;
mod search;
#[cfg(any(test, feature = "checks"))]
mod testing;

use super::bins::{Bins, Class};
use super::{NONE, OWN_CLASS_SCAN_MAX};
use filing::{link, reach_units, unlink};

/// Least ranges for which memory is obtained at a time.
const GRANT_MIN: u32 = 256;

/// Values of `Range::list` for a slot whose range is not free.
const USED: u32 = NONE - 1;
const VACANT: u32 = NONE - 2;

#[derive(Clone, Copy, Debug)]
struct Range {
    start: u32,
    units: u32,
    /// Neighbours in address order.
    before: u32,
    after: u32,
    /// Neighbours in the free list. `list_after` of a vacant slot is the next vacant slot.
    list_before: u32,
    list_after: u32,
    /// Its list, or `USED` or `VACANT`.
    list: u32,
    owner: u32,
    /// Its class in the list.
    class: Class,
    /// Its reach may have changed since it was filed: it is in `Ranges::stale`.
    is_stale: bool,
    /// The value of `Ranges::frees` when the last part of it was freed.
    freed_at: u64,
}

impl Range {
    const VACANT: Self = Self {
        start: 0,
        units: 0,
        before: NONE,
        after: NONE,
        list_before: NONE,
        list_after: NONE,
        list: VACANT,
        owner: NONE,
        class: Class::FIRST,
        is_stale: false,
        freed_at: 0,
    };
}

/// Whether ranges of `list` are filed under their own size.
#[inline]
const fn is_even(list: u32) -> bool {
    list.is_multiple_of(2)
}

/// Size and alignment of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fit {
    /// Not 0.
    pub(crate) units: u32,
    /// A power of two.
    pub(crate) align_units: u32,
}

impl Fit {
    /// Returns its first start in a range. Unit 0 is `phase` units past an aligned address.
    #[inline]
    fn start_in(self, start: u32, units: u32, phase: u32) -> Option<u32> {
        if self.align_units <= 1 {
            return (units >= self.units).then_some(start);
        }
        let mask = u64::from(self.align_units) - 1;
        let phase = u64::from(phase) & mask;
        let aligned = ((u64::from(start) + phase + mask) & !mask) - phase;
        let end = u64::from(start) + u64::from(units);
        if aligned + u64::from(self.units) > end {
            return None;
        }
        u32::try_from(aligned).ok()
    }
}

/// The ranges of all lines, and their free lists.
#[derive(Debug)]
pub(crate) struct Ranges {
    /// Whether ranges of odd lists are filed under their reach.
    joins: bool,
    ranges: Vec<Range>,
    lists: Vec<Bins>,
    vacant_head: u32,
    limit: u32,
    /// Ranges for which there is memory. It grows up to `limit`.
    granted: u32,
    /// Ranges of those granted that can still be created and are not promised.
    room: u32,
    phase: u32,
    /// Ranges promised to later splits that must not fail.
    promised: u32,
    /// Ranges whose reach may have changed since they were filed. It may contain others, and duplicates.
    stale: Vec<u32>,
    /// Number of frees: the logical time.
    frees: u64,
}

impl Ranges {
    /// Creates `lists` lists without lines, for at most `limit` ranges. Unit 0 is `phase` units past an
    /// address of every alignment. Without `joins` the ranges of all lists are filed under their size.
    pub(crate) fn new(lists: u32, limit: u32, phase: u32, joins: bool) -> Self {
        let mut it = Self {
            joins,
            ranges: Vec::new(),
            lists: Vec::new(),
            vacant_head: NONE,
            limit: limit.min(VACANT),
            granted: 0,
            room: 0,
            phase,
            promised: 0,
            stale: Vec::new(),
            frees: 0,
        };
        it.ensure_lists(lists);
        it
    }

    /// Creates the missing ones of the lists `0..count`.
    pub(crate) fn ensure_lists(&mut self, count: u32) {
        while self.lists.len() < count as usize {
            self.lists.push(Bins::new());
        }
    }

    /// Returns the number of slots, vacant ones included.
    pub(crate) fn slots(&self) -> u32 {
        // `limit` bounds the count.
        u32::try_from(self.ranges.len()).unwrap_or(u32::MAX)
    }

    /// Whether `count` more ranges can be created. `false` at the limit, or without memory for them.
    #[inline]
    pub(crate) fn can_make(&mut self, count: u32) -> bool {
        self.room >= count || self.grow(count)
    }

    /// Returns the number of ranges for which there is memory.
    #[inline]
    pub(crate) const fn granted(&self) -> u32 {
        self.granted
    }

    /// Gets memory for at least `count` more ranges, and for as many again as there are.
    #[cold]
    fn grow(&mut self, count: u32) -> bool {
        let more = self.granted.max(count).max(GRANT_MIN).min(self.limit - self.granted);
        let total = self.granted + more;
        if self.room + more < count
            || self.ranges.try_reserve_exact(total as usize - self.ranges.len()).is_err()
        {
            return false;
        }
        self.granted = total;
        self.room += more;
        true
    }

    /// Promises `count` ranges to later splits. `false` if fewer are left.
    pub(crate) fn reserve_ranges(&mut self, count: u32) -> bool {
        let is_possible = self.can_make(count);
        if is_possible {
            self.promised += count;
            self.room -= count;
        }
        is_possible
    }

    /// Ends a promise: the splits are done, or not needed.
    pub(crate) fn unreserve_ranges(&mut self, count: u32) {
        debug_assert!(self.promised >= count, "{count} of {} promised", self.promised);
        self.promised -= count;
        self.room += count;
    }

    #[inline]
    pub(crate) fn start(&self, index: u32) -> u32 {
        self.ranges[index as usize].start
    }

    #[inline]
    pub(crate) fn units(&self, index: u32) -> u32 {
        self.ranges[index as usize].units
    }

    #[inline]
    pub(crate) fn owner(&self, index: u32) -> u32 {
        self.ranges[index as usize].owner
    }

    /// Returns the range before it in the same line, or `NONE`.
    #[inline]
    pub(crate) fn before(&self, index: u32) -> u32 {
        self.ranges[index as usize].before
    }

    /// Returns the next range of the same line, or `NONE`.
    #[inline]
    pub(crate) fn after(&self, index: u32) -> u32 {
        self.ranges[index as usize].after
    }

    /// Returns the number of frees so far.
    pub(crate) const fn frees(&self) -> u64 {
        self.frees
    }

    /// Counts a free whose range is given later. Returns its number.
    pub(crate) const fn count_free(&mut self) -> u64 {
        self.frees += 1;
        self.frees
    }

    /// Sets the time of the free range `index`: when the last part of it was freed.
    pub(crate) fn set_freed_at(&mut self, index: u32, freed_at: u64) {
        self.ranges[index as usize].freed_at = freed_at;
    }

    /// Returns the value of `frees` when the last part of range `index` was freed.
    #[inline]
    pub(crate) fn freed_at(&self, index: u32) -> u64 {
        self.ranges[index as usize].freed_at
    }

    /// Returns the list of a free range; `None` for a used range or a vacant slot.
    #[inline]
    pub(crate) fn list(&self, index: u32) -> Option<u32> {
        let list = self.ranges.get(index as usize)?.list;
        (list < VACANT).then_some(list)
    }

    #[inline]
    pub(crate) fn is_used(&self, index: u32) -> bool {
        self.ranges.get(index as usize).is_some_and(|range| range.list == USED)
    }

    /// Adds a line of one free range. `None` at the limit of ranges.
    pub(crate) fn add_segment(
        &mut self,
        start: u32,
        units: u32,
        owner: u32,
        list: u32,
    ) -> Option<u32> {
        debug_assert!(units > 0 && start.checked_add(units).is_some(), "{start}+{units}");
        let index = self.make(Range { start, units, list: USED, owner, ..Range::VACANT })?;
        self.file(index, list);
        Some(index)
    }

    /// Removes the line whose only range is the free `index`. `false` for any other.
    pub(crate) fn remove_segment(&mut self, index: u32) -> bool {
        let range = self.ranges[index as usize];
        if range.list >= VACANT || range.before != NONE || range.after != NONE {
            return false;
        }
        self.unfile(index);
        self.vacate(index);
        true
    }

    /// Removes the last range of the line that begins with range `first`, if it is free. Returns its units, 0 if it is
    /// used. Walks the line.
    pub(crate) fn cut_line(&mut self, first: u32) -> u32 {
        let mut last = first;
        while self.after(last) != NONE {
            last = self.after(last);
        }
        let Range { units, list, before, .. } = self.ranges[last as usize];
        if list >= VACANT {
            return 0;
        }
        self.unfile(last);
        self.vacate(last);
        if let Some(range) = self.ranges.get_mut(before as usize) {
            range.after = NONE;
        }
        self.reach_changed(list, before, NONE);
        units
    }

    /// Finds a free range of `list` that `fit` fits into; in an odd list, into its reach (the caller has
    /// called `settle_reach`).
    ///
    /// The request's own class comes first: it has the tightest fits (only exact ones for sizes below 128).
    /// At most [`OWN_CLASS_SCAN_MAX`] of its ranges are examined. Then comes the next class in which all
    /// ranges are large enough.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "half of it is removed for unaligned requests")]
    pub(crate) fn find(&self, list: u32, fit: Fit) -> Option<u32> {
        debug_assert!(is_even(list) || self.stale.is_empty(), "list {list} is searched unsettled");
        let bins = self.lists.get(list as usize)?;
        let own = Class::of(fit.units);
        let mut index = bins.head(own);
        for _ in 0..OWN_CLASS_SCAN_MAX {
            if index == NONE {
                break;
            }
            let (start, units) = self.reach(index);
            if fit.start_in(start, units, self.phase).is_some() {
                return Some(index);
            }
            index = self.ranges[index as usize].list_after;
        }
        // The own class is empty, or none of the examined ranges fits.
        if fit.align_units <= 1 {
            return Some(bins.head(bins.at_least(own.next()?)?));
        }
        // Any range of this size contains an aligned piece of the requested size.
        let enough = fit.units.checked_add(fit.align_units - 1)?;
        let class = Class::of(enough);
        let class = if class.units_min() >= enough { class } else { class.next()? };
        Some(bins.head(bins.at_least(class)?))
    }

    /// Returns the first start of `fit` in the reach of range `index`.
    pub(crate) fn start_in_reach(&self, index: u32, fit: Fit) -> Option<u32> {
        let (start, units) = self.reach(index);
        fit.start_in(start, units, self.phase)
    }

    /// Returns the first start of `fit` in range `index` itself.
    pub(crate) fn start_in(&self, index: u32, fit: Fit) -> Option<u32> {
        let Range { start, units, .. } = self.ranges[index as usize];
        fit.start_in(start, units, self.phase)
    }

    /// Returns the last start of `fit` in the reach of range `index`.
    pub(crate) fn last_start_in_reach(&self, index: u32, fit: Fit) -> Option<u32> {
        let (start, units) = self.reach(index);
        let latest = start + units.checked_sub(fit.units)?;
        let mask = fit.align_units.max(1) - 1;
        // Units past the previous aligned address.
        let past = latest.wrapping_add(self.phase) & mask;
        latest.checked_sub(past).filter(|&it| it >= start)
    }

    /// Takes a piece for `fit` out of the free range `index`. The parts before and after it stay free in the
    /// same list. Returns the used piece. `None` if it does not fit, or at the limit of ranges.
    pub(crate) fn take(&mut self, index: u32, fit: Fit) -> Option<u32> {
        let range = self.ranges[index as usize];
        let start = fit.start_in(range.start, range.units, self.phase)?;
        self.take_at(index, start, fit.units)
    }

    /// Takes the first `units` (not 0) of the range that `find` returns for them in the even list `list`.
    #[inline]
    pub(crate) fn take_any(&mut self, list: u32, units: u32) -> Option<u32> {
        let index = self.find(list, Fit { units, align_units: 1 })?;
        self.take_lower(index, units)
    }

    /// Returns start and units of the whole pages of `page_units` (a power of two) in range `index`; 0 units
    /// if there are none. Unit 0 is the start of a page.
    #[inline]
    pub(crate) fn whole_pages(&self, index: u32, page_units: u32) -> (u32, u32) {
        let Range { start, units, .. } = self.ranges[index as usize];
        let mask = u64::from(page_units) - 1;
        let first = (u64::from(start) + mask) & !mask;
        let end = (u64::from(start) + u64::from(units)) & !mask;
        // If there is a whole page, both lie in the range.
        let first = u32::try_from(first).unwrap_or(u32::MAX);
        (first, u32::try_from(end).unwrap_or(u32::MAX).saturating_sub(first))
    }

    /// Takes `units` from `start` on out of the free range `index`, which contains them.
    #[inline]
    pub(crate) fn take_at(&mut self, index: u32, start: u32, units: u32) -> Option<u32> {
        let gap_units = start - self.ranges[index as usize].start;
        if gap_units == 0 {
            self.take_lower(index, units)
        } else {
            self.take_inner(index, gap_units, units)
        }
    }

    /// Takes the first `units` of the free range `index`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "once for each block")]
    fn take_lower(&mut self, index: u32, units: u32) -> Option<u32> {
        let range = self.ranges[index as usize];
        if range.list >= VACANT {
            return None;
        }
        let rest_units = range.units - units;
        if rest_units == 0 {
            self.unfile(index);
            self.reach_changed(range.list, range.before, range.after);
            return Some(index);
        }
        let rest = self.take_slot()?;
        let (ranges, bins) = (&mut self.ranges[..], &mut self.lists[range.list as usize]);
        // The range before the rest is used.
        let sibling = if self.joins { [NONE, range.after] } else { [NONE; 2] };
        let class = Class::of(reach_units(ranges, range.list, rest_units, sibling));
        unlink(ranges, bins, &range);
        let behind = link(ranges, bins, class, rest);
        let piece = &mut ranges[index as usize];
        (piece.units, piece.after) = (units, rest);
        (piece.list, piece.is_stale) = (USED, false);
        ranges[rest as usize] = Range {
            start: range.start + units,
            units: rest_units,
            before: index,
            list_before: NONE,
            list_after: behind,
            class,
            is_stale: false,
            ..range
        };
        if range.after != NONE {
            ranges[range.after as usize].before = rest;
        }
        self.reach_changed(range.list, range.before, range.after);
        Some(index)
    }

    /// Takes `units` of the free range `index` after its first `gap_units` (not 0), which stay free.
    fn take_inner(&mut self, index: u32, gap_units: u32, units: u32) -> Option<u32> {
        let range = self.ranges[index as usize];
        let rest_units = range.units - gap_units - units;
        if range.list >= VACANT || !self.can_make(1 + u32::from(rest_units > 0)) {
            return None;
        }
        self.unfile(index);
        let piece = self.split(index, gap_units)?;
        self.file(index, range.list);
        if rest_units > 0 {
            let rest = self.split(piece, units)?;
            self.file(rest, range.list);
        }
        self.reach_changed(range.list, range.before, range.after);
        Some(piece)
    }

    /// Splits the used range `index` after `units`, both parts used; `None` at the limit.
    pub(crate) fn split_used(&mut self, index: u32, units: u32) -> Option<u32> {
        debug_assert!(self.is_used(index), "range {index} is not in use");
        if self.can_make(1) { self.split(index, units) } else { None }
    }

    /// Joins the used range `lower` and the used range after it.
    pub(crate) fn join_used(&mut self, lower: u32) {
        let upper = self.ranges[lower as usize].after;
        debug_assert!(self.is_used(lower) && self.is_used(upper), "{lower} and {upper}");
        self.absorb(lower, upper);
    }

    /// Frees the used range `index` into `list` and merges it with free neighbours of that list. Returns the
    /// index of the merged range.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "once for each block")]
    pub(crate) fn give(&mut self, index: u32, list: u32) -> u32 {
        debug_assert!(self.is_used(index), "range {index} is not in use");
        let (ranges, bins) = (&mut self.ranges[..], &mut self.lists[list as usize]);
        let Range { units: own_units, before, after, .. } = ranges[index as usize];
        let (mut whole, mut units, mut first, mut next) = (index, own_units, before, after);
        if after != NONE && ranges[after as usize].list == list {
            let upper = ranges[after as usize];
            unlink(ranges, bins, &upper);
            (units, next) = (units + upper.units, upper.after);
            vacate(&mut ranges[after as usize], after, &mut self.vacant_head);
            self.room += 1;
        }
        if before != NONE && ranges[before as usize].list == list {
            let lower = ranges[before as usize];
            unlink(ranges, bins, &lower);
            (whole, units, first) = (before, units + lower.units, lower.before);
            vacate(&mut ranges[index as usize], index, &mut self.vacant_head);
            self.room += 1;
        }
        if units != own_units && next != NONE {
            ranges[next as usize].before = whole;
        }
        let sibling = if self.joins { [first, next] } else { [NONE; 2] };
        let class = Class::of(reach_units(ranges, list, units, sibling));
        let behind = link(ranges, bins, class, whole);
        self.frees += 1;
        let range = &mut ranges[whole as usize];
        (range.units, range.after) = (units, next);
        (range.list, range.class, range.is_stale) = (list, class, false);
        (range.list_before, range.list_after) = (NONE, behind);
        range.freed_at = self.frees;
        self.reach_changed(list, first, next);
        whole
    }

    /// Moves the free range `index` to another list. The caller moves all ranges of a line, so that ranges
    /// of different kinds stay separate.
    pub(crate) fn refile(&mut self, index: u32, list: u32) {
        self.unfile(index);
        self.file(index, list);
        let Range { before, after, .. } = self.ranges[index as usize];
        self.reach_changed(list, before, after);
    }

    /// Splits a range that is in no list after `units`. Returns the upper part, used.
    fn split(&mut self, index: u32, units: u32) -> Option<u32> {
        let range = self.ranges[index as usize];
        let upper = self.make(Range {
            start: range.start + units,
            units: range.units - units,
            before: index,
            list: USED,
            list_before: NONE,
            list_after: NONE,
            ..range
        })?;
        self.ranges[index as usize].units = units;
        self.ranges[index as usize].after = upper;
        if range.after != NONE {
            self.ranges[range.after as usize].before = upper;
        }
        Some(upper)
    }

    /// Merges `upper`, in no list, into `lower`, its neighbour before.
    fn absorb(&mut self, lower: u32, upper: u32) {
        let Range { units, after, freed_at, .. } = self.ranges[upper as usize];
        let range = &mut self.ranges[lower as usize];
        range.units += units;
        range.after = after;
        range.freed_at = range.freed_at.max(freed_at);
        if after != NONE {
            self.ranges[after as usize].before = lower;
        }
        self.vacate(upper);
    }

    /// `None` at the limit.
    #[inline]
    fn make(&mut self, range: Range) -> Option<u32> {
        let index = self.take_slot()?;
        self.ranges[index as usize] = range;
        Some(index)
    }

    /// Takes a slot for a range. `None` at the limit.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "once for each block")]
    fn take_slot(&mut self) -> Option<u32> {
        if !self.can_make(1) {
            return None;
        }
        self.room -= 1;
        if self.vacant_head == NONE {
            self.make_slot();
        }
        let index = self.vacant_head;
        self.vacant_head = self.ranges[index as usize].list_after;
        Some(index)
    }

    #[cold]
    fn make_slot(&mut self) {
        debug_assert!(
            self.slots() < self.granted,
            "{} ranges, and room for one more",
            self.granted
        );
        self.vacant_head = self.slots();
        self.ranges.push(Range::VACANT);
    }

    #[inline]
    fn vacate(&mut self, index: u32) {
        vacate(&mut self.ranges[index as usize], index, &mut self.vacant_head);
        self.room += 1;
    }
}

/// Makes the slot of range `index` the first vacant one.
#[inline]
fn vacate(range: &mut Range, index: u32, vacant_head: &mut u32) {
    (range.list, range.is_stale) = (VACANT, false);
    range.list_after = *vacant_head;
    *vacant_head = index;
}
