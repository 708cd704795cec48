//! What is asked of the schedule once a step or less, as JSON. Pure planning, no runtime needed.

use std::ffi::c_char;

use dormouse_parallel::query;

use crate::boundary::{In, Out, Outcome, enter};
use crate::fault::Fault;
use crate::status::dormouse_status_t;

/// Answers `{"version": 1, "query": "shares", ...}` with `{"version": 1, "answer": ...}`:
/// shares of ranks, lists of pipeline stages, layouts, context shards, router accounting,
/// assignments of rollouts, fitted rates, plans and simulations as text. docs/queries.md has every ask
/// with an example. Equal requests have equal answers.
///
/// `needed_out` gets the answer's bytes with the NUL; `buffer` gets the answer when `capacity_bytes`
/// has room for all of it and is untouched otherwise. `buffer` may be NULL to ask for the length,
/// which takes as long as the answer.
///
/// Any-thread. The buffer is the caller's. Errors: `NULL`, `ARGUMENT` for a request that is none,
/// an ask or a field that is not known, and whatever the ask refuses, naming the value seen and what
/// is accepted; `LIMIT` when a buffer was given and is too small (`needed_out` is written then too).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_schedule_query(
    request: *const c_char,
    buffer: *mut c_char,
    capacity_bytes: u64,
    needed_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let needed = unsafe { Out::new(needed_out, "needed_out") }?;
        // SAFETY: as above: text of the caller's that nobody writes during the call.
        let request = unsafe { In::borrowed_text(request, query::REQUEST_BYTES_MAX, "request") }?;
        let answer = query::query(request).map_err(|error| Fault::argument(error.to_string()))?;
        // SAFETY: as above: `buffer` is NULL or writable for `capacity_bytes`.
        unsafe { needed.text(&answer, buffer, capacity_bytes) }?;
        Ok(Outcome::Done)
    })
}
