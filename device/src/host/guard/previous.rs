//! The actions of `SIGSEGV` that ours was installed over, one per level, and calls of their handlers with the
//! effects that the kernel gives them.
//!
//! A program may install a handler over ours, and that handler may call the one before it, which is ours. So each
//! time that ours comes back on top it is another function, one level up, and a level passes a fault on to what it was
//! installed over. Calls go down the levels, so they end, also if a handler of the program calls one of ours.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};

/// Limit of the times that the handler is installed in a process. A level is never used again: a handler of the
/// program may still call its function.
pub(super) const LEVELS_MAX: usize = 16;

/// In place of a handler that came back on top: the level passes on to the one below it.
const BELOW: usize = usize::MAX;
const SIGSEGV_BIT: u64 = bit(libc::SIGSEGV);

/// The signals that are blocked while our handler runs: it may wait, and an alternate stack of 8 KiB has no room for
/// the registers of a second signal. All but those that an instruction causes, and the two of the C library.
pub(super) const HELD: u64 = !(bit(libc::SIGILL)
    | bit(libc::SIGTRAP)
    | bit(libc::SIGABRT)
    | bit(libc::SIGBUS)
    | bit(libc::SIGFPE)
    | SIGSEGV_BIT
    | bit(libc::SIGSYS)
    | bit(libc::SIGKILL)
    | bit(libc::SIGSTOP)
    | bit(32)
    | bit(33));

/// Returns a signal as a set of the kernel has it.
const fn bit(signal: c_int) -> u64 {
    1 << (signal - 1)
}

pub(super) type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
type SmallHandler = extern "C" fn(c_int);

/// An action of `SIGSEGV`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Action {
    pub(super) handler: usize,
    pub(super) flags: c_int,
    /// The signals that are blocked while the handler runs, as the kernel stores them.
    pub(super) mask: u64,
}

impl Action {
    pub(super) fn of(action: &libc::sigaction) -> Self {
        // SAFETY: a set is at least as long, and its first word has the signals of the kernel.
        let mask = unsafe { (&raw const action.sa_mask).cast::<u64>().read_unaligned() };
        Self { handler: action.sa_sigaction, flags: action.sa_flags, mask }
    }

    pub(super) const fn has_handler(&self) -> bool {
        self.handler != libc::SIG_DFL && self.handler != libc::SIG_IGN
    }
}

/// A level's action. The handler changes to the default one time, by `SA_RESETHAND`, or to `BELOW`.
#[derive(Debug)]
struct Level {
    handler: AtomicUsize,
    flags: AtomicI32,
    mask: AtomicU64,
}

/// The levels of a process. Lock-free for readers.
#[derive(Debug)]
pub(super) struct Levels {
    levels: [Level; LEVELS_MAX],
    /// Release, paired with the Acquire of readers: the levels below are written.
    used: AtomicUsize,
}

