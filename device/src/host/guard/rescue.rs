//! Rescue: a thread that meets an asleep span waits in the handler while another thread wakes the span, and
//! then repeats its access.
//!
//! The handler posts a request to a channel of fixed size (`channel`) and waits on a futex. A [`Listener`] serves
//! the requests on a thread of its own, where it may lock and allocate. It takes requests up while others wait for their
//! span, and a wait is limited only while no wake goes on ([`note_progress`]).
//!
//! # Deadlocks
//! The waiting thread may hold any lock: of the program, of the C library or of the interpreter. The listener's
//! thread must not need one of them. It needs one of ours only if our code accesses a caller's memory while it
//! holds a lock that a wake needs. The time limit of the rescue ends such a wait, and the process with it.
//! A thread that a wake itself may need ([`own_thread`](super::own_thread)) is never rescued, nor is the
//! listener's. A forked child has no listener: its process number differs from the one that was stored.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use super::channel::{Answer, Channel, Posting, REASON_BYTES_MAX, Reason, RescueSlot, Stray};
use super::own_threads::{self, own_thread};
use super::protocol::Access;

/// Limit of the requests at a time. A thread beyond it waits for a slot, within its time limit.
pub const RESCUES_MAX: usize = 64;
/// Time between two looks for a free slot, in nanoseconds.
const NAP_NS: u64 = 1_000_000;
/// Time between two looks of the listener at spans that are waking, in nanoseconds.
const LOOK_NS: u64 = 200_000;

static CHANNEL: Channel<RESCUES_MAX> = Channel {
    slots: [const {
        RescueSlot {
            state: AtomicU32::new(0),
            access: AtomicU32::new(0),
            thread: AtomicU32::new(0),
            address: AtomicUsize::new(0),
            reason: [const { AtomicU64::new(0) }; REASON_BYTES_MAX / 8],
        }
    }; RESCUES_MAX],
    bell: AtomicU32::new(0),
};
/// Whether a listener exists.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);
/// The process of the listener, and how long a thread waits for it. Written before the channel opens.
static PROCESS: AtomicU32 = AtomicU32::new(0);
static WAIT_NS_MAX: AtomicU64 = AtomicU64::new(0);
/// When a wake last went on. The waits compare it with the time only, so it orders nothing.
static PROGRESS_NS: AtomicU64 = AtomicU64::new(0);

/// How a wait in the handler ended.
#[derive(Debug)]
pub(super) enum Rescue {
    /// The access can be repeated.
    Awake,
    /// There is no listener for this thread.
    None,
    /// The span did not wake.
    Failed(Reason),
    /// No wake went on for this time.
    TimedOut { limit_ms: u64 },
}

impl From<Answer> for Rescue {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::Awake => Self::Awake,
            Answer::Failed(reason) => Self::Failed(reason),
        }
    }
}

/// Posts a request and waits for the answer. Async-signal-safe.
pub(super) fn wait(address: usize, access: Access) -> Rescue {
    if !CHANNEL.is_open() || PROCESS.load(Ordering::Relaxed) != process() || own_threads::is_own() {
        return Rescue::None;
    }
    let stray = Stray { address, access, thread: own_threads::current() };
    let limit_ns = WAIT_NS_MAX.load(Ordering::Relaxed);
    let timed_out = || Rescue::TimedOut { limit_ms: limit_ns / 1_000_000 };
    let began_ns = now_ns();
    let deadline_ns = || began_ns.max(PROGRESS_NS.load(Ordering::Relaxed)).saturating_add(limit_ns);
    let index = loop {
        match CHANNEL.post(&stray) {
            Posting::Posted(index) => break index,
            Posting::Closed => return Rescue::None,
            Posting::Full if now_ns() >= deadline_ns() => return timed_out(),
            // Nobody changes this word: it is a nap.
            Posting::Full => {
                let word = AtomicU32::new(0);
                wait_until(&word, 0, now_ns().saturating_add(NAP_NS));
            }
        }
    };
    wake_all(&CHANNEL.bell);
    let word = CHANNEL.word(index);
    loop {
        let seen = word.load(Ordering::Acquire);
        if let Some(answer) = CHANNEL.collect(index) {
            return answer.into();
        }
        let deadline_ns = deadline_ns();
        if now_ns() >= deadline_ns {
            return CHANNEL.leave(index).map_or_else(timed_out, Rescue::from);
        }
        wait_until(word, seen, deadline_ns);
    }
}

/// Serves the requests of the process. Only one exists at a time.
#[derive(Debug)]
pub struct Listener(());

/// Ends the service of its [`Listener`], also by its drop.
#[derive(Debug)]
pub struct Stopper(());

/// Creates the listener of the process; `None` if there is one. From now on a thread that meets an asleep span
/// waits for it, until no wake has gone on for `wait_max`.
#[must_use]
pub fn listen(wait_max: Duration) -> Option<(Listener, Stopper)> {
    if IS_TAKEN.swap(true, Ordering::AcqRel) {
        return None;
    }
    PROCESS.store(process(), Ordering::Relaxed);
    let wait_ns = u64::try_from(wait_max.as_nanos()).unwrap_or(u64::MAX);
    WAIT_NS_MAX.store(wait_ns, Ordering::Relaxed);
    CHANNEL.open();
    Some((Listener(()), Stopper(())))
}

