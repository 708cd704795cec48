//! Checks of lines and lists by walking them, and queries for tests.

use super::super::bins::Class;
use super::super::{NONE, Tlsf};
use super::{Ranges, USED, VACANT};

impl Ranges {
    /// Walks the line that begins with range `first` and checks that it tiles `[start, start + units)`.
    pub(crate) fn check_segment_ranges(
        &self,
        first: u32,
        start: u32,
        units: u32,
    ) -> Result<(), String> {
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
            if !bins.are_bitmaps_right() {
                return Err(format!("list {list}: its bitmaps are wrong"));
            }
            for class in bins.filled() {
                let (mut index, mut before) = (bins.head(class), NONE);
                while index != NONE {
                    let range = &self.ranges[index as usize];
                    let is_known = range.is_stale && self.stale.contains(&index);
                    let is_right = Class::of(self.reach(index).1) == class || is_known;
                    let is_right = is_right && range.class == class;
                    if range.list != list || range.list_before != before || !is_right {
                        return Err(format!("range {index} is misfiled in list {list}: {range:?}"));
                    }
                    filed += 1;
                    (before, index) = (index, range.list_after);
                }
            }
        }
        let free = self.ranges.iter().filter(|range| range.list < VACANT).count();
        let vacant = self.ranges.iter().filter(|range| range.list == VACANT).count();
        let room = vacant as u32 + (self.granted - self.slots());
        if self.room + self.promised != room {
            return Err(format!(
                "room for {} and {} promised, not {room}",
                self.room, self.promised
            ));
        }
        if filed != free {
            return Err(format!("{filed} filed of {free} free ranges"));
        }
        Ok(())
    }

    /// Returns the number of promised ranges.
    pub(crate) const fn promised(&self) -> u32 {
        self.promised
    }
}

impl Tlsf {
    /// Returns the free units.
    #[must_use]
    pub const fn free_units(&self) -> u32 {
        self.free_units
    }

    /// Returns the number of allocated extents. Walks all ranges.
    #[must_use]
    pub fn extents(&self) -> u32 {
        self.used_and_free().0
    }

    /// Checks that the ranges tile the units, and the number of free units.
    ///
    /// # Errors
    /// A description of the violation.
    pub fn check(&self) -> Result<(), String> {
        if self.units() == 0 {
            return Ok(());
        }
        self.ranges.check_segment_ranges(0, 0, self.units())?;
        self.ranges.check_lists()?;
        let (_, free) = self.used_and_free();
        if free != self.free_units {
            return Err(format!("{free} units are free, recorded {}", self.free_units));
        }
        Ok(())
    }

    /// Counts the used ranges and the free units.
    fn used_and_free(&self) -> (u32, u32) {
        let (mut index, mut used, mut free) = (0, 0, 0);
        while self.units() > 0 && index != NONE {
            match self.ranges.list(index) {
                Some(_) => free += self.ranges.units(index),
                None => used += 1,
            }
            index = self.ranges.after(index);
        }
        (used, free)
    }
}
