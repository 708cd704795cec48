//! A lock-free ring with many writers that overwrites its oldest events (I1, I2).
//!
//! Each slot is a sequence lock. The sequence identifies the words in the slot:
//!
//! ```text
//!   0                    empty
//!   2 × ticket + 1       the writer of `ticket` is storing its words
//!   2 × ticket + 2       the words of `ticket` are complete
//! ```
//!
//! A writer takes a ticket from the head, claims slot `ticket mod capacity` by changing its sequence from an
//! older even number to its own odd one, stores the words and makes the sequence even. If another writer
//! holds the slot (one of them is a whole lap ahead), or the slot holds a newer event, the event is
//! dropped. A reader keeps words only if the sequence was the same even number before and after.
//!
//! The words are relaxed atomics: a race yields a wrong value that the sequence check discards.

use crate::ring_slots::Slots;
use crate::sync::{AtomicU64, Ordering, fence};
use std::fmt;

/// Reads of a slot that keeps changing before the reader skips it.
#[cfg(not(loom))]
const READ_TRIES_MAX: usize = 8;
#[cfg(loom)]
const READ_TRIES_MAX: usize = 2;

/// One event and its sequence, on a cache line of its own: other threads write the neighbours. Its
/// layout is part of a file that other processes read (`live`).
#[repr(C, align(64))]
pub(crate) struct Slot<const WORDS: usize> {
    sequence: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// The next ticket, on cache lines of its own.
#[repr(align(128))]
struct Head(AtomicU64);

pub(crate) struct Ring<const WORDS: usize> {
    head: Head,
    mask: u64,
    /// Most events that are read, at most the number of slots.
    kept: usize,
    slots: Slots<WORDS>,
}

/// Events read from a ring.
#[derive(Debug)]
pub(crate) struct Reading<const WORDS: usize> {
    /// Words of each complete event, by ticket, oldest first.
    pub(crate) events: Vec<[u64; WORDS]>,
    /// Events recorded since creation that are not in `events`.
    pub(crate) dropped: u64,
}

impl<const WORDS: usize> Ring<WORDS> {
    /// Creates a ring that keeps the newest `capacity` events. Its slots are the next power of two. If the system
    /// refuses their memory, the ring drops and counts every event.
    pub(crate) fn new(capacity: usize) -> Self {
        let capacity = capacity.max(1);
        let slots = Slots::zeroed(capacity.next_power_of_two());
        let mask = capacity.next_power_of_two() as u64 - 1;
        Self { head: Head(AtomicU64::new(0)), mask, kept: capacity, slots }
    }

    /// Replaces the oldest event with `words`.
    #[inline]
    pub(crate) fn record(&self, words: [u64; WORDS]) {
        // Relaxed: the ticket only selects a slot; the slot's sequence publishes.
        let ticket = self.head.0.fetch_add(1, Ordering::Relaxed);
        if let Some(slot) = self.slots.all().get((ticket & self.mask) as usize) {
            slot.write(ticket, words);
        }
    }

    /// Returns the newest `kept` complete events, oldest first.
    pub(crate) fn read(&self) -> Reading<WORDS> {
        let mut found: Vec<(u64, [u64; WORDS])> =
            self.slots.all().iter().filter_map(Slot::read).collect();
        found.sort_unstable_by_key(|(ticket, _)| *ticket);
        // Read after the slots, so the head includes each ticket found: the writer's release of the
        // sequence, acquired in `Slot::read`, makes its increment visible.
        let recorded = self.head.0.load(Ordering::Relaxed);
        debug_assert!(found.last().is_none_or(|(ticket, _)| *ticket < recorded));
        found.drain(..found.len().saturating_sub(self.kept));
        let dropped = recorded.saturating_sub(found.len() as u64);
        Reading { events: found.into_iter().map(|(_, words)| words).collect(), dropped }
    }
}

/// Returns the ticket whose words are complete at `sequence`; `None` for a slot that is empty or being written.
pub(crate) const fn complete_ticket(sequence: u64) -> Option<u64> {
    if sequence == 0 || sequence % 2 == 1 { None } else { Some(sequence / 2 - 1) }
}

impl<const WORDS: usize> Slot<WORDS> {
    #[cfg(any(loom, test))]
    pub(crate) fn empty() -> Self {
        Self { sequence: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Stores the words of `ticket`. A newer event and a concurrent writer win.
    #[inline]
    pub(crate) fn write(&self, ticket: u64, words: [u64; WORDS]) {
        let writing = ticket * 2 + 1;
        let seen = self.sequence.load(Ordering::Relaxed);
        if seen % 2 == 1 || seen > writing {
            return;
        }
        // Acquire: pairs with the release below of the writer one lap ago, whose words must be stored
        // before these.
        let claim =
            self.sequence.compare_exchange(seen, writing, Ordering::Acquire, Ordering::Relaxed);
        if claim.is_err() {
            return;
        }
        // Pairs with the acquire fence in `read`: a reader that sees one of these words sees `writing`.
        fence(Ordering::Release);
        for (to, from) in self.words.iter().zip(words) {
            to.store(from, Ordering::Relaxed);
        }
        // Release: pairs with the first load in `read`; a reader that sees this sees all the words.
        self.sequence.store(writing + 1, Ordering::Release);
    }

    /// Returns the ticket and words of the slot, or `None` if it holds no complete event.
    pub(crate) fn read(&self) -> Option<(u64, [u64; WORDS])> {
        for _ in 0..READ_TRIES_MAX {
            let before = self.sequence.load(Ordering::Acquire);
            if before == 0 {
                return None;
            }
            let Some(ticket) = complete_ticket(before) else { continue };
            let mut words = [0; WORDS];
            for (to, from) in words.iter_mut().zip(&self.words) {
                *to = from.load(Ordering::Relaxed);
            }
            fence(Ordering::Acquire);
            if self.sequence.load(Ordering::Relaxed) == before {
                return Some((ticket, words));
            }
        }
        None
    }
}

impl<const WORDS: usize> fmt::Debug for Ring<WORDS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("capacity", &self.slots.all().len())
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
