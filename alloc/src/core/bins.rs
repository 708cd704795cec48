//! Size classes with two levels of bitmaps: which class has a range at least this large, in O(1).
//!
//! ```text
//!   units      1 .. 63      64 .. 127        128 .. 255      ...   2³¹ ..
//!   first      0            1                2                     26
//!   second     exact size   steps of 1       steps of 2            steps of 2²⁵
//! ```
//! Sizes below 128 have a class each; above, a class spans 1/64 of its power of two.

use super::NONE;

const SECOND_BITS: u32 = 6;
const SECOND_COUNT: u32 = 1 << SECOND_BITS;
const FIRST_COUNT: u32 = 32 - SECOND_BITS + 1;
/// Rows of the tables: a power of two, so that a masked index needs no bounds check.
const ROWS: usize = FIRST_COUNT.next_power_of_two() as usize;
const HEADS: usize = ROWS * SECOND_COUNT as usize;

/// One size class: `first * 64 + second`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class(u16);

/// The heads of one set of free lists.
pub(super) struct Bins {
    first_bitmap: u32,
    second_bitmaps: [u64; ROWS],
    heads: Box<[u32; HEADS]>,
}

impl std::fmt::Debug for Bins {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let filled: u32 = self.second_bitmaps.iter().map(|it| it.count_ones()).sum();
        write!(f, "Bins {{ {filled} classes in use }}")
    }
}

impl Class {
    /// The smallest class.
    pub(super) const FIRST: Self = Self(0);

    /// Returns the class of ranges of `units` (not 0).
    #[inline]
    pub(super) fn of(units: u32) -> Self {
        debug_assert!(units > 0, "an empty range has no class");
        // Below 2⁶ the shift is 0: each size is a class.
        let shift = (units | SECOND_COUNT).ilog2() - SECOND_BITS;
        let first = shift + u32::from(units >= SECOND_COUNT);
        Self::new(first, (units >> shift) & (SECOND_COUNT - 1))
    }

    #[inline]
    const fn new(first: u32, second: u32) -> Self {
        // Both are below their counts, whose product is below 2¹⁶.
        Self((first * SECOND_COUNT + second) as u16)
    }

    #[inline]
    const fn split(self) -> (u32, u32) {
        (self.0 as u32 / SECOND_COUNT, self.0 as u32 % SECOND_COUNT)
    }

    /// Returns the smallest size of this class.
    #[inline]
    pub(super) const fn units_min(self) -> u32 {
        let (first, second) = self.split();
        if first == 0 { second } else { (SECOND_COUNT + second) << (first - 1) }
    }

    /// Returns the largest size of this class.
    #[inline]
    pub(super) fn units_max(self) -> u32 {
        self.next().map_or(u32::MAX, |next| next.units_min() - 1)
    }

    /// Returns the next smaller class.
    #[inline]
    pub(super) fn before(self) -> Option<Self> {
        self.0.checked_sub(1).map(Self)
    }

    /// Returns the next larger class.
    #[inline]
    pub(super) fn next(self) -> Option<Self> {
        ((u32::from(self.0) + 1) < FIRST_COUNT * SECOND_COUNT).then_some(Self(self.0 + 1))
    }
}

impl Bins {
    pub(super) fn new() -> Self {
        Self { first_bitmap: 0, second_bitmaps: [0; ROWS], heads: Box::new([NONE; HEADS]) }
    }

    /// Returns the first range of `class`, or `NONE`.
    #[inline]
    pub(super) fn head(&self, class: Class) -> u32 {
        self.heads[class.0 as usize % HEADS]
    }

    /// Makes range `head` the first of `class`. Returns the previous first one, or `NONE`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "twice for each block")]
    pub(super) fn push(&mut self, class: Class, head: u32) -> u32 {
        let behind = std::mem::replace(&mut self.heads[class.0 as usize % HEADS], head);
        if behind == NONE {
            let (first, second) = class.split();
            self.second_bitmaps[first as usize % ROWS] |= 1 << second;
            self.first_bitmap |= 1 << first;
        }
        behind
    }

    /// Removes the first range of `class`. `head`, the second one, is then the first; with `NONE` the class is
    /// empty.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "once for each block")]
    pub(super) fn pop_to(&mut self, class: Class, head: u32) {
        self.heads[class.0 as usize % HEADS] = head;
        if head == NONE {
            let (first, second) = class.split();
            let bitmap = &mut self.second_bitmaps[first as usize % ROWS];
            *bitmap &= !(1 << second);
            if *bitmap == 0 {
                self.first_bitmap &= !(1 << first);
            }
        }
    }

