//! The handler of the signal that requests a dump.
//!
//! It is installed only where the signal has its default action: a handler of the program is never replaced, and a
//! signal that the program ignores stays ignored.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use super::bell::WAKE;
use crate::fork;

/// Signals that can request a dump, by name.
const SIGNALS: [(&str, c_int); 2] = [("SIGUSR1", libc::SIGUSR1), ("SIGUSR2", libc::SIGUSR2)];

/// Whether a signal has come since the last dump.
static HAS_COME: AtomicBool = AtomicBool::new(false);

/// A signal whose handler is ours.
#[derive(Clone, Copy, Debug)]
pub(super) struct Handler {
    pub(super) name: &'static str,
    number: c_int,
}

impl Handler {
    /// Installs the handler of the signal `name`. The error is a reason.
    pub(super) fn install(name: &str) -> Result<Self, String> {
        let known = SIGNALS.iter().find(|(known, _)| *known == name);
        let &(name, number) = known.ok_or_else(|| format!("{name} is unknown"))?;
        let other = SIGNALS.iter().find(|(other, _)| *other != name).map_or("", |(other, _)| other);
        let advice = format!("DORMOUSE_DUMP_SIGNAL={other} may be free");
        match action_of(number)?.sa_sigaction {
            libc::SIG_DFL => {}
            libc::SIG_IGN => return Err(format!("the program ignores {name}; {advice}")),
            _ => return Err(format!("the program has a handler of {name}; {advice}")),
        }
        // SAFETY: an action of zeros is valid: no flags, and an empty mask.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        action.sa_sigaction = on_signal as *const () as usize;
        // A system call that the signal interrupts goes on.
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: the handler is async-signal-safe and is never unloaded (`-z nodelete`).
        if unsafe { libc::sigaction(number, &raw const action, null_mut()) } != 0 {
            return Err(std::io::Error::last_os_error().to_string());
        }
        Ok(Self { name, number })
    }

    /// Whether the program has installed another action since.
    pub(super) fn is_replaced(self) -> bool {
        action_of(self.number).is_ok_and(|now| now.sa_sigaction != on_signal as *const () as usize)
    }
}

/// Returns whether a signal has come since the last call.
pub(super) fn take() -> bool {
    HAS_COME.swap(false, Ordering::Acquire)
}

/// Notes a signal that [`take`] returned and that is served later.
pub(super) fn put_back() {
    HAS_COME.store(true, Ordering::Release);
}

fn action_of(number: c_int) -> Result<libc::sigaction, String> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: reads the action into a live local; zeros are a valid action.
    unsafe {
        if libc::sigaction(number, std::ptr::null(), action.as_mut_ptr()) != 0 {
            return Err(std::io::Error::last_os_error().to_string());
        }
        Ok(action.assume_init())
    }
}

/// Async-signal-safe: atomics, and system calls that POSIX allows.
extern "C" fn on_signal(number: c_int) {
    // SAFETY: errno of this thread always exists.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    if fork::in_child() {
        // The child has no thread that writes. The signal does what it does without the library.
        // SAFETY: both are async-signal-safe. The signal is blocked until this handler returns.
        unsafe {
            libc::signal(number, libc::SIG_DFL);
            libc::raise(number);
        }
    } else {
        HAS_COME.store(true, Ordering::Release);
        WAKE.ring();
    }
    // SAFETY: as above.
    unsafe { *errno = before };
}

// A handler is an address.
const _: () = assert!(size_of::<extern "C" fn(c_int)>() == size_of::<*const c_void>());
