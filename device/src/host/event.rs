//! Events of the host device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sync::{Condvar, Mutex};

/// An event of a host stream; `None` is complete. Clones identify the same event. It may outlive its
/// stream and device.
#[derive(Clone, Debug)]
pub struct Event(pub(super) Option<Arc<Flag>>);

/// A flag that is set once and can be waited for.
#[derive(Debug, Default)]
pub(crate) struct Flag {
    is_set: AtomicBool,
    /// Prevents a waiter from missing the notification.
    gate: Mutex<()>,
    changed: Condvar,
}

impl Event {
    pub(super) fn is_complete(&self) -> bool {
        self.0.as_ref().is_none_or(|flag| flag.is_set.load(Ordering::Acquire))
    }

    pub(super) fn wait(&self) {
        let Some(flag) = self.0.as_ref().filter(|_| !self.is_complete()) else { return };
        let mut gate = flag.gate.lock();
        while !flag.is_set.load(Ordering::Acquire) {
            flag.changed.wait(&mut gate);
        }
    }
}

impl Flag {
    /// Sets the flag, and publishes what this thread did before.
    pub(super) fn set(&self) {
        let _gate = self.gate.lock();
        // Release: pairs with the Acquire loads of readers that take no lock.
        self.is_set.store(true, Ordering::Release);
        self.changed.notify_all();
    }
}
