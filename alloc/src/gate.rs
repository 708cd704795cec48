//! A fast path that can be disabled.
//!
//! One atomic word holds the pointer of the fast path, or "closed". Each bit of a second word is a reason to close it.
//! Setting a bit closes the path at once; the next caller of the slow path that finds no bit set opens it again.
//!
//! - **G1** After `change` has added a reason, every thread that the call happens before finds the path closed, until all
//!   reasons are removed.
//!
//! Each closing has a number of its own, and an opening replaces the very closing that it saw before it looked at the
//! reasons: one that a reason has overtaken fails.

use std::ptr::without_provenance_mut;

use crate::sync::{AtomicPtr, AtomicU64, Ordering};

/// Bit of a closed path. Targets are aligned, so they do not have it.
const CLOSED: usize = 1;
/// Bits of the reasons; the others count closings.
const REASONS: u64 = u32::MAX as u64;
/// One closing.
const CLOSING: u64 = 1 << 32;

/// A fast path to a `T`. Any-thread, no locks.
#[derive(Debug)]
pub struct Gate<T> {
    target: AtomicPtr<T>,
    word: AtomicU64,
}

impl<T> Gate<T> {
    /// Makes a closed gate with reasons, 0 for none.
    #[cfg(not(loom))]
    #[must_use]
    pub const fn new(reasons: u32) -> Self {
        assert!(align_of::<T>() > CLOSED, "a target has no room for a bit");
        Self {
            target: AtomicPtr::new(without_provenance_mut(CLOSED)),
            word: AtomicU64::new(reasons as u64),
        }
    }

    /// As above: loom's atomics are made at run time.
    #[cfg(loom)]
    pub fn new(reasons: u32) -> Self {
        Self {
            target: AtomicPtr::new(without_provenance_mut(CLOSED)),
            word: AtomicU64::new(reasons.into()),
        }
    }

    /// Returns the target of the fast path; `None` while it is closed.
    #[inline]
    #[must_use]
    pub fn target(&self) -> Option<*mut T> {
        // Acquire: pairs with the exchange in `open`, so the target is initialised for this thread.
        let target = self.target.load(Ordering::Acquire);
        (target.addr() & CLOSED == 0).then_some(target)
    }

    /// Returns the reasons.
    #[inline]
    #[must_use]
    pub fn reasons(&self) -> u32 {
        self.word.load(Ordering::SeqCst) as u32
    }

    /// Replaces the reasons by what `change` makes of them. If there are any, the path is closed on return.
    pub fn change(&self, change: impl Fn(u32) -> u32) {
        let closed = |seen: u64| {
            let closings = (seen & !REASONS).wrapping_add(CLOSING);
            Some(closings | u64::from(change(seen as u32)))
        };
        // SeqCst: an opening that does not see the reasons has seen an earlier closing.
        let seen = self.word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, closed);
        let closings = seen.map_or(0, |seen| seen >> 32).wrapping_add(1);
        if change(seen.map_or(0, |seen| seen as u32)) != 0 {
            let number = (closings as usize) << 1 | CLOSED;
            // An exchange: it comes after every opening that it does not replace.
            self.target.swap(without_provenance_mut(number), Ordering::SeqCst);
        }
    }

    /// Opens the path to `target` if there is no reason against it.
    pub fn open(&self, target: *mut T) {
        let seen = self.target.load(Ordering::SeqCst);
        if seen.addr() & CLOSED != 0 && self.reasons() == 0 {
            // It may have been closed meanwhile, or opened by another caller: then it stays as it is.
            let _ = self.target.compare_exchange(seen, target, Ordering::SeqCst, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_gate_opens_without_reasons_and_closes_at_one() {
        let mut place = 7_u64;
        let gate = Gate::new(4);
        let target = &raw mut place;
        gate.open(target);
        assert_eq!((gate.target(), gate.reasons()), (None, 4));
        gate.change(|seen| seen & !4);
        assert_eq!(gate.target(), None, "no caller has opened it");
        gate.open(target);
        assert_eq!(gate.target(), Some(target));
        gate.change(|seen| seen);
        assert_eq!(gate.target(), Some(target), "no reason was added");
        gate.change(|seen| seen | 1);
        gate.change(|seen| seen | 2);
        gate.change(|seen| seen & !1);
        gate.open(target);
        assert_eq!((gate.target(), gate.reasons()), (None, 2));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;
    use loom::thread;

    use super::*;

    const TARGET: *mut u64 = without_provenance_mut(64);

    /// G1: two callers open, and one of them learns of a reason.
    #[test]
    fn loom_a_reason_closes_the_path_for_whoever_learns_of_it() {
        loom::model(|| {
            let gate = Arc::new(Gate::<u64>::new(0));
            let is_told = Arc::new(AtomicBool::new(false));
            let opener = {
                let gate = Arc::clone(&gate);
                thread::spawn(move || gate.open(TARGET))
            };
            let other = {
                let (gate, is_told) = (Arc::clone(&gate), Arc::clone(&is_told));
                thread::spawn(move || {
                    gate.open(TARGET);
                    if is_told.load(Ordering::Acquire) {
                        assert_eq!(gate.target(), None);
                    }
                })
            };
            gate.change(|seen| seen | 1);
            assert_eq!(gate.target(), None);
            is_told.store(true, Ordering::Release);
            opener.join().unwrap();
            other.join().unwrap();
            assert_eq!(gate.target(), None);
        });
    }

    /// G1: a reason comes, goes and comes again while a caller opens.
    #[test]
    fn loom_an_opening_that_reasons_have_overtaken_fails() {
        loom::model(|| {
            let gate = Arc::new(Gate::<u64>::new(0));
            let opener = {
                let gate = Arc::clone(&gate);
                thread::spawn(move || gate.open(TARGET))
            };
            gate.change(|seen| seen | 1);
            gate.change(|seen| seen & !1);
            gate.open(TARGET);
            gate.change(|seen| seen | 2);
            assert_eq!(gate.target(), None);
            opener.join().unwrap();
            assert_eq!(gate.target(), None);
        });
    }
}
