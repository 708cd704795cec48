//! Holding events: those recorded while a hold lasts complete only when it ends.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::state::lock;

/// One hold.
#[derive(Default)]
pub(crate) struct Gate {
    is_open: Mutex<bool>,
    opened: Condvar,
}

static HOLD: Mutex<Option<Arc<Gate>>> = Mutex::new(None);

impl Gate {
    pub(crate) fn is_open(&self) -> bool {
        *lock(&self.is_open)
    }

    pub(crate) fn wait(&self) {
        let mut is_open = lock(&self.is_open);
        while !*is_open {
            is_open = self.opened.wait(is_open).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn open(&self) {
        *lock(&self.is_open) = true;
        self.opened.notify_all();
    }
}

/// The hold that lasts, if one does.
pub(crate) fn current() -> Option<Arc<Gate>> {
    lock(&HOLD).clone()
}

/// Begins a hold; one that lasts goes on.
pub(crate) fn begin() {
    lock(&HOLD).get_or_insert_default();
}

/// Ends the hold that lasts.
pub(crate) fn end() {
    if let Some(gate) = lock(&HOLD).take() {
        gate.open();
    }
}
