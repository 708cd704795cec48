//! Timeline dumps that a program does not write itself: where memory runs out, at exit, on a signal, and when a file
//! appears (`DORMOUSE_DUMP`). See `docs/decisions/0054-dumps-without-code.md`.
//!
//! A dump is a page for a browser in `DORMOUSE_DUMP_DIR`, named by host, rank, process, number, reason and device. One
//! thread writes all of them, since `malloc`, an exit and a signal handler may write no file:
//!
//! ```text
//!   out of memory ─┐                     ┌─► snapshot ─► file aside ─► rename
//!   exit ──────────┴─► job ──┐           │
//!   signal ──► flag ─────────┼─► thread ─┘
//!   trigger file ──► poll ───┘
//! ```
//! - **D1** The thread starts with the first runtime or GPU heap, so a program that only preloads the library has none.
//! - **D2** A request waits for the thread a limited time, and holds no lock that the thread takes.
//! - **D3** A forked child writes nothing.
//! - **D4** For each reason the dumps of a process that stay are limited, and so are its attempts.
//! - **D5** Dumps that fail for the same reason and cause are one warning. The error that a dump was to explain is returned
//!   all the same.
//! - **D6** No dump replaces a file: another process may have the same host, rank and id.

mod bell;
mod kept;
mod last;
mod reason;
mod signal;
mod target;
mod trigger;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam::queue::ArrayQueue;
use dormouse_device::sync::Mutex;
use dormouse_device::with_signals_blocked;

use crate::fault::Fault;
use crate::params::{Config, Key};
use crate::{fork, status, stderr};

use bell::WAKE;
use kept::Kept;
use signal::Handler;
use target::{Target, show_commands};
use trigger::Trigger;

pub(crate) use bell::Bell;
pub(crate) use last::{last, note_written};
pub(crate) use reason::Reason;
pub(crate) use target::{DeviceId, Source, check_room, process};

/// Maximum time that a request or the exit of the process waits for its dump.
const WAIT_MAX: Duration = Duration::from_secs(10);
/// How often the trigger file and the action of the signal are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Signals within this time of the last dump by signal are one request.
const SIGNAL_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of requests that wait for the thread.
const JOBS_MAX: usize = 16;
/// Maximum number of warnings about dumps that fail.
const WARNINGS_MAX: usize = 16;
/// What fails where a setting cannot work.
const SETTING: &str = "setting";

static SERVICE: OnceLock<&Service> = OnceLock::new();
/// Held while the service starts.
static STARTING: Mutex<()> = Mutex::new(());
/// What has been warned about, as (what failed, cause) (D5).
static WARNED: Mutex<Vec<(&str, String)>> = Mutex::new(Vec::new());
/// The next number in the name of a dump.
static NUMBER: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Whether this is the thread that writes: its own requests must not wait for it.
    static IS_WRITER: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// What became of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Outcome {
    /// Paths of the dumps, one for each device whose dump was written.
    paths: Vec<PathBuf>,
    /// Why one is missing, if one is.
    why_missing: Option<String>,
}

impl Outcome {
    fn failed(why: String) -> Self {
        Self { paths: Vec::new(), why_missing: Some(why) }
    }

    /// Writes a dump of each source. One that fails does not take those of others with it; the first reason stays.
    fn of_each<T>(sources: &[T], mut write: impl FnMut(&T) -> Result<PathBuf, String>) -> Self {
        let mut outcome = Self::default();
        for source in sources {
            let written = catch_unwind(AssertUnwindSafe(|| write(source)))
                .unwrap_or_else(|_| Err("internal error, please report it".to_owned()));
            match written {
                Ok(path) => outcome.paths.push(path),
                Err(why) => drop(outcome.why_missing.get_or_insert(why)),
            }
        }
        outcome
    }
}

/// A request for a dump, and its outcome.
#[derive(Debug)]
struct Job {
    reason: Reason,
    /// The text of the error, or empty.
    why: String,
    /// `None`: all devices.
    source: Option<Source>,
    outcome: OnceLock<Outcome>,
    done: Bell,
}