impl Levels {
    pub(super) const fn new() -> Self {
        let levels = [const {
            Level {
                handler: AtomicUsize::new(libc::SIG_DFL),
                flags: AtomicI32::new(0),
                mask: AtomicU64::new(0),
            }
        }; LEVELS_MAX];
        Self { levels, used: AtomicUsize::new(0) }
    }

    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Acquire)
    }

    /// Adds a level over `action`, and returns it; `None` at the limit. One thread at a time.
    pub(super) fn add(&self, action: Action) -> Option<usize> {
        let level = self.used.load(Ordering::Relaxed);
        let free = self.levels.get(level)?;
        if action.has_handler() {
            // Installed again: it may call a level above its earlier place now, which must not call it again.
            for earlier in self.levels.iter().take(level) {
                let (from, to) = (action.handler, BELOW);
                let _other =
                    earlier.handler.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
        free.flags.store(action.flags, Ordering::Relaxed);
        free.mask.store(action.mask, Ordering::Relaxed);
        free.handler.store(action.handler, Ordering::Relaxed);
        self.used.store(level + 1, Ordering::Release);
        Some(level)
    }

    /// Removes the level that was added last, whose function was not installed.
    pub(super) fn undo(&self) {
        self.used.fetch_sub(1, Ordering::Release);
    }

    /// Returns the action that a fault of `level` is passed to. One with `SA_RESETHAND` is returned once.
    pub(super) fn take(&self, level: usize) -> Action {
        let mut action = Action { handler: libc::SIG_DFL, flags: 0, mask: 0 };
        if level >= self.used() {
            return action;
        }
        for level in self.levels.iter().take(level + 1).rev() {
            let handler = level.handler.load(Ordering::Acquire);
            if handler == BELOW {
                continue;
            }
            action.flags = level.flags.load(Ordering::Relaxed);
            action.mask = level.mask.load(Ordering::Relaxed);
            action.handler = handler;
            if action.has_handler() && action.flags & libc::SA_RESETHAND != 0 {
                let reset = level.handler.compare_exchange(
                    handler,
                    libc::SIG_DFL,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
                // Another thread has taken it.
                action.handler = if reset.is_ok() { handler } else { libc::SIG_DFL };
            }
            return action;
        }
        action
    }
}

/// Calls the handler of `action` with the signals blocked that the kernel would block; `false` if it has none.
/// `context`: of the fault. Async-signal-safe.
pub(super) fn call(
    action: &Action,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) -> bool {
    if !action.has_handler() {
        return false;
    }
    let mut before = 0;
    change_mask(libc::SIG_BLOCK, 0, &mut before);
    // A handler of the program that called ours has a mask of its own.
    let is_held = before & HELD == HELD;
    let base = if is_held { interrupted_mask(context) | SIGSEGV_BIT } else { before };
    let mut mask = base | action.mask;
    if action.flags & libc::SA_NODEFER != 0 && action.mask & SIGSEGV_BIT == 0 {
        // This handler may fault itself, or jump out without a change of the mask.
        mask &= !SIGSEGV_BIT;
    }
    change_mask(libc::SIG_SETMASK, mask, null_mut());
    if action.flags & libc::SA_SIGINFO != 0 {
        // SAFETY: its owner installed it as a three-argument handler.
        let handler = unsafe { std::mem::transmute::<usize, Handler>(action.handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: its owner installed it as a one-argument handler.
        let handler = unsafe { std::mem::transmute::<usize, SmallHandler>(action.handler) };
        handler(signal);
    }
    change_mask(libc::SIG_SETMASK, before, null_mut());
    true
}

/// Returns the signals that were blocked at the fault.
fn interrupted_mask(context: *mut c_void) -> u64 {
    // SAFETY: with SA_SIGINFO the third argument is this thread's ucontext; the first word of its set has the signals
    // of the kernel.
    unsafe {
        (&raw const (*context.cast::<libc::ucontext_t>()).uc_sigmask).cast::<u64>().read_unaligned()
    }
}

/// Changes the signals that the calling thread blocks, by the kernel's own call: the C library's leaves out some.
fn change_mask(how: c_int, mask: u64, before: *mut u64) {
    // SAFETY: sets of eight bytes, live locals of the caller. A refusal leaves the mask.
    unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, how, &raw const mask, before, size_of::<u64>());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn action(handler: usize, flags: c_int) -> Action {
        Action { handler, flags, mask: handler as u64 }
    }

    #[test]
    fn levels_have_a_limit_and_an_undone_one_is_used_again() {
        let levels = Levels::new();
        assert_eq!(levels.take(0).handler, libc::SIG_DFL);
        for level in 0..LEVELS_MAX {
            assert_eq!(levels.add(action(100 + level, 0)), Some(level));
        }
        assert_eq!(levels.add(action(7, 0)), None);
        levels.undo();
        assert_eq!(levels.take(LEVELS_MAX - 1).handler, libc::SIG_DFL);
        assert_eq!(levels.add(action(7, 0)), Some(LEVELS_MAX - 1));
        assert_eq!(levels.take(LEVELS_MAX - 1), action(7, 0));
    }

    #[test]
    fn a_handler_for_one_signal_is_taken_once() {
        let levels = Levels::new();
        levels.add(action(100, libc::SA_RESETHAND)).unwrap();
        assert_eq!(levels.take(0).handler, 100);
        assert_eq!(levels.take(0).handler, libc::SIG_DFL);
    }

    proptest! {
        /// Handlers that are installed over ours, possibly again, each of which calls what it was installed over.
        /// Every fault ends, calls no handler twice, and begins with the latest.
        #[test]
        fn chains_end(installed in prop::collection::vec(100..104_usize, 1..LEVELS_MAX)) {
            let levels = Levels::new();
            levels.add(action(libc::SIG_DFL, 0)).unwrap();
            // What each handler of the program calls: the level on top when it was installed last.
            let mut calls = [0; 4];
            for &handler in &installed {
                calls[handler - 100] = levels.used() - 1;
                levels.add(action(handler, 0)).unwrap();
            }
            let mut called = Vec::new();
            let mut level = levels.used() - 1;
            loop {
                let taken = levels.take(level);
                if !taken.has_handler() {
                    break;
                }
                prop_assert!(!called.contains(&taken.handler), "{called:?} then {}", taken.handler);
                called.push(taken.handler);
                level = calls[taken.handler - 100];
            }
            prop_assert_eq!(called.first(), installed.last());
        }
    }
}
