//! Requests of PyTorch's allocators, served by the heap of the GPU they name.
//!
//! The first request creates the heap from the environment. A later runtime of the same GPU adds its
//! tiers. Memory for CUDA graphs: [`captures`].

pub(crate) mod captures;
pub(crate) mod history;
mod library;
pub(crate) mod observer;
pub(crate) mod profiler;
pub(crate) mod python;
pub(crate) mod request_flags;
mod throw;

use std::cell::Cell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{from_ref, null_mut, with_exposed_provenance_mut};

use dormouse_alloc::{AllocError, ArenaId, Block, OutOfMemory};
use dormouse_device::{Device, Fill};

use self::request_flags::Needs;
use crate::boundary::RawStream;
use crate::heap::Heap;
use crate::stderr::guarded;
use crate::{fault, fork};

pub(crate) use throw::construction_code;
use throw::{Failure, throw};

/// Alignment of blocks, as PyTorch's kernels expect from its own allocator.
const ALIGN_BYTES: usize = 512;

/// `dormouse_torch_malloc`, if the thread cache has no block.
///
/// # Safety
/// The caller, a C function, can be unwound by a C++ exception.
#[inline(never)]
pub(crate) unsafe fn malloc_or_throw(bytes: isize, device: i32, stream: RawStream) -> *mut c_void {
    let needs = Needs::of(device);
    let context = needs.record().then(history::enter_allocation);
    let outcome = malloc(bytes, device, stream, needs, true);
    // Before an observer, and the exception.
    drop(context);
    match outcome {
        Ok(pointer) => {
            if needs.profile() {
                // SAFETY: the caller's contract.
                unsafe { profiler::report_usage(pointer, profiler::bytes_of(pointer), device) };
            }
            pointer
        }
        // SAFETY: the caller's contract.
        Err(failure) => unsafe {
            if failure.is_out_of_memory {
                observer::tell(device, bytes);
                if needs.profile() {
                    profiler::report_out_of_memory(bytes, device);
                }
            }
            throw(&failure)
        },
    }
}

thread_local! {
    /// The request of this thread's pool that found no memory last: size, device and stream.
    static REFUSED: Cell<Option<(isize, i32, u64)>> = const { Cell::new(None) };
}

/// `dormouse_torch_pool_malloc`. A dump is written where PyTorch repeats the request: before that it gives back what its
/// own cache holds, and may find room.
pub(crate) fn malloc_or_null(bytes: isize, device: i32, stream: RawStream) -> *mut c_void {
    let request = (bytes, device, stream.key());
    let is_repeated = REFUSED.take() == Some(request);
    malloc(bytes, device, stream, Needs::of(device), is_repeated).unwrap_or_else(|failure| {
        if failure.is_out_of_memory && !is_repeated {
            REFUSED.set(Some(request));
        }
        if failure.is_out_of_memory {
            // PyTorch's own allocator needs the pages that the request did find.
            guarded("pool_malloc", || {
                Heap::existing_gpu(device)?.allocator().device().release_parked();
                Ok(())
            });
        }
        fault::set_last_error(&failure.text);
        null_mut()
    })
}

/// Allocates. `is_dumped`: a request that finds no memory writes a dump.
#[inline]
fn malloc(
    bytes: isize,
    device: i32,
    stream: RawStream,
    needs: Needs,
    is_dumped: bool,
) -> Result<*mut c_void, Failure> {
    match malloc_cached(bytes, device, stream, needs) {
        Some(pointer) => Ok(pointer),
        None => malloc_uncached(bytes, device, stream, is_dumped),
    }
}

