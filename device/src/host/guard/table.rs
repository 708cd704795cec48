//! The table of spans: of fixed size, lock-free, read by the fault handler.
//!
//! # Protocol
//! Each slot has one control word: generation and state. The thread that changes it by compare-and-swap to a
//! state in brackets owns the span until its next change; other threads wait or are refused.
//! ```text
//!   free ─► [filling] ─► frozen ─────────► [sealing] ─► asleep ◄─► staged
//!    ▲                    │  │ write fault      └─ refused: frozen   │
//!    │                    │  └► [opening] ─► written                 │ published
//!    ├──── [thawing] ◄────┴───────────────────┘                      │
//!    └───────────────────────────────────────────────────────────────┘
//! ```
//! - **T1** Range and label of a slot change only in *filling*, with a new generation.
//! - **T2** Pages become writable only in *opening* and *thawing*, inaccessible only in *sealing*: never two
//!   of these at once, and never after the span has left the table.
//! - **T3** A permitted write makes the span *written*, which cannot be sealed.

use super::sync::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence, yield_now};
use crate::{AddressRange, SpanId, SpanLabel};

/// Bits of the slot's index in a [`SpanId`]. The rest is the low part of its generation, so that a stale id
/// is refused (up to 2^18 spans later in the same slot).
const INDEX_BITS: u32 = 14;
/// Limit of the spans of all devices of the process.
pub(crate) const SPANS_MAX: usize = 1 << INDEX_BITS;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;
const STATE_BITS: u32 = 8;
const STATE_MASK: u64 = (1 << STATE_BITS) - 1;

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    Free = 0,
    Filling,
    Frozen,
    Opening,
    Written,
    Thawing,
    Sealing,
    Asleep,
    Staged,
}

impl State {
    fn of(control: u64) -> Self {
        match control & STATE_MASK {
            1 => Self::Filling,
            2 => Self::Frozen,
            3 => Self::Opening,
            4 => Self::Written,
            5 => Self::Thawing,
            6 => Self::Sealing,
            7 => Self::Asleep,
            8 => Self::Staged,
            _ => Self::Free,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Free | Self::Filling => "gone",
            Self::Frozen => "frozen",
            Self::Opening => "being written to",
            Self::Written => "written to",
            Self::Thawing => "thawing",
            Self::Sealing => "falling asleep",
            Self::Asleep => "asleep",
            Self::Staged => "waking",
        }
    }
}

fn control(generation: u64, state: State) -> u64 {
    generation << STATE_BITS | state as u64
}

/// A span. Its fields are visible in the guard for the initial value of a static.
#[derive(Debug)]
#[repr(align(64))] // one cache line each: the handler reads them in order
pub(crate) struct Slot {
    pub(crate) control: AtomicU64,
    pub(crate) start: AtomicUsize,
    pub(crate) bytes: AtomicUsize,
    pub(crate) name: [AtomicU64; 3],
    pub(crate) layer: AtomicU32,
    /// In the free list: the index of the next free slot plus one, 0 at the end.
    pub(crate) next_free: AtomicU32,
}

impl Slot {
    fn range(&self) -> AddressRange {
        AddressRange::new(self.start.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed))
    }

    fn label(&self) -> SpanLabel {
        let mut label =
            SpanLabel { layer: self.layer.load(Ordering::Relaxed), ..Default::default() };
        for (bytes, word) in label.name.chunks_exact_mut(8).zip(&self.name) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        label
    }

    fn fill(&self, range: AddressRange, label: &SpanLabel) {
        self.start.store(range.start, Ordering::Relaxed);
        self.bytes.store(range.bytes, Ordering::Relaxed);
        self.layer.store(label.layer, Ordering::Relaxed);
        for (bytes, word) in label.name.chunks_exact(8).zip(&self.name) {
            let mut eight = [0; 8];
            eight.copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(eight), Ordering::Relaxed);
        }
    }
}

/// A consistent snapshot of a live slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) index: u32,
    pub(crate) control: u64,
    pub(crate) state: State,
    pub(crate) range: AddressRange,
}

/// All spans. All zeroes is an empty table.
#[derive(Debug)]
pub(crate) struct Table<const N: usize> {
    pub(crate) slots: [Slot; N],
    /// Slots from this index on were never used: the handler does not search them.
    pub(crate) used: AtomicU32,
    /// Number of spans ever inserted: it tells whether one was inserted during a search.
    pub(crate) entered: AtomicU64,
    /// Head of the free list: a counter against ABA in the high half, index plus one in the low half.
    pub(crate) free: AtomicU64,
}

impl<const N: usize> Table<N> {
    /// Inserts a span as frozen. `None` if the table is full.
    pub(crate) fn insert(&self, range: AddressRange, label: &SpanLabel) -> Option<SpanId> {
        let index = self.take_free().or_else(|| self.take_unused())?;
        let slot = &self.slots[index as usize];
        let generation = (slot.control.load(Ordering::Relaxed) >> STATE_BITS).wrapping_add(1);
        slot.control.store(control(generation, State::Filling), Ordering::Relaxed);
        // Pairs with the fence in `look`: a thread that reads the new fields sees `Filling` too (T1).
        fence(Ordering::Release);
        slot.fill(range, label);
        // Release: pairs with the Acquire loads in `look` and `begin`.
        slot.control.store(control(generation, State::Frozen), Ordering::Release);
        // After the store above and before any protection: a thread that saw the old count, found no span
        // and then sees the protection, sees a new count (AcqRel: pairs with `entered`).
        self.entered.fetch_add(1, Ordering::AcqRel);
        #[expect(clippy::cast_possible_truncation, reason = "an id contains the low part")]
        let id = (generation as u32) << INDEX_BITS | index;
        Some(SpanId(id))
    }

