//! The reason why file I/O uses less than io_uring offers, reported once.

use std::fmt;
use std::sync::OnceLock;

use crate::sync::{Mutex, lock};

type Listener = Box<dyn FnOnce(&str) + Send>;

/// The first reason, set at any time and on any thread.
#[derive(Default)]
pub(super) struct Fallback {
    reason: OnceLock<String>,
    listener: Mutex<Option<Listener>>,
}

impl fmt::Debug for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Fallback").field(&self.reason).finish()
    }
}

impl Fallback {
    pub(super) fn of(reason: Option<String>) -> Self {
        let reason = reason.map_or_else(OnceLock::new, OnceLock::from);
        Self { reason, listener: Mutex::default() }
    }

    /// Sets the reason. Only the first call has an effect.
    pub(super) fn set(&self, reason: String) {
        if self.reason.set(reason).is_ok() {
            self.notify();
        }
    }

    pub(super) fn get(&self) -> Option<String> {
        self.reason.get().cloned()
    }

    /// Sets a listener that is called once with the reason, now or when it is set.
    pub(super) fn on_set(&self, listener: Listener) {
        *lock(&self.listener) = Some(listener);
        self.notify();
    }

    /// Calls the listener, without a lock. Of a concurrent `set` and `on_set` the later one finds both.
    fn notify(&self) {
        let listener = lock(&self.listener).take_if(|_| self.reason.get().is_some());
        if let (Some(listener), Some(reason)) = (listener, self.reason.get()) {
            tracing::warn!(target: "storage", reason, "file I/O continues without part of io_uring");
            listener(reason);
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Sets a listener of `note` and returns the reasons that it receives.
    fn received(note: &Fallback) -> Arc<Mutex<Vec<String>>> {
        let reasons = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&reasons);
        note.on_set(Box::new(move |reason| lock(&to).push(reason.to_owned())));
        reasons
    }

    #[test]
    fn reports_the_first_reason_once() {
        let late = Fallback::default();
        let reasons = received(&late);
        assert_eq!((late.get(), lock(&reasons).len()), (None, 0));
        late.set("first".to_owned());
        late.set("second".to_owned());
        assert_eq!(*lock(&reasons), ["first"]);
        assert_eq!(late.get().as_deref(), Some("first"));

        let early = Fallback::of(Some("early".to_owned()));
        let reasons = received(&early);
        early.set("late".to_owned());
        assert_eq!(*lock(&reasons), ["early"]);
        assert_eq!(early.get().as_deref(), Some("early"));
    }
}
