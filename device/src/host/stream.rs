//! Streams of the host device: one worker thread and one bounded queue each.
//!
//! Nothing of a stream runs in a forked child: the threads are not there. A child must not call
//! into the device at all; it inherits memory as it was (sleeping ranges inaccessible).

use std::cell::Cell;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use super::event::{Event, Flag};
use super::pages::Space;
use crate::{Callback, DeviceError, Operation};

/// The most work one stream holds. A full queue makes the submitter wait for room.
pub const QUEUE_LEN_MAX: usize = 1024;

thread_local! {
    /// Whether this thread is a stream's. No destructor, so that it costs nothing at thread exit.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// An ordered queue of work, or the calling thread itself. Clones name the same queue; the last
/// one completes what is pending and ends the thread.
#[derive(Clone, Debug)]
pub struct Stream(Option<Arc<Worker>>);

impl Stream {
    /// The stream of whichever thread uses it.
    pub(super) const fn caller() -> Self {
        Self(None)
    }

    pub(super) fn of(worker: Arc<Worker>) -> Self {
        Self(Some(worker))
    }

    /// The worker, unless this is the calling thread.
    pub(super) fn worker(&self) -> Option<&Worker> {
        self.0.as_deref()
    }
}

/// One piece of work.
pub(super) enum Work {
    Signal(Arc<Flag>),
    Wait(Event),
    Copy { destination: usize, source: usize, bytes: usize },
    Run(Callback),
}

/// What submitters and the thread share.
#[derive(Default)]
struct Queue {
    state: Mutex<QueueState>,
    /// Work came, or the end.
    work: Condvar,
    /// Room came.
    room: Condvar,
}

#[derive(Default)]
struct QueueState {
    pending: VecDeque<Work>,
    /// No more work is taken; what is pending is done.
    closed: bool,
    /// A callback panicked: the device is lost, but nobody who waits is left waiting.
    broken: bool,
}

/// A stream's thread.
pub(super) struct Worker {
    queue: Arc<Queue>,
    thread: Mutex<Option<JoinHandle<()>>>,
    name: String,
}

impl std::fmt::Debug for Worker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next work, or `None` when the queue is closed and empty.
    fn next(&self) -> Option<Work> {
        let mut state = self.lock();
        loop {
            if let Some(work) = state.pending.pop_front() {
                self.room.notify_one();
                return Some(work);
            }
            if state.closed {
                return None;
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn close(&self) {
        self.lock().closed = true;
        self.work.notify_all();
        self.room.notify_all();
    }

    /// The life of a stream's thread.
    fn serve(&self) {
        IS_WORKER.set(true);
        while let Some(work) = self.next() {
            match work {
                Work::Signal(flag) => flag.set(),
                Work::Wait(event) => event.wait(),
                // SAFETY: the caller of `Device::copy` keeps both ranges valid until the stream
                // has passed this point, and they do not overlap.
                Work::Copy { destination, source, bytes } => unsafe {
                    copy_now(destination, source, bytes);
                },
                // A panic must not end the thread: those who wait for later events would wait
                // for ever.
                Work::Run(work) => {
                    if catch_unwind(AssertUnwindSafe(work)).is_err() {
                        self.lock().broken = true;
                    }
                }
            }
        }
    }
}

/// Copies on the calling thread.
///
/// # Safety
/// Both ranges are valid and do not overlap.
pub(super) unsafe fn copy_now(destination: usize, source: usize, bytes: usize) {
    if bytes == 0 {
        return;
    }
    // SAFETY: the caller's.
    unsafe {
        std::ptr::copy_nonoverlapping(source as *const u8, destination as *mut u8, bytes);
    }
}

impl Worker {
    /// Starts a thread that keeps `space` alive, for its work may copy there to the last.
    pub(super) fn new(name: &str, space: Arc<Space>) -> Result<Arc<Self>, DeviceError> {
        let queue = Arc::new(Queue::default());
        let serving = Arc::clone(&queue);
        // A zero byte has no place in a thread's name, and would panic there.
        let name = format!("dormouse-{}", name.replace('\0', ""));
        let spawned = Builder::new().name(name.clone()).spawn(move || {
            serving.serve();
            drop(space);
        });
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
    /// wait here, for two of them might wait for each other: they are refused.
    pub(super) fn submit(&self, work: Work, operation: Operation) -> Result<(), DeviceError> {
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
            if IS_WORKER.get() {
                return Err(DeviceError::Refused {
                    operation,
                    start: 0,
                    bytes: 0,
                    code: libc::EAGAIN,
                    reason: format!("stream {}: {QUEUE_LEN_MAX} works are queued", self.name),
                });
            }
            state = self.queue.room.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.pending.push_back(work);
        self.queue.work.notify_one();
        Ok(())
    }

    /// Takes no more work, completes what is pending and ends the thread.
    pub(super) fn end(&self) {
        self.queue.close();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The last clone may go inside a callback, of this stream or of one that this stream waits
        // for: the thread ends by itself then.
        if let Some(thread) = thread.filter(|_| !IS_WORKER.get()) {
            // It catches panics of callbacks and has none of its own.
            let _ = thread.join();
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}