/// What the thread works on. Never freed.
#[derive(Debug)]
struct Service {
    target: Target,
    /// Words of `DORMOUSE_DUMP`.
    reasons: String,
    trigger: Option<Trigger>,
    /// Set once the thread runs.
    handler: OnceLock<Handler>,
    jobs: ArrayQueue<Arc<Job>>,
    sources: Mutex<Vec<Source>>,
    kept: Mutex<[Kept; Reason::COUNT]>,
}

/// Adds a device to those that are dumped. The first call with a directory starts the thread. Never fails: a setting
/// that cannot work is a warning.
pub(crate) fn watch(config: &Config, source: Source) {
    let _one_at_a_time = STARTING.lock();
    let service = SERVICE.get().copied().or_else(|| start(config));
    if let Some(service) = service {
        let mut sources = service.sources.lock();
        if sources.iter().all(|known| known.device != source.device) {
            sources.push(source);
        }
    }
}

/// Starts the service, if a directory is set.
fn start(config: &Config) -> Option<&'static Service> {
    let reasons = config.text(Key::Dump);
    let Some(directory) = config.path(Key::DumpDir) else {
        if config.is_chosen(Key::Dump) && reasons != "off" {
            warn_once(SETTING, "DORMOUSE_DUMP is set, but DORMOUSE_DUMP_DIR is not");
        }
        return None;
    };
    let target = Target::new(directory)
        .inspect_err(|why| {
            warn_once(SETTING, &format!("DORMOUSE_DUMP_DIR is {directory:?}: {why}"));
        })
        .ok()?;
    if let Some(obstacle) = target.obstacle() {
        // It may go away before the first dump.
        warn_once(SETTING, &obstacle);
    }
    let mut service = Service {
        target,
        reasons: reasons.to_owned(),
        trigger: None,
        handler: OnceLock::new(),
        jobs: ArrayQueue::new(JOBS_MAX),
        sources: Mutex::new(Vec::new()),
        kept: Mutex::default(),
    };
    service.warn_of_unused(config);
    if service.takes(Reason::Trigger) {
        let path = config.path(Key::DumpTrigger).cloned().unwrap_or_default();
        service.trigger = Trigger::new(service.target.directory(), &path)
            .inspect_err(|why| tracing::warn!(target: "ffi", %why, "no dumps by a trigger file"))
            .ok();
    }
    let service: &'static Service = Box::leak(Box::new(service));
    let builder = std::thread::Builder::new().name("dormouse-dump".to_owned());
    if let Err(error) = with_signals_blocked(|| builder.spawn(|| service.serve())) {
        warn_once(SETTING, &format!("no thread for them: {error}"));
        return None;
    }
    if service.takes(Reason::Signal) {
        let installed = Handler::install(config.text(Key::DumpSignal));
        match installed {
            Ok(handler) => drop(service.handler.set(handler)),
            Err(why) => tracing::warn!(target: "ffi", %why, "no dumps by signal"),
        }
        // The thread polls the action from now on.
        WAKE.ring();
    }
    if service.takes(Reason::Exit) {
        // SAFETY: the function does not unwind, and is never unloaded (`-z nodelete`).
        let _refused = unsafe { libc::atexit(at_exit) };
    }
    let _first = SERVICE.set(service);
    Some(service)
}

/// Writes a dump where the memory of `source` has run out, with the error's text `why`. Returns a line for that text;
/// `None` if none is to be written. Any-thread, also inside `malloc`.
pub(crate) fn out_of_memory(source: impl FnOnce() -> Source, why: &str) -> Option<String> {
    let service = SERVICE.get()?;
    if !service.takes(Reason::OutOfMemory) || !may_request() {
        return None;
    }
    let outcome = service.request(Reason::OutOfMemory, why, Some(source()));
    Some(match outcome.why_missing {
        None => {
            let commands: Vec<String> =
                outcome.paths.iter().map(|path| show_commands(path)).collect();
            format!("The dump shows what held the memory: {}", commands.join("; "))
        }
        Some(why) => format!("No dump was written: {why}."),
    })
}

