//! What happens to threads and processes that touch spans. Deadly touches run in child processes:
//! the test starts itself again and looks at how that ended.
//!
//! A binary of its own: it changes signal handlers, and children run one of its tests by name.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod children;

use std::os::unix::process::ExitStatusExt;
use std::process::Output;
use std::ptr::null_mut;

use children::{assert_survived, in_child, said};
use dormouse_device::host::{HostConfig, HostDevice, guard, os_page_bytes};
use dormouse_device::{AddressRange, Device, Fill, Sealed, SpanId, SpanLabel};

fn assert_killed(output: &Output) {
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
}

fn device() -> (HostDevice, AddressRange) {
    let page = os_page_bytes();
    // Long enough to be parked when it is sealed.
    let device = HostDevice::new(HostConfig::new(256 * page, 256 * page as u64)).unwrap();
    let range = AddressRange::new(device.address_space().start + 3 * page, 128 * page);
    device.map(range, Fill::Zero).unwrap();
    (device, range)
}

fn label() -> SpanLabel {
    let mut label = SpanLabel { layer: 7, ..SpanLabel::default() };
    label.name[..6].copy_from_slice(b"prefix");
    label
}

/// A range that sleeps until the process ends.
fn asleep() -> (AddressRange, SpanId, &'static HostDevice) {
    let (device, range) = device();
    let device = Box::leak(Box::new(device));
    let span = device.freeze(range, label()).unwrap();
    assert_eq!(device.seal(span), Ok(Sealed::Asleep));
    (range, span, device)
}

fn read(address: usize) -> u8 {
    // SAFETY: either the byte is mapped, or the process is meant to die here.
    unsafe { (address as *const u8).read_volatile() }
}

fn write(address: usize, byte: u8) {
    // SAFETY: as in `read`.
    unsafe { (address as *mut u8).write_volatile(byte) }
}

/// Installs a handler of `SIGSEGV`, as a program might have before it loads us.
fn install_first(handler: usize, flags: i32) {
    // SAFETY: an all-zero action is valid; the handlers below are async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        assert_eq!(libc::sigaction(libc::SIGSEGV, &raw const action, null_mut()), 0);
    }
}

fn shout(text: &str) {
    // SAFETY: the bytes are there.
    unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
}

#[test]
fn reading_a_sleeping_block_ends_the_process_with_a_message() {
    let output = in_child("reading_a_sleeping_block_ends_the_process_with_a_message", || {
        guard::install().unwrap();
        let (range, _, _) = asleep();
        // SAFETY: gettid has no arguments.
        let thread = unsafe { libc::syscall(libc::SYS_gettid) };
        println!("expect: thread {thread} touched {:#x} (read)", range.start + 5);
        // Said by a thread of its own, which is who touches here.
        read(range.start + 5);
    });
    assert_killed(&output);
    let text = String::from_utf8_lossy(&output.stdout);
    let expected = text.lines().find_map(|line| line.split("expect: ").nth(1)).unwrap();
    let sentence = format!(
        "dormouse: {expected} in a sleeping block (tag \"prefix\", layer 7, asleep): wake it \
         first; the process stops here\n"
    );
    assert_eq!(said(&output), sentence);
}

#[test]
fn writing_to_a_sleeping_block_ends_the_process_with_a_message() {
    let output = in_child("writing_to_a_sleeping_block_ends_the_process_with_a_message", || {
        guard::install().unwrap();
        let (range, _, _) = asleep();
        std::thread::spawn(move || write(range.end() - 1, 1)).join().unwrap();
    });
    assert_killed(&output);
    assert!(said(&output).contains("(write) in a sleeping block"), "{output:?}");
}

#[test]
fn a_waking_block_is_still_asleep() {
    let output = in_child("a_waking_block_is_still_asleep", || {
        guard::install().unwrap();
        let (range, span, device) = asleep();
        let _staged = device.stage(span, Fill::Any).unwrap();
        read(range.start);
    });
    assert_killed(&output);
    assert!(said(&output).contains("(tag \"prefix\", layer 7, waking)"), "{output:?}");
}

