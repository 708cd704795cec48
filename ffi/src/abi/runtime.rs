//! Runtime: one device with its memory tiers.

use std::ffi::c_char;
use std::path::Path;

use dormouse_offload::Tier;
use dormouse_timeline::{html, pftrace};

use super::c::*;
use super::tags;
use crate::boundary::{In, Out, check_flags, enter};
use crate::fault::Fault;
use crate::params::{self, Key};
use crate::prefix::Prefix;
use crate::runtime::create::Options;
use crate::runtime::report::stats_of;
use crate::runtime::{RUNTIMES, Runtime};
use crate::status::dormouse_status_t;
use crate::{convert, dumps, files};

/// Maximum length of a path, in bytes: the system's.
const PATH_BYTES_MAX: u64 = libc::PATH_MAX as u64;

/// Creates the runtime of one device. A device has at most one live runtime. The first call creates
/// the process heap, unless the preload library created it earlier.
///
/// `options` may be NULL. Precedence of a setting, highest first: `options`, the environment, the
/// file named by `DORMOUSE_CONFIG`, the built-in default.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_runtime_destroy`.
/// Errors: `NULL`, `VERSION`, `CONFIG` for an invalid setting, `UNSUPPORTED` if this build or machine
/// cannot drive the device, `BUSY` if the device already has a runtime, `IO` or `TIER` if the NVMe
/// tier was requested and cannot be opened, `LIMIT` if a thread cannot be started, `DEVICE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_create(
    options: *const dormouse_options_t,
    runtime_out: *mut *mut dormouse_runtime_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let (out, options) =
            unsafe { (Out::new(runtime_out, "runtime_out")?, Options::read(options)?) };
        out.write(Runtime::create(options)?);
        Ok(())
    })
}

