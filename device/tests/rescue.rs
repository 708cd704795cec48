//! Stray accesses that a listener rescues, and those that end the process. Each test runs in a child process: a
//! process has one listener, and some accesses are deadly.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod children;

use std::os::unix::process::ExitStatusExt;
use std::process::Output;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use children::{assert_survived, in_child, said};
use dormouse_device::host::guard::{RESCUES_MAX, Request, Stopper};
use dormouse_device::host::{HostConfig, HostDevice, guard, os_page_bytes};
use dormouse_device::{AddressRange, Device, Fill, Sealed, SpanId, SpanLabel};

/// Longer than any wake of these tests.
const LONG: Duration = Duration::from_secs(30);
/// Pages of a span.
const PAGES: usize = 40;

fn assert_killed(output: &Output, why: &str) {
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
    assert!(said(output).ends_with(why), "{output:?}");
}

fn read(address: usize) -> u8 {
    // SAFETY: either the byte is mapped or woken, or the process is meant to die here.
    unsafe { (address as *const u8).read_volatile() }
}

fn write(address: usize, byte: u8) {
    // SAFETY: as in `read`.
    unsafe { (address as *mut u8).write_volatile(byte) }
}

/// The byte that a test has put at `address`.
fn byte_at(address: usize) -> u8 {
    ((address / 61) ^ (address >> 13)) as u8
}

/// A range that sleeps, and its copy.
struct Sleeper {
    range: AddressRange,
    copy: Vec<u8>,
    span: Mutex<Option<SpanId>>,
}

/// Ranges that sleep on one device, which lives as long as the process.
struct Sleepers {
    device: HostDevice,
    all: Vec<Sleeper>,
    wakes: AtomicUsize,
}

impl Sleepers {
    fn new(count: usize) -> &'static Self {
        guard::install().unwrap();
        let bytes = PAGES * os_page_bytes();
        let config = HostConfig::new((2 * count + 1) * bytes, (4 * count * bytes) as u64);
        let device = HostDevice::new(config).unwrap();
        let start = device.address_space().start;
        let all = (0..count).map(|at| {
            let range = AddressRange::new(start + 2 * at * bytes, bytes);
            device.map(range, Fill::Zero).unwrap();
            (range.start..range.end()).for_each(|address| write(address, byte_at(address)));
            let mut label = SpanLabel { layer: at as u32, ..SpanLabel::default() };
            label.name[..6].copy_from_slice(b"prefix");
            let span = device.freeze(range, label).unwrap();
            let copy = (range.start..range.end()).map(read).collect();
            assert_eq!(device.seal(span), Ok(Sealed::Asleep));
            Sleeper { range, copy, span: Mutex::new(Some(span)) }
        });
        let all = all.collect();
        Box::leak(Box::new(Self { device, all, wakes: AtomicUsize::new(0) }))
    }

    /// Wakes the span around `address`, if it sleeps.
    fn wake(&self, address: usize) {
        let sleeper = self.all.iter().find(|it| it.range.contains(address)).unwrap();
        let Some(span) = sleeper.span.lock().unwrap().take() else { return };
        let staged = self.device.stage(span, Fill::Any).unwrap();
        let aside = self.device.staged_address(&staged);
        for (at, byte) in sleeper.copy.iter().enumerate() {
            write(aside + at, *byte);
        }
        self.device.publish(staged).unwrap();
        self.wakes.fetch_add(1, Ordering::Relaxed);
    }

    fn wakes(&self) -> usize {
        self.wakes.load(Ordering::Relaxed)
    }

    /// Starts a listener that wakes what is accessed.
    fn listen(&'static self) -> (Stopper, JoinHandle<()>) {
        serve(LONG, |request| {
            self.wake(request.address());
            request.awake();
        })
    }
}

/// Starts a listener.
fn serve(
    wait_max: Duration,
    mut rescue: impl FnMut(Request) + Send + 'static,
) -> (Stopper, JoinHandle<()>) {
    let (listener, stopper) = guard::listen(wait_max).unwrap();
    let serve = move || {
        listener.serve(|all| {
            all.into_iter().for_each(&mut rescue);
            false
        });
    };
    (stopper, std::thread::spawn(serve))
}