#[test]
fn a_forked_child_that_touches_dies_the_same_way() {
    let output = in_child("a_forked_child_that_touches_dies_the_same_way", || {
        guard::install().unwrap();
        let (range, _, _) = asleep();
        // SAFETY: the child only reads and dies.
        let child = unsafe { libc::fork() };
        if child == 0 {
            read(range.start);
        }
        let mut status = 0;
        // SAFETY: our own child and our own place.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV);
    });
    assert_survived(&output);
    assert!(said(&output).contains("in a sleeping block"), "{output:?}");
}

#[test]
fn faults_elsewhere_are_not_ours() {
    let output = in_child("faults_elsewhere_are_not_ours", || {
        guard::install().unwrap();
        let _keep = asleep();
        read(std::hint::black_box(64));
    });
    assert_killed(&output);
    assert_eq!(said(&output), "");
}

#[test]
fn faults_in_our_unmapped_memory_are_the_previous_handlers() {
    let output = in_child("faults_in_our_unmapped_memory_are_the_previous_handlers", || {
        guard::install().unwrap();
        let (range, _, _) = asleep();
        read(range.end());
    });
    assert_killed(&output);
    assert_eq!(said(&output), "");
}

#[test]
fn a_sent_signal_has_its_usual_effect() {
    let output = in_child("a_sent_signal_has_its_usual_effect", || {
        // Not the handler of Rust's library: it lets the first signal that was sent pass.
        install_first(libc::SIG_DFL, 0);
        guard::install().unwrap();
        // SAFETY: a signal to this thread.
        unsafe { libc::raise(libc::SIGSEGV) };
    });
    assert_killed(&output);
    assert_eq!(said(&output), "");
}

#[test]
fn an_ignored_signal_stays_ignored_and_a_fault_does_not() {
    let output = in_child("an_ignored_signal_stays_ignored_and_a_fault_does_not", || {
        install_first(libc::SIG_IGN, 0);
        guard::install().unwrap();
        // SAFETY: a signal to this thread.
        unsafe { libc::raise(libc::SIGSEGV) };
        shout("still here\n");
        read(std::hint::black_box(64));
    });
    assert_killed(&output);
    assert_eq!(said(&output), "still here\n");
}

extern "C" fn previous(_: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: installed with SA_SIGINFO.
    let address = unsafe { (*info).si_addr() as usize };
    shout(if address == 64 && !context.is_null() { "previous: 64\n" } else { "previous\n" });
    if address == 64 {
        // SAFETY: ends this test's own child at once.
        unsafe { libc::_exit(42) };
    }
    // As if the block woke just now: the access would go through if it were tried again.
    let page = address & !(os_page_bytes() - 1);
    // SAFETY: a page of this test's own child.
    unsafe {
        libc::mprotect(page as *mut _, os_page_bytes(), libc::PROT_READ | libc::PROT_WRITE);
    }
}

extern "C" fn previous_small(_: i32) {
    shout("previous, small\n");
    // SAFETY: ends this test's own child at once.
    unsafe { libc::_exit(43) };
}

#[test]
fn the_previous_handler_gets_foreign_faults_unchanged() {
    let output = in_child("the_previous_handler_gets_foreign_faults_unchanged", || {
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = previous;
        install_first(handler as usize, libc::SA_SIGINFO);
        guard::install().unwrap();
        guard::install().unwrap(); // twice is once
        read(std::hint::black_box(64));
    });
    assert_eq!(output.status.code(), Some(42), "{output:?}");
    assert_eq!(said(&output), "previous: 64\n");
}

#[test]
fn a_handler_of_one_argument_is_called_too() {
    let output = in_child("a_handler_of_one_argument_is_called_too", || {
        let handler: extern "C" fn(i32) = previous_small;
        install_first(handler as usize, 0);
        guard::install().unwrap();
        read(std::hint::black_box(64));
    });
    assert_eq!(output.status.code(), Some(43), "{output:?}");
}

#[test]
fn the_previous_handler_is_called_for_a_stray_access() {
    let name = "the_previous_handler_is_called_for_a_stray_access";
    let output = in_child(name, || {
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = previous;
        install_first(handler as usize, libc::SA_SIGINFO);
        guard::install().unwrap();
        let (range, _, _) = asleep();
        read(range.start);
    });
    assert_killed(&output);
    let text = said(&output);
    assert!(text.contains("the process stops here\nprevious\n"), "{text}");
}

