//! Logs of what callers ask the allocators for, call by call (`DORMOUSE_ALLOC_LOG_DIR`): CSV as RMM's logging adaptor
//! writes it, for `dormouse replay` and RMM's own replay. See `docs/traces.md`.
//!
//! The allocator keeps operations under its lock (`dormouse_alloc::Operations`). One thread takes them and writes a file
//! for each device:
//!
//! ```text
//!   allocate, free ──► operations ──(swap, every 20 ms)──► thread ──► rows ──► <stem>-<device>.csv
//! ```
//! - **G1** A log is whole from its begin to its end, or it ends with a warning: where operations were lost, the file
//!   cannot be written, or a limit of the reader is reached. What the file has until then can be replayed.
//! - **G2** Without the setting there is no thread, and the allocator records nothing.
//! - **G3** A forked child writes nothing: it does not use the allocators.

use std::fmt::Write as _;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use dormouse_alloc::{Allocator, HistoryAction, HistoryEvent, OPERATIONS_MAX, Operations};
use dormouse_device::sync::Mutex;
use dormouse_device::with_signals_blocked;
use dormouse_storage::OwnFile;
use dormouse_timeline::ClockAnchor;

use crate::device::AnyDevice;
use crate::dumps::{Bell, DeviceId, Source};
use crate::params::{Config, Key};
use crate::{files, fork, log};

/// How often the thread takes operations.
const INTERVAL: Duration = Duration::from_millis(20);
/// Limits of a file, those of `dormouse replay`.
const ROWS_MAX: u64 = 4_000_000;
const FILE_BYTES_MAX: u64 = 256 << 20;
/// Maximum time that the exit of the process waits for the last rows.
const END_WAIT_MAX: Duration = Duration::from_secs(10);
const COLUMNS: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

/// Set once its thread runs.
static SERVICE: OnceLock<Arc<Service>> = OnceLock::new();
/// Held while the service starts and logs are added.
static STARTING: Mutex<()> = Mutex::new(());

/// What the thread works on.
#[derive(Debug, Default)]
struct Service {
    logs: Mutex<Vec<DeviceLog>>,
    /// Devices that have or had a log.
    known: Mutex<Vec<DeviceId>>,
    is_ending: AtomicBool,
    has_ended: AtomicBool,
    wake: Bell,
    ended: Bell,
}

/// The log of one device.
#[derive(Debug)]
struct DeviceLog {
    path: PathBuf,
    file: OwnFile,
    allocator: Arc<Allocator<AnyDevice>>,
    started: ClockAnchor,
    /// Whole rows in the file, with their bytes.
    rows: u64,
    bytes: u64,
    /// Empty, with capacity.
    taken: Operations,
}

/// Starts the log of a device, if the setting asks for logs and it has had none. Never fails: what prevents it is a
/// warning.
pub(crate) fn watch(config: &Config, source: &Source, allocator: &Arc<Allocator<AnyDevice>>) {
    let Some(directory) = config.path(Key::AllocLogDir) else { return };
    let _one_at_a_time = STARTING.lock();
    if SERVICE.get().is_some_and(|service| service.known.lock().contains(&source.id)) {
        return;
    }
    let started = DeviceLog::create(directory, &source.device, allocator).and_then(|log| {
        let service = service().inspect_err(|_| {
            // The next runtime tries again.
            let _gone_already = std::fs::remove_file(&log.path);
        });
        Ok((service?, log))
    });
    match started {
        Ok((service, log)) => {
            allocator.start_log();
            service.known.lock().push(source.id);
            service.logs.lock().push(log);
        }
        Err(why) => warn(directory, &why),
    }
}

