//! Ranges that tile lines of units; free ones wait in size-class lists; all operations O(1).
//!
//! A *line* is an unbroken run of units with an owner number (a segment, or a whole file). Its
//! ranges form a chain in address order. A range is used or free; a free range is filed under one
//! of several *lists* (a pool's cached ranges, a pool's bare ranges, ...). Free neighbours of the
//! same list are always one range (I1); of different lists they stay apart.
//!
//! Lists come in pairs. A range of an even list is filed under its size. One of the odd list after it
//! is filed under its *reach*: what it and the neighbours it has in the even list come to. (A bare
//! range can be mapped, and then serve together with what is cached around it.) Ranges of even lists
//! come and go all the time, and odd lists are seldom searched: what is filed in one is put right
//! (`settle_reach`) before it is, not sooner.
//!
//! The lower of two merging ranges, and the lower part of a split one, keeps its index: the first
//! range of a line has the same index for as long as the line exists.

mod check;
mod search;

use super::bins::{Bins, Class};
use super::{NONE, OWN_CLASS_SCAN_MAX};

/// What a slot holds, in the field that names the list for free ranges.
const USED: u32 = NONE - 1;
const VACANT: u32 = NONE - 2;

#[derive(Clone, Copy, Debug)]
struct Range {
    start: u32,
    units: u32,
    /// Neighbours in address order.
    before: u32,
    after: u32,
    /// Neighbours in the free list (of a vacant slot, `list_after` links the vacant ones).
    list_before: u32,
    list_after: u32,
    /// The list it is filed under, or `USED` or `VACANT`.
    list: u32,
    owner: u32,
    /// What it is filed under, where it is.
    class: Class,
    /// Its reach has changed since then: it is in `Ranges::stale`.
    is_stale: bool,
    /// When the last part of it came free, by `Ranges::frees`.
    freed_at: u64,
}

/// So many ranges of odd lists may be filed under a reach of the past.
const STALE_MAX: usize = 64;

/// Whether ranges of `list` are filed under their own size.
#[inline]
const fn is_even(list: u32) -> bool {
    list.is_multiple_of(2)
}

/// What is wanted of a free range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fit {
    /// Not 0.
    pub(crate) units: u32,
    /// A power of two.
    pub(crate) align_units: u32,
}

impl Fit {
    /// Where in a range it would start, with unit 0 being `phase` units past an aligned address.
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
    /// Whether ranges of odd lists reach past their own ends.
    joins: bool,
    ranges: Vec<Range>,
    lists: Vec<Bins>,
    vacant_head: u32,
    limit: u32,
    /// Ranges that can still be made and are not promised.
    room: u32,
    phase: u32,
    /// Ranges promised to later splits that must not fail.
    promised: u32,
    /// Where to look for ranges whose reach has changed since they were filed. Others may be in here
    /// too, and some twice.
    stale: Vec<u32>,
    /// How often a range came free.
    frees: u64,
}

impl Ranges {
    /// No lines, `lists` lists, at most `limit` ranges; unit 0 lies `phase` units past an
    /// address of every alignment.
    /// Without `joins`, ranges of all lists are filed under their own size.
    pub(crate) fn new(lists: u32, limit: u32, phase: u32, joins: bool) -> Self {
        let mut it = Self {
            joins,
            ranges: Vec::new(),
            lists: Vec::new(),
            vacant_head: NONE,
            limit: limit.min(VACANT),
            room: limit.min(VACANT),
            phase,
            promised: 0,
            stale: Vec::new(),
            frees: 0,
        };
        it.ensure_lists(lists);
        it
    }

    /// Makes lists `0..count` exist.
    pub(crate) fn ensure_lists(&mut self, count: u32) {
        while self.lists.len() < count as usize {
            self.lists.push(Bins::new());
        }
    }

    /// Slots that exist, vacant ones included: every index is below it.
    pub(crate) fn slots(&self) -> u32 {
        // `limit` bounds the count.
        u32::try_from(self.ranges.len()).unwrap_or(u32::MAX)
    }

    /// Whether `count` more ranges can be made.
    #[inline]
    pub(crate) fn can_make(&self, count: u32) -> bool {
        self.room >= count
    }

    /// Sets `count` ranges aside for splits to come; `false` where there are not so many.
    pub(crate) fn promise(&mut self, count: u32) -> bool {
        let is_possible = self.can_make(count);
        if is_possible {
            self.promised += count;
            self.room -= count;
        }
        is_possible
    }

