//! Points in a stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::sync::{Condvar, Mutex};

/// A point in a host stream. Clones name the same point; it outlives stream and device.
#[derive(Clone, Debug)]
pub struct Event(Option<Arc<Flag>>);

/// A flag that is set once, and can be waited for.
#[derive(Debug, Default)]
pub(super) struct Flag {
    is_set: AtomicBool,
    /// Held only to keep a waiter from missing the moment.
    gate: Mutex<()>,
    changed: Condvar,
}

impl Event {
    /// The point that the calling thread has reached: complete.
    pub(super) const fn now() -> Self {
        Self(None)
    }

    /// A point that is complete when the flag is set.
    pub(super) fn when(flag: Arc<Flag>) -> Self {
        Self(Some(flag))
    }

    pub(super) fn is_complete(&self) -> bool {
        self.0.as_ref().is_none_or(|flag| flag.is_set.load(Ordering::Acquire))
    }

    pub(super) fn wait(&self) {
        if let Some(flag) = &self.0 {
            flag.wait();
        }
    }
}

impl Flag {
    /// Sets the flag; what this thread did before is seen by whoever finds it set.
    pub(super) fn set(&self) {
        let _gate = self.gate.lock();
        // Release: pairs with the Acquire loads of readers that take no lock.
        self.is_set.store(true, Ordering::Release);
        self.changed.notify_all();
    }

    fn wait(&self) {
        if self.is_set.load(Ordering::Acquire) {
            return;
        }
        let mut gate = self.gate.lock();
        while !self.is_set.load(Ordering::Acquire) {
            self.changed.wait(&mut gate);
        }
    }
}
