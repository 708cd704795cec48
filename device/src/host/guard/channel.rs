//! The rescue channel: threads that met an asleep span post requests, and one listener answers them. Of fixed
//! size and lock-free: the fault handler posts.
//!
//! # Protocol
//! Each slot has one state word. In brackets: its owner, who alone may change its fields.
//! ```text
//!   free ─► filling [poster] ─► posted ─► taken [listener] ─► awake, failed [poster] ─► free
//!    ▲                            │         └► abandoned [listener] ─┐
//!    └──────── withdrawn ─────────┴──────────────────────────────────┘
//! ```
//! - **C1** The request changes only in *filling*, the reason only in *taken* and *abandoned*.
//! - **C2** Exactly one side frees a slot: the poster, or the listener if the poster has abandoned it.
//! - **C3** A post is answered unless its poster leaves: the bell orders posts and the end of listening, so a
//!   poster either sees that nobody listens, or the listener sees the post.

use super::protocol::Access;
use super::sync::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

const FREE: u32 = 0;
const FILLING: u32 = 1;
const POSTED: u32 = 2;
const TAKEN: u32 = 3;
const AWAKE: u32 = 4;
const FAILED: u32 = 5;
const ABANDONED: u32 = 6;

/// Bit of the bell: somebody listens. The rest counts posts.
const OPEN: u32 = 1;
const POST: u32 = 2;

/// Words of a reason. The loom model has one.
const REASON_WORDS: usize = if cfg!(loom) { 1 } else { 20 };
/// Limit on the length of a reason, in bytes. Longer ones are cut.
pub(crate) const REASON_BYTES_MAX: usize = REASON_WORDS * 8;

/// An access to an asleep span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stray {
    pub(crate) address: usize,
    pub(crate) access: Access,
    pub(crate) thread: u32,
}

/// Why a span did not wake: zero-padded UTF-8.
pub(crate) type Reason = [u8; REASON_BYTES_MAX];

/// The answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The span is awake: the access can be repeated.
    Awake,
    /// It is not.
    Failed(Reason),
}

/// The result of a post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Posting {
    /// The listener will see the request in this slot.
    Posted(usize),
    /// Nobody listens.
    Closed,
    /// All slots are in use.
    Full,
}

/// A request and its answer. Its fields are visible in the guard for the initial value of a static.
#[derive(Debug)]
pub(crate) struct RescueSlot {
    /// Its poster waits on it.
    pub(crate) state: AtomicU32,
    pub(crate) access: AtomicU32,
    pub(crate) thread: AtomicU32,
    pub(crate) address: AtomicUsize,
    pub(crate) reason: [AtomicU64; REASON_WORDS],
}

impl RescueSlot {
    fn fill(&self, stray: &Stray) {
        let access = match stray.access {
            Access::Read => 0,
            Access::Write => 1,
            Access::Unknown => 2,
        };
        self.access.store(access, Ordering::Relaxed);
        self.thread.store(stray.thread, Ordering::Relaxed);
        self.address.store(stray.address, Ordering::Relaxed);
    }

    fn stray(&self) -> Stray {
        let access = match self.access.load(Ordering::Relaxed) {
            0 => Access::Read,
            1 => Access::Write,
            _ => Access::Unknown,
        };
        let address = self.address.load(Ordering::Relaxed);
        Stray { address, access, thread: self.thread.load(Ordering::Relaxed) }
    }