#[test]
fn another_handler_on_top_is_noticed() {
    let output = in_child("another_handler_on_top_is_noticed", || {
        assert!(!guard::is_installed());
        guard::install().unwrap();
        assert!(guard::is_installed());
        install_first(libc::SIG_IGN, 0);
        assert!(!guard::is_installed());
    });
    assert_survived(&output);
}

#[test]
fn a_thread_without_an_alternate_stack_is_served_on_its_own() {
    guard::install().unwrap();
    let (device, range) = device();
    let span = device.freeze(range, label()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let none = libc::stack_t { ss_sp: null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 };
            let mut was = none;
            // SAFETY: this thread's own stack, put back below for the library that owns it.
            unsafe { assert_eq!(libc::sigaltstack(&raw const none, &raw mut was), 0) };
            write(range.start, 9);
            // SAFETY: as above.
            unsafe { libc::sigaltstack(&raw const was, null_mut()) };
        });
    });
    assert_eq!(device.seal(span), Ok(Sealed::Written));
    assert_eq!(read(range.start), 9);
}

#[test]
fn system_calls_fail_with_efault() {
    guard::install().unwrap();
    let (device, range) = device();
    write(range.start, 5);
    let zero = std::fs::File::open("/dev/zero").unwrap();
    let null = std::fs::OpenOptions::new().write(true).open("/dev/null").unwrap();
    let mut ends = [0; 2];
    // SAFETY: two descriptors into our own array.
    unsafe { assert_eq!(libc::pipe(ends.as_mut_ptr()), 0) };
    let errno = |status: isize| {
        assert_eq!(status, -1);
        std::io::Error::last_os_error().raw_os_error()
    };
    use std::os::fd::AsRawFd;
    let address = range.start as *mut libc::c_void;

    let span = device.freeze(range, label()).unwrap();
    // SAFETY: the kernel checks the address, which is the point.
    let into_frozen = unsafe { libc::read(zero.as_raw_fd(), address, 8) };
    assert_eq!(errno(into_frozen), Some(libc::EFAULT));
    // SAFETY: as above. Reading a frozen range is fine.
    assert_eq!(unsafe { libc::write(null.as_raw_fd(), address, 8) }, 8);
    // The refused system call did not cancel the sleep, and changed nothing.
    assert_eq!(read(range.start), 5);
    assert_eq!(device.seal(span), Ok(Sealed::Asleep));
    // SAFETY: as above.
    let from_asleep = unsafe { libc::write(ends[1], address, 8) };
    assert_eq!(errno(from_asleep), Some(libc::EFAULT));
    // SAFETY: our own descriptors.
    ends.iter().for_each(|end| unsafe {
        libc::close(*end);
    });
}

/// Threads of the writers' tests.
const WRITERS: usize = 4;

#[test]
fn writers_racing_for_one_frozen_span_all_get_through() {
    guard::install().unwrap();
    let (device, range) = device();
    for round in 1..=200_u8 {
        let span = device.freeze(range, label()).unwrap();
        std::thread::scope(|scope| {
            for writer in 0..WRITERS {
                scope.spawn(move || write(range.start + writer * os_page_bytes(), round));
            }
        });
        assert_eq!(device.seal(span), Ok(Sealed::Written));
        for writer in 0..WRITERS {
            assert_eq!(read(range.start + writer * os_page_bytes()), round);
        }
    }
}

#[test]
fn a_writer_never_notices_freezing_and_thawing() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    guard::install().unwrap();
    let (device, range) = device();
    let (stop, writes) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut count: u8 = 0;
            while !stop.load(Ordering::Relaxed) {
                count = count.wrapping_add(1);
                write(range.start + 77, count);
                assert_eq!(read(range.start + 77), count, "a write was lost");
                writes.fetch_add(1, Ordering::Relaxed);
            }
            count
        });
        // Some freezes are cancelled by the writer, some are thawed under its hands, and some of
        // its faults are handled when the span is gone already.
        let mut rounds = 0;
        while rounds < 3000 || writes.load(Ordering::Relaxed) < 3000 {
            let span = device.freeze(range, label()).unwrap();
            device.thaw(span).unwrap();
            rounds += 1;
            if writer.is_finished() {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        let last = writer.join().unwrap();
        assert_eq!(read(range.start + 77), last);
    });
}
