//! PyTorch entry points: functions with the signatures that PyTorch's pluggable allocators call.
//!
//! Mode `allocator`: a `torch.cuda.memory.CUDAPluggableAllocator` of `dormouse_torch_malloc` and
//! `dormouse_torch_free`, with `dormouse_torch_record_stream` set; without it torch silently ignores
//! `record_stream`. Mode `pool`: the same with `dormouse_torch_pool_malloc`, whose failure torch
//! handles, and `dormouse_torch_pool_free`, since torch's own allocator needs the freed pages.
//!
//! CUDA graphs in mode `allocator`: `dormouse_torch_begin_pool`, `_end_pool` and `_release_pool` are
//! set with `set_begin_allocate_to_pool`, `set_end_allocate_to_pool_fn` and `set_release_pool`, and
//! announced with `dormouse_torch_set_graph_hooks`. Otherwise memory for a capture is refused.

use std::ffi::{c_int, c_ulonglong, c_void};
use std::panic::catch_unwind;
use std::ptr::{null_mut, with_exposed_provenance_mut, without_provenance_mut};

use dormouse_alloc::BlockInfo;
use dormouse_device::Device;

use super::c::*;
use crate::boundary::{Elements, Out, RawStream, enter};
use crate::fault::Fault;
use crate::heap::Heap;
use crate::runtime::report::stats_by_pool;
use crate::status::dormouse_status_t;
use crate::stderr::guarded;
use crate::torch::{self, captures, profiler, request_flags};
use crate::{convert, fork};

/// Allocates `bytes` bytes on GPU `device` for use on `stream`. Returns NULL for 0 bytes or less. If
/// memory is exhausted it throws the exception that PyTorch reports as `torch.OutOfMemoryError`, or a
/// `std::runtime_error` where that class is unavailable, with an allocation report.
///
/// Any-thread. The caller owns the block and releases it with `dormouse_torch_free`. Errors: every
/// failure is thrown as a C++ exception.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn dormouse_torch_malloc(
    bytes: isize,
    device: i32,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise (module docs).
    let stream = unsafe { RawStream::new(stream) };
    if let Some(pointer) = torch::malloc_small(bytes, device, stream) {
        return pointer;
    }
    // SAFETY: this function may unwind, and holds nothing that would be left behind.
    unsafe { torch::malloc_or_throw(bytes, device, stream) }
}

/// Returns how the loaded PyTorch's out-of-memory error is constructed: 1 by its own constructor, 2 by that
/// of its base class, 0 if PyTorch is not loaded or exports neither; `dormouse_torch_malloc` then throws
/// a `std::runtime_error`.
///
/// Any-thread. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_get_out_of_memory_construction() -> c_int {
    torch::construction_code()
}

/// Allocates like `dormouse_torch_malloc`, for a memory pool. Returns NULL if memory is exhausted;
/// `dormouse_get_last_error` returns the report.
///
/// Any-thread. The caller owns the block and releases it with `dormouse_torch_free`. Errors: NULL is
/// returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_pool_malloc(
    bytes: isize,
    device: i32,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller's promise (module docs).
    torch::malloc_or_null(bytes, device, unsafe { RawStream::new(stream) })
}

/// Frees a block of `dormouse_torch_malloc` or `dormouse_torch_pool_malloc`. The memory is reused in
/// the order of the stream it was allocated for, after the work of recorded streams. In a forked
/// child it does nothing.
///
/// Any-thread. Does not block. Errors: not returned; the first few are written to standard error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_free(
    ptr: *mut c_void,
    bytes: usize,
    device: i32,
    stream: *mut c_void,
) {
    // SAFETY: the caller's promise (module docs).
    let stream = unsafe { RawStream::new(stream) };
    if !torch::free_small(ptr, bytes, device, stream) {
        torch::free_other(ptr, bytes, device, stream);
    }
}

/// Frees a block like `dormouse_torch_free` and returns all cached pages of its GPU to the driver, like
/// `cudaFree`: PyTorch's own allocator shares the GPU with the pool.
///
/// Any-thread. Blocks until GPU work that uses these pages is complete. Errors: not returned; the first
/// few are written to standard error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_pool_free(
    ptr: *mut c_void,
    bytes: usize,
    device: i32,
    stream: *mut c_void,
) {
    let _ = bytes;
    // SAFETY: the caller's promise (module docs).
    torch::free_to_driver(ptr, device, unsafe { RawStream::new(stream) });
}

