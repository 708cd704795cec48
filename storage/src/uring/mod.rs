//! File I/O through io_uring: one ring per thread, with the file and lent memory registered.
//!
//! One thread submits and reaps; others only register memory, which the kernel synchronises.
//! - **U1** One thread at a time uses a ring's two queues: the owner of its [`Ring`].
//! - **U2** A request's memory is lent until the ring has answered it: the ring is not dropped
//!   before, and a request that is answered without the kernel is never submitted later.
//! - **U3** A slot of registered memory is used only for a request inside the memory it holds now.
#![expect(unsafe_code, reason = "shared rings and memory by address")]

mod buffers;
mod kernel;

pub(super) use buffers::Buffers;
pub(crate) use kernel::KernelRing;

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::descriptors::has_common_identity;
use super::error::IoOperation;
use super::fallback::Fallback;
use super::queue::{Answer, Queue, Request};
use super::storage::DirectFile;

/// Consecutive temporary errors of the kernel after which the ring is given up, and the pause between
/// them.
const ENTER_ATTEMPTS_MAX: u32 = 1000;
const ENTER_PAUSE: Duration = Duration::from_micros(100);
/// Requests that fail in the ring, but not in the file, after which the ring is given up.
const REFUSALS_MAX: u32 = 16;
/// The file's slot in the ring's table.
const FILE: types::Fixed = types::Fixed(0);

/// Why there is no ring: the step and the error.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) what: &'static str,
    pub(super) error: io::Error,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.error)
    }
}

/// Creates a ring for `depth` requests to `file`.
pub(super) fn set_up(file: &DirectFile, depth: usize) -> Result<KernelRing, Refusal> {
    let refused = |what| move |error| Refusal { what, error };
    let entries = depth as u32;
    let ring = match IoUring::builder().dontfork().setup_coop_taskrun().build(entries) {
        // Before Linux 5.19: each completion interrupts the thread.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            IoUring::builder().dontfork().build(entries)
        }
        built => built,
    }
    .map_err(refused("io_uring_setup"))?;
    let ring = KernelRing::new(ring);
    tell_apart(ring.as_raw_fd())?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(refused("asking io_uring what it can"))?;
    if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::Write::CODE) {
        let error = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        return Err(Refusal { what: "io_uring reads and writes", error });
    }
    ring.submitter()
        .register_files(&[file.as_raw_fd()])
        .map_err(refused("registering the file with io_uring"))?;
    Ok(ring)
}

/// Refuses a ring whose descriptor has the identity of others: once the program has closed it, one of the program's own
/// would be taken for it.
pub(super) fn tell_apart(fd: RawFd) -> Result<(), Refusal> {
    if !has_common_identity(fd) {
        return Ok(());
    }
    let error = io::Error::new(
        io::ErrorKind::Unsupported,
        "its descriptor has the inode of all descriptors without a file; accepted: an inode of its own",
    );
    Err(Refusal { what: "telling a ring from other descriptors", error })
}

/// A thread's queue through a ring.
pub(super) struct Ring {
    ring: Arc<KernelRing>,
    file: Arc<DirectFile>,
    buffers: Arc<Buffers>,
    depth: usize,
    /// Requests that the kernel has not taken, in order.
    asked: VecDeque<(u64, Request)>,
    /// Requests that the kernel has.
    flying: Vec<(u64, Request)>,
    /// Requests that failed in the ring, but not in the file.
    refusals: u32,
    /// Nothing is submitted any more.
    given_up: bool,
    /// The reason, for the statistics of the tier.
    note: Arc<Fallback>,
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("depth", &self.depth)
            .field("asked", &self.asked.len())
            .field("flying", &self.flying.len())
            .field("given_up", &self.given_up)
            .finish_non_exhaustive()
    }
}

impl Ring {
    pub(super) fn new(
        ring: Arc<KernelRing>,
        file: Arc<DirectFile>,
        buffers: Arc<Buffers>,
        depth: usize,
        note: Arc<Fallback>,
    ) -> Self {
        let (asked, flying) = (VecDeque::with_capacity(depth), Vec::with_capacity(depth));
        Self { ring, file, buffers, depth, asked, flying, refusals: 0, given_up: false, note }
    }

    fn entry(&self, token: u64, request: &Request) -> squeue::Entry {
        let (at, memory) = (request.offset, &request.memory);
        let (start, bytes) = (memory.address() as *mut u8, memory.bytes() as u32);
        let entry = match (request.operation, self.buffers.find(memory)) {
            (IoOperation::Read, None) => opcode::Read::new(FILE, start, bytes).offset(at).build(),
            (IoOperation::Write, None) => opcode::Write::new(FILE, start, bytes).offset(at).build(),
            (IoOperation::Read, Some(slot)) => {
                opcode::ReadFixed::new(FILE, start, bytes, slot).offset(at).build()
            }
            (IoOperation::Write, Some(slot)) => {
                opcode::WriteFixed::new(FILE, start, bytes, slot).offset(at).build()
            }
        };
        entry.user_data(token)
    }

