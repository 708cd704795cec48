//! From a unit to the block around it.
//!
//! Where a block starts is entered exactly: a bit and a number, taken out again when it ends. So
//! the start nearest before a unit, in its stretch, is that of the only block which can hold the
//! unit. Where there is none, the block must have begun in an earlier stretch, and the stretch says
//! which one covered its first unit last. That is a *hint*: it is never taken back, and the caller
//! checks that the block lives and covers the unit.
//!
//! Making a block writes one entry, and one hint per stretch it reaches into (2 MiB at 512-byte
//! units).

use super::NONE;

/// Units per stretch.
const STRETCH_UNITS: u32 = 4096;
const WORD_BITS: u32 = u64::BITS;

const WORDS: usize = (STRETCH_UNITS / WORD_BITS) as usize;

#[derive(Debug)]
struct Stretch {
    /// By unit: whether a block starts there.
    bits: [u64; WORDS],
    /// By unit: which one, where the bit is set.
    index: [Option<Box<[u32; WORD_BITS as usize]>>; WORDS],
}

/// The table. It takes memory where blocks start: 1 KiB a stretch, and 256 bytes a word of units.
#[derive(Debug)]
pub(crate) struct Starts {
    /// Per stretch: the block that covered its first unit last, having begun before it, plus one.
    across: Vec<u32>,
    stretches: Vec<Option<Box<Stretch>>>,
}

impl Starts {
    pub(crate) fn new(units: u32) -> Self {
        let count = units.div_ceil(STRETCH_UNITS) as usize;
        let stretches = std::iter::repeat_with(|| None).take(count).collect();
        Self { across: vec![0; count], stretches }
    }

    /// Block `index` holds `units` (not 0) from `start` on.
    #[inline]
    pub(crate) fn insert(&mut self, start: u32, units: u32, index: u32) {
        let first = (start / STRETCH_UNITS) as usize;
        let stretch = self.stretches[first].get_or_insert_with(Stretch::empty);
        let (word, bit) = place(start);
        stretch.bits[word] |= 1 << bit;
        stretch.index[word].get_or_insert_with(|| Box::new([0; WORD_BITS as usize]))[bit] = index;
        let last = ((start + (units - 1)) / STRETCH_UNITS) as usize;
        if last > first {
            self.across[first + 1..=last].fill(index + 1);
        }
    }

    /// The block that started at `start` is gone.
    #[inline]
    pub(crate) fn remove(&mut self, start: u32) {
        if let Some(stretch) = &mut self.stretches[(start / STRETCH_UNITS) as usize] {
            let (word, bit) = place(start);
            stretch.bits[word] &= !(1 << bit);
        }
    }

    /// The only block that can hold `unit`, or `NONE`.
    #[inline]
    pub(crate) fn find(&self, unit: u32) -> u32 {
        let at = (unit / STRETCH_UNITS) as usize;
        let Some(place) = self.stretches.get(at) else { return NONE };
        if let Some(index) = place.as_ref().and_then(|stretch| stretch.nearest(unit)) {
            return index;
        }
        self.across[at].checked_sub(1).unwrap_or(NONE)
    }
}

/// Where a unit is in its stretch: the word, and the bit in it.
#[inline]
const fn place(unit: u32) -> (usize, usize) {
    ((unit % STRETCH_UNITS / WORD_BITS) as usize, (unit % WORD_BITS) as usize)
}

impl Stretch {
    #[cold]
    fn empty() -> Box<Self> {
        Box::new(Self { bits: [0; WORDS], index: [const { None }; WORDS] })
    }

    /// The block that starts last at or before `unit`.
    #[inline]
    fn nearest(&self, unit: u32) -> Option<u32> {
        let (word, bit) = place(unit);
        let here = self.bits[word] & (u64::MAX >> (WORD_BITS as usize - 1 - bit));
        let (word, bits) = if here != 0 {
            (word, here)
        } else {
            let before = (0..word).rev().find(|&word| self.bits[word] != 0)?;
            (before, self.bits[before])
        };
        self.index[word].as_ref().map(|index| index[bits.ilog2() as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const UNITS: u32 = 4 * STRETCH_UNITS;

    proptest! {
        /// The table's promise: whatever came and went, the block around a unit is found.
        #[test]
        fn live_blocks_are_found(
            blocks in proptest::collection::vec(
                (0..UNITS, prop_oneof![1..40_u32, 1..3 * STRETCH_UNITS]), 1..60),
            probes in proptest::collection::vec(0..UNITS, 64),
        ) {
            let mut table = Starts::new(UNITS);
            let mut live: Vec<(u32, u32, u32)> = Vec::new();
            for (index, &(start, units)) in (0_u32..).zip(&blocks) {
                let units = units.min(UNITS - start);
                // Blocks that the new one overlaps are gone entirely, as in the allocator.
                live.retain(|&(other, length, _)| {
                    let stays = other + length <= start || start + units <= other;
                    if !stays {
                        table.remove(other);
                    }
                    stays
                });
                live.push((start, units, index));
                table.insert(start, units, index);
                let ends = live.iter().flat_map(|&(start, units, _)| [start, start + units - 1]);
                for unit in ends.chain(probes.iter().copied()) {
                    let holds = |&&(start, units, _): &&(u32, u32, u32)| {
                        start <= unit && unit < start + units
                    };
                    if let Some(&(_, _, index)) = live.iter().find(holds) {
                        prop_assert_eq!(table.find(unit), index, "unit {}", unit);
                    }
                }
            }
        }
    }

    #[test]
    fn nothing_is_known_of_what_was_never_written() {
        let mut table = Starts::new(10_000);
        assert_eq!(table.find(9_999), NONE);
        table.insert(10, 5, 7);
        assert_eq!((table.find(9), table.find(10), table.find(14)), (NONE, 7, 7));
        table.remove(10);
        assert_eq!(table.find(14), NONE);
        assert_eq!(table.find(50_000), NONE);
    }
}