/// Starts a listener that wakes what was accessed as long after as `delay` returns for the address.
fn serve_late(
    sleepers: &'static Sleepers,
    wait_max: Duration,
    delay: impl Fn(usize) -> Duration + Send + 'static,
) -> (Stopper, JoinHandle<()>) {
    let (listener, stopper) = guard::listen(wait_max).unwrap();
    let mut kept: Vec<(Instant, Request)> = Vec::new();
    let mut rescue = move |all: Vec<Request>| {
        let due = |request: Request| (Instant::now() + delay(request.address()), request);
        kept.extend(all.into_iter().map(due));
        let now = Instant::now();
        let is_due = |entry: &mut (Instant, Request)| entry.0 <= now;
        for (_, request) in kept.extract_if(.., is_due) {
            sleepers.wake(request.address());
            request.awake();
        }
        !kept.is_empty()
    };
    (stopper, std::thread::spawn(move || listener.serve(&mut rescue)))
}

#[test]
fn a_stray_read_and_a_stray_write_wake_and_go_on() {
    let output = in_child("a_stray_read_and_a_stray_write_wake_and_go_on", || {
        let sleepers = Sleepers::new(2);
        let (stopper, thread) = sleepers.listen();
        let [first, second] = [0, 1].map(|at| sleepers.all[at].range);
        assert_eq!(read(first.start + 77), byte_at(first.start + 77));
        write(second.end() - 1, 99);
        assert_eq!(read(second.end() - 1), 99);
        for range in [first, second] {
            assert!(
                (range.start..range.end() - 1).all(|address| read(address) == byte_at(address))
            );
        }
        assert_eq!(sleepers.wakes(), 2);
        drop(stopper);
        thread.join().unwrap();
        assert!(guard::listen(LONG).is_some(), "the next one may listen");
    });
    assert_survived(&output);
}

