//! The ring: many writers, no lock, the oldest event overwritten, readers never torn (I1, I2).
//!
//! Each slot is a sequence lock of its own. The sequence says whose words are in the slot:
//!
//! ```text
//!   0                    nothing yet
//!   2 × ticket + 1       the writer of `ticket` is storing its words
//!   2 × ticket + 2       the words of `ticket` are whole
//! ```
//!
//! A writer takes a ticket from the head, claims slot `ticket mod capacity` by moving its sequence
//! from an older even number to its own odd one, stores the words and moves it on to even. If the
//! slot is held by another writer (one of them was passed by a whole lap meanwhile), or holds
//! something newer, the event is given up rather than waited for. A reader keeps what it read only
//! if the sequence was the same even number before and after.
//!
//! The words are atomics read and written relaxed, so a race is a wrong value that the sequence
//! tells of, never undefined behaviour: this file needs no unsafe code.

use crate::sync::{AtomicU64, Ordering, fence};
use std::fmt;

/// How often a reader tries a slot that changes under it before leaving it out.
#[cfg(not(loom))]
const READ_TRIES_MAX: usize = 8;
#[cfg(loom)]
const READ_TRIES_MAX: usize = 2;

/// One event and the sequence that guards it; alone on its cache line, as its neighbours are
/// being written by other threads.
#[repr(align(64))]
struct Slot<const WORDS: usize> {
    sequence: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// The next ticket, away from everything else that is written.
#[repr(align(128))]
struct Head(AtomicU64);

pub(crate) struct Ring<const WORDS: usize> {
    head: Head,
    mask: u64,
    slots: Box<[Slot<WORDS>]>,
}

/// What a reader found.
#[derive(Debug)]
pub(crate) struct Reading<const WORDS: usize> {
    /// Words of each whole event, by ticket, oldest first.
    pub(crate) events: Vec<[u64; WORDS]>,
    /// Events recorded since the beginning that are not in `events`.
    pub(crate) dropped: u64,
}

impl<const WORDS: usize> Ring<WORDS> {
    /// A ring of `capacity` slots, rounded up to a power of two. Touches all of them.
    pub(crate) fn new(capacity: usize) -> Self {
        let capacity = capacity.max(1).next_power_of_two();
        let slots = (0..capacity).map(|_| Slot::empty()).collect();
        Self { head: Head(AtomicU64::new(0)), mask: capacity as u64 - 1, slots }
    }

    /// Puts `words` in place of the oldest event.
    #[inline]
    pub(crate) fn record(&self, words: [u64; WORDS]) {
        // Relaxed: the ticket only names a slot; the slot's sequence publishes.
        let ticket = self.head.0.fetch_add(1, Ordering::Relaxed);
        if let Some(slot) = self.slots.get((ticket & self.mask) as usize) {
            slot.write(ticket, words);
        }
    }

    /// Every whole event, oldest first.
    pub(crate) fn read(&self) -> Reading<WORDS> {
        let mut found: Vec<(u64, [u64; WORDS])> =
            self.slots.iter().filter_map(Slot::read).collect();
        found.sort_unstable_by_key(|(ticket, _)| *ticket);
        // After the slots: each ticket found above was taken before, so it is counted here. Its
        // writer's release of the sequence, acquired in `Slot::read`, makes that take visible.
        let recorded = self.head.0.load(Ordering::Relaxed);
        debug_assert!(found.last().is_none_or(|(ticket, _)| *ticket < recorded));
        let dropped = recorded.saturating_sub(found.len() as u64);
        Reading { events: found.into_iter().map(|(_, words)| words).collect(), dropped }
    }
}

impl<const WORDS: usize> Slot<WORDS> {
    fn empty() -> Self {
        Self { sequence: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    #[inline]
    fn write(&self, ticket: u64, words: [u64; WORDS]) {
        let writing = ticket * 2 + 1;
        let seen = self.sequence.load(Ordering::Relaxed);
        if seen % 2 == 1 || seen > writing {
            return;
        }
        // Acquire: pairs with the release below of the writer one lap ago, whose words must be
        // stored before ours are.
        let claim =
            self.sequence.compare_exchange(seen, writing, Ordering::Acquire, Ordering::Relaxed);
        if claim.is_err() {
            return;
        }
        // Pairs with the acquire fence in `read`: who sees one of our words sees `writing` too.
        fence(Ordering::Release);
        for (to, from) in self.words.iter().zip(words) {
            to.store(from, Ordering::Relaxed);
        }
        // Release: pairs with the first load in `read`; who sees this sees all our words.
        self.sequence.store(writing + 1, Ordering::Release);
    }

    /// The ticket and words of the event in this slot, or `None` if there is no whole one.
    fn read(&self) -> Option<(u64, [u64; WORDS])> {
        for _ in 0..READ_TRIES_MAX {
            let before = self.sequence.load(Ordering::Acquire);
            if before == 0 {
                return None;
            }
            if before % 2 == 1 {
                continue;
            }
            let mut words = [0; WORDS];
            for (to, from) in words.iter_mut().zip(&self.words) {
                *to = from.load(Ordering::Relaxed);
            }
            fence(Ordering::Acquire);
            if self.sequence.load(Ordering::Relaxed) == before {
                return Some((before / 2 - 1, words));
            }
        }
        None
    }
}

impl<const WORDS: usize> fmt::Debug for Ring<WORDS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("capacity", &self.slots.len())
            .field("recorded", &self.head.0.load(Ordering::Relaxed))
            .finish()
    }
}

#[cfg(all(test, loom))]
#[path = "ring_loom.rs"]
mod loom_tests;
#[cfg(all(test, not(loom)))]
#[path = "ring_tests.rs"]
mod tests;
