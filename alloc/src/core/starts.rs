//! A table from a unit to the block around it.
//!
//! It holds the start of each block. The nearest start at or before a unit belongs to the only block that
//! can contain the unit; the caller checks that it does. The table is divided into *stretches*. A stretch
//! stores its first start itself and further ones in a bitmap with rows of block numbers, which most
//! large blocks do not need. Stretches without a start are skipped 64 at a time.

use super::NONE;

/// Units per stretch: 2 MiB at 512-byte units.
const STRETCH_UNITS: u32 = 4096;
const WORD_BITS: u32 = u64::BITS;

const WORDS: usize = (STRETCH_UNITS / WORD_BITS) as usize;

/// For each unit of a word: the block that starts there, if its bit is set.
type Row = [u32; WORD_BITS as usize];

/// The starts in a stretch.
#[derive(Debug)]
struct Stretch {
    /// Start and number of one block, or `NONE`.
    unit: u32,
    index: u32,
    /// Starts that were inserted while that one existed.
    others: Option<Box<Others>>,
}

/// Further starts of a stretch.
#[derive(Debug)]
struct Others {
    /// For each unit: whether a block starts there.
    bits: [u64; WORDS],
    /// For each word: its row, or `NONE`.
    rows: [u32; WORDS],
    /// Number of bits set.
    count: u32,
}

/// Rows for which there is memory before a request: one for each thread that may be mapping pages.
const ROWS_SPARE: usize = 64;

/// The table: 16 bytes per stretch; for further starts 772 bytes per stretch and 256 bytes per word of units.
#[derive(Debug)]
pub(crate) struct Starts {
    rows: Vec<Row>,
    stretches: Vec<Stretch>,
    /// A bitmap of stretches: whether a block starts there.
    filled: Vec<u64>,
}

impl Starts {
    pub(crate) fn new(units: u32) -> Self {
        let count = units.div_ceil(STRETCH_UNITS) as usize;
        let empty = || Stretch { unit: NONE, index: NONE, others: None };
        Self {
            rows: Vec::new(),
            stretches: std::iter::repeat_with(empty).take(count).collect(),
            filled: vec![0; count.div_ceil(WORD_BITS as usize)],
        }
    }

    /// Whether blocks can be inserted by all threads that may be about to. Gets memory if necessary.
    #[inline]
    pub(crate) fn can_insert(&mut self) -> bool {
        self.rows.capacity() - self.rows.len() >= ROWS_SPARE
            || self.rows.try_reserve(self.rows.len().max(ROWS_SPARE)).is_ok()
    }

    /// Inserts block `index` at `start`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "once for each block")]
    pub(crate) fn insert(&mut self, start: u32, index: u32) {
        let at = start / STRETCH_UNITS;
        let stretch = &mut self.stretches[at as usize];
        if stretch.unit == NONE {
            (stretch.unit, stretch.index) = (start, index);
            self.filled[(at / WORD_BITS) as usize] |= 1 << (at % WORD_BITS);
        } else {
            debug_assert!(stretch.unit != start, "a block starts at {start} already");
            stretch.others.get_or_insert_with(Others::empty).insert(start, index, &mut self.rows);
        }
    }

    /// Removes the block that starts at `start`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "once for each block")]
    pub(crate) fn remove(&mut self, start: u32) {
        let at = start / STRETCH_UNITS;
        let stretch = &mut self.stretches[at as usize];
        if stretch.unit == start {
            stretch.unit = NONE;
        } else if let Some(others) = &mut stretch.others {
            others.remove(start);
        }
        if stretch.is_empty() {
            self.filled[(at / WORD_BITS) as usize] &= !(1 << (at % WORD_BITS));
        }
    }

    /// Returns the block that starts at `unit`.
    #[inline]
    pub(crate) fn at(&self, unit: u32) -> Option<u32> {
        let stretch = self.stretches.get((unit / STRETCH_UNITS) as usize)?;
        if stretch.unit == unit {
            return Some(stretch.index);
        }
        let others = stretch.others.as_ref()?;
        let (word, bit) = place(unit);
        let row = self.rows.get(others.rows[word] as usize)?;
        (others.bits[word] >> bit & 1 == 1).then_some(row[bit])
    }

    /// Returns the only block that can contain `unit`, or `NONE`.
    pub(crate) fn find(&self, unit: u32) -> u32 {
        let at = unit / STRETCH_UNITS;
        let here = self.stretches.get(at as usize).and_then(|it| it.nearest(unit, &self.rows));
        let found = here.or_else(|| {
            let before = self.filled_before(at)?;
            self.stretches[before as usize].nearest(at * STRETCH_UNITS - 1, &self.rows)
        });
        found.unwrap_or(NONE)
    }

    /// Returns the last stretch before `at` with a start.
    fn filled_before(&self, at: u32) -> Option<u32> {
        let (word, bit) = ((at / WORD_BITS) as usize, at % WORD_BITS);
        let here = self.filled.get(word)? & ((1 << bit) - 1);
        let (word, bits) = if here != 0 {
            (word, here)
        } else {
            let before = (0..word).rev().find(|&word| self.filled[word] != 0)?;
            (before, self.filled[before])
        };
        Some(word as u32 * WORD_BITS + bits.ilog2())
    }
}

