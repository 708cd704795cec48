//! Worker threads with a bounded FIFO queue.

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{Builder, JoinHandle};

use crate::priority::use_batch_policy;
use crate::sync::{Condvar, Mutex};
use crate::{AddressRange, DeviceError, Operation, with_signals_blocked};

/// Capacity of a worker's queue. Submitting to a full queue waits.
pub const QUEUE_LEN_MAX: usize = 1024;

thread_local! {
    /// Whether this thread must not wait for a full queue. No destructor: no cost at thread exit.
    static NEVER_WAITS: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread belongs to the runtime.
    static IS_RUNTIME_THREAD: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread belongs to the runtime: a stream, a callback thread, or a thread that has
/// called [`register_runtime_thread`]. Other threads wait for it, so it must never wait for memory or
/// for them.
#[must_use]
pub fn is_runtime_thread() -> bool {
    IS_RUNTIME_THREAD.get()
}

/// Marks the calling thread as a thread of the runtime, permanently. It no longer preempts a trainer's
/// thread when it wakes.
pub fn register_runtime_thread() {
    IS_RUNTIME_THREAD.set(true);
    use_batch_policy();
}

/// Runs `work` without waiting for full stream queues: submitting to one fails with `EAGAIN` instead.
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

/// The state shared by submitters and the thread.
struct Queue<W> {
    state: Mutex<QueueState<W>>,
    /// Notified when work arrives or the queue closes.
    work: Condvar,
    /// Notified when the queue has room.
    room: Condvar,
}

struct QueueState<W> {
    pending: VecDeque<W>,
    /// No more work is accepted; pending work is completed.
    closed: bool,
    /// A work item panicked: the device is lost; all waits still end.
    broken: bool,
}

/// A thread that runs its work in order. Dropping the last handle completes the pending work and ends it.
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

    /// Returns the next work, or `None` when the queue is closed and empty.
    fn next(&self) -> Option<W> {
        let mut state = self.state.lock();
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
        self.state.lock().closed = true;
        self.work.notify_all();
        self.room.notify_all();
    }

    /// Runs work until the queue is closed and empty.
    fn serve(&self, mut run: impl FnMut(W)) {
        NEVER_WAITS.set(true);
        register_runtime_thread();
        let _own = crate::host::guard::own_thread();
        while let Some(work) = self.next() {
            // A panic must not end the thread: waits for later work would never end.
            if catch_unwind(AssertUnwindSafe(|| run(work))).is_err() {
                self.state.lock().broken = true;
            }
        }
    }
}

impl<W: Send + 'static> Worker<W> {
    /// Starts a thread that calls `run` with each work item.
    pub(crate) fn new(
        name: &str,
        run: impl FnMut(W) + Send + 'static,
    ) -> Result<Arc<Self>, DeviceError> {
        let queue = Arc::new(Queue::new());
        let serving = Arc::clone(&queue);
        // A thread's name must not contain a zero byte.
        let name = format!("dormouse-{}", name.replace('\0', ""));
        let builder = Builder::new().name(name.clone());
        let spawned = with_signals_blocked(|| builder.spawn(move || serving.serve(run)));
        let (operation, range) = (Operation::CreateStream, AddressRange::default());
        let thread = spawned.map_err(|error| DeviceError::of_system(operation, range, &error))?;
        Ok(Arc::new(Self { queue, thread: Mutex::new(Some(thread)), name }))
    }

    /// Appends `work` to the queue, and waits while it is full. On threads of streams, which might wait
    /// for each other, and inside [`without_waiting`], it fails instead.
    pub(crate) fn submit(&self, work: W, operation: Operation) -> Result<(), DeviceError> {
        let mut state = self.queue.state.lock();
        loop {
            if state.closed || state.broken {
                let why = if state.broken { "a callback panicked" } else { "the stream has ended" };
                let reason = format!("stream {}: {why}", self.name);
                return Err(DeviceError::DeviceLost { operation, reason });
            }
            if state.pending.len() < QUEUE_LEN_MAX {
                break;
            }
            if NEVER_WAITS.get() {
                let reason = format!("stream {}: queue limit reached ({QUEUE_LEN_MAX})", self.name);
                let range = AddressRange::default();
                return Err(DeviceError::refused(operation, range, libc::EAGAIN, reason));
            }
            self.queue.room.wait(&mut state);
        }
        state.pending.push_back(work);
        self.queue.work.notify_one();
        Ok(())
    }
}

impl<W> Worker<W> {
    /// Closes the queue, completes the pending work and ends the thread.
    pub(crate) fn end(&self) {
        self.queue.close();
        let thread = self.thread.lock().take();
        // The last clone may be dropped inside a callback of this stream or of one that it waits for:
        // then the thread ends by itself.
        if let Some(thread) = thread.filter(|_| !NEVER_WAITS.get()) {
            // It catches the panics of callbacks.
            let _ = thread.join();
        }
    }
}

impl<W> Drop for Worker<W> {
    fn drop(&mut self) {
        self.end();
    }
}
