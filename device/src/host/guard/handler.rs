//! The `SIGSEGV` handler. It is async-signal-safe: atomics, raw system calls and a buffer on the stack.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};

use super::message::{Message, Touch};
use super::probe;
use super::protocol::{Access, Verdict};
use super::rescue::{self, Rescue};
use super::table::{Seen, State};
use super::{SPACES, TABLE, own_threads};
use crate::host::system;
use crate::sync::Mutex;
use crate::{DeviceError, Operation};

/// The previous handler. Written once, before ours can run.
struct Previous {
    action: UnsafeCell<MaybeUninit<libc::sigaction>>,
    /// Whether `action` is written. Release, paired with the Acquire in `get`.
    known: AtomicBool,
}

// SAFETY: `action` is written only under INSTALLING and while `known` is false, and read only
// while it is true.
unsafe impl Sync for Previous {}

static PREVIOUS: Previous =
    Previous { action: UnsafeCell::new(MaybeUninit::uninit()), known: AtomicBool::new(false) };
static INSTALLING: Mutex<()> = Mutex::new(());

impl Previous {
    fn get(&self) -> Option<libc::sigaction> {
        // SAFETY: `known`: it is written, and not written again.
        self.known.load(Ordering::Acquire).then(|| unsafe { (*self.action.get()).assume_init() })
    }
}

type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
type SmallHandler = extern "C" fn(c_int);

/// Returns the current action of `SIGSEGV`.
fn current() -> Result<libc::sigaction, DeviceError> {
    let mut action = MaybeUninit::uninit();
    // SAFETY: no action is set; the old one is written to `action`.
    let status = unsafe { libc::sigaction(libc::SIGSEGV, null(), action.as_mut_ptr()) };
    if status != 0 {
        return Err(system::refused(Operation::Guard, crate::AddressRange::default()));
    }
    // SAFETY: the call succeeded, so it wrote the action.
    Ok(unsafe { action.assume_init() })
}

fn is_ours(action: &libc::sigaction) -> bool {
    action.sa_sigaction == on_fault as Handler as usize
}

/// Installs the handler of the process in front of the existing one. Idempotent. Any-thread.
///
/// `HostDevice::new` does not install it: a library must not take over a signal implicitly.
///
/// # Errors
/// `Refused` by the system.
pub fn install() -> Result<(), DeviceError> {
    let _installing = INSTALLING.lock();
    if PREVIOUS.known.load(Ordering::Acquire) {
        return Ok(());
    }
    let previous = current()?;
    // SAFETY: INSTALLING is held and `known` is false.
    unsafe { (*PREVIOUS.action.get()).write(previous) };
    PREVIOUS.known.store(true, Ordering::Release);
    // SAFETY: all-zero is a valid action (default, no flags, empty mask).
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_fault as Handler as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: `on_fault` has the three-argument form of SA_SIGINFO, and is async-signal-safe.
    if unsafe { libc::sigaction(libc::SIGSEGV, &raw const action, null_mut()) } != 0 {
        PREVIOUS.known.store(false, Ordering::Release);
        return Err(system::refused(Operation::Guard, crate::AddressRange::default()));
    }
    Ok(())
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

extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: errno's address is this thread's own. The interrupted code may read it.
    let errno = unsafe { *libc::__errno_location() };
    if !is_handled(info, context) {
        pass_on(signal, info, context);
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Whether the faulting access can be repeated.
fn is_handled(info: *mut libc::siginfo_t, context: *mut c_void) -> bool {
    // SAFETY: with SA_SIGINFO the second argument describes the signal. A fault has a positive code and an
    // address; a sent signal has neither.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if code <= 0 || !SPACES.contains(address) {
        return false;
    }
    let Some(access) = access(context) else { return false };
    // SAFETY: T2 of the table: this thread owns the span in `Opening`, and its range is ours.
    let open = |range| unsafe { system::open_in_handler(range) };
    let accessible = || match access {
        Access::Read => probe::readable(address),
        Access::Write | Access::Unknown => probe::writable(address),
    };
    match TABLE.fault(address, access, open, accessible) {
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
            die(info, context)
        }
        Verdict::Stuck(seen) => {
            print(&Message::stuck(&touch(&TABLE.label(&seen), &seen, address, access)));
            die(info, context)
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

/// Calls the previous handler, then ends the process by `SIGSEGV`.
fn die(info: *mut libc::siginfo_t, context: *mut c_void) -> bool {
    if let Some(previous) = PREVIOUS.get() {
        call(&previous, libc::SIGSEGV, info, context);
    }
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

/// Calls the handler of `action`; `false` if it has none.
fn call(
    action: &libc::sigaction,
    signal: c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) -> bool {
    let address = action.sa_sigaction;
    if address == libc::SIG_DFL || address == libc::SIG_IGN {
        return false;
    }
    if action.sa_flags & libc::SA_SIGINFO != 0 {
        // SAFETY: its owner installed it as a three-argument handler.
        let handler = unsafe { std::mem::transmute::<usize, Handler>(address) };
        handler(signal, info, context);
    } else {
        // SAFETY: its owner installed it as a one-argument handler.
        let handler = unsafe { std::mem::transmute::<usize, SmallHandler>(address) };
        handler(signal);
    }
    true
}

/// Passes a foreign fault to the previous handler, or has the default effect.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let Some(previous) = PREVIOUS.get() else { return set_action(libc::SIG_DFL) };
    if call(&previous, signal, info, context) {
        return;
    }
    // SAFETY: as in `is_handled`.
    let is_sent = unsafe { (*info).si_code } <= 0;
    if is_sent && previous.sa_sigaction == libc::SIG_IGN {
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
