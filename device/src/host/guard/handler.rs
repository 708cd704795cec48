//! The `SIGSEGV` handler. It is async-signal-safe: atomics, raw system calls and a buffer on the stack.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use super::message::{Message, Touch};
use super::previous::{self, Action, Handler, LEVELS_MAX, Levels};
use super::probe;
use super::protocol::{Access, Verdict};
use super::rescue::{self, Rescue};
use super::table::{Seen, State};
use super::{SPACES, TABLE, own_threads};
use crate::host::system;
use crate::sync::Mutex;
use crate::{DeviceError, Operation};

static PREVIOUS: Levels = Levels::new();
static INSTALLING: Mutex<()> = Mutex::new(());
/// The process that installed the handler, which its forked children inherit. 0 before.
static INSTALLED_IN: AtomicU32 = AtomicU32::new(0);

/// Our handler, one function per level.
static HANDLERS: [Handler; LEVELS_MAX] = [
    on_fault::<0>,
    on_fault::<1>,
    on_fault::<2>,
    on_fault::<3>,
    on_fault::<4>,
    on_fault::<5>,
    on_fault::<6>,
    on_fault::<7>,
    on_fault::<8>,
    on_fault::<9>,
    on_fault::<10>,
    on_fault::<11>,
    on_fault::<12>,
    on_fault::<13>,
    on_fault::<14>,
    on_fault::<15>,
];

/// The thread and the address of an access that ends the process: handlers below are not asked again.
static ENDING: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];

fn refused() -> DeviceError {
    system::refused(Operation::Guard, crate::AddressRange::default())
}

/// Returns the current action of `SIGSEGV`.
fn current() -> Result<Action, DeviceError> {
    let mut action = MaybeUninit::uninit();
    // SAFETY: no action is set; the old one is written to `action`.
    let status = unsafe { libc::sigaction(libc::SIGSEGV, null(), action.as_mut_ptr()) };
    if status != 0 {
        return Err(refused());
    }
    // SAFETY: the call succeeded, so it wrote the action.
    Ok(Action::of(unsafe { action.assume_init_ref() }))
}

fn is_ours(action: &Action) -> bool {
    HANDLERS.iter().any(|handler| *handler as usize == action.handler)
}

/// Installs the handler of the process in front of the existing one, also if a later one took its place. Idempotent.
/// Any-thread.
///
/// `HostDevice::new` does not install it: a library must not take over a signal implicitly.
///
/// # Errors
/// `Refused` by the system, or because handlers were installed over ours too often.
pub fn install() -> Result<(), DeviceError> {
    if is_installed() {
        return Ok(());
    }
    let installing = INSTALLING.lock();
    let previous = current()?;
    if is_ours(&previous) {
        return Ok(());
    }
    let Some(level) = PREVIOUS.add(previous) else {
        let reason =
            format!("handlers of SIGSEGV were installed over ours {LEVELS_MAX} times, the limit");
        let nowhere = crate::AddressRange::default();
        return Err(DeviceError::refused(Operation::Guard, nowhere, libc::EAGAIN, reason));
    };
    // SAFETY: all-zero is a valid action (default, no flags, empty mask).
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = HANDLERS[level] as usize;
    // A handler that runs on the thread's own stack may need more than an alternate one has.
    let is_on_own_stack = previous.has_handler() && previous.flags & libc::SA_ONSTACK == 0;
    let stack = if is_on_own_stack { 0 } else { libc::SA_ONSTACK };
    action.sa_flags = libc::SA_SIGINFO | stack | previous.flags & libc::SA_RESTART;
    // SAFETY: a set is at least as long as the kernel's.
    unsafe { (&raw mut action.sa_mask).cast::<u64>().write_unaligned(previous::HELD) };
    // Relaxed: a fault that the handler receives comes after the call below.
    let _first =
        INSTALLED_IN.compare_exchange(0, rescue::process(), Ordering::Relaxed, Ordering::Relaxed);
    // SAFETY: `on_fault` has the three-argument form of SA_SIGINFO, and is async-signal-safe.
    if unsafe { libc::sigaction(libc::SIGSEGV, &raw const action, null_mut()) } != 0 {
        PREVIOUS.undo();
        return Err(refused());
    }
    drop(installing);
    if level > 0 {
        tracing::debug!(target: "device", level, "a later handler of SIGSEGV comes behind ours again");
    }
    Ok(())
}

/// Installs the handler again if it was installed before and a later one took its place. One system call if it is
/// there.
///
/// # Errors
/// As [`install`].
pub(in crate::host) fn keep_installed() -> Result<(), DeviceError> {
    if PREVIOUS.used() == 0 { Ok(()) } else { install() }
}

/// Whether our handler is the first one for a fault: false before [`install`], and after a later handler
/// was installed.
#[must_use]
pub fn is_installed() -> bool {
    current().is_ok_and(|action| is_ours(&action))
}

