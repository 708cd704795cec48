//! Names as small numbers: a table of fixed size, filled without a lock (I4).
//!
//! A name is cut into words of seven bytes, each with a marker byte on top that is never zero, so a
//! word that is zero has not been written. A thread that wants a slot for its name walks the slot's
//! words and sets each from zero to its own. Where it meets a word that is already its own, it goes
//! on; where it meets a different one, the slot belongs to another name, for good, and it tries the
//! next slot. Words never change once set, so:
//! - two threads with the same name agree on every slot along the way, and end in the same one;
//! - a half-written slot is completed by whoever set its last word, or by anyone with the same name.

use crate::sync::{AtomicU64, Ordering};
use std::fmt;

/// Words of one name in the table.
#[cfg(not(loom))]
const WORDS: usize = 8;
#[cfg(loom)]
const WORDS: usize = 2;
/// Bytes of a name in one word; the eighth is the marker.
const WORD_BYTES: usize = 7;

/// Longest name kept, in bytes of UTF-8.
pub const NAME_BYTES_MAX: usize = WORDS * WORD_BYTES;
/// Most different names one timeline keeps (64 KiB of table).
#[cfg(not(loom))]
pub const NAMES_MAX: usize = 1024;
/// Most different names one timeline keeps.
#[cfg(loom)]
pub const NAMES_MAX: usize = 2;

/// What a name beyond the table is shown as.
const OTHER: &str = "other";
/// Top byte of every written word; the low bits say how many bytes of the name it holds.
const MARKER: u64 = 0x80;

/// A name interned by [`crate::Timeline::intern`], good for that timeline alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NameId(u16);

impl NameId {
    /// Shared by every name that found no room.
    pub const OTHER: NameId = NameId(0);

    pub(crate) const fn from_index(index: u16) -> Self {
        Self(index)
    }

    pub(crate) const fn index(self) -> u16 {
        self.0
    }
}

/// The table writers intern into. Slot `i` is [`NameId`] `i + 1`.
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
        let words = encode(cut(name));
        let start = home(&words);
        for step in 0..NAMES_MAX {
            let at = (start + step) % NAMES_MAX;
            if self.slots.get(at).is_some_and(|slot| settle(slot, &words)) {
                // NAMES_MAX fits a u16 by far.
                return NameId(at as u16 + 1);
            }
        }
        NameId::OTHER
    }

    /// Every name by its id, as of now.
    pub(crate) fn read(&self) -> Names {
        let by_index = std::iter::once(OTHER.to_owned())
            .chain(self.slots.iter().map(|slot| decode(slot).unwrap_or_default()))
            .collect();
        Names { by_index }
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
    /// What `id` stands for; an id of another timeline is shown as "other".
    pub fn get(&self, id: NameId) -> &str {
        match self.by_index.get(usize::from(id.0)) {
            Some(name) => name,
            None => OTHER,
        }
    }
}

/// Makes every word of `slot` ours, or says that it is another name's.
fn settle(slot: &[AtomicU64; WORDS], words: &[u64; WORDS]) -> bool {
    slot.iter().zip(words).all(|(there, ours)| {
        // Relaxed throughout: a word is its own message and never changes again; whoever is handed
        // the id by us reads words at least as new as those we saw.
        let seen = there.load(Ordering::Relaxed);
        if seen != 0 {
            return seen == *ours;
        }
        match there.compare_exchange(0, *ours, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => true,
            Err(taken) => taken == *ours,
        }
    })
}

/// The longest start of `name` that fits and ends between characters.
fn cut(name: &str) -> &str {
    let mut end = name.len().min(NAME_BYTES_MAX);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    name.get(..end).unwrap_or_default()
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

/// Where the search for these words starts.
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