    /// Those splits have come, or never will.
    pub(crate) fn redeem(&mut self, count: u32) {
        debug_assert!(self.promised >= count, "{count} of {} promised", self.promised);
        self.promised -= count;
        self.room += count;
    }

    /// Ranges that are set aside.
    pub(crate) const fn promised(&self) -> u32 {
        self.promised
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

    /// The range before it in the same line, or `NONE`.
    #[inline]
    pub(crate) fn before(&self, index: u32) -> u32 {
        self.ranges[index as usize].before
    }

    /// The next range of the same line, or `NONE`.
    #[inline]
    pub(crate) fn after(&self, index: u32) -> u32 {
        self.ranges[index as usize].after
    }

    /// How often a range came free so far.
    pub(crate) const fn frees(&self) -> u64 {
        self.frees
    }

    /// What that was when the last part of range `index` came free; whoever has it now counts not.
    #[inline]
    pub(crate) fn freed_at(&self, index: u32) -> u64 {
        self.ranges[index as usize].freed_at
    }

    /// The list a free range is filed under; `None` for one in use or a vacant slot.
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
    pub(crate) fn add_line(
        &mut self,
        start: u32,
        units: u32,
        owner: u32,
        list: u32,
    ) -> Option<u32> {
        debug_assert!(units > 0 && start.checked_add(units).is_some(), "{start}+{units}");
        let index = self.make(Range {
            start,
            units,
            before: NONE,
            after: NONE,
            list_before: NONE,
            list_after: NONE,
            list: USED,
            owner,
            class: Class::of(units),
            is_stale: false,
            freed_at: 0,
        })?;
        self.file(index, list);
        Some(index)
    }

    /// Removes the line whose only range is the free `index`. Refused for any other.
    pub(crate) fn remove_line(&mut self, index: u32) -> bool {
        let range = self.ranges[index as usize];
        if range.list >= VACANT || range.before != NONE || range.after != NONE {
            return false;
        }
        self.unfile(index);
        self.vacate(index);
        true
    }

    /// A range of `list` that `fit` fits into, still free. Of an odd list: into the reach of, which
    /// `settle_reach` has put right.
    ///
    /// Its own class first, where the tightest fits are (and, for sizes below 128, only exact
    /// ones): at most [`OWN_CLASS_SCAN_MAX`] ranges are looked at. Then the next class whose every
    /// range is large enough.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "half of it goes where nothing is to be aligned")]
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
        // Of the own class none was there, or none of the first ones fits.
        if fit.align_units <= 1 {
            return Some(bins.head(bins.at_least(own.next()?)?));
        }
        // Wherever a range of this size starts, an aligned piece of the wanted size is inside.
        let enough = fit.units.checked_add(fit.align_units - 1)?;
        let class = Class::of(enough);
        let class = if class.units_min() >= enough { class } else { class.next()? };
        Some(bins.head(bins.at_least(class)?))
    }

    /// Start and units of what the free range `index` is filed for.
    #[inline]
    pub(crate) fn reach(&self, index: u32) -> (u32, u32) {
        let Range { start, units, list, .. } = self.ranges[index as usize];
        if self.joins && !is_even(list) { self.reach_of_odd(index) } else { (start, units) }
    }

    fn reach_of_odd(&self, index: u32) -> (u32, u32) {
        let Range { start, units, list, before, after, .. } = self.ranges[index as usize];
        let joined = |neighbour: u32| match self.ranges.get(neighbour as usize) {
            Some(range) if range.list == list - 1 => range.units,
            _ => 0,
        };
        let head_units = joined(before);
        (start - head_units, head_units + units + joined(after))
    }

    /// Where in the reach of range `index` a piece as `fit` has it would start at the earliest.
    pub(crate) fn start_in_reach(&self, index: u32, fit: Fit) -> Option<u32> {
        let (start, units) = self.reach(index);
        fit.start_in(start, units, self.phase)
    }

    /// The same at the latest.
    pub(crate) fn last_start_in_reach(&self, index: u32, fit: Fit) -> Option<u32> {
        let (start, units) = self.reach(index);
        let latest = start + units.checked_sub(fit.units)?;
        let mask = fit.align_units.max(1) - 1;
        // How far it is past the alignment, whatever the phase has of whole alignments.
        let past = latest.wrapping_add(self.phase) & mask;
        latest.checked_sub(past).filter(|&it| it >= start)
    }