/// Returns the kind of the faulting access; `None` for an instruction fetch.
#[cfg(target_arch = "x86_64")]
fn access(context: *mut c_void) -> Option<Access> {
    /// Bits of the page fault's error code.
    const WRITE: i64 = 1 << 1;
    const EXECUTE: i64 = 1 << 4;
    // SAFETY: with SA_SIGINFO the third argument is this thread's ucontext.
    let registers = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let code = registers[libc::REG_ERR as usize];
    match (code & EXECUTE != 0, code & WRITE != 0) {
        (true, _) => None,
        (_, true) => Some(Access::Write),
        _ => Some(Access::Read),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn access(_context: *mut c_void) -> Option<Access> {
    Some(Access::Unknown)
}

extern "C" fn on_fault<const LEVEL: usize>(
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    // SAFETY: errno's address is this thread's own. The interrupted code may read it.
    let errno = unsafe { *libc::__errno_location() };
    if !is_handled(LEVEL, info, context) {
        pass_on(LEVEL, signal, info, context);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Whether the faulting access can be repeated.
fn is_handled(level: usize, info: *mut libc::siginfo_t, context: *mut c_void) -> bool {
    // SAFETY: with SA_SIGINFO the second argument describes the signal. A fault has a positive code and an
    // address; a sent signal has neither.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code <= 0 || !SPACES.contains(address) || is_ending(address) {
        return false;
    }
    let Some(access) = access(context) else { return false };
    // SAFETY: T2 of the table: this thread owns the span in `Opening`, and its range is ours.
    let open = |range| unsafe { system::open_in_handler(range) };
    let accessible = || match access {
        Access::Read => probe::readable(address),
        Access::Write | Access::Unknown => probe::writable(address),
    };
    let is_forked = || INSTALLED_IN.load(Ordering::Relaxed) != rescue::process();
    match TABLE.fault(address, access, open, accessible, is_forked) {
        Verdict::Retry => true,
        Verdict::Stray(seen) => {
            let rescue = rescue::wait(address, access);
            if matches!(rescue, Rescue::Awake) {
                return true;
            }
            // It may have woken, or its memory may be free, since the verdict: the access is judged again.
            let is_away =
                |now: &Seen| matches!(now.state, State::Sealing | State::Asleep | State::Staged);
            if !TABLE.find(address).as_ref().is_some_and(is_away) {
                return true;
            }
            let label = TABLE.label(&seen);
            print(&Message::stray(&touch(&label, &seen, address, access), &rescue));
            die(level, address, info, context)
        }
        Verdict::Stuck(seen) => {
            print(&Message::stuck(&touch(&TABLE.label(&seen), &seen, address, access)));
            die(level, address, info, context)
        }
        Verdict::Elsewhere => false,
    }
}

fn touch<'a>(
    label: &'a crate::SpanLabel,
    seen: &Seen,
    address: usize,
    access: Access,
) -> Touch<'a> {
    let (thread, access) = (u64::from(own_threads::current()), access.name());
    Touch { thread, address, access, label, state: seen.state.name() }
}

/// Writes the message to stderr. Errors are ignored.
fn print(message: &Message) {
    let bytes = message.as_bytes();
    // SAFETY: the buffer is ours and of this length.
    unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
}

/// Whether this thread ends the process because of an access to `address`: a handler of the program has called ours.
fn is_ending(address: usize) -> bool {
    let [thread, at] = ENDING.each_ref().map(|word| word.load(Ordering::Relaxed));
    at == address && thread == own_threads::current() as usize
}

/// Calls the previous handler, then ends the process by `SIGSEGV`.
fn die(level: usize, address: usize, info: *mut libc::siginfo_t, context: *mut c_void) -> bool {
    ENDING[0].store(own_threads::current() as usize, Ordering::Relaxed);
    ENDING[1].store(address, Ordering::Relaxed);
    previous::call(&PREVIOUS.take(level), libc::SIGSEGV, info, context);
    set_action(libc::SIG_DFL);
    // Blocked while this handler runs: delivered on return, even if the span wakes meanwhile.
    // SAFETY: raise is async-signal-safe.
    unsafe { libc::raise(libc::SIGSEGV) };
    true
}

/// Replaces our handler by `SIG_DFL` or `SIG_IGN`.
fn set_action(handler: libc::sighandler_t) {
    // SAFETY: all-zero is a valid action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler;
    // SAFETY: `handler` is SIG_DFL or SIG_IGN; sigaction is async-signal-safe.
    unsafe { libc::sigaction(libc::SIGSEGV, &raw const action, null_mut()) };
}

/// Passes a foreign fault to the previous handler, or has the default effect.
fn pass_on(level: usize, signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.take(level);
    if previous::call(&previous, signal, info, context) {
        return;
    }
    // SAFETY: as in `is_handled`.
    let is_sent = unsafe { (*info).si_code } <= 0;
    if is_sent && previous.handler == libc::SIG_IGN {
        return;
    }
    // A fault recurs on return and has the default effect (it cannot be ignored); a sent signal must be
    // sent again.
    set_action(libc::SIG_DFL);
    if is_sent {
        // SAFETY: raise is async-signal-safe.
        unsafe { libc::raise(signal) };
    }
}