/// Records that `stream` uses the block that contains `ptr` (`Tensor.record_stream`).
///
/// Any-thread. Errors: not returned; the first few are written to standard error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_record_stream(ptr: *mut c_void, stream: *mut c_void) {
    if ptr.is_null() || fork::in_child() {
        return;
    }
    guarded("record_stream", || {
        // Memory of no heap was allocated before the installation, by PyTorch's own allocator.
        let Some(heap) = Heap::gpu_around(ptr.addr()) else { return Ok(()) };
        // SAFETY: the caller's promise (module docs).
        let stream = unsafe { RawStream::new(stream) };
        let _known = heap.stream(stream)?;
        Ok(heap.allocator().record_stream(ptr.addr(), stream.key())?)
    });
}

/// Returns the cached pages of every GPU to the driver (`torch.cuda.empty_cache`).
///
/// Any-thread. Blocks until GPU work that uses these pages is complete. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_empty_cache() {
    if fork::in_child() {
        return;
    }
    guarded("empty_cache", || {
        for heap in Heap::gpus() {
            heap.allocator().trim(u64::MAX);
        }
        Ok(())
    });
}

/// Sets the budget of GPU `device` to a fraction of its memory, above 0 and up to 1
/// (`torch.cuda.set_per_process_memory_fraction`).
///
/// Any-thread. Errors: not returned; the first few are written to standard error.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_set_memory_fraction(fraction: f64, device: i32) {
    if fork::in_child() {
        return;
    }
    guarded("set_memory_fraction", || {
        if !(fraction > 0.0 && fraction <= 1.0) {
            return Err(Fault::argument(format!(
                "fraction is {fraction}; accepted: above 0, up to 1"
            )));
        }
        let allocator = Heap::gpu(device)?.allocator();
        let capacity_bytes = allocator.device().memory_info().capacity_bytes;
        Ok(allocator.set_budget((capacity_bytes as f64 * fraction) as u64)?)
    });
}

/// Returns the budget of GPU `device` as a fraction of its memory, at most 1
/// (`torch.cuda.get_per_process_memory_fraction`). Returns 1 for a device without a heap.
///
/// Any-thread. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_get_memory_fraction(device: i32) -> f64 {
    let read = || {
        let allocator = Heap::existing_gpu(device).ok()?.allocator();
        let capacity_bytes = allocator.device().memory_info().capacity_bytes;
        let budget_bytes = allocator.stats().budget_bytes;
        (capacity_bytes > 0).then(|| budget_bytes as f64 / capacity_bytes as f64)
    };
    if fork::in_child() {
        return 1.0;
    }
    catch_unwind(read).ok().flatten().map_or(1.0, |fraction| fraction.min(1.0))
}

/// Declares (1) or withdraws (0) that every CUDA graph capture of this process calls
/// `dormouse_torch_begin_pool`, `_end_pool` and `_release_pool`. If it is not declared, each request
/// queries the driver whether its stream is being captured. If it is declared, only requests between a
/// begin and its end do, and a capture without a begin receives memory that is not reserved for its
/// graph.
///
/// Any-thread; call it before the first request. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_set_graph_hooks(registered: c_int) {
    request_flags::set_announced(registered != 0);
}

/// Declares that PyTorch's profiler runs (1) or has ended (0). While it runs, `dormouse_torch_malloc` and
/// `dormouse_torch_free` report every block to the profiler of the calling thread, which records it if it
/// was started with `profile_memory`. Returns 1 if the loaded PyTorch exports the functions for it, else
/// 0, and nothing is reported.
///
/// Any-thread. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_set_profiled(profiled: c_int) -> c_int {
    c_int::from(profiler::set_profiled(profiled != 0))
}

/// Begins a graph capture on GPU `device`. Until its end, requests on captured streams are served
/// from the pool of this id; the pool is reserved until it is released. Successive captures can share
/// an id. A second capture on a GPU during the first is refused: neither receives memory while both
/// run. `filter` is unused.
///
/// Any-thread. Errors: not returned; the first few are written to standard error.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_begin_pool(
    device: c_int,
    id_first: c_ulonglong,
    id_second: c_ulonglong,
    filter: *mut c_void,
) {
    let _ = filter;
    captures::begin(device, (id_first, id_second));
}

/// Ends the graph capture that began with this id.
///
/// Any-thread. Errors: not returned; the first few are written to standard error.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_end_pool(
    device: c_int,
    id_first: c_ulonglong,
    id_second: c_ulonglong,
) {
    captures::end(device, (id_first, id_second));
}

