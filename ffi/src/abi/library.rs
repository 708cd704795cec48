//! Library version, error texts and the parameter table.

use std::ffi::c_char;

use super::c::*;
use crate::boundary::{Out, Outcome, enter};
use crate::fault::Fault;
use crate::status::dormouse_status_t;
use crate::{fault, log, params, status};

/// Returns the version of the loaded library, packed as `DORMOUSE_VERSION`. It differs from
/// `DORMOUSE_VERSION` when the program was compiled against another header.
///
/// Any-thread. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_get_version() -> u32 {
    crate::VERSION_NUMBER
}

/// Returns the name and meaning of `status`. Unknown values return a generic text, never NULL.
///
/// Any-thread. Never fails. The text is static.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_get_status_string(status: dormouse_status_t) -> *const c_char {
    status::text(status).as_ptr()
}

/// Returns the message of the calling thread's latest call that did not return `DORMOUSE_OK`. For
/// an invalid value it names the value and the accepted range. Returns an empty string if there was
/// no such call, never NULL.
///
/// Any-thread. Never fails. The library owns the text. It is valid until the calling thread's next
/// call into the library.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_get_last_error() -> *const c_char {
    fault::last_error()
}

/// Copies parameter `index` with its current value and the source of that value. To enumerate the
/// table, start at 0 and stop at `DORMOUSE_END`. An index can change between versions; a name does
/// not.
///
/// Any-thread. The pointers in the struct refer to static text. Returns `DORMOUSE_END` if `index`
/// is past the last parameter; `param_out` is unchanged. Errors: `NULL`, `VERSION`, `CONFIG` if the
/// configuration contains an invalid value.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_param_get(
    index: u32,
    param_out: *mut dormouse_param_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(param_out, "param_out") }?;
        let Some(param) = params::describe(index)? else {
            return Ok(Outcome::Notice(status::DORMOUSE_END, params::end_text(index)));
        };
        out.fill(param);
        Ok(Outcome::Done)
    })
}

/// Removes log events from the queue, oldest first, and writes them to `buffer` as lines of JSON:
/// `time_ns` (since 1970), `level` (`ERROR`, `WARN`, `INFO`, `DEBUG`), `target`, `message` and
/// `fields`. `DORMOUSE_LOG` selects the events. `count_out` receives the number of bytes written,
/// including the NUL; it is 1 if the queue is empty. Repeat the call until then.
///
/// The first call starts the queue, which keeps the newest 4096 events and reports the number
/// dropped. From then on, events are not written to standard error. `DORMOUSE_LOG_FILE` is still
/// written.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `ARGUMENT` if `capacity` is below 4097.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_log_read(
    buffer: *mut c_char,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let count = unsafe { Out::new(count_out, "count_out") }?;
        if buffer.is_null() {
            return Err(Fault::null("buffer"));
        }
        let least = log::RECORD_BYTES_MAX as u64 + 1;
        if capacity < least {
            return Err(Fault::argument(format!(
                "capacity is {capacity}; accepted: at least {least}"
            )));
        }
        let text = log::read(capacity.min(log::READ_BYTES_MAX) as usize - 1);
        // SAFETY: as above: `buffer` is writable for `capacity` bytes, which the text fits.
        unsafe { count.text(text, buffer, capacity) }
    })
}
