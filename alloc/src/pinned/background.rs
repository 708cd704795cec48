//! The background thread that pins memory in advance and unpins surplus slabs.

use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use dormouse_device::{Device, with_signals_blocked};

use super::PinnedError;
use super::shared::Shared;

const THREAD_NAME: &str = "dormouse-pinned";
/// Limit of queued notifications: one suffices, since each run does all pending work.
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
        let body = move || {
            // Ends when the pool drops its end of the channel.
            while called.recv().is_ok() {
                if let Some(shared) = pool.upgrade() {
                    shared.work();
                }
            }
        };
        let builder = std::thread::Builder::new().name(THREAD_NAME.to_owned());
        let thread = with_signals_blocked(|| builder.spawn(body));
        let thread = thread.map_err(|error| PinnedError::Thread {
            name: THREAD_NAME,
            reason: error.to_string(),
        })?;
        Ok(Self { calls, thread })
    }

    /// Wakes the thread. Never waits.
    pub(super) fn call(&self) {
        // Full: a run is pending. Disconnected: the thread has panicked, and requests pin for themselves.
        let _ = self.calls.try_send(());
    }

    /// Ends the thread after its current run.
    pub(super) fn stop(self) {
        drop(self.calls);
        // A panic there was reported where it happened.
        let _ = self.thread.join();
    }
}