    fn set_reason(&self, reason: &Reason) {
        for (bytes, word) in reason.chunks_exact(8).zip(&self.reason) {
            let mut eight = [0; 8];
            eight.copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(eight), Ordering::Relaxed);
        }
    }

    fn reason(&self) -> Reason {
        let mut reason = [0; REASON_BYTES_MAX];
        for (bytes, word) in reason.chunks_exact_mut(8).zip(&self.reason) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        }
        reason
    }

    /// Tries to change the state. Acquire and Release: each change hands the fields over to the next owner.
    fn swap(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// All slots. All zeroes is a closed channel.
#[derive(Debug)]
pub(crate) struct Channel<const N: usize> {
    pub(crate) slots: [RescueSlot; N],
    /// The listener waits on it.
    pub(crate) bell: AtomicU32,
}

impl<const N: usize> Channel<N> {
    /// Begins to listen. For the one listener.
    pub(crate) fn open(&self) {
        self.bell.fetch_or(OPEN, Ordering::AcqRel);
    }

    /// Ends listening. Requests posted before are still [taken](Self::take) (C3).
    pub(crate) fn close(&self) {
        self.bell.fetch_and(!OPEN, Ordering::AcqRel);
    }

    pub(crate) fn is_open(&self) -> bool {
        self.bell.load(Ordering::Acquire) & OPEN != 0
    }

    /// Returns the bell for [`Self::take_all`].
    pub(crate) fn heard(&self) -> u32 {
        self.bell.load(Ordering::Acquire)
    }

    /// Whether `heard` is that of a closed channel.
    pub(crate) const fn is_end(heard: u32) -> bool {
        heard & OPEN == 0
    }

    /// Posts a request.
    pub(crate) fn post(&self, stray: &Stray) -> Posting {
        if !self.is_open() {
            return Posting::Closed;
        }
        let free = self.slots.iter().position(|slot| slot.swap(FREE, FILLING));
        let Some((index, slot)) = free.and_then(|at| Some((at, self.slots.get(at)?))) else {
            return Posting::Full;
        };
        slot.fill(stray);
        slot.state.store(POSTED, Ordering::Release);
        // C3: the order of this change and of `close` is one order. A close after it sees the post.
        if self.bell.fetch_add(POST, Ordering::AcqRel) & OPEN == 0 && slot.swap(POSTED, FREE) {
            return Posting::Closed;
        }
        // If the swap failed, another listener has come meanwhile and has taken the request.
        Posting::Posted(index)
    }

    /// Returns the state word of a posted request, to wait until it changes.
    pub(crate) fn word(&self, index: usize) -> &AtomicU32 {
        &self.slots[index].state
    }

    /// Returns the answer, if there is one, and frees the slot.
    pub(crate) fn collect(&self, index: usize) -> Option<Answer> {
        let slot = &self.slots[index];
        let answer = match slot.state.load(Ordering::Acquire) {
            AWAKE => Answer::Awake,
            FAILED => Answer::Failed(slot.reason()),
            _ => return None,
        };
        slot.state.store(FREE, Ordering::Release);
        Some(answer)
    }

    /// Stops waiting. Returns the answer if it has come meanwhile; the request is nobody's otherwise.
    pub(crate) fn leave(&self, index: usize) -> Option<Answer> {
        let slot = &self.slots[index];
        // In this order: what fails to be withdrawn is taken or answered; what fails to be abandoned is answered.
        if slot.swap(POSTED, FREE) || slot.swap(TAKEN, ABANDONED) {
            return None;
        }
        self.collect(index)
    }

    /// Takes all requests that were posted before the bell was heard, and perhaps later ones.
    pub(crate) fn take_all(&self) -> impl Iterator<Item = (usize, Stray)> {
        let slots = self.slots.iter().enumerate();
        let taken = slots.filter(|(_, slot)| slot.swap(POSTED, TAKEN));
        taken.map(|(at, slot)| (at, slot.stray()))
    }

    /// Answers a request that the caller has taken. Returns false if its poster has left.
    pub(crate) fn answer(&self, index: usize, answer: &Answer) -> bool {
        let slot = &self.slots[index];
        let to = match answer {
            Answer::Awake => AWAKE,
            Answer::Failed(reason) => {
                slot.set_reason(reason);
                FAILED
            }
        };
        let is_heard = slot.swap(TAKEN, to);
        if !is_heard {
            slot.state.store(FREE, Ordering::Release); // C2: it is abandoned
        }
        is_heard
    }
}