/// Waits for the runtime's copies, closes its tiers and destroys it. Memory that was allocated from
/// it stays valid, and is freed through the next runtime of the device. NULL is a no-op.
///
/// Any-thread. Blocks until the copies are complete. Errors: `HANDLE`, `STALE`, `BUSY` if prefixes,
/// tags or stash ids of the runtime still exist, or another thread's call is making one; the message names
/// them and nothing is destroyed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_destroy(
    runtime: *mut dormouse_runtime_t,
) -> dormouse_status_t {
    enter(|| {
        if runtime.is_null() {
            return Ok(());
        }
        let _one_at_a_time = Runtime::one_at_a_time();
        let it = Runtime::get(runtime)?;
        it.makers.close(|| {
            let mut dependents: Vec<String> =
                Prefix::labels_of(&it).chain(tags::labels_of(&it)).collect();
            match it.engine.stash_count() {
                0 => {}
                1 => dependents.push("1 stash id".to_owned()),
                count => dependents.push(format!("{count} stash ids")),
            }
            dependents
        })?;
        RUNTIMES.remove(runtime)?;
        // First: its thread reads the engine.
        drop(it.live.lock().take());
        // Second: its thread waits for the engine's I/O threads.
        drop(it.rescuer.lock().take());
        it.engine.shutdown();
        it.heap.set_engine(None);
        Ok(())
    })
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

/// Returns the memory statistics of a runtime. `flags` is the bitwise OR of `DORMOUSE_STATS_*`: what
/// is done after the statistics are read.
///
/// Any-thread. A runtime has one interval, which the latest caller began. `stats_out` may be NULL if a
/// flag is set. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `ARGUMENT` for an unknown flag.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_get_stats(
    runtime: *mut dormouse_runtime_t,
    flags: u64,
    stats_out: *mut dormouse_stats_t,
) -> dormouse_status_t {
    enter(|| {
        let known = DORMOUSE_STATS_RESET_PEAKS | DORMOUSE_STATS_BEGIN_INTERVAL;
        check_flags(flags, known, "flags", "DORMOUSE_STATS_*")?;
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::optional_sized(stats_out, "stats_out") }?;
        if out.is_none() && flags == 0 {
            return Err(Fault::null("stats_out"));
        }
        let runtime = Runtime::get(runtime)?;
        if let Some(out) = out {
            out.fill(stats_of(runtime.heap));
        }
        if flags & DORMOUSE_STATS_BEGIN_INTERVAL != 0 {
            runtime.heap.allocator().begin_interval();
        }
        if flags & DORMOUSE_STATS_RESET_PEAKS != 0 {
            runtime.heap.allocator().reset_peaks();
            runtime.engine.reset_peaks();
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
        out.write(Runtime::get(runtime)?.heap.allocator().trim(u64::MAX));
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
    enter(|| {
        let runtime = Runtime::get(runtime)?;
        let tier = convert::tier(tier)?;
        if tier == Tier::Device && bytes == 0 {
            return Err(Fault::argument("bytes is 0 for the device tier; accepted: at least 1"));
        }
        if tier == Tier::Nvme && runtime.config.path(Key::NvmeDir).is_none() && bytes > 0 {
            return Err(runtime.closed(tier));
        }
        runtime.engine.set_tier_budget(tier, bytes)?;
        if tier == Tier::Device {
            runtime.heap.note_chosen_budget();
        }
        tracing::info!(target: "ffi", ?tier, bytes, "tier budget set");
        Ok(())
    })
}

/// Writes a file: the recorded timeline (`DORMOUSE_FORMAT_PFTRACE` or `_HTML`), or the current
/// configuration with the source of each value (`DORMOUSE_FORMAT_CONFIG`), which `DORMOUSE_CONFIG`
/// can load. An existing regular file is replaced atomically, also behind a symbolic link. A device, a
/// FIFO and an open file behind `/proc` are written in place; a FIFO that no process reads is an error.
///
/// Any-thread. `runtime` may be NULL for `DORMOUSE_FORMAT_CONFIG`. Errors: `NULL`, `HANDLE`, `STALE`,
/// `ARGUMENT` for an unknown format or a path that is not UTF-8, `CONFIG`, `OUT_OF_MEMORY` without memory to write it,
/// `IO`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_dump(
    runtime: *mut dormouse_runtime_t,
    format: i32,
    path: *const c_char,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let path = unsafe { In::text(path, "path") }?;
        let path = Path::new(&path);
        let write = match format {
            DORMOUSE_FORMAT_PFTRACE => pftrace::write,
            DORMOUSE_FORMAT_HTML => html::write,
            DORMOUSE_FORMAT_CONFIG => return params::dump_to(path),
            _ => {
                return Err(Fault::argument(format!(
                    "format is {format}; accepted: 1 (pftrace), 2 (html), 3 (config)"
                )));
            }
        };
        let heap = Runtime::get(runtime)?.heap;
        dumps::check_room(&heap.dumped().timeline)?;
        let snapshot = heap.snapshot("");
        let process = dumps::process();
        files::dump(path, |file| write(&snapshot, &process, file))?;
        dumps::note_written(path, dumps::Reason::Call);
        Ok(())
    })
}

/// Writes the recorded timeline as an HTML page into `DORMOUSE_DUMP_DIR`, under the name of the dumps that
/// `DORMOUSE_DUMP` requests, with `call` as the reason. `buffer` receives the path, and `count_out` its
/// length with the NUL. Any number of calls write as many files.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` if `capacity` is
/// below 4097, `CONFIG` if no directory was set when the first runtime was created, `OUT_OF_MEMORY` without memory to
/// write it, `IO`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_runtime_write_dump(
    runtime: *mut dormouse_runtime_t,
    buffer: *mut c_char,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let count = unsafe { Out::new(count_out, "count_out") }?;
        let runtime = Runtime::get(runtime)?;
        if buffer.is_null() {
            return Err(Fault::null("buffer"));
        }
        if capacity <= PATH_BYTES_MAX {
            return Err(Fault::argument(format!(
                "capacity is {capacity}; accepted: at least {}",
                PATH_BYTES_MAX + 1
            )));
        }
        let path = dumps::write(&runtime.heap.dumped())?;
        // SAFETY: as above: `buffer` is writable for `capacity` bytes, which a path fits.
        unsafe { count.text(path.display().to_string(), buffer, capacity) }
    })
}
