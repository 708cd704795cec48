//! Searches over more than one size class: for pages to take, for places to choose from, for reports.

use super::super::NONE;
use super::super::bins::Class;
use super::Ranges;

/// Ranges of which the one that came free first is taken for the pages it has.
const COLD_LOOKS_MAX: usize = 64;

impl Ranges {
    /// A range of `list` with a whole page of `page_units` in it, as large as can be found
    /// quickly; where the ranges of the largest class have none, all that could are looked at.
    pub(crate) fn with_whole_page(&self, list: u32, page_units: u32) -> Option<u32> {
        let bins = self.lists.get(list as usize)?;
        let mut class = bins.largest();
        while let Some(at) = class {
            let mut index = bins.head(at);
            while index != NONE {
                if self.whole_pages(index, page_units).1 > 0 {
                    return Some(index);
                }
                index = self.ranges[index as usize].list_after;
            }
            class = at.before().filter(|it| it.units_max() >= page_units);
        }
        None
    }

    /// Of the smallest ranges of `list` with a whole page of `page_units`, the one that came free
    /// first.
    pub(crate) fn cold_with_whole_page(&self, list: u32, page_units: u32) -> Option<u32> {
        let ranges = self.no_smaller(list, page_units);
        let small = ranges.filter(|&index| self.whole_pages(index, page_units).1 > 0);
        small.take(COLD_LOOKS_MAX).min_by_key(|&index| self.freed_at(index))
    }

    /// The ranges of `list` that are filed under `units` or more, the smallest first: class by class,
    /// so that some of the first class may be smaller.
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
}
