//! The offset allocator: one line of units, one list of free ranges.

use super::{Fit, Ranges};

/// The one list there is.
const FREE: u32 = 0;

/// A piece of a [`Tlsf`]. Not `Clone`: whoever holds it may give it back, once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "an extent that is dropped is never given back"]
pub struct Extent {
    start: u32,
    units: u32,
    index: u32,
}

impl Extent {
    /// First unit.
    #[must_use]
    pub const fn start_units(&self) -> u32 {
        self.start
    }

    /// Length in units.
    #[must_use]
    pub const fn units(&self) -> u32 {
        self.units
    }
}

/// What a [`Tlsf`] refuses.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TlsfError {
    /// An extent of some other `Tlsf`. It comes back.
    #[error("extent {}+{} is not in use here", .0.start_units(), .0.units())]
    Foreign(Extent),
}

/// Allocates runs of units out of `[0, units)`. Every operation is O(1); freed neighbours merge
/// at once; which run is chosen depends on the order of operations only.
///
/// It is pure: what a unit is (4 KiB of a file, a page of addresses) is the caller's business.
/// Not synchronised; `Send`.
#[derive(Debug)]
pub struct Tlsf {
    ranges: Ranges,
    units: u32,
    free_units: u32,
    extents: u32,
}

impl Tlsf {
    /// `units` units, all free. None at all is allowed: every request is refused then.
    #[must_use]
    pub fn new(units: u32) -> Self {
        let mut ranges = Ranges::new(1, u32::MAX, 0, false);
        if units > 0 {
            // The first range of an unlimited arena can always be made.
            let first = ranges.add_segment(0, units, 0, FREE);
            debug_assert_eq!(first, Some(0), "the line begins with range 0");
        }
        Self { ranges, units, free_units: units, extents: 0 }
    }

    /// A run of `units` units whose first is a multiple of `align_units` (a power of two).
    ///
    /// `None` where it does not fit, or `units` or `align_units` makes no sense. A run is always
    /// found where a free one of 33/32 · (`units` + `align_units` − 1) exists, and where one of
    /// the first [`super::OWN_CLASS_SCAN_MAX`] free ones of the same size class fits. Sizes below
    /// 64 units have a class each, so that unaligned requests of these never miss.
    pub fn allocate(&mut self, units: u32, align_units: u32) -> Option<Extent> {
        if units == 0 || units > self.free_units || !align_units.is_power_of_two() {
            return None;
        }
        let fit = Fit { units, align_units };
        let index = self.ranges.take(self.ranges.find(FREE, fit)?, fit)?;
        self.free_units -= units;
        self.extents += 1;
        Some(Extent { start: self.ranges.start(index), units, index })
    }

    /// Gives `extent` back.
    ///
    /// # Errors
    /// `Foreign` for an extent of another `Tlsf`, as far as that can be seen.
    pub fn free(&mut self, extent: Extent) -> Result<(), TlsfError> {
        let Extent { start, units, index } = extent;
        let known = self.ranges.is_used(index)
            && self.ranges.start(index) == start
            && self.ranges.units(index) == units;
        if !known {
            return Err(TlsfError::Foreign(extent));
        }
        self.ranges.give(index, FREE);
        self.free_units += units;
        self.extents -= 1;
        Ok(())
    }

    /// Units in all.
    #[must_use]
    pub const fn units(&self) -> u32 {
        self.units
    }

    /// Units not handed out.
    #[must_use]
    pub const fn free_units(&self) -> u32 {
        self.free_units
    }

    /// Extents handed out.
    #[must_use]
    pub const fn extents(&self) -> u32 {
        self.extents
    }

    /// Units of the largest free run. Walks one size class: for reports.
    #[must_use]
    pub fn largest_free_units(&self) -> u32 {
        self.ranges.largest_units(FREE)
    }

    /// Walks everything and checks that it tiles and adds up.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> Result<(), String> {
        if self.units == 0 {
            return Ok(());
        }
        self.ranges.check_segment_ranges(0, 0, self.units)?;
        self.ranges.check_lists()?;
        let (mut index, mut free, mut used) = (0, 0, 0);
        while index != super::NONE {
            match self.ranges.list(index) {
                Some(_) => free += self.ranges.units(index),
                None => used += 1,
            }
            index = self.ranges.after(index);
        }
        if (free, used) != (self.free_units, self.extents) {
            return Err(format!(
                "{free} units free and {used} extents, but {} and {} are on the books",
                self.free_units, self.extents
            ));
        }
        Ok(())
    }
}
