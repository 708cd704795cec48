//! Points in a stream. The driver's events are recycled: making one costs more than recording it.

use std::sync::{Arc, Mutex, PoisonError};

use super::entries::{Handle, check};
use super::error::Code;
use super::space::Space;
use crate::{AddressRange, DeviceError, Operation};

/// The most events kept for use again.
const POOLED_MAX: usize = 1024;
/// `CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING`: who waits sleeps.
const FLAGS: u32 = 1 | 2;

/// A point in a stream. Clones name the same point.
#[derive(Clone, Debug)]
pub struct Event(Arc<Recorded>);

#[derive(Debug)]
struct Recorded {
    handle: Handle,
    space: Arc<Space>,
}

impl Drop for Recorded {
    /// Waits that are queued keep the point they were given, so the event can be recorded anew.
    fn drop(&mut self) {
        self.space.events.give(&self.space, self.handle);
    }
}

/// Events in nobody's hands.
#[derive(Debug, Default)]
pub(super) struct EventPool(Mutex<Vec<Handle>>);

impl EventPool {
    fn take(&self) -> Option<Handle> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    fn give(&self, space: &Space, handle: Handle) {
        let mut pooled = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pooled.len() < POOLED_MAX {
            pooled.push(handle);
            return;
        }
        drop(pooled);
        if let Ok(_gpu) = space.context.enter(OPERATION) {
            // SAFETY: created by us and in nobody's hands.
            unsafe { (space.context.entries.event_destroy)(handle) };
        }
    }

    pub(super) fn take_all(&self) -> Vec<Handle> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

const OPERATION: Operation = Operation::Event;

impl Event {
    pub(super) fn handle(&self) -> Handle {
        self.0.handle
    }

    /// Records a point on `stream`, whose context is current.
    pub(super) fn record(space: &Arc<Space>, stream: Handle) -> Result<Self, Code> {
        let entries = space.context.entries;
        let handle = match space.events.take() {
            Some(handle) => handle,
            None => {
                let mut handle = 0;
                // SAFETY: it writes one handle, destroyed with the pool.
                check(unsafe { (entries.event_create)(&raw mut handle, FLAGS) })?;
                handle
            }
        };
        let event = Self(Arc::new(Recorded { handle, space: Arc::clone(space) }));
        // SAFETY: both are live.
        check(unsafe { (entries.event_record)(handle, stream) })?;
        Ok(event)
    }

    pub(super) fn is_complete(&self) -> Result<bool, DeviceError> {
        let context = &self.0.space.context;
        let _gpu = context.enter(OPERATION)?;
        // SAFETY: a live event.
        match check(unsafe { (context.entries.event_query)(self.0.handle) }) {
            Ok(()) => Ok(true),
            Err(Code::NOT_READY) => Ok(false),
            Err(code) => Err(context.error(code, OPERATION, AddressRange::default())),
        }
    }

    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        let context = &self.0.space.context;
        let _gpu = context.enter(OPERATION)?;
        // SAFETY: a live event.
        check(unsafe { (context.entries.event_synchronize)(self.0.handle) })
            .map_err(|code| context.error(code, OPERATION, AddressRange::default()))
    }
}
