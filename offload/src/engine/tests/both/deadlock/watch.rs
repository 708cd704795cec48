//! Ends a test that hangs, and says what everybody waits for.

use std::fmt::Write;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::Fixture;

/// How long one call may take in all, its scene included.
const LIMIT: Duration = Duration::from_secs(30);

/// Ends the process where a call takes longer than [`LIMIT`].
pub(super) struct Watchdog(Sender<Option<String>>);

impl Watchdog {
    pub(super) fn start() -> Self {
        let (tell, told) = channel::<Option<String>>();
        std::thread::spawn(move || {
            while let Ok(next) = told.recv() {
                let mut now = next;
                while let Some(what) = now {
                    now = match told.recv_timeout(LIMIT) {
                        Ok(next) => next,
                        Err(RecvTimeoutError::Disconnected) => return,
                        Err(RecvTimeoutError::Timeout) => {
                            eprintln!("over {LIMIT:?}: {what}\n{}", threads());
                            std::process::abort();
                        }
                    }
                }
            }
        });
        Self(tell)
    }

    /// Until [`Watchdog::rest`] or the next.
    pub(super) fn watch(&self, what: String) {
        self.0.send(Some(what)).unwrap();
    }

    /// While a test waits for its turn with a device, however long others take.
    pub(super) fn rest(&self) {
        self.0.send(None).unwrap();
    }
}

/// Where regions stand, what is on its way, and what threads are about.
pub(super) fn dump(fixture: &Fixture) -> String {
    let mut text = String::new();
    for (id, entry) in fixture.engine.table.lock().iter() {
        let region = entry.region;
        let _ = writeln!(text, "{id}: {:?}, in flight {:?}", region.state, region.in_flight);
    }
    text + &threads()
}

fn threads() -> String {
    let mut text = String::new();
    for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let (name, waits) = (read("comm"), read("wchan"));
        let _ = writeln!(text, "thread {}: {}", name.trim(), waits.trim());
    }
    text
}
