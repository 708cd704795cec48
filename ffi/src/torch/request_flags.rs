//! One word per GPU that says whether a request needs more than memory: a CUDA graph may be being
//! captured, PyTorch's profiler runs, or PyTorch's memory history is recorded.
//!
//! Loaded by every request, stored by captures, profilers, histories and a forked child. No locks.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::device::GPUS_MAX;

/// Number of open captures of each GPU, refused ones included, [`UNANNOUNCED`], [`PROFILED`] and [`RECORDED`].
static FLAGS: [AtomicU32; GPUS_MAX] = [const { AtomicU32::new(UNANNOUNCED) }; GPUS_MAX];
/// Captures may exist that `dormouse_torch_begin_pool` does not announce.
const UNANNOUNCED: u32 = 1 << 31;
/// PyTorch's profiler runs (`dormouse_torch_set_profiled`).
const PROFILED: u32 = 1 << 30;
/// PyTorch's memory history is recorded (`dormouse_torch_record_history`).
const RECORDED: u32 = 1 << 29;
/// The bits that count captures.
const CAPTURES: u32 = RECORDED - 1;

/// Returns whether a request on GPU `device` may be served without a look at captures, profilers and histories.
#[inline]
pub(crate) fn is_plain(device: i32) -> bool {
    word(device) == 0
}

/// Returns whether a request on GPU `device` must query the driver if its stream is being captured.
#[inline]
pub(crate) fn must_query_driver(device: i32) -> bool {
    word(device) & !(PROFILED | RECORDED) > 0
}

/// Returns whether allocations and frees on GPU `device` are reported or recorded.
#[inline]
pub(crate) fn is_watched(device: i32) -> bool {
    word(device) & (PROFILED | RECORDED) > 0
}

/// Returns whether allocations and frees on GPU `device` are recorded in a history.
#[inline]
pub(crate) fn is_recorded(device: i32) -> bool {
    word(device) & RECORDED > 0
}

/// Returns whether allocations and frees on GPU `device` are reported to PyTorch's profiler.
#[inline]
pub(crate) fn is_profiled(device: i32) -> bool {
    word(device) & PROFILED > 0
}

/// Returns the word of GPU `device`; [`UNANNOUNCED`] for a number that is no GPU's.
#[inline]
fn word(device: i32) -> u32 {
    // Acquire: pairs with the stores below. A thread that works for a capture got its work after the begin.
    // A negative number is a large one when unsigned.
    let flags = FLAGS.get(device.cast_unsigned() as usize);
    flags.map_or(UNANNOUNCED, |flags| flags.load(Ordering::Acquire))
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
    let set = |seen: u32| Some(seen & !CAPTURES | captures.min(CAPTURES));
    // Release: pairs with `word`.
    let _always = FLAGS[device].fetch_update(Ordering::Release, Ordering::Relaxed, set);
}

/// Sets or clears a bit for every GPU.
fn set(bit: u32, is_set: bool) {
    for flags in &FLAGS {
        // Release: pairs with `word`.
        if is_set {
            flags.fetch_or(bit, Ordering::Release);
        } else {
            flags.fetch_and(!bit, Ordering::Release);
        }
    }
}