/// Releases one graph captured with this id. After the last release, the pool's free memory is
/// returned when its streams have passed, and the rest when it is freed.
///
/// Any-thread. Does not block. Errors: not returned; the first few are written to standard error.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_release_pool(
    device: c_int,
    id_first: c_ulonglong,
    id_second: c_ulonglong,
) {
    captures::release(device, (id_first, id_second));
}

/// Returns the id of the pool that holds the block around `ptr`, as given to `dormouse_torch_begin_pool`.
/// Both parts are 0 for a block of no pool or of a released one, and if no live block contains `ptr`.
///
/// Any-thread. The results must not be NULL. Never fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_get_pool_id(
    ptr: *const c_void,
    id_first_out: *mut c_ulonglong,
    id_second_out: *mut c_ulonglong,
) {
    let find = || {
        let heap = Heap::gpu_around(ptr.addr())?;
        captures::pool_of(heap, heap.allocator().lookup(ptr.addr())?.arena?)
    };
    let found = if fork::in_child() { None } else { catch_unwind(find).ok().flatten() };
    let (first, second) = found.unwrap_or_default();
    // SAFETY: the caller's promise: writable.
    unsafe {
        id_first_out.write(first);
        id_second_out.write(second);
    }
}

/// Returns the start of the block that contains `ptr`. `bytes_out` receives its length and may be
/// NULL.
///
/// Any-thread. Errors: NULL is returned if no live block of a GPU contains `ptr`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_get_base(
    ptr: *mut c_void,
    bytes_out: *mut usize,
) -> *mut c_void {
    if fork::in_child() {
        return null_mut();
    }
    let find = || Heap::gpu_around(ptr.addr())?.allocator().lookup(ptr.addr());
    let Some(BlockInfo { range, .. }) = catch_unwind(find).ok().flatten() else {
        return null_mut();
    };
    if !bytes_out.is_null() {
        // SAFETY: the caller's promise: NULL or writable.
        unsafe { bytes_out.write(range.bytes) };
    }
    with_exposed_provenance_mut(range.start)
}

/// Returns the memory statistics and the live blocks of GPU `device`, with or without a runtime.
/// Figures that only a runtime counts are 0 without one. Requests of the GPU wait while blocks are counted.
///
/// `stats_out` receives the statistics and may be NULL. `count_out` receives the number of live
/// blocks, asleep or awake, and may be NULL if no blocks are wanted. `blocks` receives the blocks, in
/// no particular order, if `capacity` elements are enough; otherwise it is unchanged. `blocks` may be
/// NULL to query the number.
///
/// Any-thread. The caller owns the array. Errors: `NULL` if both results are NULL, `VERSION`,
/// `ARGUMENT` for a device without a heap, `LIMIT` if the array is too small (`stats_out` and
/// `count_out` are written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_get_stats(
    device: i32,
    stats_out: *mut dormouse_stats_t,
    blocks: *mut dormouse_block_t,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        if stats_out.is_null() && count_out.is_null() {
            return Err(Fault::null("stats_out and count_out"));
        }
        // SAFETY: the caller's promise (module docs).
        let (stats, count, blocks) = unsafe {
            (
                Out::optional_sized(stats_out, "stats_out")?,
                Out::optional(count_out, "count_out")?,
                Elements::new(blocks, capacity, "blocks")?,
            )
        };
        let heap = Heap::existing_gpu(device)?;
        if let Some(stats) = stats {
            stats.fill(stats_by_pool(heap));
        }
        if let Some(count) = count {
            count.array(&blocks_of(heap), &blocks)?;
        }
        Ok(())
    })
}

/// Returns the live blocks of a heap.
fn blocks_of(heap: &Heap) -> Vec<dormouse_block_t> {
    let engine = heap.engine();
    let state = |block: &BlockInfo| {
        let region = engine
            .as_ref()
            .and_then(|engine| engine.region_info(engine.region_at(block.range.start)?).ok());
        match region {
            Some(region) => convert::state_code(region.state),
            None if block.asleep => DORMOUSE_STATE_EMPTY,
            None => DORMOUSE_STATE_AWAKE,
        }
    };
    let live = heap.allocator().blocks().into_iter().filter(|block| !block.free_deferred);
    live.map(|block| dormouse_block_t {
        base: with_exposed_provenance_mut(block.range.start),
        bytes: block.range.bytes as u64,
        requested_bytes: block.requested_bytes as u64,
        stream: without_provenance_mut(block.stream as usize),
        state: state(&block),
        reserved: 0,
    })
    .collect()
}
