//! Size classes with two levels of bitmaps: which class has a range at least this large, in O(1).
//!
//! ```text
//!   units      1 .. 31      32 .. 63         64 .. 127       ...   2³¹ ..
//!   first      0            1                2                     27
//!   second     exact size   steps of 1       steps of 2            steps of 2²⁶
//! ```
//! Sizes below 64 have a class each; above, a class spans 1/32 of its power of two.

use super::NONE;

const SECOND_BITS: u32 = 5;
const SECOND_COUNT: u32 = 1 << SECOND_BITS;
const FIRST_COUNT: u32 = 32 - SECOND_BITS + 1;

/// One size class: `first * 32 + second`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class(u32);

/// The heads of one set of free lists.
#[derive(Debug)]
pub(super) struct Bins {
    first_bitmap: u32,
    second_bitmaps: [u32; FIRST_COUNT as usize],
    heads: Box<[u32]>,
}

impl Class {
    /// The class that ranges of `units` (not 0) are filed under.
    #[inline]
    pub(super) fn of(units: u32) -> Self {
        debug_assert!(units > 0, "an empty range has no class");
        if units < SECOND_COUNT {
            return Self(units);
        }
        let top_bit = 31 - units.leading_zeros();
        let shift = top_bit - SECOND_BITS;
        let second = (units >> shift) & (SECOND_COUNT - 1);
        Self((shift + 1) * SECOND_COUNT + second)
    }

    /// The smallest size filed under this class.
    #[inline]
    pub(super) fn units_min(self) -> u32 {
        let (first, second) = (self.0 / SECOND_COUNT, self.0 % SECOND_COUNT);
        if first == 0 { second } else { (SECOND_COUNT + second) << (first - 1) }
    }

    /// The next larger class, where there is one.
    #[inline]
    pub(super) fn next(self) -> Option<Self> {
        (self.0 + 1 < FIRST_COUNT * SECOND_COUNT).then_some(Self(self.0 + 1))
    }
}

impl Bins {
    pub(super) fn new() -> Self {
        Self {
            first_bitmap: 0,
            second_bitmaps: [0; FIRST_COUNT as usize],
            heads: vec![NONE; (FIRST_COUNT * SECOND_COUNT) as usize].into_boxed_slice(),
        }
    }

    /// The first range of `class`, or `NONE`.
    #[inline]
    pub(super) fn head(&self, class: Class) -> u32 {
        self.heads[class.0 as usize]
    }

    /// Puts `head` in front of `class`; `NONE` marks the class empty.
    #[inline]
    pub(super) fn set_head(&mut self, class: Class, head: u32) {
        self.heads[class.0 as usize] = head;
        let (first, second) = (class.0 / SECOND_COUNT, class.0 % SECOND_COUNT);
        let bitmap = &mut self.second_bitmaps[first as usize];
        if head == NONE {
            *bitmap &= !(1 << second);
            if *bitmap == 0 {
                self.first_bitmap &= !(1 << first);
            }
        } else {
            *bitmap |= 1 << second;
            self.first_bitmap |= 1 << first;
        }
    }

    /// The smallest class, `from` or larger, that is not empty.
    #[inline]
    pub(super) fn at_least(&self, from: Class) -> Option<Class> {
        let (first, second) = (from.0 / SECOND_COUNT, from.0 % SECOND_COUNT);
        let here = self.second_bitmaps[first as usize] & (u32::MAX << second);
        if here != 0 {
            return Some(Class(first * SECOND_COUNT + here.trailing_zeros()));
        }
        let above = self.first_bitmap & u32::MAX.checked_shl(first + 1).unwrap_or(0);
        if above == 0 {
            return None;
        }
        let first = above.trailing_zeros();
        let second = self.second_bitmaps[first as usize].trailing_zeros();
        Some(Class(first * SECOND_COUNT + second))
    }

    /// The largest class that is not empty.
    #[inline]
    pub(super) fn largest(&self) -> Option<Class> {
        let first = self.first_bitmap.checked_ilog2()?;
        let second = self.second_bitmaps[first as usize].checked_ilog2()?;
        Some(Class(first * SECOND_COUNT + second))
    }

    /// Every class there is, smallest first (for checks).
    pub(super) fn classes() -> impl Iterator<Item = Class> {
        (0..FIRST_COUNT * SECOND_COUNT).map(Class)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn small_sizes_have_a_class_each() {
        for units in 1..64_u32 {
            assert_eq!(Class::of(units).units_min(), units);
        }
        assert_ne!(Class::of(62), Class::of(63));
        assert_eq!(Class::of(64), Class::of(65));
    }

    #[test]
    fn the_largest_size_is_in_the_last_class() {
        assert_eq!(Class::of(u32::MAX).next(), None);
        assert!(Class::of(u32::MAX - (u32::MAX >> 6)).next().is_none());
    }

    proptest! {
        #[test]
        fn a_class_holds_what_lies_between_its_minimum_and_the_next(units in 1..=u32::MAX) {
            let class = Class::of(units);
            prop_assert!(class.units_min() <= units);
            if let Some(next) = class.next() {
                prop_assert!(units < next.units_min());
                // Good fit: at most 1/32 of a size is unknown within a class.
                prop_assert!(next.units_min() - class.units_min() <= (units / 32).max(1));
            }
        }

        #[test]
        fn bitmaps_agree_with_a_linear_search(
            sizes in proptest::collection::vec(1..=u32::MAX, 1..40),
            asked in 1..=u32::MAX,
        ) {
            let mut bins = Bins::new();
            for (index, &units) in sizes.iter().enumerate() {
                bins.set_head(Class::of(units), u32::try_from(index).unwrap());
            }
            let from = Class::of(asked);
            let expected = Bins::classes().filter(|&c| bins.head(c) != NONE).find(|&c| c >= from);
            prop_assert_eq!(bins.at_least(from), expected);
            let largest = Bins::classes().filter(|&c| bins.head(c) != NONE).last();
            prop_assert_eq!(bins.largest(), largest);
            for &units in &sizes {
                bins.set_head(Class::of(units), NONE);
            }
            prop_assert_eq!(bins.largest(), None);
            prop_assert_eq!(bins.at_least(Class::of(1)), None);
        }
    }
}
