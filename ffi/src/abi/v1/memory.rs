//! Memory: blocks of the linked mode. The preload mode uses the same heap.

use std::ffi::c_void;

use super::structs::{dormouse_mem_info_t, dormouse_runtime_t};
use crate::boundary::{Out, RawStream, enter};
use crate::runtime::Runtime;
use crate::status::dormouse_status_t;

/// Allocates `bytes` of device memory, aligned to `align` bytes (0: the page size). A block consists
/// of whole pages, so that it can sleep. On the host device, a block that was never used before is
/// zeroed.
///
/// `stream` is the stream that uses the block first; NULL is the calling thread.
///
/// Any-thread. The caller owns the block and releases it with `dormouse_mem_free`. Errors: `NULL`,
/// `HANDLE`, `STALE`, `ARGUMENT` for 0 bytes, an `align` that is not a power of two or a stream of
/// another device, `OUT_OF_MEMORY` with a report in the message.
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
        Ok(())
    })
}

/// Frees the block that starts at `ptr`. The data of a sleeping block is discarded. `stream` is the
/// stream that used the block last. NULL is a no-op.
///
/// Any-thread. Does not block. Errors: `HANDLE`, `STALE`, `NOT_OURS` if `ptr` is not the start of a
/// live block, `ARGUMENT` for a stream of another device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_mem_free(
    runtime: *mut dormouse_runtime_t,
    ptr: *mut c_void,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        Runtime::get(runtime)?.mem_free(ptr, stream)
    })
}

/// Records that `stream` uses the block at `ptr`. After the block is freed, its memory is reused only
/// when the work recorded here is complete. On the host device this only checks the arguments.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE`, `NOT_OURS`, `ARGUMENT` for a stream of another
/// device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_mem_record_stream(
    runtime: *mut dormouse_runtime_t,
    ptr: *mut c_void,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        Runtime::get(runtime)?.mem_record_stream(ptr, stream)
    })
}

/// Describes the block that contains `ptr`: base, size, state, tier, role and name. `NOT_OURS` means
/// that no live block of this library contains `ptr`.
///
/// Any-thread. Other threads can change the block before the result is read. Errors: `NULL`,
/// `VERSION`, `HANDLE`, `STALE`, `NOT_OURS`.
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
        Ok(())
    })
}
