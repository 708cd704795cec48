//! The states of all pages, in two bits each: a wrong range is an error before any system call, and never
//! destroys data.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::host::system;
use crate::{AddressRange, DeviceError, Operation};

/// The state of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum PageState {
    /// Addresses only, or parked pages. The bits of a new table.
    Unmapped = 0,
    /// Mapped, used by its owner.
    Mapped = 1,
    /// Part of a span: frozen, asleep or staged.
    Span = 2,
    /// A call is in progress.
    Busy = 3,
}

impl PageState {
    fn from_bits(bits: u64) -> Self {
        match bits & 3 {
            0 => Self::Unmapped,
            1 => Self::Mapped,
            2 => Self::Span,
            _ => Self::Busy,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Unmapped => "unmapped",
            Self::Mapped => "mapped",
            Self::Span => "in a span",
            Self::Busy => "being changed",
        }
    }
}

/// Bits of one page, and the pages whose bits share a word.
const PAGE_BITS: usize = 2;
const WORD_PAGES: usize = u64::BITS as usize / PAGE_BITS;
/// The low bit of each page: multiplied by a state, a word of pages in that state.
const EACH_PAGE: u64 = 0x5555_5555_5555_5555;

/// The states of all pages of a space. Its memory is used sparsely.
#[derive(Debug)]
pub(crate) struct PageStates {
    space: AddressRange,
    page_bytes: usize,
    /// A mapping of atomic words.
    memory: AddressRange,
    /// All pages from this one on have always been unmapped.
    high: AtomicUsize,
}

impl PageStates {
    pub(crate) fn new(space: AddressRange, page_bytes: usize) -> Result<Self, DeviceError> {
        let words = (space.bytes / page_bytes).div_ceil(WORD_PAGES);
        let memory = system::fresh(words * size_of::<AtomicU64>(), Operation::Reserve)?;
        Ok(Self { space, page_bytes, memory, high: AtomicUsize::new(0) })
    }

    fn words(&self) -> &[AtomicU64] {
        let count = self.memory.bytes / size_of::<AtomicU64>();
        // SAFETY: `memory` is a zeroed, page-aligned mapping of these words, which lives as long as
        // `self` and is used only here.
        unsafe { std::slice::from_raw_parts(self.memory.start as *const AtomicU64, count) }
    }

    /// Changes every page of `range` from `from` to `to`, or none of them.
    pub(crate) fn change(
        &self,
        range: AddressRange,
        from: PageState,
        to: PageState,
        operation: Operation,
    ) -> Result<(), DeviceError> {
        let first = (range.start - self.space.start) / self.page_bytes;
        let end = first + range.bytes / self.page_bytes;
        if from == PageState::Unmapped {
            // Before the states, for `used_end`.
            self.high.fetch_max(end, Ordering::AcqRel);
        }
        let mut page = first;
        while page < end {
            let next = ((page / WORD_PAGES + 1) * WORD_PAGES).min(end);
            if let Err((page, seen)) = self.change_word(page, next, from, to) {
                self.change_back(first, page, from, to);
                return Err(DeviceError::WrongPages {
                    operation,
                    start: self.space.start + page * self.page_bytes,
                    state: seen.name(),
                    needed: from.name(),
                });
            }
            page = next;
        }
        Ok(())
    }

    /// Returns the end of the last page in another state than `Unmapped`; the start of the space without any.
    pub(crate) fn used_end(&self) -> usize {
        // The rest of the table was never touched.
        let words = &self.words()[..self.high.load(Ordering::Acquire).div_ceil(WORD_PAGES)];
        let last = words.iter().enumerate().rev().find_map(|(at, word)| {
            let bits = word.load(Ordering::Acquire).checked_ilog2()?;
            Some(at * WORD_PAGES + bits as usize / PAGE_BITS)
        });
        self.space.start + last.map_or(0, |page| page + 1) * self.page_bytes
    }