    /// Takes the piece `fit` describes out of the free range `index`; what is left before and
    /// after stays free where it was filed. Returns the piece, used. `None` where it does not fit
    /// or the limit of ranges does not let the rest be kept.
    pub(crate) fn take(&mut self, index: u32, fit: Fit) -> Option<u32> {
        let range = self.ranges[index as usize];
        let start = fit.start_in(range.start, range.units, self.phase)?;
        self.take_at(index, start, fit.units)
    }

    /// Takes `units` (not 0) out of the free range of `list`, an even one, that `find` finds for
    /// them: from its start on.
    #[inline]
    pub(crate) fn take_any(&mut self, list: u32, units: u32) -> Option<u32> {
        let index = self.find(list, Fit { units, align_units: 1 })?;
        self.take_lower(index, units)
    }

    /// The part of range `index` that consists of whole pages of `page_units` (a power of two):
    /// start and units, the latter 0 where there is none. Unit 0 is the start of a page.
    #[inline]
    pub(crate) fn whole_pages(&self, index: u32, page_units: u32) -> (u32, u32) {
        let Range { start, units, .. } = self.ranges[index as usize];
        let mask = u64::from(page_units) - 1;
        let first = (u64::from(start) + mask) & !mask;
        let end = (u64::from(start) + u64::from(units)) & !mask;
        // Where there is a page, both lie in the range.
        let first = u32::try_from(first).unwrap_or(u32::MAX);
        (first, u32::try_from(end).unwrap_or(u32::MAX).saturating_sub(first))
    }

    /// Takes whole pages out of the free range `index`: its last ones, up to `units` of them
    /// (rounded up). What is left on either side stays free where it was filed. `None` where there
    /// is no whole page, or the limit of ranges does not let the rest be kept.
    pub(crate) fn take_pages(&mut self, index: u32, units: u32, page_units: u32) -> Option<u32> {
        let (first, all_units) = self.whole_pages(index, page_units);
        if all_units == 0 {
            return None;
        }
        let units = units.max(1).checked_next_multiple_of(page_units).unwrap_or(u32::MAX);
        let units = units.min(all_units);
        self.take_at(index, first + (all_units - units), units)
    }

