//! The ends of moved pieces: one bit for each page of the space.
//!
//! The kernel moves pages of one mapping at a time, and does not report where a mapping ends. A surplus
//! bit costs a system call; a missing one returns pages to the system that could have been moved.

use super::system;
use crate::{AddressRange, DeviceError, Operation};

/// Pages whose bits share a word.
const WORD_PAGES: usize = u64::BITS as usize;

/// The first pages of pieces, and the first pages after them.
#[derive(Debug)]
pub(super) struct Edges {
    space: AddressRange,
    page_bytes: usize,
    /// A mapping of words, used sparsely.
    memory: AddressRange,
    count: usize,
}

impl Edges {
    pub(super) fn new(space: AddressRange, page_bytes: usize) -> Result<Self, DeviceError> {
        let words = (space.bytes / page_bytes).div_ceil(WORD_PAGES);
        let memory = system::fresh(words * size_of::<u64>(), Operation::Reserve)?;
        Ok(Self { space, page_bytes, memory, count: 0 })
    }

    pub(super) const fn count(&self) -> usize {
        self.count
    }

    /// Makes `range` one piece: an edge at both ends, none inside.
    pub(super) fn cut(&mut self, range: AddressRange) {
        if range.bytes == 0 {
            return;
        }
        let (first, end) = (self.page(range.start), self.page(range.end()));
        let mut page = first + 1;
        while let Some(edge) = self.next(page, end) {
            self.words()[edge / WORD_PAGES] &= !(1 << (edge % WORD_PAGES));
            self.count -= 1;
            page = edge + 1;
        }
        self.set(first);
        self.set(end);
    }

    /// Returns the bytes from the start of `range` to the next edge, or to its end.
    pub(super) fn run_bytes(&mut self, range: AddressRange) -> usize {
        let (first, end) = (self.page(range.start), self.page(range.end()));
        (self.next(first + 1, end).unwrap_or(end) - first) * self.page_bytes
    }

    fn page(&self, address: usize) -> usize {
        (address - self.space.start) / self.page_bytes
    }

    fn words(&mut self) -> &mut [u64] {
        let count = self.memory.bytes / size_of::<u64>();
        // SAFETY: `memory` is a zeroed, page-aligned mapping of these words, which lives as long as
        // `self` and is used only here.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start as *mut u64, count) }
    }

    /// Sets an edge, except at the end of the space.
    fn set(&mut self, page: usize) {
        if page >= self.space.bytes / self.page_bytes {
            return;
        }
        let word = &mut self.words()[page / WORD_PAGES];
        let bit = 1 << (page % WORD_PAGES);
        let is_new = *word & bit == 0;
        *word |= bit;
        self.count += usize::from(is_new);
    }

    /// Returns the first edge in pages `page..end`.
    fn next(&mut self, mut page: usize, end: usize) -> Option<usize> {
        while page < end {
            let bits = self.words().get(page / WORD_PAGES)? >> (page % WORD_PAGES);
            if bits != 0 {
                return Some(page + bits.trailing_zeros() as usize).filter(|edge| *edge < end);
            }
            page = (page / WORD_PAGES + 1) * WORD_PAGES;
        }
        None
    }
}

impl Drop for Edges {
    fn drop(&mut self) {
        // SAFETY: our own mapping, borrowed only from `self`.
        unsafe { system::release(self.memory) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// More than three words of them, the last one not full.
    const PAGES: usize = 3 * WORD_PAGES + 5;
    const PAGE_BYTES: usize = 4096;
    const SPACE: AddressRange = AddressRange::new(7 << 20, PAGES * PAGE_BYTES);

    proptest! {
        #[test]
        fn edges_equal_a_set_of_pages(cuts in prop::collection::vec((0..PAGES, 1..PAGES), 1..80)) {
            let mut edges = Edges::new(SPACE, PAGE_BYTES).unwrap();
            let mut model = BTreeSet::new();
            for (first, pages) in cuts {
                let end = (first + pages).min(PAGES);
                let range =
                    AddressRange::new(SPACE.start + first * PAGE_BYTES, (end - first) * PAGE_BYTES);
                let next = model.range(first + 1..).next().copied().unwrap_or(end).min(end);
                prop_assert_eq!(edges.run_bytes(range), (next - first) * PAGE_BYTES);
                edges.cut(range);
                model.retain(|page| *page <= first || *page >= end);
                model.extend([first, end].into_iter().filter(|page| *page < PAGES));
                prop_assert_eq!(edges.count(), model.len());
                prop_assert_eq!(edges.run_bytes(range), range.bytes);
            }
        }
    }
}