/// Serves a request from the heap of GPU `device` if it needs nothing else ([`request_flags::plain_heap`]).
///
/// A closure: an `Option` of the heap would be compared with NULL once more.
#[inline(always)]
#[expect(clippy::inline_always, reason = "most requests consist of little else")]
fn serve_plain<R>(device: i32, serve: impl FnOnce(&'static Heap) -> Option<R>) -> Option<R> {
    let heap = request_flags::plain_heap(device)?;
    // SAFETY: `malloc_cached` alone opens the path, to heaps, which are never destroyed.
    serve(unsafe { &*heap.cast::<Heap>() })
}

/// Allocates a small block from the thread cache, which serves most requests. Does not panic, wait or
/// fail; `None` if [`malloc`] is needed.
#[inline]
pub(crate) fn malloc_small(bytes: isize, device: i32, stream: RawStream) -> Option<*mut c_void> {
    // Never in a forked child.
    serve_plain(device, |heap| {
        // A negative size is a large one when unsigned.
        let address = heap.allocate_small(bytes.cast_unsigned(), stream.key())?;
        Some(with_exposed_provenance_mut(address))
    })
}

/// Allocates from cached pages, on a thread with no open window or tag.
#[inline(always)]
#[expect(clippy::inline_always, reason = "half of a recorded request is calls otherwise")]
fn malloc_cached(
    bytes: isize,
    device: i32,
    stream: RawStream,
    needs: Needs,
) -> Option<*mut c_void> {
    // Also set in a forked child.
    if needs.driver_query() || bytes <= 0 {
        return None;
    }
    let heap = Heap::get_gpu(device.cast_unsigned())?;
    request_flags::open(device, from_ref(heap).cast_mut().cast());
    let take = || heap.try_allocate(bytes.cast_unsigned(), stream.key());
    // A panic repeats on the slow path, which reports it.
    let address = catch_unwind(AssertUnwindSafe(take)).ok().flatten()?;
    Some(with_exposed_provenance_mut(address))
}

#[inline(never)]
fn malloc_uncached(
    bytes: isize,
    device: i32,
    stream: RawStream,
    is_dumped: bool,
) -> Result<*mut c_void, Failure> {
    let Some(bytes) = usize::try_from(bytes).ok().filter(|bytes| *bytes > 0) else {
        return Ok(null_mut());
    };
    if fork::in_child() {
        return Err(Failure::other(
            "dormouse: this process was forked after dormouse was loaded; a GPU cannot be used in \
             the child. Use torch.multiprocessing with the spawn start method",
        ));
    }
    let answer = catch_unwind(AssertUnwindSafe(|| allocate(bytes, device, stream, is_dumped)));
    answer.unwrap_or_else(|_| Err(Failure::other("internal error in dormouse, please report it")))
}

fn allocate(
    bytes: usize,
    device: i32,
    stream: RawStream,
    is_dumped: bool,
) -> Result<*mut c_void, Failure> {
    let heap = Heap::gpu(device)?;
    if Needs::of(device).record() {
        history::join(heap);
    }
    // A graph replays on the addresses of its capture: no other request may get them.
    let arena = if Needs::of(device).driver_query() {
        captures::arena_for(heap, &heap.stream(stream)?)?
    } else {
        None
    };
    let outcome = match allocate_from(heap, bytes, stream, arena) {
        Err(AllocError::UnknownStream { .. }) => {
            let _known = heap.stream(stream)?;
            allocate_from(heap, bytes, stream, arena)
        }
        outcome => outcome,
    };
    match outcome {
        Ok(block) => Ok(with_exposed_provenance_mut(block.range.start)),
        Err(AllocError::OutOfMemory(report)) => {
            history::note_out_of_memory(heap, bytes);
            let capacity_bytes = heap.allocator().device().memory_info().capacity_bytes;
            let mut text = out_of_memory_text(&report, device, capacity_bytes);
            if is_dumped && let Some(line) = heap.dump_line(text.trim_end()) {
                text = format!("{}\n{line}", text.trim_end());
            }
            Err(Failure { text, is_out_of_memory: true })
        }
        Err(error) => Err(Failure::other(error.to_string())),
    }
}

fn allocate_from(
    heap: &Heap,
    bytes: usize,
    stream: RawStream,
    arena: Option<ArenaId>,
) -> Result<Block, AllocError> {
    match arena {
        Some(arena) => heap.allocate_for_graph(bytes, ALIGN_BYTES, stream.key(), arena),
        None => heap.allocate(bytes, ALIGN_BYTES, stream.key(), Fill::Any),
    }
}

/// Frees a small block into the thread cache; `false` if [`free`] is needed. `bytes`, the size as the
/// caller knows it, is only a hint.
#[inline]
pub(crate) fn free_small(
    pointer: *mut c_void,
    bytes: usize,
    device: i32,
    stream: RawStream,
) -> bool {
    let free = |heap: &Heap| heap.free_small(pointer.addr(), bytes, stream.key()).then_some(());
    serve_plain(device, free).is_some()
}

/// `dormouse_torch_free`, if [`free_small`] does not take the block.
#[inline(never)]
pub(crate) fn free_other(pointer: *mut c_void, bytes: usize, device: i32, stream: RawStream) {
    let needs = Needs::of(device);
    if needs.watch() {
        free_watched(pointer, device, stream, needs);
        return;
    }
    let heap = Heap::get_gpu(device.cast_unsigned());
    // While graphs may be captured, say. In a forked child this frees in the child's copy, from which nothing is allocated.
    if !heap.is_some_and(|heap| heap.free_small(pointer.addr(), bytes, stream.key())) {
        free(pointer, device, stream);
    }
}

/// Frees a block that the thread cache does not take.
#[inline(always)]
#[expect(clippy::inline_always, reason = "as `malloc_cached`")]
pub(crate) fn free(pointer: *mut c_void, device: i32, stream: RawStream) {
    if pointer.is_null() || fork::in_child() {
        return;
    }
    let try_free = |heap: &Heap| heap.try_free(pointer.addr(), stream.key());
    // A panic repeats on the slow path, which reports it.
    let is_freed = Heap::get_gpu(device.cast_unsigned())
        .is_some_and(|heap| catch_unwind(AssertUnwindSafe(|| try_free(heap))).unwrap_or(false));
    if !is_freed {
        guarded("free", || {
            let heap = Heap::gpu_around(pointer.addr()).map_or_else(|| Heap::gpu(device), Ok)?;
            heap.free_on(pointer.addr(), stream)
        });
    }
}

/// `dormouse_torch_free` while PyTorch's profiler runs or its memory history is recorded.
#[inline]
fn free_watched(pointer: *mut c_void, device: i32, stream: RawStream, needs: Needs) {
    // A forked child has no profiler, nor a lock to look its block up.
    if pointer.is_null() || fork::in_child() {
        return;
    }
    let bytes = if needs.profile() { profiler::bytes_of(pointer) } else { 0 };
    let context = history::enter_free();
    free(pointer, device, stream);
    drop(context);
    if needs.profile() {
        // SAFETY: a C++ exception ends the process at the caller, which is called by C++ destructors.
        unsafe { profiler::report_usage(pointer, -bytes, device) };
    }
}

/// `dormouse_torch_pool_free`.
pub(crate) fn free_to_driver(pointer: *mut c_void, device: i32, stream: RawStream) {
    free(pointer, device, stream);
    if pointer.is_null() || fork::in_child() {
        return;
    }
    guarded("pool_free", || {
        Heap::existing_gpu(device)?.allocator().trim(u64::MAX);
        Ok(())
    });
}

/// The message of PyTorch's own allocator, which trainers search for "CUDA out of memory", and our
/// report.
fn out_of_memory_text(report: &OutOfMemory, device: i32, capacity_bytes: u64) -> String {
    format!(
        "CUDA out of memory. Tried to allocate {}. GPU {device} has a total capacity of {}, of which dormouse may use {} \
         and holds {}.\n{report}",
        torch_size(report.asked_bytes),
        torch_size(capacity_bytes),
        torch_size(report.stats.budget_bytes),
        torch_size(report.stats.mapped_bytes.current),
    )
}

/// Formats bytes as PyTorch's own allocator does in this message.
fn torch_size(bytes: u64) -> String {
    let scaled = |unit_bytes: u64, unit| format!("{:.2} {unit}", bytes as f64 / unit_bytes as f64);
    match bytes {
        0..=0x400 => format!("{bytes} bytes"),
        0x401..=0x10_0000 => scaled(1 << 10, "KiB"),
        0x10_0001..=0x4000_0000 => scaled(1 << 20, "MiB"),
        _ => scaled(1 << 30, "GiB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_the_units_of_pytorch() {
        let sizes = [512, 1024, 1536, 1 << 20, 20 << 20, 1 << 30, 5 << 29].map(torch_size);
        let wanted = [
            "512 bytes",
            "1024 bytes",
            "1.50 KiB",
            "1024.00 KiB",
            "20.00 MiB",
            "1024.00 MiB",
            "2.50 GiB",
        ];
        assert_eq!(sizes, wanted);
    }
}
