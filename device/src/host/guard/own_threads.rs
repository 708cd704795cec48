//! Threads whose stray accesses are not rescued: those that a wake may need.
//!
//! A table of thread numbers, because the handler reads it: the first access to thread-local data of a library
//! that was loaded later may allocate.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// Limit of the threads of the process that are known to be the runtime's own. A stray access of any other
/// one ends with the time limit of the rescue.
pub(super) const OWN_THREADS_MAX: usize = 1024;

static THREADS: OwnThreads = OwnThreads::new();

/// Thread numbers. Lock-free.
#[derive(Debug)]
struct OwnThreads {
    /// 0: unused.
    numbers: [AtomicU32; OWN_THREADS_MAX],
    /// Entries from this index on were never used: the handler does not search them.
    used: AtomicUsize,
}

/// Marks the thread that created it as the runtime's own, until it is dropped there.
#[derive(Debug)]
#[must_use = "the thread is marked until this is dropped"]
pub struct OwnThread {
    index: Option<usize>,
}

/// Marks the calling thread as the runtime's own: a stray access of it ends the process at once.
pub fn own_thread() -> OwnThread {
    OwnThread { index: THREADS.enter(current()) }
}

/// Whether the calling thread is marked. Async-signal-safe.
pub(super) fn is_own() -> bool {
    THREADS.contains(current())
}

/// Returns the number of the calling thread. Async-signal-safe.
pub(super) fn current() -> u32 {
    // SAFETY: gettid has no arguments and cannot fail.
    let number = unsafe { libc::syscall(libc::SYS_gettid) };
    u32::try_from(number).unwrap_or(0)
}

impl Drop for OwnThread {
    fn drop(&mut self) {
        if let Some(index) = self.index {
            THREADS.leave(index);
        }
    }
}

// Relaxed, all of them: a thread looks for its own number only.
impl OwnThreads {
    const fn new() -> Self {
        let numbers = [const { AtomicU32::new(0) }; OWN_THREADS_MAX];
        Self { numbers, used: AtomicUsize::new(0) }
    }

    fn enter(&self, number: u32) -> Option<usize> {
        let free = |entry: &AtomicU32| {
            entry.compare_exchange(0, number, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let index = self.numbers.iter().position(free)?;
        self.used.fetch_max(index + 1, Ordering::Relaxed);
        Some(index)
    }

    fn leave(&self, index: usize) {
        if let Some(entry) = self.numbers.get(index) {
            entry.store(0, Ordering::Relaxed);
        }
    }

    fn contains(&self, number: u32) -> bool {
        let used = self.used.load(Ordering::Relaxed);
        self.numbers.iter().take(used).any(|entry| entry.load(Ordering::Relaxed) == number)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_marked_until_the_drop() {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert!(!is_own());
                let (outer, inner) = (own_thread(), own_thread());
                assert!(is_own());
                drop(inner);
                assert!(is_own());
                drop(outer);
                assert!(!is_own());
            });
        });
    }

    #[test]
    fn threads_beyond_the_limit_are_not_marked() {
        let threads = OwnThreads::new();
        for number in 1..=OWN_THREADS_MAX as u32 {
            assert!(threads.enter(number).is_some());
        }
        assert_eq!(threads.enter(u32::MAX), None);
        threads.leave(5);
        assert!(!threads.contains(6) && threads.contains(7));
        assert_eq!(threads.enter(u32::MAX), Some(5));
        assert!(threads.contains(u32::MAX));
    }
}