/// Returns the service. The first call starts its thread; the caller has the lock of `STARTING`.
fn service() -> Result<&'static Service, String> {
    if let Some(service) = SERVICE.get() {
        return Ok(service);
    }
    let service = Arc::new(Service::default());
    let of_thread = Arc::clone(&service);
    let builder = std::thread::Builder::new().name("dormouse-alloc-log".to_owned());
    with_signals_blocked(|| builder.spawn(move || of_thread.serve()))
        .map_err(|error| format!("no thread for it: {error}"))?;
    // SAFETY: the function does not unwind, and is never unloaded (`-z nodelete`).
    let _refused = unsafe { libc::atexit(at_exit) };
    Ok(SERVICE.get_or_init(|| service))
}

/// The exit of the process, by `exit` or a return from `main`: waits until what was asked for by now is written.
extern "C" fn at_exit() {
    let Some(service) = SERVICE.get().filter(|_| !fork::in_child() && !fork::borrows_memory())
    else {
        return;
    };
    service.is_ending.store(true, Ordering::Release);
    service.wake.ring();
    let deadline = Instant::now() + END_WAIT_MAX;
    while !service.has_ended.load(Ordering::Acquire) {
        let seen = service.ended.count();
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || service.has_ended.load(Ordering::Acquire) {
            return;
        }
        service.ended.wait(seen, Some(left));
    }
}

fn warn(path: &Path, why: &str) {
    tracing::warn!(target: "ffi", path = %path.display(), why, "an allocation log has ended");
}

impl Service {
    /// The thread's body.
    fn serve(&self) {
        loop {
            let seen = self.wake.count();
            let is_last = self.is_ending.load(Ordering::Acquire);
            let write_all = || self.logs.lock().retain_mut(DeviceLog::go_on);
            if catch_unwind(AssertUnwindSafe(write_all)).is_err() || is_last {
                break;
            }
            self.wake.wait(seen, Some(INTERVAL));
        }
        self.has_ended.store(true, Ordering::Release);
        self.ended.ring();
    }
}

impl DeviceLog {
    fn create(
        directory: &Path,
        device: &str,
        allocator: &Arc<Allocator<AnyDevice>>,
    ) -> Result<Self, String> {
        let directory = log::expand_path(directory)?;
        let stem = log::expand_path(Path::new("dormouse-%h-rank%r-pid%p"))?;
        let directory = std::path::absolute(directory).map_err(|error| error.to_string())?;
        // Another process may have the same host, rank and id.
        let numbers =
            std::iter::once(String::new()).chain((1..).map(|number| format!("-{number}")));
        let paths = numbers.map(|number| directory.join(format!("{stem}{number}-{device}.csv")));
        let (mut file, path) = files::create_first(paths)?;
        file.write_all(COLUMNS.as_bytes())
            .map_err(|error| format!("could not write {}: {error}", path.display()))?;
        Ok(Self {
            path,
            file: OwnFile::new(file),
            allocator: Arc::clone(allocator),
            started: ClockAnchor::now(),
            rows: 0,
            bytes: COLUMNS.len() as u64,
            taken: Operations { events: Vec::with_capacity(OPERATIONS_MAX), lost: 0 },
        })
    }

    /// Writes what has happened since the last call. `false`, with a warning, if the log ends here (G1).
    fn go_on(&mut self) -> bool {
        let Err(why) = self.write_taken() else { return true };
        self.allocator.stop_log();
        warn(&self.path, &why);
        false
    }

    fn write_taken(&mut self) -> Result<(), String> {
        if !self.allocator.take_operations(&mut self.taken) {
            return Ok(());
        }
        let (text, rows, is_full) = rows(&self.taken.events, &self.started, self.rows, self.bytes);
        self.taken.events.clear();
        let lost = std::mem::take(&mut self.taken.lost);
        let file = self.file.get().map_err(|error| error.to_string())?;
        let mut writer: &std::fs::File = file;
        if let Err(error) = writer.write_all(text.as_bytes()) {
            // No part of a row stays.
            let _as_it_is = file.set_len(self.bytes);
            return Err(error.to_string());
        }
        (self.rows, self.bytes) = (rows, self.bytes + text.len() as u64);
        if lost > 0 {
            return Err(format!("{lost} operations came faster than they could be written"));
        }
        if is_full {
            let limits = format!("{ROWS_MAX} rows or {FILE_BYTES_MAX} bytes");
            return Err(format!("it has reached a limit of dormouse replay, {limits}"));
        }
        Ok(())
    }
}

