//! Planning queries in JSON. They need no runtime.

use std::ffi::c_char;

use dormouse_parallel::query;

use crate::boundary::{In, Out, enter};
use crate::fault::Fault;
use crate::status::dormouse_status_t;

/// Answers a JSON request, `{"version": 1, "query": "shares", ...}`, with
/// `{"version": 1, "answer": ...}`. Queries cover rank shares, pipeline stages, layouts, context
/// shards, router accounting, rollout assignment, fitted rates, plans and simulations;
/// docs/queries/ documents each with an example. Equal requests have equal answers.
///
/// `count_out` receives the number of bytes of the answer, including the NUL. `buffer` receives the
/// answer if `capacity` bytes are enough; otherwise it is unchanged. `buffer` may be NULL to query
/// the length, which computes the whole answer.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `ARGUMENT` for an invalid request, with the
/// value and the accepted values in the message, `LIMIT` if the buffer is too small (`count_out` is
/// written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_schedule_query(
    request: *const c_char,
    buffer: *mut c_char,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let count = unsafe { Out::new(count_out, "count_out") }?;
        // SAFETY: as above: text of the caller's that nobody writes during the call.
        let request = unsafe { In::borrowed_text(request, query::REQUEST_BYTES_MAX, "request") }?;
        let answer = query::query(request).map_err(|error| Fault::argument(error.to_string()))?;
        // SAFETY: as above: `buffer` is NULL or writable for `capacity` bytes.
        unsafe { count.text(&answer, buffer, capacity) }
    })
}
