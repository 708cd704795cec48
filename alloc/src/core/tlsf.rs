//! The offset allocator: one line of units with one list of free ranges.

use super::{Fit, Ranges};

/// The only list.
const FREE: u32 = 0;

/// An allocated run of a [`Tlsf`]. Not `Clone`: its holder frees it once.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a dropped extent is never freed"]
pub struct Extent {
    start: u32,
    units: u32,
    index: u32,
}

impl Extent {
    /// Returns the first unit.
    #[must_use]
    pub const fn start_units(&self) -> u32 {
        self.start
    }

    /// Returns the length in units.
    #[must_use]
    pub const fn units(&self) -> u32 {
        self.units
    }
}

/// Allocates runs of units in `[0, units)`. Every operation is O(1); freed neighbours merge at once; the
/// chosen run depends on the order of operations only.
///
/// Pure: the caller defines the unit (4 KiB of a file, a granule of addresses). Not synchronised; `Send`.
#[derive(Debug)]
pub struct Tlsf {
    pub(super) ranges: Ranges,
    units: u32,
    pub(super) free_units: u32,
}

impl Tlsf {
    /// Creates an allocator of `units` free units. With 0 it refuses every request.
    #[must_use]
    pub fn new(units: u32) -> Self {
        let mut ranges = Ranges::new(1, u32::MAX, 0, false);
        if units > 0 {
            // The first range is within the limit.
            let first = ranges.add_segment(0, units, 0, FREE);
            debug_assert_eq!(first, Some(0), "the line begins with range 0");
        }
        Self { ranges, units, free_units: units }
    }

    /// Allocates `units` units, the first of them a multiple of `align_units` (a power of two).
    ///
    /// `None` if no free run fits, or for an invalid argument. A run is always found if a free one of
    /// 33/32 · (`units` + `align_units` − 1) exists, or if one of the first
    /// [`super::OWN_CLASS_SCAN_MAX`] free runs of the same size class fits. Sizes below 64 units have a
    /// class each: an unaligned request of such a size never misses a free run.
    pub fn allocate(&mut self, units: u32, align_units: u32) -> Option<Extent> {
        if units == 0 || units > self.free_units || !align_units.is_power_of_two() {
            return None;
        }
        let fit = Fit { units, align_units };
        let index = self.ranges.take(self.ranges.find(FREE, fit)?, fit)?;
        self.free_units -= units;
        Some(Extent { start: self.ranges.start(index), units, index })
    }

    /// Frees `extent`.
    ///
    /// # Errors
    /// Returns an extent of another `Tlsf`, as far as it can be recognised.
    pub fn free(&mut self, extent: Extent) -> Result<(), Extent> {
        let Extent { start, units, index } = extent;
        let known = self.ranges.is_used(index)
            && self.ranges.start(index) == start
            && self.ranges.units(index) == units;
        if !known {
            return Err(extent);
        }
        self.ranges.give(index, FREE);
        self.free_units += units;
        Ok(())
    }

    /// Removes the free units at the end of the line, for good. Returns the units that are left. Walks all ranges.
    pub fn cut(&mut self) -> u32 {
        if self.units > 0 {
            // The first range of a line keeps its index.
            let cut_units = self.ranges.cut_line(0);
            self.units -= cut_units;
            self.free_units -= cut_units;
        }
        self.units
    }

    /// Returns the total of units.
    #[must_use]
    pub const fn units(&self) -> u32 {
        self.units
    }

    /// Returns the units of the largest free run. Walks one size class: for reports.
    #[must_use]
    pub fn largest_free_units(&self) -> u32 {
        self.ranges.largest_units(FREE)
    }
}
