//! Threads that do one thing after the other, from a bounded queue.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use crate::priority::wait_our_turn;
use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::{DeviceError, Operation};

/// The most work one worker holds. A full queue makes the submitter wait for room.
pub const QUEUE_LEN_MAX: usize = 1024;

thread_local! {
    /// Whether this thread may not wait for room in a queue. No destructor, so that it costs nothing
    /// at thread exit.
    static NEVER_WAITS: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread is one of the runtime's own.
    static IS_OURS: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is one of the runtime's own: of a stream, a teller of callbacks, or
/// one that [`enlist`]ed. Others wait for what such a thread does, so it must never wait for memory
/// or for work of theirs.
#[must_use]
pub fn is_ours() -> bool {
    IS_OURS.get()
}

/// Makes the calling thread one of the runtime's own, to its end. When it wakes it no longer pushes
/// a trainer's thread off its processor.
pub fn enlist() {
    IS_OURS.set(true);
    wait_our_turn();
}

/// Runs `work`, in which nothing waits for room in a stream's queue: what finds none is refused
/// (`EAGAIN`) instead.
pub fn without_waiting<T>(work: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            NEVER_WAITS.set(self.0);
        }
    }
    let _restore = Restore(NEVER_WAITS.replace(true));
    work()
}

/// What submitters and the thread share.
struct Queue<W> {
    state: Mutex<QueueState<W>>,
    /// Work came, or the end.
    work: Condvar,
    /// Room came.
    room: Condvar,
}

struct QueueState<W> {
    pending: VecDeque<W>,
    /// No more work is taken; what is pending is done.
    closed: bool,
    /// A piece of work panicked: the device is lost, but nobody who waits is left waiting.
    broken: bool,
}

/// A thread that does its work in order. The last handle completes what is pending and ends it.
pub(crate) struct Worker<W> {
    queue: Arc<Queue<W>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    name: String,
}

impl<W> std::fmt::Debug for Worker<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<W> Queue<W> {
    fn new() -> Self {
        let state = QueueState { pending: VecDeque::new(), closed: false, broken: false };
        Self { state: Mutex::new(state), work: Condvar::new(), room: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState<W>> {
        self.state.lock()
    }

    /// The next work, or `None` when the queue is closed and empty.
    fn next(&self) -> Option<W> {
        let mut state = self.lock();
        loop {
            if let Some(work) = state.pending.pop_front() {
                self.room.notify_one();
                return Some(work);
            }
            if state.closed {
                return None;
            }
            self.work.wait(&mut state);
        }
    }

    fn close(&self) {
        self.lock().closed = true;
        self.work.notify_all();
        self.room.notify_all();
    }

    /// The life of the thread.
    fn serve(&self, mut run: impl FnMut(W)) {
        NEVER_WAITS.set(true);
        enlist();
        while let Some(work) = self.next() {
            // A panic must not end the thread: those who wait for later work would wait for ever.
            if catch_unwind(AssertUnwindSafe(|| run(work))).is_err() {
                self.lock().broken = true;
            }
        }
    }
}

impl<W: Send + 'static> Worker<W> {
    /// Starts a thread that does each piece of work by `run`, which lives as long as the thread.
    pub(crate) fn new(
        name: &str,
        run: impl FnMut(W) + Send + 'static,
    ) -> Result<Arc<Self>, DeviceError> {
        let queue = Arc::new(Queue::new());
        let serving = Arc::clone(&queue);
        // A zero byte has no place in a thread's name, and would panic there.
        let name = format!("dormouse-{}", name.replace('\0', ""));
        let spawned = Builder::new().name(name.clone()).spawn(move || serving.serve(run));
        let thread = spawned.map_err(|error| DeviceError::Refused {
            operation: Operation::CreateStream,
            start: 0,
            bytes: 0,
            code: error.raw_os_error().unwrap_or(0),
            reason: error.to_string(),
        })?;
        Ok(Arc::new(Self { queue, thread: Mutex::new(Some(thread)), name }))
    }

    /// Puts `work` at the end of the queue, waiting for room if need be. Threads of streams never
    /// wait here, for two of them might wait for each other: they are refused. So is whoever is inside
    /// [`without_waiting`].
    pub(crate) fn submit(&self, work: W, operation: Operation) -> Result<(), DeviceError> {
        let mut state = self.queue.lock();
        loop {
            if state.closed || state.broken {
                let why = if state.broken { "a callback of it panicked" } else { "it was ended" };
                let reason = format!("stream {}: {why}", self.name);
                return Err(DeviceError::DeviceLost { operation, reason });
            }
            if state.pending.len() < QUEUE_LEN_MAX {
                break;
            }
            if NEVER_WAITS.get() {
                return Err(DeviceError::Refused {
                    operation,
                    start: 0,
                    bytes: 0,
                    code: libc::EAGAIN,
                    reason: format!("stream {}: {QUEUE_LEN_MAX} works are queued", self.name),
                });
            }
            self.queue.room.wait(&mut state);
        }
        state.pending.push_back(work);
        self.queue.work.notify_one();
        Ok(())
    }
}

impl<W> Worker<W> {
    /// Takes no more work, completes what is pending and ends the thread.
    pub(crate) fn end(&self) {
        self.queue.close();
        let thread = self.thread.lock().take();
        // The last clone may go inside a callback, of this stream or of one that this stream waits
        // for: the thread ends by itself then.
        if let Some(thread) = thread.filter(|_| !NEVER_WAITS.get()) {
            // It catches panics of callbacks and has none of its own.
            let _ = thread.join();
        }
    }
}

impl<W> Drop for Worker<W> {
    fn drop(&mut self) {
        self.end();
    }
}