    /// Takes `units` from `start` on out of the free range `index` around them.
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
    #[inline]
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
        let rest = self.make(Range {
            start: range.start + units,
            units: rest_units,
            before: index,
            ..range
        })?;
        self.leave(index);
        let piece = &mut self.ranges[index as usize];
        piece.units = units;
        piece.after = rest;
        piece.list = USED;
        if range.after != NONE {
            self.ranges[range.after as usize].before = rest;
        }
        if is_even(range.list) {
            self.enter_as(rest, range.list, rest_units);
        } else {
            self.enter(rest);
        }
        self.reach_changed(range.list, range.before, range.after);
        Some(index)
    }

    /// Takes `units` out of the free range `index`, its first `gap_units` (not 0) left free.
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

    /// Makes one range of the used range `lower` and the used one right after it.
    pub(crate) fn join_used(&mut self, lower: u32) {
        let upper = self.ranges[lower as usize].after;
        debug_assert!(self.is_used(lower) && self.is_used(upper), "{lower} and {upper}");
        self.absorb(lower, upper);
    }

    /// Frees the used range `index` into `list`, merging it with free neighbours of that list.
    /// Returns the index of the free range it is now part of.
    #[inline]
    pub(crate) fn give(&mut self, index: u32, list: u32) -> u32 {
        debug_assert!(self.is_used(index), "range {index} is not in use");
        let Range { units: own_units, before, after, .. } = self.ranges[index as usize];
        let (mut whole, mut units, mut next) = (index, own_units, after);
        if after != NONE && self.ranges[after as usize].list == list {
            self.leave(after);
            let upper = &self.ranges[after as usize];
            units += upper.units;
            next = upper.after;
            self.vacate(after);
        }
        if before != NONE && self.ranges[before as usize].list == list {
            self.leave(before);
            units += self.ranges[before as usize].units;
            self.vacate(index);
            whole = before;
        }
        self.frees += 1;
        let range = &mut self.ranges[whole as usize];
        range.freed_at = self.frees;
        range.units = units;
        range.after = next;
        range.list = list;
        let before = range.before;
        if units != own_units && next != NONE {
            self.ranges[next as usize].before = whole;
        }
        if is_even(list) {
            self.enter_as(whole, list, units);
        } else {
            self.enter(whole);
        }
        self.reach_changed(list, before, next);
        whole
    }

    /// Files the free range `index` under another list. The caller moves a whole line, kind by
    /// kind, so that neighbours which were kept apart still are.
    pub(crate) fn refile(&mut self, index: u32, list: u32) {
        self.unfile(index);
        self.file(index, list);
        let Range { before, after, .. } = self.ranges[index as usize];
        self.reach_changed(list, before, after);
    }

    /// Splits a range that is in no list after `units`; returns the upper part, used.
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

    /// Files a range. Whoever changes ranges of an even list calls `reach_changed` for the
    /// neighbours of what it changed, once it is done.
    #[inline]
    fn file(&mut self, index: u32, list: u32) {
        self.ranges[index as usize].list = list;
        self.enter(index);
    }

    /// Takes a free range out of its list; it counts as used from here.
    #[inline]
    fn unfile(&mut self, index: u32) {
        self.leave(index);
        self.ranges[index as usize].list = USED;
    }

    /// Something of `list` changed between `before` and `after`: where these are of the odd list, they
    /// reach further now, or less far.
    #[inline]
    fn reach_changed(&mut self, list: u32, before: u32, after: u32) {
        if self.joins && is_even(list) {
            self.outdate(before, list + 1);
            self.outdate(after, list + 1);
        }
    }

    /// Where range `index` is of the odd `list`, it may be filed under a reach of the past.
    #[inline]
    fn outdate(&mut self, index: u32, list: u32) {
        let Some(range) = self.ranges.get_mut(index as usize) else { return };
        if range.list == list && !range.is_stale {
            range.is_stale = true;
            self.stale.push(index);
            if self.stale.len() >= STALE_MAX {
                self.settle_reach();
            }
        }
    }

    /// Files ranges of odd lists under the reach they have now.
    #[inline(never)]
    pub(crate) fn settle_reach(&mut self) {
        while let Some(index) = self.stale.pop() {
            // It may be a range of another kind by now.
            if self.ranges[index as usize].is_stale {
                self.ranges[index as usize].is_stale = false;
                let (_, units) = self.reach_of_odd(index);
                if Class::of(units) != self.ranges[index as usize].class {
                    self.leave(index);
                    self.enter(index);
                }
            }
        }
    }

    /// Puts a range in front of the class it belongs to, in the list it says it is in.
    fn enter(&mut self, index: u32) {
        let (Range { list, .. }, (_, units)) = (self.ranges[index as usize], self.reach(index));
        self.enter_as(index, list, units);
    }

    /// Files a range under `units` in `list`, which it says it is in.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "twice for each block that comes and goes")]
    fn enter_as(&mut self, index: u32, list: u32, units: u32) {
        let class = Class::of(units);
        let behind = self.lists[list as usize].push(class, index);
        let range = &mut self.ranges[index as usize];
        range.class = class;
        range.is_stale = false;
        range.list_before = NONE;
        range.list_after = behind;
        if behind != NONE {
            self.ranges[behind as usize].list_before = index;
        }
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as `enter_as`")]
    fn leave(&mut self, index: u32) {
        let range = &mut self.ranges[index as usize];
        range.is_stale = false;
        let Range { list, class, list_before, list_after, .. } = *range;
        if list_before == NONE {
            self.lists[list as usize].pop_to(class, list_after);
        } else {
            self.ranges[list_before as usize].list_after = list_after;
        }
        if list_after != NONE {
            self.ranges[list_after as usize].list_before = list_before;
        }
    }

    /// `None` at the limit.
    #[inline]
    fn make(&mut self, range: Range) -> Option<u32> {
        self.room = self.room.checked_sub(1)?;
        let index = self.vacant_head;
        let Some(slot) = self.ranges.get_mut(index as usize) else {
            return Some(self.make_slot(range));
        };
        self.vacant_head = slot.list_after;
        *slot = range;
        Some(index)
    }

    #[cold]
    fn make_slot(&mut self, range: Range) -> u32 {
        let index = self.slots();
        debug_assert!(index < self.limit, "{index} ranges, and room for one more");
        self.ranges.push(range);
        index
    }

    #[inline]
    fn vacate(&mut self, index: u32) {
        let next = self.vacant_head;
        let range = &mut self.ranges[index as usize];
        range.list = VACANT;
        range.list_after = next;
        self.vacant_head = index;
        self.room += 1;
    }
}
