//! Locks: `dormouse_device::sync`, since reclaim reaches them from `malloc` (decision 0014); loom's in a
//! model. A debug build counts the locks that a thread holds.

#[cfg(not(loom))]
use dormouse_device::sync::MutexGuard;
#[cfg(not(loom))]
pub use dormouse_device::sync::{Condvar, Mutex};
#[cfg(loom)]
use loom::sync::MutexGuard;
#[cfg(loom)]
pub use loom::sync::{
    Condvar, Mutex,
    atomic::{AtomicUsize, Ordering},
};
use std::cell::Cell;
use std::ops::{Deref, DerefMut};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicUsize, Ordering};

/// The guard of a locked mutex.
#[derive(Debug)]
pub struct Guard<'a, T> {
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

/// Locks a mutex.
pub fn lock<T>(mutex: &Mutex<T>) -> Guard<'_, T> {
    #[cfg(not(loom))]
    let guard = mutex.lock();
    #[cfg(loom)]
    let guard = mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    Guard { guard, held: Held::new() }
}

/// Waits on a condition variable. `guard` must be the only lock that the thread holds: the thread that
/// ends the wait may need any other.
pub fn wait<'a, T>(condvar: &Condvar, guard: Guard<'a, T>) -> Guard<'a, T> {
    let Guard { guard, held } = guard;
    drop(held);
    debug_assert_eq!(held_count(), 0, "a wait under another lock");
    #[cfg(not(loom))]
    let guard = {
        let mut guard = guard;
        condvar.wait(&mut guard);
        guard
    };
    #[cfg(loom)]
    let guard = condvar.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner);
    Guard { guard, held: Held::new() }
}

/// Whether locks are counted: in debug builds, but not under loom, whose threads share thread-local data.
const COUNTS: bool = cfg!(all(debug_assertions, not(loom)));

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
}

/// Counts one lock of this thread for as long as it lives.
#[derive(Debug)]
struct Held(());

impl Held {
    fn new() -> Self {
        if COUNTS {
            HELD.set(HELD.get() + 1);
        }
        Self(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if COUNTS {
            HELD.set(HELD.get() - 1);
        }
    }
}

/// Returns how many locks of `storage` and `offload` the calling thread holds; 0 in release builds.
pub fn held_count() -> usize {
    if COUNTS { HELD.get() } else { 0 }
}
