//! Events. The driver's events are reused: creating one costs more than recording it.

use std::sync::Arc;
use std::time::Duration;

use super::entries::{Handle, check, is_complete, read};
use super::error::Code;
use super::space::Space;
use crate::sync::Mutex;
use crate::{AddressRange, DeviceError, Operation};

/// Limit of the unused events of each kind.
const POOLED_MAX: usize = 1024;
/// `CU_EVENT_BLOCKING_SYNC`: waiting threads sleep.
const BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: recording costs less.
const UNTIMED: u32 = 2;
const OPERATION: Operation = Operation::Event;

/// A recorded event. Clones identify the same event.
#[derive(Clone, Debug)]
pub struct Event(Arc<Recorded>);

#[derive(Debug)]
struct Recorded {
    handle: Handle,
    is_timed: bool,
    space: Arc<Space>,
}

impl Drop for Recorded {
    /// Queued waits keep the point they were given, so the event can be recorded again.
    fn drop(&mut self) {
        let Self { handle, is_timed, space } = self;
        let mut pooled = space.events.0[usize::from(*is_timed)].lock();
        if pooled.len() < POOLED_MAX {
            pooled.push(*handle);
            return;
        }
        drop(pooled);
        if let Ok(_gpu) = space.context.enter(OPERATION) {
            // SAFETY: created by us and unused.
            unsafe { (space.context.entries.event_destroy)(*handle) };
        }
    }
}

/// Unused events: untimed and timed.
#[derive(Debug, Default)]
pub(super) struct EventPool([Mutex<Vec<Handle>>; 2]);

impl EventPool {
    pub(super) fn take_all(&self) -> Vec<Handle> {
        self.0.iter().flat_map(|pooled| std::mem::take(&mut *pooled.lock())).collect()
    }
}

impl Event {
    pub(super) fn handle(&self) -> Handle {
        self.0.handle
    }

    /// Records an event on `stream`, whose context is current.
    pub(super) fn record(space: &Arc<Space>, stream: Handle, is_timed: bool) -> Result<Self, Code> {
        let entries = space.context.entries;
        let pooled = space.events.0[usize::from(is_timed)].lock().pop();
        let handle = match pooled {
            Some(handle) => handle,
            None => {
                let flags = if is_timed { BLOCKING } else { BLOCKING | UNTIMED };
                // SAFETY: it writes one handle, destroyed with the pool.
                read(|handle| unsafe { (entries.event_create)(handle, flags) })?
            }
        };
        let event = Self(Arc::new(Recorded { handle, is_timed, space: Arc::clone(space) }));
        // SAFETY: both are live.
        check(unsafe { (entries.event_record)(handle, stream) })?;
        Ok(event)
    }

    pub(super) fn is_complete(&self) -> Result<bool, DeviceError> {
        self.0.space.context.call(OPERATION, AddressRange::default(), |entries| {
            // SAFETY: a live event.
            is_complete(unsafe { (entries.event_query)(self.0.handle) })
        })
    }

    /// Returns the time since it completed, relative to an event that is recorded now.
    pub(super) fn age(&self) -> Option<Duration> {
        let space = &self.0.space;
        let _gpu = space.context.enter(OPERATION).ok()?;
        let now = Self::record(space, space.idle_stream, true).ok()?;
        now.synchronize().ok()?;
        self.until(&now)
    }

    /// Returns the time from its completion to that of `later`.
    pub(super) fn until(&self, later: &Self) -> Option<Duration> {
        let context = &self.0.space.context;
        let _gpu = context.enter(OPERATION).ok()?;
        let elapsed = context.entries.event_elapsed;
        // SAFETY: live events, the context is current; it writes one number, and refuses events
        // that are not complete or untimed.
        let milliseconds = read(|ms| unsafe { elapsed(ms, self.handle(), later.handle()) }).ok()?;
        Duration::try_from_secs_f32(milliseconds / 1e3).ok()
    }

    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        self.0.space.context.call(OPERATION, AddressRange::default(), |entries| {
            // SAFETY: a live event.
            check(unsafe { (entries.event_synchronize)(self.0.handle) })
        })
    }
}
