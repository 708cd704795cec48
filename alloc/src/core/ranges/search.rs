//! Searches over several size classes, for pages to take, places for a block, and reports.

use super::super::NONE;
use super::super::bins::Class;
use super::Ranges;

/// Limit of the ranges among which the one freed first is chosen.
const COLD_LOOKS_MAX: usize = 64;
/// Limit of the ranges that are examined for it.
const COLD_EXAMINED_MAX: usize = 1024;

impl Ranges {
    /// Finds a range of `list` with a whole page of `page_units` that `which` accepts, from the largest class
    /// that has one. If the largest class has none, all smaller classes that could have one are searched.
    pub(crate) fn with_whole_page(
        &self,
        list: u32,
        page_units: u32,
        which: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let bins = self.lists.get(list as usize)?;
        let mut class = bins.largest();
        while let Some(at) = class {
            let mut index = bins.head(at);
            while index != NONE {
                if self.whole_pages(index, page_units).1 > 0 && which(index) {
                    return Some(index);
                }
                index = self.ranges[index as usize].list_after;
            }
            class = at.before().filter(|it| it.units_max() >= page_units);
        }
        None
    }

    /// Returns, of the smallest ranges of `list` with a whole page of `page_units` that `which` accepts, the one
    /// freed first.
    pub(crate) fn cold_with_whole_page(
        &self,
        list: u32,
        page_units: u32,
        which: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let ranges = self.no_smaller(list, page_units).take(COLD_EXAMINED_MAX);
        let has_page = |&index: &u32| self.whole_pages(index, page_units).1 > 0 && which(index);
        let small = ranges.filter(has_page);
        small.take(COLD_LOOKS_MAX).min_by_key(|&index| self.freed_at(index))
    }

    /// Returns the ranges of `list` from the class of `units` on, class by class. Some of the first class may
    /// be smaller.
    pub(crate) fn no_smaller(&self, list: u32, units: u32) -> impl Iterator<Item = u32> {
        let bins = self.lists.get(list as usize);
        let mut class = bins.and_then(|bins| bins.at_least(Class::of(units)));
        let mut index = NONE;
        std::iter::from_fn(move || {
            if index == NONE {
                let (bins, at) = (bins?, class?);
                index = bins.head(at);
                class = at.next().and_then(|next| bins.at_least(next));
            }
            let found = index;
            index = self.ranges[found as usize].list_after;
            Some(found)
        })
    }

    /// Returns a range of the largest non-empty class of `list`: at most 1/32 smaller than the largest.
    pub(crate) fn near_largest(&self, list: u32) -> Option<u32> {
        let bins = self.lists.get(list as usize)?;
        Some(bins.head(bins.largest()?))
    }

    /// Returns the units of the largest range of `list`. Walks one class: for reports.
    pub(crate) fn largest_units(&self, list: u32) -> u32 {
        let mut index = self.near_largest(list).unwrap_or(NONE);
        let mut largest = 0;
        while index != NONE {
            largest = largest.max(self.units(index));
            index = self.ranges[index as usize].list_after;
        }
        largest
    }
}
