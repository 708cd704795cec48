//! The thread that pins ahead of need, and unpins what is too much, off everybody's path.

use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use dormouse_device::Device;

use super::PinnedError;
use super::shared::Shared;

const THREAD_NAME: &str = "dormouse-pinned";
/// Calls that wait: one is enough, for the thread looks for everything there is to do.
const CALLS_MAX: usize = 1;

#[derive(Debug)]
pub(super) struct BackgroundThread {
    calls: SyncSender<()>,
    thread: JoinHandle<()>,
}

impl BackgroundThread {
    pub(super) fn start<D: Device>(shared: &Arc<Shared<D>>) -> Result<Self, PinnedError> {
        let (calls, called) = sync_channel(CALLS_MAX);
        let pool: Weak<Shared<D>> = Arc::downgrade(shared);
        let thread = std::thread::Builder::new().name(THREAD_NAME.to_owned()).spawn(move || {
            // Ends when the pool lets go of its end of the channel.
            while called.recv().is_ok() {
                if let Some(shared) = pool.upgrade() {
                    shared.work();
                }
            }
        });
        let thread = thread.map_err(|error| PinnedError::Thread {
            name: THREAD_NAME,
            reason: error.to_string(),
        })?;
        Ok(Self { calls, thread })
    }

    /// Wakes the thread. Never waits.
    pub(super) fn call(&self) {
        match self.calls.try_send(()) {
            // Full: it is about to look. Disconnected: it has panicked, and requests pin for
            // themselves.
            Ok(()) | Err(TrySendError::Full(()) | TrySendError::Disconnected(())) => {}
        }
    }

    /// Ends the thread once what it is at is done.
    pub(super) fn stop(self) {
        drop(self.calls);
        // A panic there was reported where it happened.
        let _ = self.thread.join();
    }
}
