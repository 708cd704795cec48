//! The ends of moved pieces: two bits for each page of the space.
//!
//! The kernel moves pages of one mapping at a time, and does not report where a mapping ends. A surplus
//! edge costs a system call; a missing one returns pages to the system that could have been moved.

use super::system;
use crate::{AddressRange, DeviceError, Operation};

/// Pages whose bits share a word.
const WORD_PAGES: usize = u64::BITS as usize;

/// An edge is where moved pages meet others, or another piece.
#[derive(Debug)]
pub(super) struct Edges {
    space: AddressRange,
    page_bytes: usize,
    /// A mapping of words, used sparsely.
    memory: AddressRange,
    count: usize,
}

#[derive(Clone, Copy)]
struct Word {
    /// Pages that were moved to where they are.
    moved: u64,
    /// The first pages of pieces.
    starts: u64,
}

/// Returns the word and the bits in it of pages `first..end`.
fn masks(first: usize, end: usize) -> impl Iterator<Item = (usize, u64)> {
    (first / WORD_PAGES..end.div_ceil(WORD_PAGES)).map(move |at| {
        let from = first.saturating_sub(at * WORD_PAGES);
        let unused = ((at + 1) * WORD_PAGES).saturating_sub(end);
        (at, (u64::MAX << from) & (u64::MAX >> unused))
    })
}

impl Edges {
    pub(super) fn new(space: AddressRange, page_bytes: usize) -> Result<Self, DeviceError> {
        let words = (space.bytes / page_bytes).div_ceil(WORD_PAGES);
        let memory = system::fresh(words * size_of::<Word>(), Operation::Reserve)?;
        Ok(Self { space, page_bytes, memory, count: 0 })
    }

    pub(super) const fn count(&self) -> usize {
        self.count
    }

    /// Records that the pages of `range` are one piece that was moved there.
    pub(super) fn add(&mut self, range: AddressRange) {
        self.change(range, true);
    }

    /// Records that `range` has no pages any more: what is mapped there next is not moved.
    pub(super) fn erase(&mut self, range: AddressRange) {
        self.change(range, false);
    }

    fn change(&mut self, range: AddressRange, is_moved: bool) {
        let (first, end) = (self.page(range.start), self.page(range.end()));
        let before = self.count_to(first, end);
        for (at, mask) in masks(first, end) {
            let word = &mut self.words()[at];
            // Pages of the table that were never written stay untouched.
            if is_moved || (word.moved | word.starts) & mask != 0 {
                word.starts &= !mask;
                word.moved = if is_moved { word.moved | mask } else { word.moved & !mask };
            }
        }
        if is_moved {
            // The rest of a piece that was cut begins after `range`.
            for start in [first, end] {
                let (at, bit) = (start / WORD_PAGES, 1 << (start % WORD_PAGES));
                if let Some(word) = self.words().get_mut(at).filter(|it| it.moved & bit != 0) {
                    word.starts |= bit;
                }
            }
        }
        self.count = self.count - before + self.count_to(first, end);
    }

    /// Returns the bytes from the start of `range` to the next edge, or to its end.
    pub(super) fn run_bytes(&mut self, range: AddressRange) -> usize {
        let (first, end) = (self.page(range.start), self.page(range.end()));
        let next = masks(first + 1, end).find_map(|(at, mask)| {
            let edges = self.edges(at) & mask;
            (edges != 0).then(|| at * WORD_PAGES + edges.trailing_zeros() as usize)
        });
        (next.unwrap_or(end) - first) * self.page_bytes
    }

    fn page(&self, address: usize) -> usize {
        (address - self.space.start) / self.page_bytes
    }

    fn words(&mut self) -> &mut [Word] {
        let count = self.memory.bytes / size_of::<Word>();
        // SAFETY: `memory` is a zeroed, page-aligned mapping of these words, which lives as long as
        // `self` and is used only here.
        unsafe { std::slice::from_raw_parts_mut(self.memory.start as *mut Word, count) }
    }

    /// Returns the edges at the pages of a word.
    fn edges(&mut self, at: usize) -> u64 {
        let words = self.words();
        let before = at.checked_sub(1).map_or(0, |before| words[before].moved >> (WORD_PAGES - 1));
        let Word { moved, starts } = words[at];
        (moved ^ (moved << 1 | before)) | starts
    }

    /// Returns the number of edges at pages `first..=end`; the end of the space has none.
    fn count_to(&mut self, first: usize, end: usize) -> usize {
        let end = (end + 1).min(self.space.bytes / self.page_bytes);
        masks(first, end).map(|(at, mask)| (self.edges(at) & mask).count_ones() as usize).sum()
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
    use proptest::prelude::*;

    use super::*;

    /// More than three words of them, the last one not full.
    const PAGES: usize = 3 * WORD_PAGES + 5;
    const PAGE_BYTES: usize = 4096;
    const SPACE: AddressRange = AddressRange::new(7 << 20, PAGES * PAGE_BYTES);

    proptest! {
        #[test]
        fn edges_are_where_the_piece_changes(
            changes in prop::collection::vec((0..PAGES, 1..PAGES, any::<bool>()), 1..80),
        ) {
            let mut edges = Edges::new(SPACE, PAGE_BYTES).unwrap();
            // The piece that each page is of, 0 if it was not moved.
            let mut model = [0; PAGES];
            for (piece, (first, pages, is_moved)) in (1..).zip(changes) {
                let end = (first + pages).min(PAGES);
                let range =
                    AddressRange::new(SPACE.start + first * PAGE_BYTES, (end - first) * PAGE_BYTES);
                let next = (first + 1..end).find(|page| model[page - 1] != model[*page]);
                prop_assert_eq!(edges.run_bytes(range), (next.unwrap_or(end) - first) * PAGE_BYTES);
                if is_moved { edges.add(range) } else { edges.erase(range) }
                model[first..end].fill(if is_moved { piece } else { 0 });
                let pairs = std::iter::once(0).chain(model).zip(model);
                prop_assert_eq!(edges.count(), pairs.filter(|(before, here)| before != here).count());
                prop_assert_eq!(edges.run_bytes(range), range.bytes);
            }
            edges.erase(SPACE);
            prop_assert_eq!(edges.count(), 0);
        }
    }
}
