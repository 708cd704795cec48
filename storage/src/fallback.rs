//! Why the file's I/O is less than was hoped for: one reason, told once.

use std::fmt;

use crate::sync::{Mutex, lock};

type Listener = Box<dyn FnOnce(&str) + Send>;

#[derive(Default)]
struct FallbackState {
    reason: Option<String>,
    listener: Option<Listener>,
}

/// The reason, which may come at any time and on any thread.
#[derive(Default)]
pub(super) struct Fallback(Mutex<FallbackState>);

impl fmt::Debug for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Fallback").field(&self.get()).finish()
    }
}

impl Fallback {
    /// With that reason from the start.
    pub(super) fn of(reason: Option<String>) -> Self {
        Self(Mutex::new(FallbackState { reason, listener: None }))
    }

    /// The first reason stays.
    pub(super) fn set(&self, reason: String) {
        let mut kept = lock(&self.0);
        if kept.reason.is_none() {
            kept.reason = Some(reason);
            drop(kept);
            self.tell();
        }
    }

    pub(super) fn get(&self) -> Option<String> {
        lock(&self.0).reason.clone()
    }

    /// Has `listener` told the reason once, now or when it comes.
    pub(super) fn on_set(&self, listener: Listener) {
        lock(&self.0).listener = Some(listener);
        self.tell();
    }

    /// Under no lock: whose listener it is decides what it takes.
    fn tell(&self) {
        let told = {
            let mut kept = lock(&self.0);
            let reason = kept.reason.clone();
            reason.and_then(|reason| Some((kept.listener.take()?, reason)))
        };
        if let Some((listener, reason)) = told {
            tracing::warn!(target: "storage", reason, "file I/O goes on without part of io_uring");
            listener(&reason);
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Tells `note`'s listener apart, and gives what it has heard.
    fn listened(note: &Fallback) -> Arc<Mutex<Vec<String>>> {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&heard);
        note.on_set(Box::new(move |reason| lock(&to).push(reason.to_owned())));
        heard
    }

    #[test]
    fn the_first_reason_is_told_once_whenever_it_comes() {
        let late = Fallback::default();
        let heard = listened(&late);
        assert_eq!((late.get(), lock(&heard).len()), (None, 0));
        late.set("first".to_owned());
        late.set("second".to_owned());
        assert_eq!(*lock(&heard), ["first"]);
        assert_eq!(late.get().as_deref(), Some("first"));

        let early = Fallback::of(Some("early".to_owned()));
        let heard = listened(&early);
        early.set("late".to_owned());
        assert_eq!(*lock(&heard), ["early"]);
        assert_eq!(early.get().as_deref(), Some("early"));
    }
}
