//! The free lists, and the reach of the ranges in odd lists.

use super::super::NONE;
use super::super::bins::{Bins, Class};
use super::{Range, Ranges, USED, is_even};

/// Limit of the entries of `Ranges::stale`.
const STALE_MAX: usize = 64;

impl Ranges {
    /// Returns start and units of the reach of the free range `index`.
    #[inline]
    pub(crate) fn reach(&self, index: u32) -> (u32, u32) {
        let Range { start, units, list, .. } = self.ranges[index as usize];
        if self.joins && !is_even(list) { self.reach_of_odd(index) } else { (start, units) }
    }

    fn reach_of_odd(&self, index: u32) -> (u32, u32) {
        let Range { start, units, list, before, after, .. } = self.ranges[index as usize];
        let head_units = joined_units(&self.ranges, list, before);
        (start - head_units, head_units + units + joined_units(&self.ranges, list, after))
    }

    /// Files a range. After a change of an even list the caller calls `reach_changed` for the neighbours.
    #[inline]
    pub(super) fn file(&mut self, index: u32, list: u32) {
        self.ranges[index as usize].list = list;
        self.enter(index);
    }

    /// Removes a free range from its list and marks it used.
    #[inline]
    pub(super) fn unfile(&mut self, index: u32) {
        self.leave(index);
        self.ranges[index as usize].list = USED;
    }

    /// Notes a change of `list` between the ranges `before` and `after`: the reach of those in the odd list
    /// has changed.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "twice for each block")]
    pub(super) fn reach_changed(&mut self, list: u32, before: u32, after: u32) {
        if self.joins && is_even(list) {
            for index in [before, after] {
                let range = self.ranges.get(index as usize);
                if range.is_some_and(|range| range.list == list + 1 && !range.is_stale) {
                    self.outdate(index);
                }
            }
        }
    }

    /// Marks range `index` as stale.
    #[cold]
    fn outdate(&mut self, index: u32) {
        self.ranges[index as usize].is_stale = true;
        self.stale.push(index);
        if self.stale.len() >= STALE_MAX {
            self.settle_reach();
        }
    }

    /// Refiles stale ranges under their current reach.
    #[inline(never)]
    pub(crate) fn settle_reach(&mut self) {
        while let Some(index) = self.stale.pop() {
            // The slot may hold another range by now.
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

    /// Files a range under its reach, in the list that its slot names.
    fn enter(&mut self, index: u32) {
        let (Range { list, .. }, (_, units)) = (self.ranges[index as usize], self.reach(index));
        let class = Class::of(units);
        let behind = link(&mut self.ranges, &mut self.lists[list as usize], class, index);
        let range = &mut self.ranges[index as usize];
        (range.class, range.is_stale) = (class, false);
        (range.list_before, range.list_after) = (NONE, behind);
    }

    #[inline]
    fn leave(&mut self, index: u32) {
        let range = self.ranges[index as usize];
        self.ranges[index as usize].is_stale = false;
        unlink(&mut self.ranges, &mut self.lists[range.list as usize], &range);
    }
}

/// Returns the reach of `units` of `list` between the ranges `sibling` (or `NONE`).
#[inline]
pub(super) fn reach_units(ranges: &[Range], list: u32, units: u32, sibling: [u32; 2]) -> u32 {
    if is_even(list) {
        return units;
    }
    let [before, after] = sibling;
    joined_units(ranges, list, before) + units + joined_units(ranges, list, after)
}

/// Returns the units that `neighbour` adds to the reach of a range of the odd `list`.
fn joined_units(ranges: &[Range], list: u32, neighbour: u32) -> u32 {
    match ranges.get(neighbour as usize) {
        Some(range) if range.list == list - 1 => range.units,
        _ => 0,
    }
}

/// Makes range `index` the first of `class`. Returns the second one, or `NONE`.
#[inline(always)]
#[expect(clippy::inline_always, reason = "twice for each block")]
pub(super) fn link(ranges: &mut [Range], bins: &mut Bins, class: Class, index: u32) -> u32 {
    let behind = bins.push(class, index);
    if behind != NONE {
        ranges[behind as usize].list_before = index;
    }
    behind
}

/// Removes `range` from its list.
#[inline(always)]
#[expect(clippy::inline_always, reason = "as `link`")]
pub(super) fn unlink(ranges: &mut [Range], bins: &mut Bins, range: &Range) {
    let Range { class, list_before, list_after, .. } = *range;
    if list_before == NONE {
        bins.pop_to(class, list_after);
    } else {
        ranges[list_before as usize].list_after = list_after;
    }
    if list_after != NONE {
        ranges[list_after as usize].list_before = list_before;
    }
}
