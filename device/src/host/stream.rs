//! Streams of the host device: one worker thread and one bounded queue each.
//!
//! A forked child has no threads of streams and must not call the device. It inherits the memory as it
//! was; asleep ranges are inaccessible.

use std::sync::Arc;

use super::event::{Event, Flag};
use super::pages::Space;
use crate::worker::Worker;
use crate::{Callback, DeviceError, Operation};

/// An ordered queue of work, or (`None`) the calling thread. Clones identify the same queue; dropping the
/// last one completes the pending work and ends the thread.
#[derive(Clone, Debug)]
pub struct Stream(pub(super) Option<Arc<Worker<Work>>>);

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(ours), Some(theirs)) => Arc::ptr_eq(ours, theirs),
            (ours, theirs) => ours.is_none() && theirs.is_none(),
        }
    }
}

/// A work item of a stream.
pub(crate) enum Work {
    Signal(Arc<Flag>),
    Wait(Event),
    Copy { destination: usize, source: usize, bytes: usize },
    Zero { start: usize, bytes: usize },
    Run(Callback),
}

impl Work {
    /// # Safety
    /// The ranges of a copy or zeroing are valid and used by nothing else, and those of a copy do not overlap.
    unsafe fn run(self) {
        match self {
            Self::Signal(flag) => flag.set(),
            Self::Wait(event) => event.wait(),
            Self::Copy { bytes: 0, .. } | Self::Zero { bytes: 0, .. } => {}
            // SAFETY: the caller's contract.
            Self::Copy { destination, source, bytes } => unsafe {
                std::ptr::copy_nonoverlapping(source as *const u8, destination as *mut u8, bytes);
            },
            // SAFETY: the caller's contract.
            Self::Zero { start, bytes } => unsafe {
                std::ptr::write_bytes(start as *mut u8, 0, bytes);
            },
            Self::Run(work) => work(Ok(())),
        }
    }
}

/// Starts a stream's thread. It keeps `space` alive, which its work may use.
pub(super) fn start(name: &str, space: Arc<Space>) -> Result<Arc<Worker<Work>>, DeviceError> {
    Worker::new(name, move |work: Work| {
        let _kept = &space;
        // SAFETY: the callers of `Device::copy` and `Device::zero` keep the ranges valid until the stream
        // has passed the work.
        unsafe { work.run() };
    })
}

/// Appends `work` to the stream's queue, or runs it if the stream is the calling thread.
///
/// # Safety
/// As [`Device::copy`](crate::Device::copy) and [`Device::zero`](crate::Device::zero).
pub(super) unsafe fn run_or_submit(
    stream: &Stream,
    work: Work,
    operation: Operation,
) -> Result<(), DeviceError> {
    if let Some(worker) = &stream.0 {
        return worker.submit(work, operation);
    }
    // SAFETY: the caller's contract; this thread is the stream.
    unsafe { work.run() };
    Ok(())
}
