//! Ranges that tile lines of units; free ones wait in size-class lists; all operations O(1).
//!
//! A *line* is an unbroken run of units with an owner number (a segment, or a whole file). Its
//! ranges form a chain in address order. A range is used or free; a free range is filed under one
//! of several *lists* (a pool's cached ranges, a pool's bare ranges, ...). Free neighbours of the
//! same list are always one range (I1); of different lists they stay apart.
//!
//! The lower of two merging ranges, and the lower part of a split one, keeps its index: the first
//! range of a line has the same index for as long as the line exists.

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
    ranges: Vec<Range>,
    lists: Vec<Bins>,
    vacant_head: u32,
    vacant_count: u32,
    limit: u32,
    phase: u32,
}

impl Ranges {
    /// No lines, `lists` lists, at most `limit` ranges; unit 0 lies `phase` units past an
    /// address of every alignment.
    pub(crate) fn new(lists: u32, limit: u32, phase: u32) -> Self {
        let mut it = Self {
            ranges: Vec::new(),
            lists: Vec::new(),
            vacant_head: NONE,
            vacant_count: 0,
            limit: limit.min(VACANT),
            phase,
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
        self.vacant_count >= count || self.limit - self.slots() >= count - self.vacant_count
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

    /// The next range of the same line, or `NONE`.
    #[inline]
    pub(crate) fn after(&self, index: u32) -> u32 {
        self.ranges[index as usize].after
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

    /// A range of `list` that `fit` fits into, still free.
    ///
    /// Its own class first, where the tightest fits are (and, for sizes below 64, only exact
    /// ones): at most [`OWN_CLASS_SCAN_MAX`] ranges are looked at. Then the next class whose every
    /// range is large enough.
    pub(crate) fn find(&self, list: u32, fit: Fit) -> Option<u32> {
        let bins = self.lists.get(list as usize)?;
        let own = Class::of(fit.units);
        let mut index = bins.head(own);
        for _ in 0..OWN_CLASS_SCAN_MAX {
            if index == NONE {
                break;
            }
            let range = &self.ranges[index as usize];
            if fit.start_in(range.start, range.units, self.phase).is_some() {
                return Some(index);
            }
            index = range.list_after;
        }
        // Wherever a range of this size starts, an aligned piece of the wanted size is inside.
        let enough = fit.units.checked_add(fit.align_units.max(1) - 1)?;
        let class = Class::of(enough);
        let class = if class.units_min() >= enough { class } else { class.next()? };
        Some(bins.head(bins.at_least(class)?))
    }

    /// Takes the piece `fit` describes out of the free range `index`; what is left before and
    /// after stays free where it was filed. Returns the piece, used. `None` where it does not fit
    /// or the limit of ranges does not let the rest be kept.
    pub(crate) fn take(&mut self, index: u32, fit: Fit) -> Option<u32> {
        let range = self.ranges[index as usize];
        let start = fit.start_in(range.start, range.units, self.phase)?;
        let gap_units = start - range.start;
        let rest_units = range.units - gap_units - fit.units;
        if range.list >= VACANT
            || !self.can_make(u32::from(gap_units > 0) + u32::from(rest_units > 0))
        {
            return None;
        }
        self.unfile(index);
        let mut piece = index;
        if gap_units > 0 {
            piece = self.split(index, gap_units)?;
            self.file(index, range.list);
        }
        if rest_units > 0 {
            let rest = self.split(piece, fit.units)?;
            self.file(rest, range.list);
        }
        Some(piece)
    }

    /// Takes the last `units` of the free range `index`, or all of it where it has no more (or
    /// the limit of ranges is reached).
    pub(crate) fn take_tail(&mut self, index: u32, units: u32) -> u32 {
        let range = self.ranges[index as usize];
        self.unfile(index);
        if units >= range.units || units == 0 {
            return index;
        }
        match self.split(index, range.units - units) {
            Some(tail) => {
                self.file(index, range.list);
                tail
            }
            None => index,
        }
    }

    /// Frees the used range `index` into `list`, merging it with free neighbours of that list.
    /// Returns the index of the free range it is now part of.
    pub(crate) fn give(&mut self, index: u32, list: u32) -> u32 {
        debug_assert!(self.is_used(index), "range {index} is not in use");
        let Range { before, after, .. } = self.ranges[index as usize];
        if after != NONE && self.ranges[after as usize].list == list {
            self.unfile(after);
            self.absorb(index, after);
        }
        let mut whole = index;
        if before != NONE && self.ranges[before as usize].list == list {
            self.unfile(before);
            self.absorb(before, index);
            whole = before;
        }
        self.file(whole, list);
        whole
    }

    /// Files the free range `index` under another list. The caller moves a whole line, kind by
    /// kind, so that neighbours which were kept apart still are.
    pub(crate) fn refile(&mut self, index: u32, list: u32) {
        self.unfile(index);
        self.file(index, list);
    }

    /// Some range of the largest non-empty class of `list`: at most 1/32 smaller than the largest.
    pub(crate) fn near_largest(&self, list: u32) -> Option<u32> {
        let bins = self.lists.get(list as usize)?;
        Some(bins.head(bins.largest()?))
    }

    /// Units of the largest range of `list`. Walks one class: for reports.
    pub(crate) fn largest_units(&self, list: u32) -> u32 {
        let mut index = self.near_largest(list).unwrap_or(NONE);
        let mut largest = 0;
        while index != NONE {
            largest = largest.max(self.units(index));
            index = self.ranges[index as usize].list_after;
        }
        largest
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
        let Range { units, after, .. } = self.ranges[upper as usize];
        self.ranges[lower as usize].units += units;
        self.ranges[lower as usize].after = after;
        if after != NONE {
            self.ranges[after as usize].before = lower;
        }
        self.vacate(upper);
    }

    fn file(&mut self, index: u32, list: u32) {
        let class = Class::of(self.ranges[index as usize].units);
        let head = self.lists[list as usize].head(class);
        let range = &mut self.ranges[index as usize];
        range.list = list;
        range.list_before = NONE;
        range.list_after = head;
        if head != NONE {
            self.ranges[head as usize].list_before = index;
        }
        self.lists[list as usize].set_head(class, index);
    }

    /// Takes a free range out of its list; it counts as used from here.
    fn unfile(&mut self, index: u32) {
        let Range { units, list, list_before, list_after, .. } = self.ranges[index as usize];
        if list_before == NONE {
            self.lists[list as usize].set_head(Class::of(units), list_after);
        } else {
            self.ranges[list_before as usize].list_after = list_after;
        }
        if list_after != NONE {
            self.ranges[list_after as usize].list_before = list_before;
        }
        self.ranges[index as usize].list = USED;
    }

    fn make(&mut self, range: Range) -> Option<u32> {
        if self.vacant_head != NONE {
            let index = self.vacant_head;
            self.vacant_head = self.ranges[index as usize].list_after;
            self.vacant_count -= 1;
            self.ranges[index as usize] = range;
            return Some(index);
        }
        let index = self.slots();
        if index >= self.limit {
            return None;
        }
        self.ranges.push(range);
        Some(index)
    }

    fn vacate(&mut self, index: u32) {
        let next = self.vacant_head;
        let range = &mut self.ranges[index as usize];
        range.list = VACANT;
        range.list_after = next;
        self.vacant_head = index;
        self.vacant_count += 1;
    }

    /// Walks the line that begins with range `first` and checks that it tiles
    /// `[start, start + units)`; then that every free list holds what it says. For tests.
    pub(crate) fn check_line(&self, first: u32, start: u32, units: u32) -> Result<(), String> {
        let (mut index, mut before, mut at) = (first, NONE, start);
        let mut list_before = USED;
        while index != NONE {
            let range = self.ranges.get(index as usize).ok_or(format!("no range {index}"))?;
            if range.start != at || range.units == 0 || range.before != before {
                return Err(format!("range {index} does not follow unit {at}: {range:?}"));
            }
            if range.list == VACANT {
                return Err(format!("range {index} of a line is vacant"));
            }
            if range.list != USED && range.list == list_before {
                return Err(format!("ranges {before} and {index} should be one"));
            }
            at = at.checked_add(range.units).ok_or(format!("range {index} is past the end"))?;
            (before, list_before) = (index, range.list);
            index = range.after;
        }
        if at != start + units {
            return Err(format!("a line of {units} units from {start} ends at {at}"));
        }
        Ok(())
    }

    /// Checks every free list against the ranges, and the bitmaps against the lists.
    pub(crate) fn check_lists(&self) -> Result<(), String> {
        let mut filed = 0_usize;
        for (list, bins) in (0_u32..).zip(&self.lists) {
            for class in Bins::classes() {
                let (mut index, mut before) = (bins.head(class), NONE);
                if (bins.at_least(class) == Some(class)) != (index != NONE) {
                    return Err(format!("list {list}: bitmap of {class:?} is wrong"));
                }
                while index != NONE {
                    let range = &self.ranges[index as usize];
                    if range.list != list || range.list_before != before {
                        return Err(format!("range {index} is misfiled in list {list}: {range:?}"));
                    }
                    if Class::of(range.units) != class {
                        return Err(format!("range {index} of {} units in {class:?}", range.units));
                    }
                    filed += 1;
                    (before, index) = (index, range.list_after);
                }
            }
        }
        let free = self.ranges.iter().filter(|range| range.list < VACANT).count();
        let vacant = self.ranges.iter().filter(|range| range.list == VACANT).count();
        if filed != free || vacant != self.vacant_count as usize {
            return Err(format!("{filed} filed of {free} free ranges, {vacant} vacant slots"));
        }
        Ok(())
    }
}