    /// Changes `span` to the state that `next` returns for its current state. Waits for a thread in *opening*.
    /// Fails with the current state if `next` returns none, or the span is gone.
    pub(crate) fn begin(
        &self,
        span: SpanId,
        next: impl Fn(State) -> Option<State>,
    ) -> Result<(AddressRange, State), State> {
        let slot = self.slots.get((span.0 & INDEX_MASK) as usize).ok_or(State::Free)?;
        loop {
            let seen = slot.control.load(Ordering::Acquire);
            let generation = seen >> STATE_BITS;
            if (generation as u32) << INDEX_BITS != span.0 & !INDEX_MASK {
                return Err(State::Free);
            }
            let state = State::of(seen);
            if state == State::Opening {
                yield_now();
                continue;
            }
            let to = next(state).ok_or(state)?;
            // AcqRel: pairs with every other change of this control word.
            let moved = slot.control.compare_exchange_weak(
                seen,
                control(generation, to),
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
            if moved.is_ok() {
                return Ok((slot.range(), state));
            }
        }
    }

    /// Changes the state of a span that the caller owns by `begin`.
    pub(crate) fn finish(&self, span: SpanId, to: State) {
        let slot = &self.slots[(span.0 & INDEX_MASK) as usize];
        let generation = slot.control.load(Ordering::Relaxed) >> STATE_BITS;
        slot.control.store(control(generation, to), Ordering::Release);
    }

    /// Removes a span that the caller owns by `begin` or by its staged pages.
    pub(crate) fn remove(&self, span: SpanId) {
        self.finish(span, State::Free);
        self.put_free(span.0 & INDEX_MASK);
    }

    /// Returns the range and state of `span`.
    pub(crate) fn get(&self, span: SpanId) -> Result<(AddressRange, State), State> {
        let seen = self.look(span.0 & INDEX_MASK).ok_or(State::Free)?;
        let generation = ((seen.control >> STATE_BITS) as u32) << INDEX_BITS;
        if generation == span.0 & !INDEX_MASK {
            Ok((seen.range, seen.state))
        } else {
            Err(State::Free)
        }
    }

    /// Returns the number of spans ever inserted.
    pub(crate) fn entered(&self) -> u64 {
        self.entered.load(Ordering::Acquire)
    }

    /// Returns the live span that contains `address`.
    pub(crate) fn find(&self, address: usize) -> Option<Seen> {
        let used = self.used.load(Ordering::Acquire);
        (0..used).filter_map(|index| self.look(index)).find(|seen| seen.range.contains(address))
    }

    /// Returns the label of a slot just seen; rarely that of a later span, which affects only a message.
    pub(crate) fn label(&self, seen: &Seen) -> SpanLabel {
        self.slots[seen.index as usize].label()
    }

    /// Tries once to change the state of a slot just seen.
    pub(crate) fn swap(&self, seen: &Seen, to: State) -> bool {
        let slot = &self.slots[seen.index as usize];
        let moved = control(seen.control >> STATE_BITS, to);
        slot.control
            .compare_exchange(seen.control, moved, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Changes the state of a slot that the caller owns by `swap`.
    pub(crate) fn settle(&self, seen: &Seen, to: State) {
        let moved = control(seen.control >> STATE_BITS, to);
        self.slots[seen.index as usize].control.store(moved, Ordering::Release);
    }

    /// Removes all spans inside `range`, in any state.
    pub(crate) fn clear(&self, range: AddressRange) {
        for index in 0..self.used.load(Ordering::Acquire) {
            while let Some(seen) = self.look(index).filter(|seen| range.covers(seen.range)) {
                if self.swap(&seen, State::Free) {
                    self.put_free(index);
                }
            }
        }
    }

    /// Returns a slot, if it is live and was the same span throughout the read (T1).
    fn look(&self, index: u32) -> Option<Seen> {
        let slot = self.slots.get(index as usize)?;
        let control = slot.control.load(Ordering::Acquire);
        let state = State::of(control);
        if matches!(state, State::Free | State::Filling) {
            return None;
        }
        let range = slot.range();
        fence(Ordering::Acquire); // pairs with the fence in `insert`
        let again = slot.control.load(Ordering::Relaxed);
        // A span that was removed meanwhile is not live; one that changed state is.
        if again >> STATE_BITS != control >> STATE_BITS || State::of(again) == State::Free {
            return None;
        }
        Some(Seen { index, control, state, range })
    }

    fn take_unused(&self) -> Option<u32> {
        let more = |used: u32| ((used as usize) < N).then_some(used + 1);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()
    }

    fn take_free(&self) -> Option<u32> {
        let mut head = self.free.load(Ordering::Acquire);
        loop {
            let index = (head as u32).checked_sub(1)?;
            let next = self.slots[index as usize].next_free.load(Ordering::Relaxed);
            let count = (head >> 32).wrapping_add(1);
            let moved = count << 32 | u64::from(next);
            // AcqRel: pairs with `put_free`; the counter makes a stale `next` fail.
            match self.free.compare_exchange_weak(head, moved, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return Some(index),
                Err(now) => head = now,
            }
        }
    }

    fn put_free(&self, index: u32) {
        let mut head = self.free.load(Ordering::Relaxed);
        loop {
            self.slots[index as usize].next_free.store(head as u32, Ordering::Relaxed);
            let moved = head & !u64::from(u32::MAX) | u64::from(index + 1);
            // Release: pairs with `take_free`.
            match self.free.compare_exchange_weak(head, moved, Ordering::AcqRel, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }
}
