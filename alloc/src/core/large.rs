//! Large pages: aligned runs of pages that the device maps as one and unmaps only as a whole.

/// Bits of a word.
const WORD_BITS: u32 = u64::BITS;

/// Which large pages of an address space are mapped. Unit 0 is the start of one.
#[derive(Debug)]
pub(crate) struct LargePages {
    /// Binary logarithm of the units of a large page.
    log: u32,
    /// A bit for each. Empty if the device has none.
    words: Vec<u64>,
    /// Number of bits that are set.
    count: u32,
}

impl LargePages {
    /// None is mapped yet. `large_units` is a power of two; with those of a page there are no large pages.
    pub(crate) fn new(units: u32, page_units: u32, large_units: u32) -> Self {
        let log = large_units.trailing_zeros();
        let bits = if large_units > page_units { units >> log } else { 0 };
        Self { log, words: vec![0; bits.div_ceil(WORD_BITS) as usize], count: 0 }
    }

    #[inline]
    pub(crate) const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether the device has large pages.
    pub(crate) const fn are_there(&self) -> bool {
        !self.words.is_empty()
    }

    /// Returns the numbers of the large pages that would lie wholly in `units` from `start` on, mapped or not.
    fn inside(&self, start: u32, units: u32) -> std::ops::Range<u32> {
        let end = (u64::from(start) + u64::from(units)) >> self.log;
        let first = u64::from(start).div_ceil(1 << self.log);
        // Both are at most the number of units.
        u32::try_from(first).unwrap_or(u32::MAX)..u32::try_from(end).unwrap_or(u32::MAX)
    }

    /// Whether a large page can lie in `units` from `start` on.
    pub(crate) fn fits(&self, start: u32, units: u32) -> bool {
        !self.words.is_empty() && !self.inside(start, units).is_empty()
    }

    fn set(&mut self, start: u32, units: u32, is_mapped: bool) {
        if self.words.is_empty() {
            return;
        }
        for at in self.inside(start, units) {
            let bit = 1_u64 << (at % WORD_BITS);
            let Some(word) = self.words.get_mut((at / WORD_BITS) as usize) else { continue };
            let was_mapped = *word & bit != 0;
            match (was_mapped, is_mapped) {
                (false, true) => (*word, self.count) = (*word | bit, self.count + 1),
                (true, false) => (*word, self.count) = (*word & !bit, self.count - 1),
                _ => {}
            }
        }
    }

    /// Records that each large page that lies wholly in `units` from `start` on is mapped as one.
    pub(crate) fn add(&mut self, start: u32, units: u32) {
        self.set(start, units, true);
    }

    /// Records that `units` from `start` on are unmapped.
    pub(crate) fn remove(&mut self, start: u32, units: u32) {
        if !self.is_empty() {
            self.set(start, units, false);
        }
    }

    /// Returns first unit and units of the large page that contains `unit`.
    #[inline]
    pub(crate) fn around(&self, unit: u32) -> Option<(u32, u32)> {
        if self.is_empty() {
            return None;
        }
        let at = unit >> self.log;
        let word = self.words.get((at / WORD_BITS) as usize)?;
        (word >> (at % WORD_BITS) & 1 != 0).then_some((at << self.log, 1 << self.log))
    }

    /// Returns `unit`, or the start of the large page that a range which ends or starts there would split.
    #[inline]
    pub(crate) fn floor(&self, unit: u32) -> u32 {
        self.around(unit).map_or(unit, |(start, _)| start)
    }

    /// Returns `unit`, or the end of the large page that a range which ends or starts there would split.
    pub(crate) fn ceil(&self, unit: u32) -> u32 {
        match self.around(unit) {
            Some((start, units)) if start != unit => start + units,
            _ => unit,
        }
    }

    /// Whether a range of `units` from `start` on would split a large page.
    #[inline]
    pub(crate) fn is_split_by(&self, start: u32, units: u32) -> bool {
        !self.is_empty()
            && (self.floor(start) != start || self.floor(start + units) != start + units)
    }

    /// Number of them. For checks.
    #[cfg(any(test, feature = "checks"))]
    pub(crate) const fn count(&self) -> u32 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LARGE: u32 = 8;
    /// More than two words of them, and a rest.
    const UNITS: u32 = 150 * LARGE + 3;

    /// A range that often begins or ends with a large page.
    fn range() -> impl Strategy<Value = (u32, u32)> {
        let unit = || prop_oneof![0..UNITS, (0..UNITS / LARGE).prop_map(|at| at * LARGE)];
        (unit(), unit()).prop_map(|(a, b)| (a.min(b), a.abs_diff(b)))
    }

    proptest! {
        #[test]
        fn agrees_with_a_table_of_units(
            changes in prop::collection::vec((range(), any::<bool>()), 1..60),
            asked in prop::collection::vec(range(), 20),
        ) {
            let mut pages = LargePages::new(UNITS, 2, LARGE);
            let mut model = [false; (UNITS / LARGE) as usize];
            for ((start, units), is_mapped) in changes {
                if is_mapped { pages.add(start, units) } else { pages.remove(start, units) }
                for (at, bit) in (0..).zip(&mut model) {
                    let is_inside = at * LARGE >= start && (at + 1) * LARGE <= start + units;
                    *bit = if is_inside { is_mapped } else { *bit };
                }
                let count = model.iter().filter(|bit| **bit).count();
                prop_assert_eq!(pages.count() as usize, count);
                prop_assert_eq!(pages.is_empty(), count == 0);
            }
            let is_inside = |unit: u32| {
                !unit.is_multiple_of(LARGE) && model.get((unit / LARGE) as usize).is_some_and(|bit| *bit)
            };
            for (start, units) in asked {
                let around = model.get((start / LARGE) as usize).is_some_and(|bit| *bit);
                let expected = around.then_some((start / LARGE * LARGE, LARGE));
                prop_assert_eq!(pages.around(start), expected);
                let ceil = if is_inside(start) { (start / LARGE + 1) * LARGE } else { start };
                prop_assert_eq!(pages.ceil(start), ceil);
                let splits = is_inside(start) || is_inside(start + units);
                prop_assert_eq!(pages.is_split_by(start, units), splits);
                let fits = (0..UNITS / LARGE)
                    .any(|at| at * LARGE >= start && (at + 1) * LARGE <= start + units);
                prop_assert_eq!(pages.fits(start, units), fits);
            }
        }
    }

    #[test]
    fn a_device_without_them_has_none() {
        let mut pages = LargePages::new(UNITS, LARGE, LARGE);
        pages.add(0, UNITS);
        assert!(pages.is_empty() && !pages.are_there() && !pages.fits(0, UNITS));
    }
}