    /// Returns the smallest class from `from` on that is not empty.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "once for each block")]
    pub(super) fn at_least(&self, from: Class) -> Option<Class> {
        let (first, second) = from.split();
        let here = self.second_bitmaps[first as usize % ROWS] & (u64::MAX << second);
        if here != 0 {
            return Some(Class::new(first, here.trailing_zeros()));
        }
        let above = self.first_bitmap & u32::MAX.checked_shl(first + 1).unwrap_or(0);
        if above == 0 {
            return None;
        }
        let first = above.trailing_zeros();
        Some(Class::new(first, self.second_bitmaps[first as usize % ROWS].trailing_zeros()))
    }

    /// Returns the largest class that is not empty.
    #[inline]
    pub(super) fn largest(&self) -> Option<Class> {
        let first = self.first_bitmap.checked_ilog2()?;
        let second = self.second_bitmaps[first as usize % ROWS].checked_ilog2()?;
        Some(Class::new(first, second))
    }

    /// Whether the bitmaps match the lists.
    #[cfg(any(test, feature = "checks"))]
    pub(super) fn are_bitmaps_right(&self) -> bool {
        let mut rows = self.heads.chunks_exact(SECOND_COUNT as usize).zip(0..FIRST_COUNT);
        rows.all(|(heads, first)| {
            let word = self.second_bitmaps[first as usize];
            // Most rows are empty: this is fast.
            let is_row_right = if word == 0 {
                heads.iter().all(|&head| head == NONE)
            } else {
                heads.iter().zip(0..).all(|(&head, bit)| (head != NONE) == (word >> bit & 1 == 1))
            };
            is_row_right && (self.first_bitmap >> first & 1 == 1) == (word != 0)
        })
    }

    /// Returns the classes that are not empty, smallest first.
    #[cfg(any(test, feature = "checks"))]
    pub(super) fn filled(&self) -> impl Iterator<Item = Class> {
        let next = |class: &Class| self.at_least(class.next()?);
        std::iter::successors(self.at_least(Class::FIRST), next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Returns all classes, smallest first.
    fn classes() -> impl Iterator<Item = Class> {
        (0..(FIRST_COUNT * SECOND_COUNT) as u16).map(Class)
    }

    #[test]
    fn small_sizes_have_a_class_each() {
        for units in 1..128_u32 {
            assert_eq!(Class::of(units).units_min(), units);
        }
        assert_ne!(Class::of(126), Class::of(127));
        assert_eq!(Class::of(128), Class::of(129));
    }

    #[test]
    fn the_largest_size_is_in_the_last_class() {
        assert_eq!(Class::of(u32::MAX).next(), None);
        assert!(Class::of(u32::MAX - (u32::MAX >> 7)).next().is_none());
    }

    proptest! {
        #[test]
        fn a_class_spans_its_minimum_to_that_of_the_next(units in 1..=u32::MAX) {
            let class = Class::of(units);
            prop_assert!(class.units_min() <= units);
            if let Some(next) = class.next() {
                prop_assert!(units < next.units_min());
                // Good fit: at most 1/64 of a size is unknown within a class.
                prop_assert!(next.units_min() - class.units_min() <= (units / 64).max(1));
            }
        }

        #[test]
        fn bitmaps_agree_with_a_linear_search(
            sizes in proptest::collection::vec(1..=u32::MAX, 1..40),
            asked in 1..=u32::MAX,
        ) {
            let mut bins = Bins::new();
            for (index, &units) in sizes.iter().enumerate() {
                bins.push(Class::of(units), u32::try_from(index).unwrap());
            }
            let from = Class::of(asked);
            let expected = classes().filter(|&c| bins.head(c) != NONE).find(|&c| c >= from);
            prop_assert_eq!(bins.at_least(from), expected);
            let largest = classes().filter(|&c| bins.head(c) != NONE).last();
            prop_assert_eq!(bins.largest(), largest);
            for &units in &sizes {
                bins.pop_to(Class::of(units), NONE);
            }
            prop_assert_eq!(bins.largest(), None);
            prop_assert_eq!(bins.at_least(Class::of(1)), None);
        }
    }
}
