//! Points in a stream. The driver's events are recycled: making one costs more than recording it.

use std::sync::Arc;
use std::time::Duration;

use super::entries::{Handle, check};
use super::error::Code;
use super::space::Space;
use crate::sync::{Mutex, MutexGuard};
use crate::{AddressRange, DeviceError, Operation};

/// The most events kept for use again.
const POOLED_MAX: usize = 1024;
/// `CU_EVENT_BLOCKING_SYNC`: who waits sleeps.
const BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: recording costs less.
const UNTIMED: u32 = 2;

/// A point in a stream. Clones name the same point.
#[derive(Clone, Debug)]
pub struct Event(Arc<Recorded>);

#[derive(Debug)]
struct Recorded {
    handle: Handle,
    is_timed: bool,
    space: Arc<Space>,
}

impl Drop for Recorded {
    /// Waits that are queued keep the point they were given, so the event can be recorded anew.
    fn drop(&mut self) {
        self.space.events.give(&self.space, self.handle, self.is_timed);
    }
}

/// Events in nobody's hands: untimed ones, and timed ones.
#[derive(Debug, Default)]
pub(super) struct EventPool([Mutex<Vec<Handle>>; 2]);

impl EventPool {
    fn of(&self, is_timed: bool) -> MutexGuard<'_, Vec<Handle>> {
        self.0[usize::from(is_timed)].lock()
    }

    fn give(&self, space: &Space, handle: Handle, is_timed: bool) {
        let mut pooled = self.of(is_timed);
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
        [false, true]
            .into_iter()
            .flat_map(|is_timed| std::mem::take(&mut *self.of(is_timed)))
            .collect()
    }
}

const OPERATION: Operation = Operation::Event;

impl Event {
    pub(super) fn handle(&self) -> Handle {
        self.0.handle
    }

    /// Records a point on `stream`, whose context is current.
    pub(super) fn record(space: &Arc<Space>, stream: Handle, is_timed: bool) -> Result<Self, Code> {
        let entries = space.context.entries;
        let pooled = space.events.of(is_timed).pop();
        let handle = match pooled {
            Some(handle) => handle,
            None => {
                let flags = if is_timed { BLOCKING } else { BLOCKING | UNTIMED };
                let mut handle = 0;
                // SAFETY: it writes one handle, destroyed with the pool.
                check(unsafe { (entries.event_create)(&raw mut handle, flags) })?;
                handle
            }
        };
        let event = Self(Arc::new(Recorded { handle, is_timed, space: Arc::clone(space) }));
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

    /// How long ago it completed: against a point that is recorded and reached now.
    pub(super) fn age(&self) -> Option<Duration> {
        let space = &self.0.space;
        let _gpu = space.context.enter(OPERATION).ok()?;
        let now = Self::record(space, space.idle_stream, true).ok()?;
        // SAFETY: a live event.
        check(unsafe { (space.context.entries.event_synchronize)(now.handle()) }).ok()?;
        self.elapsed(&now)
    }

    /// How long after this one `later` completed.
    pub(super) fn until(&self, later: &Self) -> Option<Duration> {
        let _gpu = self.0.space.context.enter(OPERATION).ok()?;
        self.elapsed(later)
    }

    fn elapsed(&self, later: &Self) -> Option<Duration> {
        let entries = self.0.space.context.entries;
        let mut milliseconds = 0.0_f32;
        // SAFETY: live events, the context is current; it writes one number, and refuses events
        // that are not complete or have no time.
        let known = unsafe {
            (entries.event_elapsed)(&raw mut milliseconds, self.handle(), later.handle())
        };
        check(known).ok()?;
        Duration::try_from_secs_f32(milliseconds / 1e3).ok()
    }

    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        let context = &self.0.space.context;
        let _gpu = context.enter(OPERATION)?;
        // SAFETY: a live event.
        check(unsafe { (context.entries.event_synchronize)(self.0.handle) })
            .map_err(|code| context.error(code, OPERATION, AddressRange::default()))
    }
}
