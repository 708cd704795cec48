//! A counter that threads wait for and that a signal handler may change.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Wakes the thread that writes dumps.
pub(super) static WAKE: Bell = Bell::new();

/// Wakes threads. `ring` is async-signal-safe.
#[derive(Debug, Default)]
pub(crate) struct Bell(AtomicU32);

impl Bell {
    pub(crate) const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Wakes every waiting thread. Changes `errno`.
    pub(crate) fn ring(&self) {
        // Release: pairs with `count`. What was stored before is seen by the thread that wakes.
        self.0.fetch_add(1, Ordering::Release);
        let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word is live, and the kernel neither reads nor writes it.
        let _woken =
            unsafe { libc::syscall(libc::SYS_futex, self.0.as_ptr(), operation, i32::MAX) };
    }

    /// Returns the number of rings so far, which wraps.
    pub(crate) fn count(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// Waits for a ring after the count was `seen`, at most `timeout` if there is one. May return earlier.
    pub(crate) fn wait(&self, seen: u32, timeout: Option<Duration>) {
        let limit = timeout.map(|limit| libc::timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the word and the limit are live, and the kernel only reads them. The limit is relative, on the
        // monotonic clock. Callers look again, so the result does not matter.
        let _why =
            unsafe { libc::syscall(libc::SYS_futex, self.0.as_ptr(), operation, seen, limit) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_wait_ends_by_a_ring_a_passed_ring_or_its_limit() {
        static BELL: Bell = Bell::new();
        let seen = BELL.count();
        BELL.ring();
        BELL.wait(seen, None);
        let seen = BELL.count();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(move || {
                while BELL.count() == seen {
                    BELL.wait(seen, None);
                }
            });
            BELL.ring();
            waiter.join().unwrap();
        });
        let began = Instant::now();
        BELL.wait(BELL.count(), Some(Duration::from_millis(1)));
        assert!(began.elapsed() >= Duration::from_millis(1));
    }
}
