//! The books of the slabs, walked whole: for tests.

use super::slabs::{SlabFigures, Slabs};
use crate::core::NONE;

impl Slabs {
    /// Walks everything and checks that it tiles and adds up.
    pub(super) fn check(&self) -> Result<(), String> {
        self.ranges.check_lists()?;
        let (mut figures, mut idle) = (SlabFigures::default(), 0);
        let (mut open, mut in_use) = ([0; 2], [0; 2]);
        for (slot, slab) in (0..).zip(&self.slabs).filter(|(_, slab)| slab.units > 0) {
            self.ranges.check_segment_ranges(slab.first, 0, slab.units)?;
            let (mut range, mut used) = (slab.first, 0);
            while range != NONE {
                let is_out = self.serials.get(range as usize).is_some_and(|&serial| serial != 0);
                if self.ranges.is_used(range) {
                    used += self.ranges.units(range);
                    figures.pieces += 1;
                }
                if is_out != self.ranges.is_used(range) || self.ranges.owner(range) != slot {
                    return Err(format!("range {range} of slab {slot}: out is {is_out}"));
                }
                range = self.ranges.after(range);
            }
            if used != slab.used || (used == 0) != self.idle.contains(&(slab.units, slot)) {
                return Err(format!("slab {slot}: {used} units used; {slab:?}"));
            }
            figures.slabs += 1;
            figures.used += u64::from(used);
            figures.pinned += u64::from(slab.units);
            match used {
                0 => (figures.idle, idle) = (figures.idle + u64::from(slab.units), idle + 1),
                _ => {
                    open[slab.kind as usize] += u64::from(slab.units - used);
                    in_use[slab.kind as usize] += 1;
                }
            }
        }
        let SlabFigures { peak_used, peak_pinned, in_flight, .. } = self.figures;
        let seen = SlabFigures { peak_used, peak_pinned, in_flight, ..figures };
        let state = (self.figures, self.open, self.in_use, self.idle.len());
        if (seen, open, in_use, idle) != state {
            return Err(format!("seen {:?}, on the books {state:?}", (seen, open, in_use, idle)));
        }
        Ok(())
    }
}
