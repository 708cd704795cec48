//! Which shard a thread uses.

use std::cell::Cell;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    /// No destructor: threads may free late.
    static PLACE: Cell<Option<Place>> = const { Cell::new(None) };
}

/// Places chosen so far.
static PLACES: AtomicUsize = AtomicUsize::new(0);

/// A thread's place in the fronts of all allocators. It is no more than a hint where to look first:
/// a thread may use any, and threads may share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(NonZero<usize>);

impl Place {
    /// The calling thread's.
    #[inline]
    #[must_use]
    pub fn of_thread() -> Self {
        PLACE.get().unwrap_or_else(Self::choose_for_thread)
    }

    #[cold]
    fn choose_for_thread() -> Self {
        // Relaxed: a count.
        let before = PLACES.fetch_add(1, Ordering::Relaxed);
        let chosen = Self(NonZero::<usize>::MIN.saturating_add(before));
        PLACE.set(Some(chosen));
        chosen
    }

    /// How many were chosen.
    pub(super) fn count() -> usize {
        PLACES.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) const fn number(self) -> usize {
        self.0.get() - 1
    }
}