/// Writes a dump of `source` because the program calls for it. On the calling thread.
pub(crate) fn write(source: &Source) -> Result<PathBuf, Fault> {
    let service = SERVICE.get().ok_or_else(|| {
        Fault::new(
            status::DORMOUSE_ERR_CONFIG,
            "DORMOUSE_DUMP_DIR was not set, or could not be used, when the first runtime was created; accepted: an \
             existing, writable directory",
        )
    })?;
    service.target.write(source, next_number(), Reason::Call, "")
}

/// Whether this thread may wait for the one that writes (D3).
fn may_request() -> bool {
    !fork::in_child() && !fork::borrows_memory() && !IS_WRITER.get()
}

/// The exit of the process, by `exit` or a return from `main`.
extern "C" fn at_exit() {
    let Some(service) = SERVICE.get().filter(|_| may_request()) else { return };
    let outcome = catch_unwind(AssertUnwindSafe(|| service.request(Reason::Exit, "", None)));
    // The thread has warned about its own failures.
    if let Ok(Outcome { why_missing: Some(why), .. }) = outcome
        && is_first(Reason::Exit.name(), &why)
    {
        stderr::print(&format!("no dump at exit: {why}"));
    }
}

/// Returns the number of the next dump.
fn next_number() -> u64 {
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

/// Warns about dumps of `what` that cannot be written, once for each cause (D5).
fn warn_once(what: &'static str, why: &str) {
    if is_first(what, why) {
        tracing::warn!(target: "ffi", reason = why, "dumps cannot be written");
    }
}

/// Whether `what` fails by this cause for the first time. The cause is the end of the text: before it is the path, which
/// differs for each dump.
fn is_first(what: &'static str, why: &str) -> bool {
    let cause = why.rsplit(": ").next().unwrap_or(why).to_owned();
    let mut warned = WARNED.lock();
    let is_known = warned.iter().any(|known| known.0 == what && known.1 == cause);
    if is_known || warned.len() == WARNINGS_MAX {
        return false;
    }
    warned.push((what, cause));
    true
}

impl Service {
    /// Warns about settings of reasons that `DORMOUSE_DUMP` does not have.
    fn warn_of_unused(&self, config: &Config) {
        for (reason, key) in
            [(Reason::Signal, Key::DumpSignal), (Reason::Trigger, Key::DumpTrigger)]
        {
            if config.is_chosen(key) && !self.takes(reason) {
                let (name, word) = (key.name(), reason.name());
                tracing::warn!(target: "ffi", name, word, "a setting of dumps has no effect: DORMOUSE_DUMP lacks its word");
            }
        }
    }

    fn takes(&self, reason: Reason) -> bool {
        self.reasons.split(',').any(|word| word == reason.name())
    }

    /// Has the thread write a dump, and waits for it (D2).
    fn request(&self, reason: Reason, why: &str, source: Option<Source>) -> Outcome {
        let (outcome, done) = (OnceLock::new(), Bell::default());
        let job = Arc::new(Job { reason, why: why.to_owned(), source, outcome, done });
        if self.jobs.push(Arc::clone(&job)).is_err() {
            return Outcome::failed(format!("{JOBS_MAX} others wait for theirs"));
        }
        WAKE.ring();
        let deadline = Instant::now() + WAIT_MAX;
        loop {
            let seen = job.done.count();
            if let Some(outcome) = job.outcome.get() {
                return outcome.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let waited = WAIT_MAX.as_secs();
                let place = self.target.directory().display();
                return Outcome::failed(format!(
                    "it takes more than {waited} s; it may still come in {place}"
                ));
            }
            job.done.wait(seen, Some(left));
        }
    }

    /// The thread's body.
    fn serve(&self) {
        IS_WRITER.set(true);
        let mut polled = Polled { handler: true, trigger: true, signal_from: Instant::now() };
        loop {
            let seen = WAKE.count();
            let timeout = self.poll(&mut polled);
            while let Some(job) = self.jobs.pop() {
                let outcome = self.write(job.reason, &job.why, job.source.as_ref());
                let _first = job.outcome.set(outcome);
                job.done.ring();
            }
            WAKE.wait(seen, timeout);
        }
    }

    /// Serves a signal and the trigger file. Returns when to look again at the latest.
    fn poll(&self, polled: &mut Polled) -> Option<Duration> {
        let handler = self.handler.get().filter(|_| polled.handler);
        if let Some(handler) = handler.filter(|handler| handler.is_replaced()) {
            polled.handler = false;
            let signal = handler.name;
            tracing::warn!(target: "ffi", signal, "the program has replaced the handler of dumps; its own must call it");
        }
        if signal::take() {
            if Instant::now() < polled.signal_from {
                signal::put_back();
                return Some(POLL_INTERVAL);
            }
            let _reported = self.write(Reason::Signal, "", None);
            polled.signal_from = Instant::now() + SIGNAL_INTERVAL;
        }
        let trigger = self.trigger.as_ref().filter(|_| polled.trigger);
        match trigger.map(Trigger::take) {
            Some(Ok(true)) => drop(self.write(Reason::Trigger, "", None)),
            Some(Err(why)) => {
                polled.trigger = false;
                tracing::warn!(target: "ffi", why, "no dumps by the trigger file");
            }
            Some(Ok(false)) | None => {}
        }
        (handler.is_some() || trigger.is_some()).then_some(POLL_INTERVAL)
    }

    /// Writes a dump of `source`, or of every device. On the thread.
    fn write(&self, reason: Reason, why: &str, source: Option<&Source>) -> Outcome {
        if !self.kept.lock()[reason as usize].attempt(reason) {
            let limit = reason.attempts_max();
            let why = format!("this process has tried {limit} times");
            warn_once(reason.name(), &why);
            return Outcome::failed(why);
        }
        let number = next_number();
        let sources = source.map_or_else(|| self.sources.lock().clone(), |one| vec![one.clone()]);
        let outcome = Outcome::of_each(&sources, |source| {
            let written = self.target.write(source, number, reason, why);
            written.map_err(|fault| fault.message.into_owned())
        });
        if let Some(why) = &outcome.why_missing {
            warn_once(reason.name(), why);
        }
        if !outcome.paths.is_empty() {
            self.keep(reason, &outcome.paths);
        }
        outcome
    }

    /// Tells where a dump is, and removes the one that it replaces (D4).
    fn keep(&self, reason: Reason, paths: &[PathBuf]) {
        for path in paths {
            tracing::info!(target: "ffi", path = %path.display(), "dump written");
        }
        for old in self.kept.lock()[reason as usize].add(reason, paths.to_vec()) {
            // Somebody may have moved it.
            let removed = std::fs::remove_file(&old).is_ok();
            tracing::info!(target: "ffi", path = %old.display(), removed, "an older dump makes room");
        }
    }
}

/// What the thread looks at by itself.
#[derive(Debug)]
struct Polled {
    /// Whether the signal's handler is ours.
    handler: bool,
    /// Whether the trigger file can be removed.
    trigger: bool,
    /// The earliest time of the next dump by signal.
    signal_from: Instant,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_that_fails_takes_no_other_with_it() {
        let quiet = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let outcome = Outcome::of_each(&["cuda0", "full", "host", "broken"], |&name| match name {
            "full" => Err("the disk is full".to_owned()),
            "broken" => panic!("of a defect"),
            name => Ok(PathBuf::from(name)),
        });
        let only_broken = Outcome::of_each(&[0], |_| panic!("of a defect"));
        std::panic::set_hook(quiet);
        let paths = vec![PathBuf::from("cuda0"), PathBuf::from("host")];
        let why_missing = Some("the disk is full".to_owned());
        assert_eq!(outcome, Outcome { paths, why_missing });
        assert!(only_broken.why_missing.is_some_and(|why| why.contains("internal error")));
        assert_eq!(Outcome::of_each(&[0; 0], |_| Ok(PathBuf::new())), Outcome::default());
    }
}
