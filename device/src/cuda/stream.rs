//! Streams of the runtime and of the trainer, and their callback threads.
//!
//! A callback runs on a thread of the runtime that waits for an event, not inside the driver, where it
//! could not call the device and would delay the stream's next copy.

use std::sync::Arc;

use super::entries::{Entries, Handle, is_complete, read};
use super::error::Code;
use super::event::Event;
use super::space::Space;
use crate::sync::Mutex;
use crate::worker::Worker;
use crate::{AddressRange, Callback, DeviceError, Operation};

/// `CU_STREAM_NON_BLOCKING`: no implicit order with the default stream.
const NON_BLOCKING: u32 = 1;
/// `CU_STREAM_PER_THREAD`: a different stream on each thread.
pub(super) const PER_THREAD: Handle = 2;
/// `CU_STREAM_CAPTURE_STATUS_NONE`.
const NOT_CAPTURING: i32 = 0;

/// Work to run when an event completes.
type PendingCallback = (Event, Callback);

/// An ordered queue of a GPU. Clones identify the same queue.
#[derive(Clone, Debug)]
pub struct Stream(Arc<Queue>);

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        self.handle() == other.handle()
    }
}

#[derive(Debug)]
struct Queue {
    handle: Handle,
    is_owned: bool,
    name: String,
    /// Started by the first callback.
    callbacks: Mutex<Option<Arc<Worker<PendingCallback>>>>,
    space: Arc<Space>,
}

/// Creates a stream, which the caller destroys.
pub(super) fn create(entries: &Entries) -> Result<Handle, Code> {
    // SAFETY: it writes one handle.
    read(|handle| unsafe { (entries.stream_create)(handle, NON_BLOCKING, 0) })
}

impl Stream {
    /// A stream that is destroyed on drop, if `is_owned`.
    pub(super) fn new(space: &Arc<Space>, name: &str, handle: Handle, is_owned: bool) -> Self {
        let (name, space) = (name.to_owned(), Arc::clone(space));
        Self(Arc::new(Queue { handle, is_owned, name, callbacks: Mutex::default(), space }))
    }

    pub(super) fn handle(&self) -> Handle {
        self.0.handle
    }

    /// Queries the driver, except for streams of ours.
    fn is_captured(&self) -> Result<bool, Code> {
        if self.0.is_owned {
            return Ok(false);
        }
        let query = self.0.space.context.entries.stream_is_capturing;
        // SAFETY: it writes one number; the caller of `foreign_stream` keeps the stream alive.
        let status = read(|status| unsafe { query(self.0.handle, status) })?;
        Ok(status != NOT_CAPTURING)
    }

    /// Returns the code that a refused call on this stream stands for. Of a stream that was destroyed the driver may say that
    /// its context was; the context lives if a stream of ours is known.
    fn refusal(&self, code: Code) -> Code {
        let space = &self.0.space;
        if code != Code::CONTEXT_IS_DESTROYED || self.0.is_owned {
            return code;
        }
        // SAFETY: a live stream of ours; nothing is queued.
        let answer = unsafe { (space.context.entries.stream_query)(space.idle_stream) };
        if is_complete(answer).is_ok() { Code::INVALID_HANDLE } else { code }
    }

    /// Runs `work` on the callback thread after `event` of this stream.
    pub(super) fn call_after(&self, event: Event, work: Callback) -> Result<(), DeviceError> {
        let callbacks = {
            let mut callbacks = self.0.callbacks.lock();
            match &*callbacks {
                Some(callbacks) => Arc::clone(callbacks),
                None => {
                    let run = |(event, work): PendingCallback| work(event.synchronize());
                    Arc::clone(callbacks.insert(Worker::new(&self.0.name, run)?))
                }
            }
        };
        callbacks.submit((event, work), Operation::Callback)
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if !self.is_owned {
            return;
        }
        let context = &self.space.context;
        if let Ok(_gpu) = context.enter(Operation::CreateStream) {
            // Queued work still runs. It fails only if the driver is gone, and the stream with it.
            // SAFETY: created by us, and this is the last handle to it.
            unsafe { (context.entries.stream_destroy)(self.handle) };
        }
    }
}

impl super::CudaDevice {
    /// Whether a stream is being captured into a graph, also if the capture has failed.
    ///
    /// # Errors
    /// `DeviceLost`; `Refused`.
    pub fn is_captured(&self, stream: &Stream) -> Result<bool, DeviceError> {
        let range = AddressRange::default();
        self.space.context.call(Operation::Event, range, |_| match stream.is_captured() {
            // The legacy stream is never captured: a stream ordered with it is.
            Err(Code::CAPTURE_IMPLICIT) => Ok(false),
            answer => answer.map_err(|code| stream.refusal(code)),
        })
    }
}

impl Space {
    /// Runs `queue` with the context current. Refuses a stream that is being captured into a graph: the work
    /// would run with every replay instead of now.
    pub(super) fn queue<T>(
        self: &Arc<Self>,
        stream: &Stream,
        operation: Operation,
        range: AddressRange,
        queue: impl FnOnce() -> Result<T, Code>,
    ) -> Result<T, DeviceError> {
        self.context.call(operation, range, |_| {
            let queued = match stream.is_captured() {
                Ok(true) => Err(Code::CAPTURE_UNSUPPORTED),
                Ok(false) => queue(),
                Err(code) => Err(code),
            };
            queued.map_err(|code| stream.refusal(code))
        })
    }

    /// Records an event on `stream`, unless the stream is being captured into a graph.
    pub(super) fn record(
        self: &Arc<Self>,
        stream: &Stream,
        is_timed: bool,
    ) -> Result<Event, DeviceError> {
        self.queue(stream, Operation::Event, AddressRange::default(), || {
            let event = Event::record(self, stream.handle(), is_timed)?;
            // Another thread may have begun a capture before the record, which then is part of it: a query of the event would
            // invalidate the capture.
            match stream.is_captured() {
                Ok(true) => Err(Code::CAPTURE_UNSUPPORTED),
                _ => Ok(event),
            }
        })
    }
}
