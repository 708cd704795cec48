//! Damaged tables are refused, not panicked on.
//!
//! The readers of Arrow and Parquet check most of a file, but not all: offsets of buffers that lie
//! outside a message, say, they slice, and panic. Here that is an error of the file, and the hook
//! that prints panics says nothing of it.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use super::ReadError;

thread_local! {
    static READING: Cell<bool> = const { Cell::new(false) };
}

/// Reads, or says what the reader panicked of. What was being read into is half read then.
pub(super) fn caught(
    file: &str,
    read: impl FnOnce() -> Result<(), ReadError>,
) -> Result<(), ReadError> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !READING.get() {
                before(info);
            }
        }));
    });
    READING.set(true);
    let read = panic::catch_unwind(AssertUnwindSafe(read));
    READING.set(false);
    read.unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
        let what = text.unwrap_or("what is in it does not fit together").to_owned();
        Err(ReadError::Damaged { file: file.to_owned(), what })
    })
}
