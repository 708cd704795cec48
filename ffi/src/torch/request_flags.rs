//! What a request of a GPU needs beside memory: a CUDA graph may be being captured, PyTorch's profiler runs, or
//! PyTorch's memory history is recorded. While it needs nothing, one load finds the GPU's heap.
//!
//! Loaded by every request, changed by captures, profilers, histories and a forked child. No locks.

use dormouse_alloc::Gate;

use crate::device::GPUS_MAX;

/// Number of open captures of each GPU, refused ones included, [`UNANNOUNCED`], [`PROFILED`] and [`RECORDED`].
static FLAGS: [Gate<AHeap>; GPUS_MAX] = [const { Gate::new(UNANNOUNCED) }; GPUS_MAX];
/// Captures may exist that `dormouse_torch_begin_pool` does not announce.
const UNANNOUNCED: u32 = 1 << 31;
/// PyTorch's profiler runs (`dormouse_torch_set_profiled`).
const PROFILED: u32 = 1 << 30;
/// PyTorch's memory history is recorded (`dormouse_torch_record_history`).
const RECORDED: u32 = 1 << 29;
/// The bits that count captures.
const CAPTURES: u32 = RECORDED - 1;

/// A GPU's heap, which this module does not know: a fork's handler needs it, and a heap needs that.
#[derive(Debug)]
pub(super) struct AHeap(#[expect(dead_code, reason = "the alignment of a heap")] u64);

/// Returns the heap of GPU `device` if its requests may be served without a look at captures, profilers and histories: a
/// pointer that was given to [`open`]. `None` does not say that they may not.
#[inline(always)]
#[expect(clippy::inline_always, reason = "most requests consist of little else")]
pub(super) fn plain_heap(device: i32) -> Option<*mut AHeap> {
    // A negative number is a large one when unsigned. A thread that works for a capture got its work after the begin.
    FLAGS.get(device.cast_unsigned() as usize)?.target()
}

/// Lets [`plain_heap`] return a GPU's heap from now on, if its requests need nothing else.
#[inline]
pub(super) fn open(device: i32, heap: *mut AHeap) {
    if let Some(gate) = FLAGS.get(device.cast_unsigned() as usize) {
        gate.open(heap);
    }
}

/// What the requests of a GPU need beside memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs(u32);

impl Needs {
    /// Returns what a request on GPU `device` needs now; of a number that is no GPU's, a query of the driver.
    #[inline]
    pub(crate) fn of(device: i32) -> Self {
        Self(FLAGS.get(device.cast_unsigned() as usize).map_or(UNANNOUNCED, Gate::reasons))
    }

    /// Whether the driver must be queried if the request's stream is being captured.
    #[inline]
    pub(crate) const fn driver_query(self) -> bool {
        self.0 & !(PROFILED | RECORDED) > 0
    }

    /// Whether allocations and frees are reported or recorded.
    #[inline]
    pub(crate) const fn watch(self) -> bool {
        self.0 & (PROFILED | RECORDED) > 0
    }

    /// Whether allocations and frees are recorded in a history.
    #[inline]
    pub(crate) const fn record(self) -> bool {
        self.0 & RECORDED > 0
    }

    /// Whether allocations and frees are reported to PyTorch's profiler.
    #[inline]
    pub(crate) const fn profile(self) -> bool {
        self.0 & PROFILED > 0
    }
}

/// `dormouse_torch_set_graph_hooks`.
pub(crate) fn set_announced(are_announced: bool) {
    set(UNANNOUNCED, !are_announced);
}

/// Sets whether PyTorch's profiler runs.
pub(super) fn set_profiled(is_profiled: bool) {
    set(PROFILED, is_profiled);
}

/// Sets whether PyTorch's memory history is recorded.
pub(super) fn set_recorded(is_recorded: bool) {
    set(RECORDED, is_recorded);
}

/// Sets the number of open captures of GPU `device`.
pub(super) fn set_open(device: usize, captures: u32) {
    if let Some(gate) = FLAGS.get(device) {
        gate.change(|seen| seen & !CAPTURES | captures.min(CAPTURES));
    }
}

/// Sets or clears a bit for every GPU.
fn set(bit: u32, is_set: bool) {
    for gate in &FLAGS {
        gate.change(|seen| if is_set { seen | bit } else { seen & !bit });
    }
}
