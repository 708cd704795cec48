//! From a unit to the range that holds it, in O(1): two levels of plain indices.
//!
//! Entries are written when a block is made and never cleared: an entry is a *hint*, and the
//! caller checks that the range it names is live and covers the unit. That is enough, because
//! every unit of a live block was written when the block was made and by nobody since.
//!
//! A stretch that lies wholly inside one block is one entry in the root, so that making a block
//! writes at most two leaves and one entry per further stretch (2 MiB at 4 KiB granules).

use super::NONE;

/// Units per leaf.
const LEAF_UNITS: u32 = 512;

/// The table. All-zero when new, so a large address space costs nothing until it is used.
#[derive(Debug)]
pub(crate) struct PageTable {
    /// Per stretch: the range that holds all of it, plus one; 0: look into the leaf.
    whole: Vec<u32>,
    /// Per stretch: its leaf, plus one; 0: none yet.
    leaf: Vec<u32>,
    leaves: Vec<Box<[u32]>>,
}

impl PageTable {
    pub(crate) fn new(units: u32) -> Self {
        let stretches = units.div_ceil(LEAF_UNITS) as usize;
        Self { whole: vec![0; stretches], leaf: vec![0; stretches], leaves: Vec::new() }
    }

    /// Makes `index` the hint of `units` units from `start`.
    #[inline]
    pub(crate) fn set(&mut self, start: u32, units: u32, index: u32) {
        let end = start + units;
        let mut at = start;
        while at < end {
            let stretch = at / LEAF_UNITS;
            let until = (stretch * LEAF_UNITS).saturating_add(LEAF_UNITS).min(end);
            if until - at == LEAF_UNITS {
                self.whole[stretch as usize] = index + 1;
            } else {
                self.set_part(stretch as usize, at % LEAF_UNITS, until - at, index);
            }
            at = until;
        }
    }

    fn set_part(&mut self, stretch: usize, from: u32, units: u32, index: u32) {
        // The block that held the whole stretch is gone, or this one could not begin inside it.
        self.whole[stretch] = 0;
        if self.leaf[stretch] == 0 {
            self.leaves.push(vec![0; LEAF_UNITS as usize].into_boxed_slice());
            // At most 2³² / 512 leaves, so the count fits.
            self.leaf[stretch] = u32::try_from(self.leaves.len()).unwrap_or(u32::MAX);
        }
        let leaf = &mut self.leaves[self.leaf[stretch] as usize - 1];
        leaf[from as usize..(from + units) as usize].fill(index + 1);
    }

    /// The hint of `unit`, or `NONE`.
    #[inline]
    pub(crate) fn get(&self, unit: u32) -> u32 {
        let stretch = (unit / LEAF_UNITS) as usize;
        let hint = match (self.whole.get(stretch), self.leaf.get(stretch)) {
            (Some(0), Some(0)) => 0,
            (Some(0), Some(&leaf)) => self.leaves[leaf as usize - 1][(unit % LEAF_UNITS) as usize],
            (Some(&whole), _) => whole,
            (None, _) => 0,
        };
        hint.checked_sub(1).unwrap_or(NONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UNITS: u32 = 4000;

    proptest! {
        /// The table's promise: for units of the blocks written last, the hint is right.
        #[test]
        fn hints_of_live_blocks_are_right(
            blocks in proptest::collection::vec((0..UNITS, 1..2000_u32), 1..60),
        ) {
            let mut table = PageTable::new(UNITS);
            let mut model = vec![NONE; UNITS as usize];
            for (index, &(start, units)) in blocks.iter().enumerate() {
                let index = u32::try_from(index).unwrap();
                let units = units.min(UNITS - start);
                // Blocks that the new one overlaps are gone entirely, as in the allocator.
                let range = start as usize..(start + units) as usize;
                let gone: Vec<u32> = model[range.clone()].to_vec();
                for held in model.iter_mut().filter(|held| gone.contains(held)) {
                    *held = NONE;
                }
                model[range].fill(index);
                table.set(start, units, index);
                for unit in 0..UNITS {
                    let held = model[unit as usize];
                    prop_assert!(held == NONE || table.get(unit) == held, "unit {}", unit);
                }
            }
        }
    }

    #[test]
    fn nothing_is_known_of_what_was_never_written() {
        let mut table = PageTable::new(1000);
        assert_eq!(table.get(999), NONE);
        table.set(10, 5, 7);
        assert_eq!((table.get(9), table.get(10), table.get(14), table.get(15)), (NONE, 7, 7, NONE));
        assert_eq!(table.get(5000), NONE);
    }
}
