//! Locks that `malloc`, `free` and a forked child may meet (decision 0014).
//!
//! The interface is parking_lot's, without poison; the lock is one futex word. Unlike parking_lot it has
//! no thread-local data with a destructor and no global table, and unlike `std` no poison flag to check.

use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use parking_lot::lock_api::{self, GuardNoSend, RawMutex};

/// A mutex whose lock is one futex word.
pub type Mutex<T> = lock_api::Mutex<RawFutex, T>;
/// The guard of a [`Mutex`].
pub type MutexGuard<'a, T> = lock_api::MutexGuard<'a, RawFutex, T>;

const UNLOCKED: u32 = 0;
const LOCKED: u32 = 1;
/// Locked, and a thread may be waiting.
const CONTENDED: u32 = 2;
/// Times a thread looks at a locked word before it waits.
const SPINS_MAX: u32 = 100;

/// The lock word of a [`Mutex`].
#[derive(Debug)]
pub struct RawFutex(AtomicU32);

// SAFETY: a thread holds the lock from the moment it has changed the word from `UNLOCKED` until it
// stores `UNLOCKED`: Acquire there, Release here. No operation unwinds.
unsafe impl RawMutex for RawFutex {
    const INIT: Self = Self(AtomicU32::new(UNLOCKED));

    type Guard = GuardNoSend;

    #[inline]
    fn lock(&self) -> GuardNoSend {
        match self.try_lock() {
            Some(guard) => guard,
            None => self.lock_contended(),
        }
    }

    #[inline]
    fn try_lock(&self) -> Option<GuardNoSend> {
        let locked = self.0.compare_exchange(UNLOCKED, LOCKED, Acquire, Relaxed).is_ok();
        locked.then(GuardNoSend::new)
    }

    #[inline]
    unsafe fn unlock(&self, _: GuardNoSend) {
        if self.0.swap(UNLOCKED, Release) == CONTENDED {
            wake(&self.0, 1);
        }
    }

    fn is_locked(&self) -> bool {
        self.0.load(Relaxed) != UNLOCKED
    }
}

impl RawFutex {
    #[cold]
    fn lock_contended(&self) -> GuardNoSend {
        loop {
            for _ in 0..SPINS_MAX {
                if self.0.load(Relaxed) != LOCKED {
                    break;
                }
                std::hint::spin_loop();
            }
            // A thread that waited cannot know whether others still do.
            if self.0.swap(CONTENDED, Acquire) == UNLOCKED {
                return GuardNoSend::new();
            }
            wait(&self.0, CONTENDED);
        }
    }
}

/// A condition variable for one [`Mutex`]. Waits may end without a notification.
#[derive(Debug, Default)]
pub struct Condvar(AtomicU32);

impl Condvar {
    /// Creates a condition variable.
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Releases the mutex of `guard`, waits for a notification and locks the mutex again.
    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        // Read before the mutex is released: a later notification changes it, and the wait returns.
        let notifications = self.0.load(Relaxed);
        MutexGuard::unlocked(guard, || wait(&self.0, notifications));
    }

    /// Wakes one waiting thread.
    pub fn notify_one(&self) {
        self.0.fetch_add(1, Relaxed);
        wake(&self.0, 1);
    }

    /// Wakes all waiting threads.
    pub fn notify_all(&self) {
        self.0.fetch_add(1, Relaxed);
        wake(&self.0, i32::MAX);
    }
}

/// Waits while `word` is `seen`, or until it is interrupted.
fn wait(word: &AtomicU32, seen: u32) {
    let no_timeout = std::ptr::null::<libc::timespec>();
    // SAFETY: the word is live and the kernel only reads it. Callers check the word again, so the
    // result does not matter.
    let _ = unsafe {
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        libc::syscall(libc::SYS_futex, word.as_ptr(), operation, seen, no_timeout)
    };
}

/// Wakes up to `count` threads that wait on `word`.
#[cold]
fn wake(word: &AtomicU32, count: i32) {
    // SAFETY: the kernel uses the address as a key and reads no memory.
    let _ = unsafe {
        let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        libc::syscall(libc::SYS_futex, word.as_ptr(), operation, count)
    };
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_contended_mutex_loses_no_update() {
        const THREADS: u64 = 8;
        const UPDATES: u64 = 20_000;
        let sum = Mutex::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    for at in 0..UPDATES {
                        let mut sum = sum.lock();
                        let seen = *sum;
                        if at % 64 == 0 {
                            // Long enough for others to wait in the kernel.
                            std::thread::yield_now();
                        }
                        *sum = seen + 1;
                    }
                });
            }
        });
        assert_eq!(*sum.lock(), THREADS * UPDATES);
        let held = sum.lock();
        assert!(sum.try_lock().is_none());
        drop(held);
        assert!(sum.try_lock().is_some());
    }

    #[test]
    fn a_notification_after_the_check_is_not_missed() {
        const TURNS: u32 = 5_000;
        let (turn, changed) = (Mutex::new(0_u32), Condvar::new());
        let play = |parity: u32| {
            let mut turn = turn.lock();
            while *turn < TURNS {
                if *turn % 2 == parity {
                    *turn += 1;
                    changed.notify_one();
                } else {
                    changed.wait(&mut turn);
                }
            }
            changed.notify_all();
        };
        std::thread::scope(|scope| {
            scope.spawn(|| play(0));
            scope.spawn(|| play(1));
        });
        assert_eq!(*turn.lock(), TURNS);
    }
}
