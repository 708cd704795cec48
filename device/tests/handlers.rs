//! The guard among other handlers of `SIGSEGV`: those before it keep what their action says, and those after it do
//! not disable it. Each deed runs in a child process: the test starts itself again and looks at how that ended.
//!
//! A binary of its own: it changes signal handlers, and children run one of its tests by name.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod children;

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::unix::process::ExitStatusExt;
use std::process::Output;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicUsize, Ordering};

use children::{assert_survived, in_child};
use dormouse_device::host::{HostConfig, HostDevice, guard, os_page_bytes};
use dormouse_device::{AddressRange, Device, DeviceError, Fill, Operation, Sealed, SpanLabel};

/// How a child ends that would run forever.
const ENDLESS: i32 = 8;
/// Calls of a handler after which a child is endless.
const CALLS_MAX: usize = 16;
/// An unmapped address.
const NOWHERE: usize = 64;

#[track_caller]
fn assert_killed(output: &Output, said: &str) {
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
    assert_eq!(String::from_utf8_lossy(&output.stderr), said);
}

fn device() -> (HostDevice, AddressRange) {
    let page = os_page_bytes();
    let device = HostDevice::new(HostConfig::new(256 * page, 256 * page as u64)).unwrap();
    let range = AddressRange::new(device.address_space().start, 4 * page);
    device.map(range, Fill::Zero).unwrap();
    (device, range)
}

fn read(address: usize) -> u8 {
    // SAFETY: either the byte is mapped, or a handler sees to it.
    unsafe { (std::hint::black_box(address) as *const u8).read_volatile() }
}

fn write(address: usize) {
    // SAFETY: as in `read`.
    unsafe { (address as *mut u8).write_volatile(9) }
}

/// Maps a page without access, for a fault that is not ours.
fn closed_page() -> usize {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a mapping of this test's own child.
    let page = unsafe { libc::mmap(null_mut(), os_page_bytes(), libc::PROT_NONE, flags, -1, 0) };
    assert_ne!(page, libc::MAP_FAILED);
    page as usize
}

fn open_page(address: usize) {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a page of this test's own child.
    unsafe { libc::mprotect((address & !(os_page_bytes() - 1)) as *mut _, 1, access) };
}

/// Installs `handler` with the signals of `mask` and returns the action before.
fn set(handler: usize, flags: c_int, mask: &[c_int]) -> libc::sigaction {
    let mut before = MaybeUninit::uninit();
    // SAFETY: an all-zero action is valid; the handlers of this file are async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        for signal in mask {
            libc::sigaddset(&raw mut action.sa_mask, *signal);
        }
        assert_eq!(libc::sigaction(libc::SIGSEGV, &raw const action, before.as_mut_ptr()), 0);
        before.assume_init()
    }
}

type Handler = extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
type SmallHandler = extern "C" fn(c_int);

fn address_of(info: *mut libc::siginfo_t) -> usize {
    // SAFETY: installed with SA_SIGINFO.
    unsafe { (*info).si_addr() as usize }
}

