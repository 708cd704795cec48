//! Checks of everything there is: slow, for tests.

use super::super::NONE;
use super::super::bins::Class;
use super::{Ranges, USED, VACANT};

impl Ranges {
    /// Walks the line that begins with range `first` and checks that it tiles
    /// `[start, start + units)`; then that every free list holds what it says. For tests.
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
        let room = vacant as u32 + (self.limit - self.slots());
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
}
