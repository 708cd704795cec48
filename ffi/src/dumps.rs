//! Timeline dumps that nobody asks for by a call: one where device memory ran out, into `DORMOUSE_DUMP_DIR`.
//!
//! A dump is a page for a browser, named by host, rank, process and number, written aside and renamed. One that
//! fails is a warning: the error that it was to explain goes on.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use dormouse_timeline::{Process, html};

use crate::fault::Fault;
use crate::heap::Heap;
use crate::params::{self, Key};
use crate::{files, log};

/// Limit of the dumps of a process: a trainer may try the same request again for ever.
const DUMPS_MAX: u64 = 8;

static NUMBER: AtomicU64 = AtomicU64::new(0);

/// Writes a dump where device memory ran out, if a directory is set. Returns a line for the error's text. Waits
/// for the disk; called without a lock of the allocator.
pub(crate) fn out_of_memory(heap: &Heap, reason: &str) -> Option<String> {
    let config = params::in_effect().ok()?;
    let directory = config.path(Key::DumpDir)?;
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    if number >= DUMPS_MAX {
        return Some(format!("No dump was written: this process has written {DUMPS_MAX}."));
    }
    match write(heap, reason, directory, number) {
        Ok(path) => {
            Some(format!("Open {} in a browser: it shows what held the memory.", path.display()))
        }
        Err(fault) => {
            tracing::warn!(target: "ffi", reason = %fault.message, "dump not written");
            Some(format!("No dump was written: {}.", fault.message))
        }
    }
}

fn write(heap: &Heap, reason: &str, directory: &Path, number: u64) -> Result<PathBuf, Fault> {
    let name = format!("dormouse-%h-rank%r-pid%p-{number}-oom.html");
    let path = log::expand_path(&directory.join(name)).map_err(Fault::argument)?;
    let path = PathBuf::from(path);
    let process = process();
    let snapshot = heap.snapshot(reason);
    files::dump(&path, |file| html::write(&snapshot, &process, file))?;
    Ok(path)
}

/// Returns this process as the titles of dumps name it.
pub(crate) fn process() -> Process {
    let rank = log::rank().and_then(|rank| rank.try_into().ok()).unwrap_or(0);
    Process::current(program_name(), rank)
}

fn program_name() -> String {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "process".to_owned() } else { name.to_owned() }
}
