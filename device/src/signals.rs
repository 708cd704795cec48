//! Signals of the program and threads of the runtime.

use std::mem::MaybeUninit;

/// Signals that a thread raises by its own instructions: the guard needs `SIGSEGV`, and a blocked one
/// would end the process without its handler.
const OF_FAULTS: [i32; 7] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGABRT,
];

/// The real-time signals, from `SIGRTMIN` on, that stay open: with these two the deadlock tests
/// (`python/tests/deadlock.py`) hold our threads and let them go. A program that sends them to the process sees
/// them taken by any of its threads, as without the library.
const HELD_BY_TESTS: [i32; 2] = [6, 7];

/// Runs `start`, which creates threads of the runtime. They inherit a mask that blocks every signal but
/// those of faults and two of tests: the program's handlers run on its own threads, and its `sigwait` gets what is sent to
/// the process. The caller's mask is restored.
pub fn with_signals_blocked<T>(start: impl FnOnce() -> T) -> T {
    struct Restore(libc::sigset_t);
    impl Drop for Restore {
        fn drop(&mut self) {
            // SAFETY: a mask that the kernel wrote. It cannot fail with this operation.
            unsafe {
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, std::ptr::null_mut())
            };
        }
    }
    let mut before = MaybeUninit::<libc::sigset_t>::zeroed();
    let mut blocked = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are written before they are read; zero is an empty mask.
    let _restore = unsafe {
        libc::sigfillset(blocked.as_mut_ptr());
        for signal in OF_FAULTS {
            libc::sigdelset(blocked.as_mut_ptr(), signal);
        }
        for above in HELD_BY_TESTS {
            libc::sigdelset(blocked.as_mut_ptr(), libc::SIGRTMIN() + above);
        }
        libc::pthread_sigmask(libc::SIG_SETMASK, blocked.as_ptr(), before.as_mut_ptr());
        Restore(before.assume_init())
    };
    start()
}

#[cfg(all(test, not(loom)))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    /// Returns which signals the calling thread blocks.
    fn blocked() -> Vec<i32> {
        let mut mask = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: the mask is written, and read afterwards.
        unsafe {
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), mask.as_mut_ptr());
            (1..=64).filter(|&signal| libc::sigismember(mask.as_ptr(), signal) == 1).collect()
        }
    }

    #[test]
    fn a_thread_blocks_all_but_faults_and_its_creator_keeps_its_mask() {
        let before = blocked();
        let thread = with_signals_blocked(|| std::thread::spawn(blocked));
        let inside = thread.join().unwrap();
        assert_eq!(blocked(), before);
        for signal in (1..32).chain(libc::SIGRTMIN()..=libc::SIGRTMAX()) {
            let may_be = ![libc::SIGKILL, libc::SIGSTOP].contains(&signal);
            let is_open =
                OF_FAULTS.contains(&signal) || HELD_BY_TESTS.contains(&(signal - libc::SIGRTMIN()));
            assert_eq!(inside.contains(&signal), may_be && !is_open, "signal {signal}");
        }
    }
}
