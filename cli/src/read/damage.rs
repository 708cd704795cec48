//! Conversion of panics on damaged tables into errors.
//!
//! The readers of Arrow and Parquet do not check everything: a buffer outside its message makes them panic.
//! Such a panic becomes an error of the file and is not printed.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

use super::ReadError;

thread_local! {
    static READING: Cell<bool> = const { Cell::new(false) };
}

/// Calls `read` and converts a panic into an error; the sequences may then contain some of the rows.
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
        let what = text.unwrap_or("its parts are inconsistent").to_owned();
        Err(ReadError::Damaged { file: file.to_owned(), what })
    })
}