    /// Undoes a change of the words before page `failed`.
    fn change_back(&self, first: usize, failed: usize, from: PageState, to: PageState) {
        let end = failed / WORD_PAGES * WORD_PAGES;
        let mut page = first;
        while page < end {
            let next = (page / WORD_PAGES + 1) * WORD_PAGES;
            // Fails only if two threads change the same range.
            let undone = self.change_word(page, next, to, from);
            debug_assert!(undone.is_ok(), "pages changed by two calls at once");
            page = next;
        }
    }

    /// Changes pages `first..end` of one word. After an error returns the first page in another state.
    fn change_word(
        &self,
        first: usize,
        end: usize,
        from: PageState,
        to: PageState,
    ) -> Result<(), (usize, PageState)> {
        let shift = first % WORD_PAGES * PAGE_BITS;
        let width = (end - first) * PAGE_BITS;
        let mask = (u64::MAX >> (u64::BITS as usize - width)) << shift;
        let wanted = (EACH_PAGE * from as u64) & mask;
        let word = &self.words()[first / WORD_PAGES];
        // AcqRel: what was done before a change is seen after it.
        let step = |bits: u64| {
            (bits & mask == wanted).then_some((bits & !mask) | (EACH_PAGE * to as u64) & mask)
        };
        word.fetch_update(Ordering::AcqRel, Ordering::Acquire, step).map(|_| ()).map_err(|bits| {
            let other = (bits & mask ^ wanted).trailing_zeros() as usize / PAGE_BITS;
            let page = first / WORD_PAGES * WORD_PAGES + other;
            (page, PageState::from_bits(bits >> (other * PAGE_BITS)))
        })
    }
}

impl Drop for PageStates {
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
    const PAGE_BYTES: usize = 1 << 16;
    const SPACE: AddressRange = AddressRange::new(7 << 20, PAGES * PAGE_BYTES);

    fn state() -> impl Strategy<Value = PageState> {
        (0..4_u64).prop_map(PageState::from_bits)
    }

    /// A run of pages, often one that crosses words, and the change asked of it.
    fn change() -> impl Strategy<Value = (usize, usize, PageState, PageState)> {
        (0..PAGES).prop_flat_map(|first| (Just(first), first + 1..=PAGES, state(), state()))
    }

    proptest! {
        #[test]
        fn changes_all_pages_or_none(changes in prop::collection::vec(change(), 1..80)) {
            let states = PageStates::new(SPACE, PAGE_BYTES).unwrap();
            let mut model = [PageState::Unmapped; PAGES];
            for (first, end, from, to) in changes {
                // Mostly what the first page is, so that many changes go far before they fail.
                let from = if from == PageState::Busy { from } else { model[first] };
                let start = SPACE.start + first * PAGE_BYTES;
                let range = AddressRange::new(start, (end - first) * PAGE_BYTES);
                let wrong = (first..end).find(|page| model[*page] != from);
                let expected = match wrong {
                    None => {
                        model[first..end].fill(to);
                        Ok(())
                    }
                    Some(page) => Err(DeviceError::WrongPages {
                        operation: Operation::Map,
                        start: SPACE.start + page * PAGE_BYTES,
                        state: model[page].name(),
                        needed: from.name(),
                    }),
                };
                prop_assert_eq!(states.change(range, from, to, Operation::Map), expected);
                for (page, state) in model.iter().enumerate() {
                    let bits = states.words()[page / WORD_PAGES].load(Ordering::Relaxed);
                    let now = PageState::from_bits(bits >> (page % WORD_PAGES * PAGE_BITS));
                    prop_assert_eq!(now, *state, "page {}", page);
                }
                let used = model.iter().rposition(|state| *state != PageState::Unmapped);
                let used_end = SPACE.start + used.map_or(0, |page| page + 1) * PAGE_BYTES;
                prop_assert_eq!(states.used_end(), used_end);
            }
        }
    }
}