/// Notes that wakes go on: the limit of all waits begins anew. Each answer does this too.
pub fn note_progress() {
    PROGRESS_NS.store(now_ns(), Ordering::Relaxed);
}

impl Drop for Stopper {
    fn drop(&mut self) {
        CHANNEL.close();
        wake_all(&CHANNEL.bell);
    }
}

impl Listener {
    /// Hands requests to `rescue` until the stopper is dropped and none is left. `rescue` returns true if it keeps some,
    /// to be answered when their span is awake: it is then called again, with what was posted meanwhile or, a moment
    /// later, with none. It does not wait for a span. Requests that it drops fail, also if it panics.
    pub fn serve(self, mut rescue: impl FnMut(Vec<Request>) -> bool) {
        let _own = own_thread();
        let mut are_kept = false;
        loop {
            // In this order: what is posted after the bell was heard changes it.
            let heard = CHANNEL.heard();
            let requests: Vec<Request> =
                CHANNEL.take_all().map(|(index, stray)| Request { index, stray }).collect();
            if are_kept || !requests.is_empty() {
                // After a panic the unanswered ones are answered by their drop.
                are_kept = catch_unwind(AssertUnwindSafe(|| rescue(requests))).unwrap_or(false);
                if are_kept {
                    wait_until(&CHANNEL.bell, heard, now_ns().saturating_add(LOOK_NS));
                }
            } else if Channel::<RESCUES_MAX>::is_end(heard) {
                return;
            } else {
                wait_until(&CHANNEL.bell, heard, u64::MAX);
            }
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Also without a stopper, or without service: nobody waits for nothing.
        CHANNEL.close();
        CHANNEL.take_all().for_each(|(index, stray)| drop(Request { index, stray }));
        IS_TAKEN.store(false, Ordering::Release);
    }
}

/// A thread that waits in the handler. A drop fails the request.
#[derive(Debug)]
pub struct Request {
    index: usize,
    stray: Stray,
}

impl Request {
    /// The address that was accessed.
    #[must_use]
    pub const fn address(&self) -> usize {
        self.stray.address
    }

    /// The number of the thread.
    #[must_use]
    pub const fn thread(&self) -> u32 {
        self.stray.thread
    }

    /// The kind of the access: "read", "write" or "read or write".
    #[must_use]
    pub const fn access(&self) -> &'static str {
        self.stray.access.name()
    }

    /// The span is awake: the thread repeats its access.
    pub fn awake(self) {
        self.answer(&Answer::Awake);
        std::mem::forget(self);
    }

    /// The span does not wake: the process ends with a message that has this reason.
    pub fn failed(self, reason: &str) {
        self.answer(&Answer::Failed(cut(reason)));
        std::mem::forget(self);
    }

    fn answer(&self, answer: &Answer) {
        // First: it is what the other threads wait behind.
        note_progress();
        if CHANNEL.answer(self.index, answer) {
            wake_all(CHANNEL.word(self.index));
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.answer(&Answer::Failed(cut("nobody woke it")));
    }
}

/// Returns `text` up to the limit, cut at a character.
fn cut(text: &str) -> Reason {
    let mut reason = [0; REASON_BYTES_MAX];
    let bytes = text.floor_char_boundary(REASON_BYTES_MAX);
    reason[..bytes].copy_from_slice(&text.as_bytes()[..bytes]);
    reason
}

/// Returns the number of this process, a forked child's own. Async-signal-safe.
pub(super) fn process() -> u32 {
    // SAFETY: getpid has no arguments and cannot fail.
    let number = unsafe { libc::syscall(libc::SYS_getpid) };
    u32::try_from(number).unwrap_or(0)
}

/// Returns the monotonic time. Async-signal-safe.
fn now_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a live local. The clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs()
}

/// Waits while `word` is `seen`, at most until `deadline_ns`, or until it is interrupted. Async-signal-safe.
fn wait_until(word: &AtomicU32, seen: u32, deadline_ns: u64) {
    let deadline = libc::timespec {
        tv_sec: libc::time_t::try_from(deadline_ns / 1_000_000_000).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::try_from(deadline_ns % 1_000_000_000).unwrap_or(0),
    };
    // SAFETY: the word is live and the kernel only reads it. Callers check the word and the time again, so the
    // result does not matter.
    let _ = unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT_BITSET | libc::FUTEX_PRIVATE_FLAG,
            seen,
            &raw const deadline,
            null::<u32>(),
            libc::FUTEX_BITSET_MATCH_ANY,
        )
    };
}

/// Wakes the threads that wait on `word`. Async-signal-safe.
fn wake_all(word: &AtomicU32) {
    // SAFETY: the kernel uses the address as a key and reads no memory.
    let _ = unsafe {
        let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        libc::syscall(libc::SYS_futex, word.as_ptr(), operation, i32::MAX)
    };
}
