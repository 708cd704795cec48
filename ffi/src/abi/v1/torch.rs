//! The doors of PyTorch: functions with the signatures its allocators call.
//!
//! Door A, the whole process: `torch.cuda.memory.CUDAPluggableAllocator` made of
//! `dormouse_torch_malloc` and `dormouse_torch_free`, with `dormouse_torch_record_stream` set: torch
//! silently ignores `record_stream` otherwise. Door B, a memory pool: the same with
//! `dormouse_torch_pool_malloc`, whose failure torch handles itself.
//!
//! CUDA graphs under door A: `dormouse_torch_begin_pool`, `_end_pool` and `_release_pool` are the
//! allocator's `set_begin_allocate_to_pool`, `set_end_allocate_to_pool_fn` and `set_release_pool`;
//! whoever has set all three says so with `dormouse_torch_set_graph_hooks`. Where they are not set, memory
//! for a capture is refused by name.

use std::ffi::{c_int, c_ulonglong, c_void};

use super::structs::{dormouse_block_t, dormouse_stats_t};
use crate::boundary::{Out, Outcome, RawStream, enter};
use crate::status::dormouse_status_t;
use crate::torch;

/// Allocates `bytes` of GPU `device` for use on `stream`; NULL for 0 bytes or less. Where there is
/// no memory it does not return: it throws what PyTorch turns into `torch.OutOfMemoryError`, with
/// a report; where PyTorch's own exception cannot be had, a `std::runtime_error` of that text.
///
/// Any-thread. Errors: none is returned; every failure is thrown.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dormouse_torch_malloc(
    bytes: isize,
    device: i32,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise: NULL, or a live stream of the device.
    let stream = unsafe { RawStream::new(stream) };
    if let Some(pointer) = torch::malloc_small(bytes, device, stream) {
        return pointer;
    }
    // SAFETY: this function may unwind, and holds nothing that would be left behind.
    unsafe { torch::malloc_or_throw(bytes, device, stream) }
}

/// As `dormouse_torch_malloc`, for a memory pool: NULL where there is no memory, with the report
/// in `dormouse_get_last_error`.
///
/// Any-thread. Errors: NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_pool_malloc(
    bytes: isize,
    device: i32,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise: NULL, or a live stream of the device.
    torch::malloc_or_null(bytes, device, unsafe { RawStream::new(stream) })
}

/// Frees what one of the two above gave. Never blocks: the memory is reused in the order of the
/// stream it was allocated for, and after what other streams have recorded. In a forked child it
/// does nothing.
///
/// Any-thread. Errors: none is returned; the first few are written to standard error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_free(
    ptr: *mut c_void,
    bytes: usize,
    device: i32,
    stream: *mut c_void,
) {
    // SAFETY: the caller's promise: NULL, or a live stream of the device.
    let stream = unsafe { RawStream::new(stream) };
    if !torch::free_small(ptr, bytes, device, stream) {
        torch::free(ptr, device, stream);
    }
}

/// `Tensor.record_stream`: `stream` uses the block around `ptr` as well.
///
/// Any-thread. Errors: none is returned; the first few are written to standard error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    // SAFETY: the caller's promise: NULL, or a live stream of the device.
    torch::record_stream(ptr, unsafe { RawStream::new(stream) });
}

/// `torch.cuda.empty_cache`: gives cached pages of every GPU back to the driver.
///
/// Any-thread; waits for GPU work that uses what is given back. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_empty_cache() {
    torch::empty_cache();
}

/// `torch.cuda.set_per_process_memory_fraction`: a budget of that share of the GPU's memory.
///
/// Any-thread. Errors: none is returned; the first few are written to standard error.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_set_memory_fraction(fraction: f64, device: i32) {
    torch::memory_fraction(fraction, device);
}

/// Promises (1), or takes back (0), that whatever captures a stream of this process into a graph
/// calls the three functions below around it. Without the promise every request asks the driver
/// whether its stream is being captured; with it only those do that come between a begin and its
/// end, and a capture that nobody announced gets memory that others will use as well.
///
/// Any-thread, and init-only: before the first request. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_set_graph_hooks(registered: c_int) {
    torch::captures::promise(registered != 0);
}

/// A capture on GPU `device` is about to begin: until its end, requests of streams that are being
/// captured are served from the pool of this id, which nobody else is served from before the pool is
/// released. Several graphs may share an id, one after the other. A capture while another one runs
/// on the same GPU is refused: it gets no memory. `filter` is torch's, good for this call only; it is
/// not used.
///
/// Any-thread. Errors: none is returned; the first few are written to standard error.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_begin_pool(
    device: c_int,
    id_first: c_ulonglong,
    id_second: c_ulonglong,
    filter: *mut c_void,
) {
    let _ = filter;
    torch::captures::begin(device, (id_first, id_second));
}

/// The capture that began with this id is over.
///
/// Any-thread. Errors: none is returned; the first few are written to standard error.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_end_pool(
    device: c_int,
    id_first: c_ulonglong,
    id_second: c_ulonglong,
) {
    torch::captures::end(device, (id_first, id_second));
}

/// A graph that was captured with this id is gone. After the last one the pool's memory returns:
/// what is free of it once the streams are through, the rest as it is freed.
///
/// Any-thread; waits for nothing. Errors: none is returned; the first few are written to standard
/// error.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_release_pool(
    device: c_int,
    id_first: c_ulonglong,
    id_second: c_ulonglong,
) {
    torch::captures::release(device, (id_first, id_second));
}

/// The block around `ptr`: its begin, and its length in `bytes_out`. NULL where it is not ours.
///
/// Any-thread. Errors: NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_get_base(
    ptr: *mut c_void,
    bytes_out: *mut usize,
) -> *mut c_void {
    let Some(range) = torch::base(ptr) else { return std::ptr::null_mut() };
    if !bytes_out.is_null() {
        // SAFETY: the caller's promise: NULL or writable.
        unsafe { bytes_out.write(range.bytes) };
    }
    std::ptr::with_exposed_provenance_mut(range.start)
}

/// Memory of GPU `device`, with or without a runtime; fields that only a runtime has are 0.
///
/// Any-thread. Errors: `NULL`, `VERSION`, `ARGUMENT` for a device that has no heap yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_get_stats(
    device: i32,
    stats_out: *mut dormouse_stats_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(stats_out, "stats_out") }?;
        out.fill(torch::stats(device)?);
        Ok(Outcome::Done)
    })
}

/// Lists the blocks of GPU `device` that somebody has, asleep or awake, in no particular order.
/// Their number always; the blocks where `blocks` has room for all (`capacity` of them), so ask
/// with NULL first.
///
/// Any-thread. Errors: `NULL`, `LIMIT` for too little room, `ARGUMENT` for a device that has no
/// heap yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_get_blocks(
    device: i32,
    blocks: *mut dormouse_block_t,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(count_out, "count_out") }?;
        // SAFETY: the caller's promise: `blocks` is NULL or writable for `capacity` blocks.
        unsafe { out.array(&torch::blocks(device)?, blocks, capacity) }?;
        Ok(Outcome::Done)
    })
}
