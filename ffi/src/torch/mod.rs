//! PyTorch's doors: requests of its allocators, answered by the heap of the GPU they name.
//!
//! A heap is made by the first request, from the environment alone; a runtime made later for the
//! same GPU puts its tiers beside it. Memory for graphs is [`captures`]'.

pub(crate) mod captures;
mod throw;

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use dormouse_alloc::{AllocError, ArenaId, Block, BlockInfo, OutOfMemory};
use dormouse_device::{AddressRange, Device, Fill};

use crate::abi::v1::structs as c;
use crate::boundary::RawStream;
use crate::fault::{self, Fault};
use crate::heap::Heap;
use crate::{convert, fork, note, params, runtime};

pub(crate) use throw::throw;

/// Addresses are multiples of this, as torch's kernels expect of its own allocator.
const ALIGN_BYTES: usize = 512;
/// Most sentences about failures of calls that cannot return one, of one process.
const SENTENCES_MAX: usize = 8;

/// Why a request of torch's failed: text for a person, and whether memory was what lacked.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) text: String,
    pub(crate) is_out_of_memory: bool,
}

impl Failure {
    fn other(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_out_of_memory: false }
    }
}

/// `dormouse_torch_malloc`, where no small block is at hand.
///
/// # Safety
/// The caller may be unwound by a C++ exception, as the function of C it is called from.
#[inline(never)]
pub(crate) unsafe fn malloc_or_throw(bytes: isize, device: i32, stream: RawStream) -> *mut c_void {
    match malloc(bytes, device, stream) {
        Ok(pointer) => pointer,
        // SAFETY: the caller's promise; nothing of ours is left behind.
        Err(failure) => unsafe { throw(&failure) },
    }
}

/// `dormouse_torch_malloc`, up to the throw.
#[inline]
pub(crate) fn malloc(bytes: isize, device: i32, stream: RawStream) -> Result<*mut c_void, Failure> {
    match malloc_cached(bytes, device, stream) {
        Some(pointer) => Ok(pointer),
        None => malloc_anew(bytes, device, stream),
    }
}

/// A block out of cached pages, for a thread that collects for nobody.
#[inline]
fn malloc_cached(bytes: isize, device: i32, stream: RawStream) -> Option<*mut c_void> {
    // In a forked child it must be asked too.
    if captures::must_query_driver(device) || bytes <= 0 {
        return None;
    }
    let heap = Heap::get_gpu(device.cast_unsigned())?;
    let take = || heap.try_allocate(bytes.cast_unsigned(), stream.key());
    // What panics here does so again, where it is said.
    let address = catch_unwind(AssertUnwindSafe(take)).ok().flatten()?;
    Some(std::ptr::with_exposed_provenance_mut(address))
}

/// The same as `malloc`, where what is cached does not serve as it is.
#[inline(never)]
fn malloc_anew(bytes: isize, device: i32, stream: RawStream) -> Result<*mut c_void, Failure> {
    let Some(bytes) = usize::try_from(bytes).ok().filter(|bytes| *bytes > 0) else {
        return Ok(std::ptr::null_mut());
    };
    if fork::in_child() {
        return Err(Failure::other(
            "dormouse: this process was forked after dormouse was loaded; a GPU cannot be used in \
             the child. Use torch.multiprocessing with the spawn start method",
        ));
    }
    let answer = catch_unwind(AssertUnwindSafe(|| allocate(bytes, device, stream)));
    answer.unwrap_or_else(|_| Err(Failure::other("defect in dormouse, please report it")))
}

/// A small block that was freed a moment ago: what most requests come to. Nothing in here can panic,
/// wait or fail; whatever is out of the ordinary is `malloc`'s.
#[inline]
pub(crate) fn malloc_small(bytes: isize, device: i32, stream: RawStream) -> Option<*mut c_void> {
    // In a forked child it must be asked too.
    if captures::must_query_driver(device) {
        return None;
    }
    let heap = Heap::get_gpu(device.cast_unsigned())?;
    // Less than nothing is too much, as any size beyond the largest small one.
    let address = heap.allocate_small(bytes.cast_unsigned(), stream.key())?;
    Some(std::ptr::with_exposed_provenance_mut(address))
}

