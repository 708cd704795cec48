//! Checks of the slabs and their statistics by walking all ranges.

use dormouse_device::Device;

use super::{SlabFigures, Slabs};
use crate::core::NONE;
use crate::pinned::PinnedPool;

impl<D: Device> PinnedPool<D> {
    /// Checks the bookkeeping.
    ///
    /// # Errors
    /// A description of the violation.
    pub fn check(&self) -> Result<(), String> {
        self.shared.state().slabs.check()
    }
}

impl Slabs {
    /// Checks that the ranges tile the slabs and that the statistics are correct.
    pub(in crate::pinned) fn check(&self) -> Result<(), String> {
        self.ranges.check_lists()?;
        let (mut figures, mut idle) = (SlabFigures::default(), 0);
        let (mut open, mut in_use) = ([0; 2], [0; 2]);
        for (slot, slab) in (0..).zip(&self.slabs).filter(|(_, slab)| slab.units > 0) {
            self.ranges.check_segment_ranges(slab.first, 0, slab.units)?;
            let (mut range, mut used) = (slab.first, 0);
            while range != NONE {
                let has_serial =
                    self.serials.get(range as usize).is_some_and(|&serial| serial != 0);
                let is_used = self.ranges.is_used(range);
                if has_serial != is_used || self.ranges.owner(range) != slot {
                    return Err(format!("range {range} of slab {slot}: serial {has_serial}"));
                }
                if is_used {
                    used += self.ranges.units(range);
                    figures.pieces += 1;
                }
                range = self.ranges.after(range);
            }
            if used != slab.used || (used == 0) != self.idle.contains(&(slab.units, slot)) {
                return Err(format!("slab {slot}: {used} units used; {slab:?}"));
            }
            figures.slabs += 1;
            figures.used += u64::from(used);
            figures.pinned += u64::from(slab.units);
            if used == 0 {
                (figures.idle, idle) = (figures.idle + u64::from(slab.units), idle + 1);
            } else {
                open[slab.kind as usize] += u64::from(slab.units - used);
                in_use[slab.kind as usize] += 1;
            }
        }
        let SlabFigures { peak_used, peak_pinned, in_flight, .. } = self.figures;
        let seen = SlabFigures { peak_used, peak_pinned, in_flight, ..figures };
        let (seen, recorded) =
            ((seen, open, in_use, idle), (self.figures, self.open, self.in_use, self.idle.len()));
        if seen != recorded {
            return Err(format!("found {seen:?}, recorded {recorded:?}"));
        }
        Ok(())
    }
}