/// Returns word and bit of a unit in its stretch.
#[inline]
const fn place(unit: u32) -> (usize, usize) {
    ((unit % STRETCH_UNITS / WORD_BITS) as usize, (unit % WORD_BITS) as usize)
}

impl Stretch {
    #[inline]
    fn is_empty(&self) -> bool {
        self.unit == NONE && self.others.as_ref().is_none_or(|others| others.count == 0)
    }

    /// Returns the block with the last start at or before `unit` (of this stretch or a later one).
    fn nearest(&self, unit: u32, rows: &[Row]) -> Option<u32> {
        let alone = (self.unit <= unit).then_some(place(self.unit));
        let other = self.others.as_ref().and_then(|others| others.nearest(unit));
        match other {
            Some((word, bit)) if alone.is_none_or(|it| it < (word, bit)) => {
                let row = self.others.as_ref()?.rows[word];
                Some(rows[row as usize][bit])
            }
            _ => alone.map(|_| self.index),
        }
    }
}

impl Others {
    #[cold]
    fn empty() -> Box<Self> {
        Box::new(Self { bits: [0; WORDS], rows: [NONE; WORDS], count: 0 })
    }

    #[inline]
    fn insert(&mut self, start: u32, index: u32, rows: &mut Vec<Row>) {
        let (word, bit) = place(start);
        debug_assert!(self.bits[word] >> bit & 1 == 0, "a block starts at {start} already");
        self.bits[word] |= 1 << bit;
        self.count += 1;
        if let Some(row) = rows.get_mut(self.rows[word] as usize) {
            row[bit] = index;
        } else {
            self.insert_in_new_row(word, bit, index, rows);
        }
    }

    #[cold]
    fn insert_in_new_row(&mut self, word: usize, bit: usize, index: u32, rows: &mut Vec<Row>) {
        // At most one row per word of units.
        self.rows[word] = rows.len() as u32;
        let mut row = [NONE; WORD_BITS as usize];
        row[bit] = index;
        rows.push(row);
    }

    #[inline]
    fn remove(&mut self, start: u32) {
        let (word, bit) = place(start);
        debug_assert!(self.bits[word] >> bit & 1 == 1, "no block starts at {start}");
        self.bits[word] &= !(1 << bit);
        self.count -= 1;
    }

    /// Returns word and bit of the last start at or before `unit` of the stretch.
    #[inline]
    fn nearest(&self, unit: u32) -> Option<(usize, usize)> {
        let (word, bit) = place(unit);
        let here = self.bits[word] & (u64::MAX >> (WORD_BITS as usize - 1 - bit));
        let (word, bits) = if here != 0 {
            (word, here)
        } else {
            let before = (0..word).rev().find(|&word| self.bits[word] != 0)?;
            (before, self.bits[before])
        };
        Some((word, bits.ilog2() as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Several words of stretches, so that a block and its start can lie in different stretches.
    const UNITS: u32 = 150 * STRETCH_UNITS;

    proptest! {
        /// After any inserts and removals the block around a unit is found.
        #[test]
        fn live_blocks_are_found(
            blocks in proptest::collection::vec(
                (0..UNITS, prop_oneof![
                    1..40_u32, 1..3 * STRETCH_UNITS, 1..100 * STRETCH_UNITS]), 1..60),
            probes in proptest::collection::vec(0..UNITS, 64),
        ) {
            let mut table = Starts::new(UNITS);
            let mut live: Vec<(u32, u32, u32)> = Vec::new();
            for (index, &(start, units)) in (0_u32..).zip(&blocks) {
                let units = units.min(UNITS - start);
                // Blocks that the new one overlaps are removed first.
                live.retain(|&(other, length, _)| {
                    let stays = other + length <= start || start + units <= other;
                    if !stays {
                        table.remove(other);
                    }
                    stays
                });
                live.push((start, units, index));
                table.insert(start, index);
                let ends = live.iter().flat_map(|&(start, units, _)| [start, start + units - 1]);
                for unit in ends.chain(probes.iter().copied()) {
                    let holds = |&&(start, units, _): &&(u32, u32, u32)| {
                        start <= unit && unit < start + units
                    };
                    if let Some(&(_, _, index)) = live.iter().find(holds) {
                        prop_assert_eq!(table.find(unit), index, "unit {}", unit);
                    }
                    let starts = live.iter().find(|&&(start, ..)| start == unit);
                    prop_assert_eq!(table.at(unit), starts.map(|it| it.2), "unit {}", unit);
                }
            }
        }
    }

    #[test]
    fn an_empty_table_finds_nothing() {
        let mut table = Starts::new(10_000);
        assert_eq!(table.find(9_999), NONE);
        table.insert(10, 7);
        assert_eq!((table.find(9), table.find(10), table.find(14)), (NONE, 7, 7));
        assert_eq!(
            (table.at(9), table.at(10), table.at(11), table.at(50_000)),
            (None, Some(7), None, None)
        );
        table.remove(10);
        assert_eq!(table.find(14), NONE);
        assert_eq!(table.find(50_000), NONE);
    }
}
