//! Name interning: a fixed-size table, filled without a lock (I4).
//!
//! A name is cut into words of seven bytes, each with a nonzero marker byte on top, so a zero word has not
//! been written. To claim a slot, a thread sets each word of the slot from zero to the word of its name. If a
//! word already holds a different value, the slot belongs to another name and the thread tries the next
//! slot. Words never change once set, so threads with the same name end in the same slot, and any of them
//! completes a half-written slot.

use crate::sync::{AtomicU64, Ordering};
use std::fmt;

/// Words of a name in the table.
#[cfg(not(loom))]
const WORDS: usize = 8;
#[cfg(loom)]
const WORDS: usize = 2;
/// Bytes of a name in one word; the eighth byte is the marker.
const WORD_BYTES: usize = 7;

/// Maximum length of a name, in bytes of UTF-8.
pub const NAME_BYTES_MAX: usize = WORDS * WORD_BYTES;
/// Maximum distinct names of a timeline (64 KiB of table).
#[cfg(not(loom))]
pub const NAMES_MAX: usize = 1024;
/// Maximum distinct names of a timeline.
#[cfg(loom)]
pub const NAMES_MAX: usize = 2;

/// Shown for names that do not fit the table.
const OTHER: &str = "other";
/// Top byte of every written word; its low bits hold the number of name bytes in the word.
const MARKER: u64 = 0x80;

/// A name interned by [`crate::Timeline::intern`], valid for that timeline only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NameId(u16);

impl NameId {
    /// Shared by all names that do not fit the table.
    pub const OTHER: NameId = NameId(0);

    pub(crate) const fn from_index(index: u16) -> Self {
        Self(index)
    }

    pub(crate) const fn index(self) -> u16 {
        self.0
    }
}

/// The table of names. Slot `i` is [`NameId`] `i + 1`.
pub(crate) struct NameTable {
    slots: Box<[[AtomicU64; WORDS]]>,
}

impl NameTable {
    pub(crate) fn new() -> Self {
        let slot = |_| std::array::from_fn(|_| AtomicU64::new(0));
        Self { slots: (0..NAMES_MAX).map(slot).collect() }
    }

    pub(crate) fn intern(&self, name: &str) -> NameId {
        if name == OTHER {
            return NameId::OTHER;
        }
        let words = encode(&name[..name.floor_char_boundary(NAME_BYTES_MAX)]);
        let start = home(&words);
        for step in 0..NAMES_MAX {
            let at = (start + step) % NAMES_MAX;
            if self.slots.get(at).is_some_and(|slot| settle(slot, &words)) {
                // NAMES_MAX fits a u16.
                return NameId(at as u16 + 1);
            }
        }
        NameId::OTHER
    }

    /// Returns all names by id.
    pub(crate) fn read(&self) -> Names {
        let names = self.slots.iter().map(|slot| decode(slot).unwrap_or_default());
        Names { by_index: std::iter::once(OTHER.to_owned()).chain(names).collect() }
    }
}

impl fmt::Debug for NameTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NameTable").field("slots", &self.slots.len()).finish()
    }
}

/// The names of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    by_index: Vec<String>,
}

impl Names {
    /// Returns the name of `id`, or "other" for an id that the timeline does not have.
    pub fn get(&self, id: NameId) -> &str {
        self.by_index.get(usize::from(id.0)).map_or(OTHER, String::as_str)
    }
}

/// Sets every word of `slot`; false if the slot belongs to another name.
fn settle(slot: &[AtomicU64; WORDS], words: &[u64; WORDS]) -> bool {
    slot.iter().zip(words).all(|(there, ours)| {
        // Relaxed: each word is independent and never changes once set, and a thread that receives the id
        // from this one reads words at least as new.
        let seen = there.load(Ordering::Relaxed);
        if seen != 0 {
            return seen == *ours;
        }
        let set = there.compare_exchange(0, *ours, Ordering::Relaxed, Ordering::Relaxed);
        set.err().is_none_or(|taken| taken == *ours)
    })
}

fn encode(name: &str) -> [u64; WORDS] {
    let mut chunks = name.as_bytes().chunks(WORD_BYTES);
    std::array::from_fn(|_| {
        let chunk = chunks.next().unwrap_or_default();
        let marker = (MARKER | chunk.len() as u64) << 56;
        chunk.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)) | marker
    })
}

fn decode(slot: &[AtomicU64; WORDS]) -> Option<String> {
    let mut bytes = Vec::with_capacity(NAME_BYTES_MAX);
    for word in slot {
        let word = word.load(Ordering::Relaxed);
        if word == 0 {
            return None;
        }
        let len = ((word >> 56) ^ MARKER) as usize;
        bytes.extend(word.to_le_bytes().into_iter().take(len.min(WORD_BYTES)));
    }
    String::from_utf8(bytes).ok()
}

/// Returns the first slot to try.
fn home(words: &[u64; WORDS]) -> usize {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15; // 2^64 divided by the golden ratio
    let mixed = words
        .iter()
        .fold(0u64, |mixed, word| (mixed ^ word).wrapping_mul(MULTIPLIER).rotate_left(29));
    (mixed % NAMES_MAX as u64) as usize
}

#[cfg(all(test, loom))]
#[path = "names_loom.rs"]
mod loom_tests;
#[cfg(all(test, not(loom)))]
#[path = "names_tests.rs"]
mod tests;
