//! The library: version, texts, the parameter table.

use std::ffi::c_char;

use super::structs::dormouse_param_t;
use crate::boundary::{In, Out, Outcome, enter};
use crate::fault::Fault;
use crate::status::dormouse_status_t;
use crate::{fault, log, params, status};

/// Version of the loaded library: major * 1000000 + minor * 1000 + patch.
///
/// Any-thread. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_get_version() -> u32 {
    crate::VERSION_NUMBER
}

/// The name and meaning of `status`: static text, never NULL, also for unknown numbers.
///
/// Any-thread. Never fails; the text is the library's and lives as long as the process.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_get_status_string(status: dormouse_status_t) -> *const c_char {
    status::text(status).as_ptr()
}

/// One sentence about this thread's latest call that did not return `DORMOUSE_OK`: the value
/// seen and what is accepted. Empty before there was one; never NULL.
///
/// Any-thread. The text is the library's, valid until this thread's next call into it; copy it
/// to keep it.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_get_last_error() -> *const c_char {
    fault::last_sentence()
}

/// How many parameters there are.
///
/// Any-thread. Errors: `NULL`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_param_count(count_out: *mut u32) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(count_out, "count_out") }?;
        out.write(params::count());
        Ok(Outcome::Done)
    })
}

/// Parameter `index` with its value now and who set it. Indices are those of this library's
/// table, `0` to count - 1, and may move between versions; names do not.
///
/// Any-thread. The struct's pointers are static text of the library. Errors: `NULL`, `VERSION`,
/// `ARGUMENT` for an index past the table, `CONFIG` when the configuration itself is not accepted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_param_get(
    index: u32,
    param_out: *mut dormouse_param_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(param_out, "param_out") }?;
        out.fill(params::describe(index)?);
        Ok(Outcome::Done)
    })
}

/// Writes the configuration in effect, as a file `DORMOUSE_CONFIG` can load, with the
/// provenance of every value in comments. An existing file is replaced.
///
/// Any-thread. Errors: `NULL`, `ARGUMENT` for a path that is not UTF-8, `CONFIG`, `IO`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_params_dump(path: *const c_char) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let path = unsafe { In::text(path, "path") }?;
        params::dump_to(&path)?;
        Ok(Outcome::Done)
    })
}

/// Takes log events, the oldest first, as lines of JSON in `buffer`, NUL-terminated: `time_ns`
/// (since 1970), `level` (`ERROR`, `WARN`, `INFO`, `DEBUG`), `target`, `message` and `fields`.
/// `DORMOUSE_LOG` says which events there are. Writes 1 and an empty text if there is none.
///
/// The first call starts the queue, which keeps the newest 4096 events and reports how many it
/// dropped. From then on nothing is written to standard error; `DORMOUSE_LOG_FILE` is still written.
/// `bytes_out` receives the bytes written with the NUL. Call again until there is no event left.
///
/// Any-thread. The buffer is the caller's. Errors: `NULL`, `ARGUMENT` if `capacity_bytes` is less
/// than 4097.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_log_read(
    buffer: *mut c_char,
    capacity_bytes: u64,
    bytes_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let bytes = unsafe { Out::new(bytes_out, "bytes_out") }?;
        if buffer.is_null() {
            return Err(Fault::null("buffer"));
        }
        let least = log::RECORD_BYTES_MAX as u64 + 1;
        if capacity_bytes < least {
            return Err(Fault::argument(format!(
                "capacity_bytes is {capacity_bytes}; at least {least} is accepted"
            )));
        }
        let text = log::read(capacity_bytes.min(log::READ_BYTES_MAX) as usize - 1);
        // SAFETY: as above: `buffer` is writable for `capacity_bytes`, which the text fits.
        unsafe { bytes.text(&text, buffer, capacity_bytes) }?;
        Ok(Outcome::Done)
    })
}
