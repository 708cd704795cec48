//! Calls that fail because a test said so, and how often each was made.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::code::Code;
use crate::table::{Entry, NAMES, find};

/// The variable that sets faults from the start.
const FAIL_VARIABLE: &str = "STANDIN_CUDA_FAIL";

/// Calls `first` to `last` of one entry point, counted from the start of the process, return `code`.
struct Fault {
    entry: Entry,
    first: u64,
    last: u64,
    code: Code,
}

static FAULTS: Mutex<Vec<Fault>> = Mutex::new(Vec::new());
/// Whether there may be any: without, no call takes the lock, which a forked child may find held.
static HAS_FAULTS: AtomicBool = AtomicBool::new(false);
/// Relaxed throughout: a count guards no other memory.
static CALLS: [AtomicU64; NAMES.len()] = [const { AtomicU64::new(0) }; NAMES.len()];
/// What was wrong with the variable, if anything.
static FROM_ENVIRONMENT: OnceLock<Option<String>> = OnceLock::new();

fn faults() -> MutexGuard<'static, Vec<Fault>> {
    FAULTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts a call; says how it fails if it is to.
pub(crate) fn count(entry: Entry) -> Result<(), Code> {
    read_environment();
    let number = CALLS[entry as usize].fetch_add(1, Ordering::Relaxed) + 1;
    if !HAS_FAULTS.load(Ordering::Relaxed) {
        return Ok(());
    }
    let faults = faults();
    let hit = faults
        .iter()
        .find(|fault| fault.entry == entry && (fault.first..=fault.last).contains(&number));
    hit.map_or(Ok(()), |fault| Err(fault.code))
}

/// How often `name` was called; `None` if there is no such entry point.
pub(crate) fn calls(name: &str) -> Option<u64> {
    find(name).map(|entry| CALLS[entry as usize].load(Ordering::Relaxed))
}

/// How often all of them were called.
pub(crate) fn calls_total() -> u64 {
    CALLS.iter().map(|calls| calls.load(Ordering::Relaxed)).sum()
}

/// Makes the `nth` call from now, and the `count - 1` after it, fail. Whether that makes sense.
pub(crate) fn fail(name: &str, nth: u64, count: u64, code: c_int) -> bool {
    let (Some(entry), true) = (find(name), nth > 0 && count > 0 && code != 0) else {
        return false;
    };
    let first = CALLS[entry as usize].load(Ordering::Relaxed).saturating_add(nth);
    let last = first.saturating_add(count - 1);
    faults().push(Fault { entry, first, last, code: Code(code) });
    HAS_FAULTS.store(true, Ordering::Relaxed);
    true
}

/// Takes every fault back.
pub(crate) fn heal() {
    faults().clear();
    HAS_FAULTS.store(false, Ordering::Relaxed);
}

/// Sets the faults of the environment, once. What could not be read, if anything.
pub(crate) fn read_environment() -> Option<&'static str> {
    let read = FROM_ENVIRONMENT.get_or_init(|| {
        let value = std::env::var_os(FAIL_VARIABLE)?;
        let text = value.to_string_lossy();
        let wrong = text.split(',').filter(|fault| !fault.is_empty()).find(|fault| !set(fault));
        wrong.map(|fault| {
            format!("{FAIL_VARIABLE}: {fault:?} is not entry:nth:count:code of a known entry point")
        })
    });
    read.as_deref()
}

/// Sets one fault of the variable; whether it was understood.
fn set(text: &str) -> bool {
    let parts: Vec<&str> = text.split(':').collect();
    let [name, nth, count, code] = parts.as_slice() else { return false };
    let (Ok(nth), Ok(count), Ok(code)) = (nth.parse(), count.parse(), code.parse()) else {
        return false;
    };
    fail(name, nth, count, code)
}