/// More threads than slots: of eight spans, each thread reads one and then the next.
#[test]
fn many_threads_meet_the_same_and_different_spans() {
    const THREADS: usize = 2 * RESCUES_MAX;
    let output = in_child("many_threads_meet_the_same_and_different_spans", || {
        let sleepers = Sleepers::new(8);
        let _listener = sleepers.listen();
        let together = Arc::new(Barrier::new(THREADS));
        let threads: Vec<_> = (0..THREADS)
            .map(|number| {
                let together = Arc::clone(&together);
                std::thread::spawn(move || {
                    together.wait();
                    for at in [number, number + 1] {
                        let range = sleepers.all[at % sleepers.all.len()].range;
                        let page = number % PAGES * os_page_bytes();
                        for address in range.start + page..range.start + page + os_page_bytes() {
                            assert_eq!(read(address), byte_at(address));
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(sleepers.wakes(), 8);
    });
    assert_survived(&output);
}

#[test]
fn a_span_that_is_waking_is_waited_for() {
    let output = in_child("a_span_that_is_waking_is_waited_for", || {
        let sleepers = Sleepers::new(1);
        let sleeper = &sleepers.all[0];
        let span = sleeper.span.lock().unwrap().unwrap();
        let staged = sleepers.device.stage(span, Fill::Zero).unwrap();
        let waking = Mutex::new(Some(staged));
        let _listener = serve(LONG, move |request| {
            // A wake that had begun before the access ends some time later.
            std::thread::sleep(Duration::from_millis(50));
            let staged = waking.lock().unwrap().take();
            staged.into_iter().for_each(|staged| sleepers.device.publish(staged).unwrap());
            request.awake();
        });
        assert_eq!(read(sleeper.range.start + 9), 0);
    });
    assert_survived(&output);
}

#[test]
fn a_refusal_that_is_late_is_judged_again() {
    let output = in_child("a_refusal_that_is_late_is_judged_again", || {
        let sleepers = Sleepers::new(1);
        let start = sleepers.all[0].range.start;
        let _listener = serve(LONG, |request| {
            sleepers.wake(request.address());
            request.failed("another thread has woken it meanwhile");
        });
        assert_eq!(read(start), byte_at(start));
    });
    assert_survived(&output);
}

#[test]
fn a_wake_that_fails_ends_the_process_with_its_reason() {
    let output = in_child("a_wake_that_fails_ends_the_process_with_its_reason", || {
        let sleepers = Sleepers::new(1);
        let _listener = serve(LONG, |request| request.failed("the file ends\nearly"));
        read(sleepers.all[0].range.start);
    });
    let why = "(tag \"prefix\", layer 0, asleep): it did not wake (the file ends?early); the process stops here\n";
    assert_killed(&output, why);
}

#[test]
fn a_listener_that_panics_fails_its_requests() {
    let output = in_child("a_listener_that_panics_fails_its_requests", || {
        let sleepers = Sleepers::new(1);
        std::panic::set_hook(Box::new(|_| {}));
        let _listener = serve(LONG, |_request| panic!("on purpose"));
        read(sleepers.all[0].range.start);
    });
    assert_killed(&output, "it did not wake (nobody woke it); the process stops here\n");
}

#[test]
fn a_wake_that_takes_too_long_ends_the_process() {
    let output = in_child("a_wake_that_takes_too_long_ends_the_process", || {
        let sleepers = Sleepers::new(1);
        let _listener = serve(Duration::from_millis(120), |request| {
            std::thread::sleep(LONG);
            request.awake();
        });
        read(sleepers.all[0].range.start);
    });
    assert_killed(&output, "it did not wake within 120 ms; the process stops here\n");
}

/// The second access is taken up while the first is waited for, and each is answered in its time.
#[test]
fn an_access_does_not_wait_behind_another() {
    const LIMIT: Duration = Duration::from_secs(1);
    let output = in_child("an_access_does_not_wait_behind_another", || {
        let sleepers = Sleepers::new(2);
        let [first, second] = [0, 1].map(|at| sleepers.all[at].range.start);
        let delay = move |address| Duration::from_millis(if address == first { 900 } else { 300 });
        let _listener = serve_late(sleepers, LIMIT, delay);
        let reader = std::thread::spawn(move || read(first) == byte_at(first));
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!((read(second), sleepers.wakes()), (byte_at(second), 1), "before the first");
        assert!(reader.join().unwrap());
    });
    assert_survived(&output);
}

/// A limit, and a delay of which two exceed it.
const LIMIT: Duration = Duration::from_millis(1500);
const DELAY: Duration = Duration::from_millis(900);

/// The limit is one of the time in which nothing goes on: each answer is progress for the later ones.
#[test]
fn a_wait_goes_on_while_others_are_answered() {
    let output = in_child("a_wait_goes_on_while_others_are_answered", || {
        let sleepers = Sleepers::new(3);
        let starts = [0, 1, 2].map(|at| sleepers.all[at].range.start);
        let delay =
            move |address| DELAY * (1 + starts.iter().filter(|it| **it < address).count() as u32);
        let (stopper, listener) = serve_late(sleepers, LIMIT, delay);
        let readers =
            starts.map(|address| std::thread::spawn(move || read(address) == byte_at(address)));
        for thread in readers {
            assert!(thread.join().unwrap());
        }
        drop(stopper);
        listener.join().unwrap();
    });
    assert_survived(&output);
}

/// A service notes that a wake goes on before it ends.
#[test]
fn a_wait_goes_on_while_progress_is_noted() {
    let output = in_child("a_wait_goes_on_while_progress_is_noted", || {
        let sleepers = Sleepers::new(1);
        let start = sleepers.all[0].range.start;
        let _listener = serve_late(sleepers, LIMIT, |_| 3 * DELAY);
        let noting = std::thread::spawn(|| {
            for _ in 0..2 {
                std::thread::sleep(DELAY);
                guard::note_progress();
            }
        });
        assert_eq!(read(start), byte_at(start));
        noting.join().unwrap();
    });
    assert_survived(&output);
}

/// The slots are full of threads that wait for a listener that does not come.
#[test]
fn a_thread_without_a_slot_waits_no_longer_than_the_limit() {
    let output = in_child("a_thread_without_a_slot_waits_no_longer_than_the_limit", || {
        let sleepers = Sleepers::new(1);
        let (_listener, _stopper) = guard::listen(Duration::from_millis(300)).unwrap();
        let threads: Vec<_> = (0..RESCUES_MAX + 8)
            .map(|_| std::thread::spawn(|| read(sleepers.all[0].range.start)))
            .collect();
        threads.into_iter().for_each(|thread| drop(thread.join()));
    });
    assert_killed(&output, "it did not wake within 300 ms; the process stops here\n");
}

/// What the message says where nobody is asked.
const STRICT: &str = "asleep): wake it first; the process stops here\n";

#[test]
fn an_access_after_the_end_of_listening_ends_the_process() {
    let output = in_child("an_access_after_the_end_of_listening_ends_the_process", || {
        let sleepers = Sleepers::new(2);
        let (stopper, thread) = sleepers.listen();
        read(sleepers.all[0].range.start);
        drop(stopper);
        thread.join().unwrap();
        read(sleepers.all[1].range.start);
    });
    assert_killed(&output, STRICT);
}

#[test]
fn an_access_of_the_runtimes_own_thread_ends_the_process() {
    let output = in_child("an_access_of_the_runtimes_own_thread_ends_the_process", || {
        let sleepers = Sleepers::new(1);
        let _listener = sleepers.listen();
        let _own = guard::own_thread();
        read(sleepers.all[0].range.start);
    });
    assert_killed(&output, STRICT);
}

#[test]
fn an_access_of_a_stream_ends_the_process() {
    let output = in_child("an_access_of_a_stream_ends_the_process", || {
        let sleepers = Sleepers::new(1);
        let _listener = sleepers.listen();
        let stream = sleepers.device.create_stream("callbacks").unwrap();
        let work = |_| {
            read(sleepers.all[0].range.start);
        };
        sleepers.device.callback(&stream, Box::new(work)).unwrap();
        std::thread::sleep(LONG);
    });
    assert_killed(&output, STRICT);
}

#[test]
fn an_access_of_the_listener_ends_the_process() {
    let output = in_child("an_access_of_the_listener_ends_the_process", || {
        let sleepers = Sleepers::new(2);
        let _listener = serve(LONG, |_request| {
            read(sleepers.all[1].range.start);
        });
        read(sleepers.all[0].range.start);
    });
    assert_killed(&output, STRICT);
}

#[test]
fn a_forked_child_is_not_rescued() {
    let output = in_child("a_forked_child_is_not_rescued", || {
        let sleepers = Sleepers::new(1);
        let _listener = sleepers.listen();
        let start = sleepers.all[0].range.start;
        let began = Instant::now();
        // SAFETY: the child only reads and dies.
        let child = unsafe { libc::fork() };
        if child == 0 {
            read(start);
        }
        let mut status = 0;
        // SAFETY: our own child and our own place.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV);
        assert!(began.elapsed() < LONG);
        assert_eq!(sleepers.wakes(), 0);
        assert_eq!(read(start), byte_at(start));
    });
    assert_survived(&output);
    assert!(said(&output).ends_with(STRICT), "{output:?}");
}

/// A signal that arrives meanwhile does not end the wait. It is delivered behind it: an alternate stack of the thread
/// may have no room for a second signal's registers.
#[test]
fn a_wait_goes_on_after_a_signal() {
    static ARRIVED: AtomicBool = AtomicBool::new(false);
    extern "C" fn arrive(_: i32) {
        ARRIVED.store(true, Ordering::Relaxed);
    }
    let output = in_child("a_wait_goes_on_after_a_signal", || {
        let handler: extern "C" fn(i32) = arrive;
        // SAFETY: the handler stores an atomic.
        unsafe { libc::signal(libc::SIGUSR1, handler as usize) };
        let sleepers = Sleepers::new(1);
        let start = sleepers.all[0].range.start;
        let _listener = serve(LONG, |request| {
            for _ in 0..20 {
                // SAFETY: a signal to a thread of this process.
                unsafe {
                    let (process, thread) = (libc::getpid(), request.thread());
                    libc::syscall(libc::SYS_tgkill, process, thread, libc::SIGUSR1);
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            assert!(!ARRIVED.load(Ordering::Relaxed));
            assert_eq!(request.access(), "read");
            sleepers.wake(request.address());
            request.awake();
        });
        assert_eq!(read(start), byte_at(start));
        assert!(ARRIVED.load(Ordering::Relaxed));
    });
    assert_survived(&output);
}
