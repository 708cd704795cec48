//! The one range that all device addresses lie in, and who has which part of it.
//!
//! Addresses are handed out in rotation, so that a freed address stays unused for long: a use after free
//! then faults instead of reading the next owner's bytes.

use std::collections::BTreeMap;

use crate::code::Code;
use crate::system;

/// Addresses of the device: a small part of what a process has, and far more than the memory.
const ARENA_BYTES: usize = 16 << 40;
/// Where it begins if nothing is to be there: beyond what tools that keep most addresses for
/// themselves let a process have, as valgrind does, and below where a process has its own.
const NUMBERS_START: usize = 32 << 40;

/// Reserved addresses and the parts taken of them.
pub(crate) struct Arena {
    start: usize,
    end: usize,
    /// Bytes by their first address.
    taken: BTreeMap<usize, usize>,
    /// Where the last place given out ends.
    cursor: usize,
}

impl Arena {
    pub(crate) fn new() -> Result<Self, Code> {
        let start = system::map_anywhere(ARENA_BYTES, libc::PROT_NONE)?;
        Ok(Self { start, end: start + ARENA_BYTES, taken: BTreeMap::new(), cursor: start })
    }

    /// Addresses that are numbers: nothing is there.
    pub(crate) fn of_numbers() -> Self {
        let (start, end) = (NUMBERS_START, NUMBERS_START + ARENA_BYTES);
        Self { start, end, taken: BTreeMap::new(), cursor: start }
    }

    /// Whether an address is the device's.
    pub(crate) fn contains(&self, address: usize) -> bool {
        (self.start..self.end).contains(&address)
    }

    /// Takes a place for `bytes`, at `hint` if it can be; `align` is a power of two.
    pub(crate) fn take(&mut self, bytes: usize, align: usize, hint: usize) -> Result<usize, Code> {
        let wanted =
            (hint != 0 && hint.is_multiple_of(align) && self.is_free(hint, bytes)).then_some(hint);
        let place = wanted
            .or_else(|| self.find(self.cursor, bytes, align))
            .or_else(|| self.find(self.start, bytes, align))
            .ok_or(Code::OUT_OF_MEMORY)?;
        self.taken.insert(place, bytes);
        self.cursor = place + bytes;
        Ok(place)
    }

    /// Gives a place back, by its first address.
    pub(crate) fn give(&mut self, start: usize) {
        self.taken.remove(&start);
    }

    fn is_free(&self, start: usize, bytes: usize) -> bool {
        let Some(end) = start.checked_add(bytes) else { return false };
        start >= self.start && end <= self.end && self.last_end_before(end) <= start
    }

    /// Where the last place that begins before `address` ends.
    fn last_end_before(&self, address: usize) -> usize {
        let last = self.taken.range(..address).next_back();
        last.map_or(self.start, |(start, bytes)| start + bytes)
    }

    /// The first free place at `from` or after it.
    fn find(&self, from: usize, bytes: usize, align: usize) -> Option<usize> {
        let mut place = self.last_end_before(from).max(from).checked_next_multiple_of(align)?;
        for (start, taken) in self.taken.range(from..) {
            if place.checked_add(bytes)? <= *start {
                break;
            }
            place = place.max((start + taken).checked_next_multiple_of(align)?);
        }
        (place.checked_add(bytes)? <= self.end).then_some(place)
    }
}