/// Frees a block like that; `false` where it has to be looked at more closely. What the caller says of
/// its size only decides where to look first.
#[inline]
pub(crate) fn free_small(
    pointer: *mut c_void,
    bytes: usize,
    device: i32,
    stream: RawStream,
) -> bool {
    let heap = Heap::get_gpu(device.cast_unsigned());
    // In a forked child this frees in the child's own copy of what nobody there allocates from.
    heap.is_some_and(|heap| heap.free_small(pointer.addr(), bytes, stream.key()))
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

fn allocate(bytes: usize, device: i32, stream: RawStream) -> Result<*mut c_void, Failure> {
    let heap = heap(device).map_err(|fault| Failure::other(fault.sentence))?;
    // A replay would use memory that was given to somebody else since.
    let arena = if captures::must_query_driver(device) {
        let known = heap.stream(stream).map_err(|fault| Failure::other(fault.sentence))?;
        captures::arena_for(heap, &known)?
    } else {
        None
    };
    let outcome = allocate_from(heap, bytes, stream, arena);
    let outcome = if let Err(AllocError::UnknownStream { .. }) = outcome {
        let _known = heap.stream(stream).map_err(|fault| Failure::other(fault.sentence))?;
        allocate_from(heap, bytes, stream, arena)
    } else {
        outcome
    };
    match outcome {
        Ok(block) => Ok(std::ptr::with_exposed_provenance_mut(block.range.start)),
        Err(AllocError::OutOfMemory(report)) => {
            let capacity_bytes = heap.allocator().device().memory_info().capacity_bytes;
            let text = out_of_memory_text(&report, device, capacity_bytes);
            Err(Failure { text, is_out_of_memory: true })
        }
        Err(error) => Err(Failure::other(error.to_string())),
    }
}

/// `dormouse_torch_pool_malloc`.
pub(crate) fn malloc_or_null(bytes: isize, device: i32, stream: RawStream) -> *mut c_void {
    malloc(bytes, device, stream).unwrap_or_else(|failure| {
        fault::keep(&failure.text);
        std::ptr::null_mut()
    })
}

/// `dormouse_torch_free`, where it is no small block.
#[inline(never)]
pub(crate) fn free(pointer: *mut c_void, device: i32, stream: RawStream) {
    let heap = Heap::get_gpu(device.cast_unsigned()).filter(|_| !fork::in_child());
    let give = |heap: &Heap| heap.try_free(pointer.addr(), stream.key());
    // What panics here does so again, where it is said.
    let is_freed =
        heap.is_some_and(|heap| catch_unwind(AssertUnwindSafe(|| give(heap))).unwrap_or(false));
    if !is_freed {
        free_anew(pointer, device, stream);
    }
}

/// The same, where it has to be looked at more closely.
#[inline(never)]
fn free_anew(pointer: *mut c_void, device: i32, stream: RawStream) {
    if pointer.is_null() || fork::in_child() {
        return;
    }
    guarded("free", || {
        let heap = Heap::gpu_around(pointer.addr()).map_or_else(|| heap(device), Ok)?;
        heap.free_on(pointer.addr(), stream)
    });
}

/// `dormouse_torch_record_stream`.
pub(crate) fn record_stream(pointer: *mut c_void, stream: RawStream) {
    if pointer.is_null() || fork::in_child() {
        return;
    }
    guarded("record_stream", || {
        // Memory from before the door was opened is not ours, and torch's own to look after.
        let Some(heap) = Heap::gpu_around(pointer.addr()) else { return Ok(()) };
        let _known = heap.stream(stream)?;
        Ok(heap.allocator().record_stream(pointer.addr(), stream.key())?)
    });
}

/// `dormouse_torch_empty_cache`.
pub(crate) fn empty_cache() {
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

/// `dormouse_torch_set_memory_fraction`.
pub(crate) fn memory_fraction(fraction: f64, device: i32) {
    if fork::in_child() {
        return;
    }
    guarded("memory_fraction", || {
        if !(fraction > 0.0 && fraction <= 1.0) {
            return Err(Fault::argument(format!(
                "fraction is {fraction}; more than 0 and up to 1 are accepted"
            )));
        }
        let heap = heap(device)?;
        let capacity_bytes = heap.allocator().device().memory_info().capacity_bytes;
        let budget_bytes = (capacity_bytes as f64 * fraction) as u64;
        Ok(heap.allocator().set_budget(budget_bytes)?)
    });
}

/// `dormouse_torch_get_base`.
pub(crate) fn base(pointer: *mut c_void) -> Option<AddressRange> {
    if fork::in_child() {
        return None;
    }
    let found = catch_unwind(|| {
        let heap = Heap::gpu_around(pointer.addr())?;
        heap.allocator().lookup(pointer.addr()).map(|block| block.range)
    });
    found.unwrap_or_default()
}

/// `dormouse_torch_get_stats`.
pub(crate) fn stats(device: i32) -> Result<c::dormouse_stats_t, Fault> {
    Ok(runtime::stats_of(made_heap(device)?))
}

/// The blocks of `dormouse_torch_get_stats`.
pub(crate) fn blocks(device: i32) -> Result<Vec<c::dormouse_block_t>, Fault> {
    let heap = made_heap(device)?;
    let engine = heap.engine();
    let state = |block: &BlockInfo| {
        let region = engine
            .as_ref()
            .and_then(|engine| engine.region_info(engine.region_at(block.range.start)?).ok());
        match region {
            Some(region) => convert::state_code(region.state),
            None if block.asleep => c::DORMOUSE_STATE_EMPTY,
            None => c::DORMOUSE_STATE_AWAKE,
        }
    };
    let held = heap.allocator().blocks().into_iter().filter(|block| !block.free_deferred);
    let listed = held.map(|block| c::dormouse_block_t {
        base: std::ptr::with_exposed_provenance_mut(block.range.start),
        bytes: block.range.bytes as u64,
        requested_bytes: block.requested_bytes as u64,
        stream: std::ptr::without_provenance_mut(block.stream as usize),
        state: state(&block),
        reserved: 0,
    });
    Ok(listed.collect())
}

/// The heap of GPU `device`, where there is one.
fn made_heap(device: i32) -> Result<&'static Heap, Fault> {
    let ordinal = u32::try_from(device).unwrap_or(u32::MAX);
    Heap::get_gpu(ordinal).ok_or_else(|| {
        Fault::argument(format!("CUDA device {device} has no heap; allocate there first"))
    })
}

/// The heap of GPU `device`.
fn heap(device: i32) -> Result<&'static Heap, Fault> {
    let ordinal = u32::try_from(device).unwrap_or(u32::MAX);
    match Heap::get_gpu(ordinal) {
        Some(heap) => Ok(heap),
        None => Heap::get_or_make_gpu(ordinal, &*params::in_effect()?),
    }
}