fn shout(text: &str) {
    // SAFETY: the bytes are there.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

/// Ends the child if a handler is called without end.
fn count() {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    if CALLS.fetch_add(1, Ordering::Relaxed) == CALLS_MAX {
        // SAFETY: ends this test's own child at once.
        unsafe { libc::_exit(ENDLESS) };
    }
}

fn is_blocked(signal: c_int) -> bool {
    let mut mask = MaybeUninit::uninit();
    // SAFETY: the mask is read, into a live local.
    unsafe {
        libc::pthread_sigmask(libc::SIG_BLOCK, null(), mask.as_mut_ptr());
        libc::sigismember(mask.as_ptr(), signal) == 1
    }
}

/// Faults itself, one time.
extern "C" fn faulting(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    static INNER: AtomicUsize = AtomicUsize::new(0);
    count();
    if INNER.load(Ordering::Relaxed) == 0 {
        INNER.store(closed_page(), Ordering::Relaxed);
        read(INNER.load(Ordering::Relaxed));
    }
    open_page(address_of(info));
}

#[test]
fn a_previous_handler_with_nodefer_may_fault_itself() {
    let output = in_child("a_previous_handler_with_nodefer_may_fault_itself", || {
        set(faulting as Handler as usize, libc::SA_SIGINFO | libc::SA_NODEFER, &[]);
        guard::install().unwrap();
        read(closed_page());
        assert!(!is_blocked(libc::SIGSEGV));
    });
    assert_survived(&output);
}

#[test]
fn a_previous_handler_without_nodefer_may_not() {
    let output = in_child("a_previous_handler_without_nodefer_may_not", || {
        set(faulting as Handler as usize, libc::SA_SIGINFO, &[]);
        guard::install().unwrap();
        read(closed_page());
    });
    assert_killed(&output, "");
}

extern "C" fn shouting(_: c_int) {
    shout("once\n");
    count();
}

#[test]
fn a_previous_handler_with_resethand_is_called_once() {
    let output = in_child("a_previous_handler_with_resethand_is_called_once", || {
        set(shouting as SmallHandler as usize, libc::SA_RESETHAND, &[]);
        guard::install().unwrap();
        read(NOWHERE);
    });
    assert_killed(&output, "once\n");
}

extern "C" fn masked(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    if is_blocked(libc::SIGUSR1) && is_blocked(libc::SIGSEGV) && !is_blocked(libc::SIGUSR2) {
        open_page(address_of(info));
    }
    count();
}

#[test]
fn signals_of_the_previous_mask_are_blocked_while_its_handler_runs() {
    let output =
        in_child("signals_of_the_previous_mask_are_blocked_while_its_handler_runs", || {
            set(masked as Handler as usize, libc::SA_SIGINFO, &[libc::SIGUSR1]);
            guard::install().unwrap();
            read(closed_page());
            assert!(!is_blocked(libc::SIGUSR1) && !is_blocked(libc::SIGSEGV));
        });
    assert_survived(&output);
}

/// The alternate stack of the thread that faults.
static STACK: [AtomicUsize; 2] = [AtomicUsize::new(0), AtomicUsize::new(0)];
static WAS_ON_STACK: AtomicUsize = AtomicUsize::new(usize::MAX);

extern "C" fn standing(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    let local = (&raw const info).addr();
    let [start, end] = STACK.each_ref().map(|word| word.load(Ordering::Relaxed));
    WAS_ON_STACK.store(usize::from((start..end).contains(&local)), Ordering::Relaxed);
    open_page(address_of(info));
}

#[test]
fn a_previous_handler_runs_on_the_stack_that_it_asked_for() {
    let output = in_child("a_previous_handler_runs_on_the_stack_that_it_asked_for", || {
        for (at, flags) in [0, libc::SA_ONSTACK].into_iter().enumerate() {
            // A later handler, in the second turn.
            set(standing as Handler as usize, libc::SA_SIGINFO | flags, &[]);
            guard::install().unwrap();
            let bytes = 64 << 10;
            let stack = Box::leak(vec![0_u8; bytes].into_boxed_slice());
            let start = stack.as_ptr().addr();
            STACK[0].store(start, Ordering::Relaxed);
            STACK[1].store(start + bytes, Ordering::Relaxed);
            let alternate =
                libc::stack_t { ss_sp: stack.as_mut_ptr().cast(), ss_flags: 0, ss_size: bytes };
            // SAFETY: this thread's own stack, which is never freed.
            assert_eq!(unsafe { libc::sigaltstack(&raw const alternate, null_mut()) }, 0);
            read(closed_page());
            assert_eq!(WAS_ON_STACK.load(Ordering::Relaxed), at);
        }
    });
    assert_survived(&output);
}

extern "C" fn foreign(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    shout("foreign\n");
    count();
    open_page(address_of(info));
}

#[test]
fn a_later_handler_comes_behind_at_the_next_freeze() {
    let output = in_child("a_later_handler_comes_behind_at_the_next_freeze", || {
        guard::install().unwrap();
        let (device, range) = device();
        for action in [foreign as Handler as usize, libc::SIG_IGN, libc::SIG_DFL] {
            set(action, libc::SA_SIGINFO, &[]);
            assert!(!guard::is_installed());
            let span = device.freeze(range, SpanLabel::default()).unwrap();
            assert!(guard::is_installed());
            write(range.start);
            assert_eq!(device.seal(span), Ok(Sealed::Written));
        }
        set(foreign as Handler as usize, libc::SA_SIGINFO, &[]);
        guard::install().unwrap();
        read(closed_page());
    });
    assert_survived(&output);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "foreign\n");
}

static OLD: AtomicUsize = AtomicUsize::new(0);

/// Calls what it was installed over, as a careful program does.
extern "C" fn chaining(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    shout("chaining\n");
    count();
    // SAFETY: a handler of three arguments: ours.
    let old: Handler = unsafe { std::mem::transmute(OLD.load(Ordering::Relaxed)) };
    old(signal, info, context);
}

/// Installs `chaining`, over ours.
fn set_chaining() {
    let before = set(chaining as Handler as usize, libc::SA_SIGINFO, &[]);
    OLD.store(before.sa_sigaction, Ordering::Relaxed);
}

/// Installed again, it calls a function of ours that was installed over itself.
#[test]
fn a_later_handler_that_calls_ours_does_not_loop() {
    let output = in_child("a_later_handler_that_calls_ours_does_not_loop", || {
        set(foreign as Handler as usize, libc::SA_SIGINFO, &[]);
        guard::install().unwrap();
        let (device, range) = device();
        for _ in 0..3 {
            set_chaining();
            let span = device.freeze(range, SpanLabel::default()).unwrap();
            write(range.start);
            assert_eq!(device.seal(span), Ok(Sealed::Written));
            read(closed_page());
        }
    });
    assert_survived(&output);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "chaining\nforeign\n".repeat(3));
}

#[test]
fn a_stray_access_has_one_message_where_a_later_handler_calls_ours() {
    let output =
        in_child("a_stray_access_has_one_message_where_a_later_handler_calls_ours", || {
            guard::install().unwrap();
            let (device, range) = device();
            set_chaining();
            let span = device.freeze(range, SpanLabel::default()).unwrap();
            assert_eq!(device.seal(span), Ok(Sealed::Asleep));
            read(range.start);
        });
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(text.matches("the process stops here").count(), 1, "{text}");
    assert_eq!(text.matches("chaining").count(), 1, "{text}");
}

#[test]
fn nothing_falls_asleep_once_the_handler_cannot_come_back() {
    let output = in_child("nothing_falls_asleep_once_the_handler_cannot_come_back", || {
        guard::install().unwrap();
        let (device, range) = device();
        let refused = (0..64).find_map(|_| {
            set(foreign as Handler as usize, libc::SA_SIGINFO, &[]);
            let frozen = device.freeze(range, SpanLabel::default());
            frozen.and_then(|span| device.thaw(span)).err()
        });
        let Some(DeviceError::Refused { operation, reason, .. }) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(operation, Operation::Guard);
        assert!(reason.contains("16 times"), "{reason}");
        // Nothing has changed: the memory is used as before.
        write(range.start);
        assert_eq!(read(range.start), 9);
    });
    assert_survived(&output);
}
