//! Streams of the host device: one worker thread and one bounded queue each.
//!
//! Nothing of a stream runs in a forked child: the threads are not there. A child must not call
//! into the device at all; it inherits memory as it was (sleeping ranges inaccessible).

use std::sync::Arc;

use super::event::{Event, Flag};
use super::pages::Space;
use crate::worker::Worker;
use crate::{Callback, DeviceError};

/// An ordered queue of work, or the calling thread itself. Clones name the same queue; the last
/// one completes what is pending and ends the thread.
#[derive(Clone, Debug)]
pub struct Stream(Option<Arc<Worker<Work>>>);

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(ours), Some(theirs)) => Arc::ptr_eq(ours, theirs),
            (ours, theirs) => ours.is_none() && theirs.is_none(),
        }
    }
}

impl Stream {
    /// The stream of whichever thread uses it.
    pub(super) const fn caller() -> Self {
        Self(None)
    }

    pub(super) fn of(worker: Arc<Worker<Work>>) -> Self {
        Self(Some(worker))
    }

    /// The worker, unless this is the calling thread.
    pub(super) fn worker(&self) -> Option<&Worker<Work>> {
        self.0.as_deref()
    }
}

/// One piece of work.
pub(super) enum Work {
    Signal(Arc<Flag>),
    Wait(Event),
    Copy { destination: usize, source: usize, bytes: usize },
    Zero { start: usize, bytes: usize },
    Run(Callback),
}

/// Starts a stream's thread, which keeps `space` alive: its work may copy there to the last.
pub(super) fn start(name: &str, space: Arc<Space>) -> Result<Arc<Worker<Work>>, DeviceError> {
    Worker::new(name, move |work| {
        let _kept = &space;
        match work {
            Work::Signal(flag) => flag.set(),
            Work::Wait(event) => event.wait(),
            // SAFETY: the caller of `Device::copy` keeps both ranges valid until the stream
            // has passed this point, and they do not overlap.
            Work::Copy { destination, source, bytes } => unsafe {
                copy_now(destination, source, bytes);
            },
            // SAFETY: the caller of `Device::zero` keeps the range valid likewise.
            Work::Zero { start, bytes } => unsafe { zero_now(start, bytes) },
            Work::Run(work) => work(Ok(())),
        }
    })
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

/// Zeroes on the calling thread.
///
/// # Safety
/// The range is valid, and nobody else uses it.
pub(super) unsafe fn zero_now(start: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller's.
        unsafe { std::ptr::write_bytes(start as *mut u8, 0, bytes) };
    }
}
