//! Memory: the linked door. The preload door ends in the same code.

use std::ffi::c_void;

use super::structs::{dormouse_mem_info_t, dormouse_runtime_t};
use crate::boundary::{Out, Outcome, RawStream, enter};
use crate::runtime::Runtime;
use crate::status::dormouse_status_t;

/// Allocates `bytes` of device memory at a multiple of `align` (0: the page). Whole pages, so
/// the block can sleep. On the host device memory of a block that never was used is zero.
///
/// Any-thread. The caller owns the block and gives it to `dormouse_mem_free`. `stream` is where
/// it is used first; NULL is the calling thread. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT`
/// for 0 bytes, an `align` that is no power of two, or a stream the device has not,
/// `OUT_OF_MEMORY` with a report.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_mem_alloc(
    runtime: *mut dormouse_runtime_t,
    bytes: u64,
    align: u64,
    stream: *mut c_void,
    ptr_out: *mut *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(ptr_out, "ptr_out") }?;
        out.write(Runtime::get(runtime)?.mem_alloc(bytes, align, stream)?);
        Ok(Outcome::Done)
    })
}

/// Frees a block: its start, as `dormouse_mem_alloc` gave it. A sleeping block is dropped with
/// its bytes. Never blocks. NULL is fine and does nothing.
///
/// Any-thread. `stream` is where it was used last. Errors: `HANDLE`, `STALE`, `NOT_OURS` for an
/// address that is not the start of a live block, `ARGUMENT` for a stream the device has not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_mem_free(
    runtime: *mut dormouse_runtime_t,
    ptr: *mut c_void,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        Runtime::get(runtime)?.mem_free(ptr, stream)?;
        Ok(Outcome::Done)
    })
}

/// Says that `stream` uses the block as well, so its memory is reused only after that use. On
/// the host device only the calling thread exists, and this checks its arguments.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE`, `NOT_OURS`, `ARGUMENT` for a stream the device
/// has not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_mem_record_stream(
    runtime: *mut dormouse_runtime_t,
    ptr: *mut c_void,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        Runtime::get(runtime)?.mem_record_stream(ptr, stream)?;
        Ok(Outcome::Done)
    })
}

/// What lies at `ptr`, any address inside a block: base, bytes, state, tier, role, the first 24
/// bytes of its name. Also answers "is it ours".
///
/// Any-thread; the answer may be old by the time it is read. Errors: `NULL`, `VERSION`,
/// `HANDLE`, `STALE`, `NOT_OURS`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_mem_query(
    runtime: *mut dormouse_runtime_t,
    ptr: *const c_void,
    info_out: *mut dormouse_mem_info_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(info_out, "info_out") }?;
        out.fill(Runtime::get(runtime)?.mem_query(ptr)?);
        Ok(Outcome::Done)
    })
}