/// A call that cannot return an error says it on standard error, a few times.
fn guarded(what: &str, body: impl FnOnce() -> Result<(), Fault>) {
    static SENTENCES: AtomicUsize = AtomicUsize::new(0);
    let sentence = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return,
        Ok(Err(fault)) => fault.sentence,
        Err(_) => "defect in dormouse, please report it".into(),
    };
    fault::keep(&sentence);
    // Relaxed: a count.
    if SENTENCES.fetch_add(1, Ordering::Relaxed) < SENTENCES_MAX {
        note::say(&format!("torch door, {what}: {sentence}"));
    }
}

/// What torch's own allocator would say, which trainers search for "CUDA out of memory", and then
/// our report.
fn out_of_memory_text(report: &OutOfMemory, device: i32, capacity_bytes: u64) -> String {
    const GIB: f64 = (1_u64 << 30) as f64;
    let gib = |bytes: u64| bytes as f64 / GIB;
    format!(
        "CUDA out of memory. Tried to allocate {:.2} GiB. GPU {device} has a total capacity of \
         {:.2} GiB, of which dormouse may use {:.2} GiB and holds {:.2} GiB.\n{report}",
        gib(report.asked_bytes),
        gib(capacity_bytes),
        gib(report.stats.budget_bytes),
        gib(report.stats.mapped_bytes.current),
    )
}
