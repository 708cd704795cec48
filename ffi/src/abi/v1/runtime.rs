//! A runtime: one device with its tiers.

use std::ffi::c_char;

use super::structs::{dormouse_info_t, dormouse_options_t, dormouse_runtime_t, dormouse_stats_t};
use crate::boundary::{In, Out, Outcome, enter};
use crate::runtime::{self, Runtime};
use crate::status::dormouse_status_t;

/// Makes the runtime of one device. At most one is live per device. The process' heap is made
/// here unless the preload library made it before.
///
/// Any-thread. `options` may be NULL: nothing set. What is set in `options` beats the
/// environment, that beats the file `DORMOUSE_CONFIG` names, that beats what is built in. The
/// caller owns the handle and gives it to `dormouse_runtime_destroy`.
/// Errors: `NULL`, `VERSION`, `CONFIG` naming the value seen and what is accepted,
/// `UNSUPPORTED` for a device this build cannot drive, `BUSY` when the device has a runtime,
/// `IO` or `TIER` when the file tier was asked for and cannot be had, `DEVICE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_create(
    options: *const dormouse_options_t,
    runtime_out: *mut *mut dormouse_runtime_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(runtime_out, "runtime_out") }?;
        // SAFETY: as above.
        let options = unsafe { runtime::Options::read(options) }?;
        out.write(Runtime::create(options)?);
        Ok(Outcome::Done)
    })
}

/// Drains the runtime's copies, closes its tiers and ends it. Memory handed out stays valid.
/// NULL is fine and does nothing.
///
/// Any-thread. Errors: `HANDLE`, `STALE`, `BUSY` while it has live nodes, stash ids or tags
/// (the sentence names them; nothing is destroyed then).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_destroy(
    runtime: *mut dormouse_runtime_t,
) -> dormouse_status_t {
    enter(|| {
        Runtime::destroy(runtime)?;
        Ok(Outcome::Done)
    })
}

/// What the runtime is: device, pages, open doors and why the others are closed.
///
/// Any-thread. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_get_info(
    runtime: *mut dormouse_runtime_t,
    info_out: *mut dormouse_info_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(info_out, "info_out") }?;
        out.fill(Runtime::get(runtime)?.info());
        Ok(Outcome::Done)
    })
}

/// What the runtime holds per tier and role: now, peak, counts; copies per direction; stall.
/// Bytes and nanoseconds throughout.
///
/// Any-thread. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_get_stats(
    runtime: *mut dormouse_runtime_t,
    stats_out: *mut dormouse_stats_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(stats_out, "stats_out") }?;
        out.fill(Runtime::get(runtime)?.stats());
        Ok(Outcome::Done)
    })
}

/// Sets every peak to the value now.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_reset_peaks(
    runtime: *mut dormouse_runtime_t,
) -> dormouse_status_t {
    enter(|| {
        Runtime::get(runtime)?.reset_peaks();
        Ok(Outcome::Done)
    })
}

/// Gives cached free pages back to the system.
///
/// Any-thread. Writes the bytes given back. Errors: `NULL`, `HANDLE`, `STALE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_trim(
    runtime: *mut dormouse_runtime_t,
    freed_bytes_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(freed_bytes_out, "freed_bytes_out") }?;
        out.write(Runtime::get(runtime)?.trim());
        Ok(Outcome::Done)
    })
}

/// Changes the budget of a tier, in bytes. 0 is refused for the device tier and closes the
/// others to new sleeps; what sleeps there stays and can wake.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for an unknown tier or 0 for the
/// device, `TIER` for a tier that was never opened.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_set_budget(
    runtime: *mut dormouse_runtime_t,
    tier: i32,
    bytes: u64,
) -> dormouse_status_t {
    enter(|| {
        Runtime::get(runtime)?.set_budget(tier, bytes)?;
        Ok(Outcome::Done)
    })
}

/// Writes the timeline recorded so far. `format` is `DORMOUSE_FORMAT_*`; an existing file is
/// replaced in one step.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for an unknown format or a path
/// that is not UTF-8, `IO`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_dump(
    runtime: *mut dormouse_runtime_t,
    format: i32,
    path: *const c_char,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let path = unsafe { In::text(path, "path") }?;
        Runtime::get(runtime)?.dump(format, &path)?;
        Ok(Outcome::Done)
    })
}