/// Returns the rows of operations for a file that has `rows` and `bytes`, the number of rows with them, and whether some
/// do not fit.
fn rows(
    events: &[HistoryEvent],
    started: &ClockAnchor,
    mut rows: u64,
    bytes: u64,
) -> (String, u64, bool) {
    let mut text = String::new();
    for event in events {
        let length = text.len();
        row(event, started, &mut text);
        if rows == ROWS_MAX || bytes + text.len() as u64 > FILE_BYTES_MAX {
            text.truncate(length);
            return (text, rows, true);
        }
        rows += 1;
    }
    (text, rows, false)
}

/// Appends the row of an operation. The time is that of the day, UTC.
fn row(event: &HistoryEvent, started: &ClockAnchor, text: &mut String) {
    let action = match event.action {
        HistoryAction::Allocated => "allocate",
        HistoryAction::OutOfMemory => "allocate failure",
        _ => "free",
    };
    let day_us = started.unix_ns(event.at_ns) / 1000 % (24 * 3600 * 1_000_000);
    let (day_s, us) = (day_us / 1_000_000, day_us % 1_000_000);
    let (hours, minutes, seconds) = (day_s / 3600, day_s / 60 % 60, day_s % 60);
    let HistoryEvent { thread, address, bytes, stream, .. } = event;
    let _infallible = writeln!(
        text,
        "{thread},{hours:02}:{minutes:02}:{seconds:02}.{us:06},{action},{address:#x},{bytes},{stream}"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(action: HistoryAction, at_ns: u64) -> HistoryEvent {
        HistoryEvent {
            at_ns,
            action,
            address: 0x7f00,
            bytes: 100,
            stream: 7,
            scope: 0,
            tag: 0,
            thread: 2,
            arena: None,
            context: 0,
        }
    }

    /// The day's last microsecond but one, at 5 s of the monotonic clock.
    const STARTED: ClockAnchor = ClockAnchor {
        monotonic_ns: 5_000_000_000,
        realtime_ns: 86_400_000_000_000 * 20_000 - 1000,
        boottime_ns: 0,
        error_ns: 0,
    };

    #[test]
    fn rows_have_the_columns_of_rmm_and_the_time_of_the_day() {
        let (start, next) = (5_000_000_000, 5_000_001_000);
        let refused = HistoryEvent { address: 0, ..event(HistoryAction::OutOfMemory, next) };
        let events =
            [event(HistoryAction::Allocated, start), refused, event(HistoryAction::Freed, next)];
        let wanted = "2,23:59:59.999999,allocate,0x7f00,100,7\n\
                      2,00:00:00.000000,allocate failure,0x0,100,7\n\
                      2,00:00:00.000000,free,0x7f00,100,7\n";
        assert_eq!(rows(&events, &STARTED, 1, 50), (wanted.to_owned(), 4, false));
    }

    #[test]
    fn a_file_has_whole_rows_up_to_the_limits_of_its_reader() {
        let events = [event(HistoryAction::Freed, 5_000_000_000); 3];
        let (one, count, is_full) = rows(&events, &STARTED, ROWS_MAX - 1, 0);
        assert_eq!((one.lines().count(), count, is_full), (1, ROWS_MAX, true));
        let length = one.len() as u64;
        let (two, count, is_full) = rows(&events, &STARTED, 0, FILE_BYTES_MAX - 2 * length);
        assert_eq!((two, count, is_full), (one.repeat(2), 2, true));
        assert!(!rows(&events, &STARTED, 0, FILE_BYTES_MAX - 3 * length).2);
    }
}
