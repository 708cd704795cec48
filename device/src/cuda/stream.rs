//! Streams of the runtime and of the trainer, and their callback threads.
//!
//! A callback runs on a thread of the runtime that waits for an event, not inside the driver, where it
//! could not call the device and would delay the stream's next copy.

use std::sync::Arc;

use super::context::Context;
use super::entries::{Handle, check};
use super::error::Code;
use super::event::Event;
use super::space::Space;
use crate::sync::Mutex;
use crate::worker::Worker;
use crate::{AddressRange, Callback, DeviceError, Operation};

/// `CU_STREAM_NON_BLOCKING`: no order with the default stream but what we ask for.
const NON_BLOCKING: u32 = 1;
/// `CU_STREAM_PER_THREAD`: whichever thread's that uses it.
pub(super) const PER_THREAD: Handle = 2;
/// What `cuStreamIsCapturing` says of a stream that is not.
const NOT_CAPTURING: i32 = 0;

/// Work to run when an event completes.
type PendingCallback = (Event, Callback);

/// An ordered queue of a GPU. Clones identify the same queue.
#[derive(Clone, Debug)]
pub struct Stream(Arc<Queue>);

/// The driver's name for it says which queue it is.
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

/// A stream of our own.
pub(super) fn create(context: &Context) -> Result<Handle, Code> {
    let mut handle = 0;
    // SAFETY: it writes one handle; whoever calls destroys it.
    check(unsafe { (context.entries.stream_create)(&raw mut handle, NON_BLOCKING, 0) })?;
    Ok(handle)
}

impl Stream {
    pub(super) fn owned(space: &Arc<Space>, name: &str, handle: Handle) -> Self {
        Self::new(space, name, handle, true)
    }

    pub(super) fn foreign(space: &Arc<Space>, handle: Handle) -> Self {
        Self::new(space, "foreign", handle, false)
    }

    fn new(space: &Arc<Space>, name: &str, handle: Handle, is_owned: bool) -> Self {
        let (name, space) = (name.to_owned(), Arc::clone(space));
        Self(Arc::new(Queue { handle, is_owned, name, callbacks: Mutex::default(), space }))
    }

    pub(super) fn handle(&self) -> Handle {
        self.0.handle
    }

    /// Refuses a stream that is being captured into a graph: what we queued there would run with
    /// every replay, and not now.
    pub(super) fn refuse_capture(&self) -> Result<(), Code> {
        if self.is_captured()? { Err(Code::CAPTURE_UNSUPPORTED) } else { Ok(()) }
    }

    /// Asks the driver, but for streams of ours.
    fn is_captured(&self) -> Result<bool, Code> {
        if self.0.is_owned {
            return Ok(false);
        }
        let mut status = NOT_CAPTURING;
        let entries = self.0.space.context.entries;
        // SAFETY: it writes one number; the caller of `foreign_stream` keeps the stream alive.
        check(unsafe { (entries.stream_is_capturing)(self.0.handle, &raw mut status) })?;
        Ok(status != NOT_CAPTURING)
    }

    /// `Device::callback`, for the point `event` of this stream.
    pub(super) fn tell(&self, event: Event, work: Callback) -> Result<(), DeviceError> {
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
            // What is queued still runs. Fails only where the driver is gone, and the stream too.
            // SAFETY: created by us, and this is the last handle to it.
            unsafe { (context.entries.stream_destroy)(self.handle) };
        }
    }
}

#[cfg(any(feature = "conformance", feature = "faults"))]
impl super::CudaDevice {
    /// Runs `work` inside the driver when `stream` reaches it; later work of the stream waits for
    /// it. It must not call the driver.
    pub(crate) fn host_function(
        &self,
        stream: &Stream,
        work: Box<dyn FnOnce() + Send>,
    ) -> Result<(), DeviceError> {
        /// Runs the work, whose box `data` is.
        unsafe extern "C" fn run(data: *mut std::ffi::c_void) {
            // SAFETY: boxed below, and the driver calls once.
            let work = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
            work();
        }
        let data = Box::into_raw(Box::new(work));
        let launched =
            self.space.queue(stream, Operation::Callback, AddressRange::default(), || {
                let entries = self.space.context.entries;
                // SAFETY: `run` takes what `data` is.
                check(unsafe { (entries.launch_host_function)(stream.handle(), run, data.cast()) })
            });
        if launched.is_err() {
            // SAFETY: boxed above, and the driver will not call.
            drop(unsafe { Box::from_raw(data) });
        }
        launched
    }
}

impl super::CudaDevice {
    /// Whether a stream is being captured into a graph, also where that capture has failed
    /// already.
    ///
    /// # Errors
    /// Whatever the driver says but that.
    pub fn is_captured(&self, stream: &Stream) -> Result<bool, DeviceError> {
        let context = &self.space.context;
        let _gpu = context.enter(Operation::Event)?;
        match stream.is_captured() {
            // The legacy stream never is: another one that is ordered with it.
            Err(Code::CAPTURE_IMPLICIT) => Ok(false),
            answer => answer
                .map_err(|code| context.error(code, Operation::Event, AddressRange::default())),
        }
    }
}

impl Space {
    /// Runs `queue` with the context current, unless `stream` is being captured.
    pub(super) fn queue<T>(
        self: &Arc<Self>,
        stream: &Stream,
        operation: Operation,
        range: AddressRange,
        queue: impl FnOnce() -> Result<T, Code>,
    ) -> Result<T, DeviceError> {
        let _gpu = self.context.enter(operation)?;
        let queued = stream.refuse_capture().and_then(|()| queue());
        queued.map_err(|code| self.context.error(code, operation, range))
    }
}
