//! Messages on standard error, for calls that cannot return a status.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::fault::{self, Fault};
use crate::files;

/// Maximum length of a message, in bytes.
const NOTE_BYTES_MAX: usize = 4096;
/// Maximum number of failures that one process writes to standard error.
const FAILURES_MAX: usize = 8;

/// Writes `text` to standard error in one system call, so that messages of threads do not mix.
pub(crate) fn print(text: &str) {
    let mut line = format!("dormouse: {text}");
    line.truncate(line.floor_char_boundary(NOTE_BYTES_MAX - 1));
    line.push('\n');
    write(line.as_bytes());
}

pub(crate) fn write(bytes: &[u8]) {
    // A failed or short write to standard error cannot be reported.
    let _ignored = files::write_without_signal(libc::STDERR_FILENO, bytes);
}

/// Runs the body of PyTorch entry point `what`, which cannot return an error. The first few failures
/// are written to standard error.
pub(crate) fn guarded(what: &str, body: impl FnOnce() -> Result<(), Fault>) {
    static FAILURES: AtomicUsize = AtomicUsize::new(0);
    let message = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return,
        Ok(Err(fault)) => fault.message,
        Err(_) => "internal error, please report it".into(),
    };
    fault::set_last_error(&message);
    // Relaxed: a count.
    if FAILURES.fetch_add(1, Ordering::Relaxed) < FAILURES_MAX {
        print(&format!("dormouse_torch_{what}: {message}"));
    }
}
