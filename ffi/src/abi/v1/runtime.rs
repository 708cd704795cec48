//! Runtime: one device with its memory tiers.

use std::ffi::c_char;

use super::structs::{dormouse_info_t, dormouse_options_t, dormouse_runtime_t, dormouse_stats_t};
use crate::boundary::{In, Out, enter};
use crate::runtime::{self, Runtime};
use crate::status::dormouse_status_t;

/// Creates the runtime of one device. A device has at most one live runtime. The first call creates
/// the process heap, unless the preload library created it earlier.
///
/// `options` may be NULL. Precedence of a setting, highest first: `options`, the environment, the
/// file named by `DORMOUSE_CONFIG`, the built-in default.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_runtime_destroy`.
/// Errors: `NULL`, `VERSION`, `CONFIG` for an invalid setting, `UNSUPPORTED` if this build or machine
/// cannot drive the device, `BUSY` if the device already has a runtime, `IO` or `TIER` if the NVMe
/// tier was requested and cannot be opened, `DEVICE`.
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
        Ok(())
    })
}

/// Waits for the runtime's copies, closes its tiers and destroys it. Memory that was allocated from
/// it stays valid. NULL is a no-op.
///
/// Any-thread. Blocks until the copies are complete. Errors: `HANDLE`, `STALE`, `BUSY` if prefixes,
/// tags or stash ids of the runtime still exist; the message names them and nothing is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_destroy(
    runtime: *mut dormouse_runtime_t,
) -> dormouse_status_t {
    enter(|| Runtime::destroy(runtime))
}

/// Returns the properties of a runtime: device, page size, budgets, modes and tiers.
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
        Ok(())
    })
}

/// Returns the memory statistics of a runtime. `flags` is 0 or `DORMOUSE_STATS_RESET_PEAKS`, which
/// sets every peak to its current value after the statistics are read.
///
/// Any-thread. `stats_out` may be NULL if `DORMOUSE_STATS_RESET_PEAKS` is set. Errors: `NULL`,
/// `VERSION`, `HANDLE`, `STALE`, `ARGUMENT` for an unknown flag.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_get_stats(
    runtime: *mut dormouse_runtime_t,
    flags: u64,
    stats_out: *mut dormouse_stats_t,
) -> dormouse_status_t {
    enter(|| {
        let resets = runtime::stats_flags(flags)?;
        let out = if resets && stats_out.is_null() {
            None
        } else {
            // SAFETY: the caller's promise (module docs).
            Some(unsafe { Out::sized(stats_out, "stats_out") }?)
        };
        let runtime = Runtime::get(runtime)?;
        if let Some(out) = out {
            out.fill(runtime.stats());
        }
        if resets {
            runtime.reset_peaks();
        }
        Ok(())
    })
}

/// Returns cached free pages to the operating system or the driver.
///
/// Any-thread. `freed_bytes_out` receives the number of bytes returned. Errors: `NULL`, `HANDLE`,
/// `STALE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_trim(
    runtime: *mut dormouse_runtime_t,
    freed_bytes_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(freed_bytes_out, "freed_bytes_out") }?;
        out.write(Runtime::get(runtime)?.trim());
        Ok(())
    })
}

/// Sets the budget of a tier, in bytes. 0 is not accepted for the device tier. For another tier, 0
/// closes it to new sleeps; data already asleep there stays and can wake.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for an unknown tier or 0 for the device
/// tier, `TIER` if the tier was not opened at creation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_set_budget(
    runtime: *mut dormouse_runtime_t,
    tier: i32,
    bytes: u64,
) -> dormouse_status_t {
    enter(|| Runtime::get(runtime)?.set_budget(tier, bytes))
}

/// Writes a file: the recorded timeline (`DORMOUSE_FORMAT_PFTRACE` or `_HTML`), or the current
/// configuration with the source of each value (`DORMOUSE_FORMAT_CONFIG`), which `DORMOUSE_CONFIG`
/// can load. An existing file is replaced atomically.
///
/// Any-thread. `runtime` may be NULL for `DORMOUSE_FORMAT_CONFIG`. Errors: `NULL`, `HANDLE`, `STALE`,
/// `ARGUMENT` for an unknown format or a path that is not UTF-8, `CONFIG`, `IO`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_dump(
    runtime: *mut dormouse_runtime_t,
    format: i32,
    path: *const c_char,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let path = unsafe { In::text(path, "path") }?;
        runtime::dump(runtime, format, &path)
    })
}