    /// Submits the pending requests and waits for `wanted` answers.
    fn enter(&mut self, wanted: usize) -> io::Result<()> {
        // In a batch of at least one chunk, 0.2 µs.
        let entered = self.ring.check().and_then(|()| self.ring.submit_and_wait(wanted));
        // SAFETY: U1.
        let left = unsafe { self.ring.submission_shared() }.len();
        while self.asked.len() > left {
            self.flying.extend(self.asked.pop_front());
        }
        entered.map(drop)
    }

    /// Returns a completed request and its result: bytes, or a negative errno.
    fn reap(&mut self) -> Option<(u64, Request, i32)> {
        // SAFETY: U1.
        let over = unsafe { self.ring.completion_shared() }.next()?;
        let at = self.flying.iter().position(|(token, _)| *token == over.user_data());
        debug_assert!(at.is_some(), "{:#x} is not with the kernel", over.user_data());
        let (token, request) = self.flying.swap_remove(at?);
        Some((token, request, over.result()))
    }

    fn next_answer(&mut self) -> Option<Answer> {
        let (token, request, result) = self.reap()?;
        let result = match usize::try_from(result) {
            Ok(bytes) => Ok(bytes),
            Err(_) => self.answer_refused(&request, -result),
        };
        Some(Answer { token, result })
    }

    /// Executes a request that failed in the ring: it may fail for reasons of its own, such as a lack of
    /// kernel threads. The kernel no longer uses the memory.
    fn answer_refused(&mut self, request: &Request, errno: i32) -> io::Result<usize> {
        let answer = request.execute(&*self.file);
        if answer.is_ok() {
            self.refusals += 1;
            if self.refusals == REFUSALS_MAX {
                self.give_up("a request through io_uring", &io::Error::from_raw_os_error(errno));
            }
        }
        answer
    }

    /// From here on this thread executes new requests; the kernel answers those it has.
    fn give_up(&mut self, what: &str, error: &io::Error) {
        self.given_up = true;
        self.note.set(format!("{what}: {error}; a thread continues without it"));
    }

    fn wait_without(&mut self) -> Option<Answer> {
        if let Some((token, request)) = self.asked.pop_front() {
            return Some(Answer { token, result: request.execute(&*self.file) });
        }
        // Without a limit, like a blocking read: the memory is lent to the kernel (U2).
        while !self.flying.is_empty() {
            std::thread::sleep(ENTER_PAUSE);
            if let Some(answer) = self.next_answer() {
                return Some(answer);
            }
        }
        None
    }
}

impl Queue for Ring {
    fn depth(&self) -> usize {
        self.depth
    }

    fn push(&mut self, token: u64, request: Request) {
        let entry = self.entry(token, &request);
        self.asked.push_back((token, request));
        if self.given_up {
            return;
        }
        // SAFETY: the queue U1; the memory U2, and `IoMemory::new`'s contract; the slot U3; the
        // file is open as long as `self.file`.
        let pushed = unsafe { self.ring.submission_shared().push(&entry) };
        debug_assert!(pushed.is_ok(), "more than {} unanswered", self.depth);
        if pushed.is_err() {
            // This thread executes it, like those after it.
            return self.give_up("io_uring", &io::Error::other("the submission queue is full"));
        }
        // The disk must stay busy while the next chunks are summed. Otherwise one call submits several.
        if self.flying.len() < self.depth.div_ceil(2) {
            // An error recurs in `wait`, which handles it.
            let _ = self.enter(0);
        }
    }

    fn wait(&mut self) -> Option<Answer> {
        let mut attempts = 0;
        // Ends: the kernel answers its requests, or returns at most this many temporary errors.
        while attempts < ENTER_ATTEMPTS_MAX {
            if let Some(answer) = self.next_answer() {
                return Some(answer);
            }
            if self.given_up || (self.flying.is_empty() && self.asked.is_empty()) {
                return self.wait_without();
            }
            match self.enter(1).map_err(|e| (e.raw_os_error(), e)) {
                Ok(()) => attempts = 0,
                Err((Some(libc::EINTR), _)) => {}
                Err((Some(libc::EAGAIN | libc::EBUSY), _)) => {
                    attempts += 1;
                    std::thread::sleep(ENTER_PAUSE);
                }
                Err((_, e)) => self.give_up("io_uring_enter", &e),
            }
        }
        self.give_up("io_uring_enter", &io::Error::from_raw_os_error(libc::EAGAIN));
        self.wait_without()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // U2: the kernel may still be filling memory. Requests that it does not have need no answer.
        while !self.flying.is_empty() {
            if self.reap().is_none() {
                std::thread::sleep(ENTER_PAUSE);
            }
        }
    }
}
