//! One place for locks, so that loom can put its own in their stead, and so that a debug build can
//! say how many of them a thread holds (I8 of the crate).

#[cfg(loom)]
use loom::sync::MutexGuard;
#[cfg(loom)]
pub(crate) use loom::sync::{
    Condvar, Mutex,
    atomic::{AtomicUsize, Ordering},
};
#[cfg(not(loom))]
use std::sync::MutexGuard;
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Condvar, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;

/// What [`lock`] gives.
#[derive(Debug)]
pub(crate) struct Guard<'a, T> {
    guard: MutexGuard<'a, T>,
    held: Held,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

/// Locks, going on past a panic of another holder: every critical section here leaves its data
/// consistent at each step, so a poisoned lock guards nothing broken.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> Guard<'_, T> {
    Guard { guard: mutex.lock().unwrap_or_else(PoisonError::into_inner), held: Held::new() }
}

/// Waits on `condvar`, with the same rule about poison. The one lock is the only one held: whoever
/// is to end the wait may need any other.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: Guard<'a, T>) -> Guard<'a, T> {
    let Guard { guard, held } = guard;
    drop(held);
    debug_assert_eq!(held_count(), 0, "I8: a wait under another lock");
    let guard = condvar.wait(guard).unwrap_or_else(PoisonError::into_inner);
    Guard { guard, held: Held::new() }
}

pub(crate) use self::count::{Held, held_count};

#[cfg(all(debug_assertions, not(loom)))]
mod count {
    use std::cell::Cell;

    thread_local! {
        static HELD: Cell<usize> = const { Cell::new(0) };
    }

    /// Counts one lock of this thread's for as long as it lives.
    #[derive(Debug)]
    pub(crate) struct Held(());

    impl Held {
        pub(crate) fn new() -> Self {
            HELD.set(HELD.get() + 1);
            Self(())
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            HELD.set(HELD.get() - 1);
        }
    }

    /// How many locks of this crate the calling thread holds.
    pub(crate) fn held_count() -> usize {
        HELD.get()
    }
}

/// Nobody counts in a release build; under loom threads share what is thread-local.
#[cfg(not(all(debug_assertions, not(loom))))]
mod count {
    #[derive(Debug)]
    pub(crate) struct Held;

    impl Held {
        pub(crate) const fn new() -> Self {
            Self
        }
    }

    pub(crate) const fn held_count() -> usize {
        0
    }
}
