//! Prefix: one shared prefix across phases A, B and C.

use std::ffi::{c_char, c_void};

use super::structs::{
    dormouse_plan_t, dormouse_prefix_report_t, dormouse_prefix_t, dormouse_runtime_t,
};
use crate::boundary::{Out, RawStream, enter};
use crate::convert;
use crate::fault::Fault;
use crate::prefix::Prefix;
use crate::status::dormouse_status_t;

/// Creates a prefix of `layers` layers. `plan` may be NULL. With a plan, `prefix_id` is the number of
/// a plan node that runs backward, and the plan sets the wake window. With
/// `DORMOUSE_OFFLOAD_RESIDENCY=fit`, the step is planned from the latest prefix with the same
/// `prefix_id` and number of layers.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_prefix_destroy`.
/// Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for an invalid number of layers or a node that the
/// plan does not run backward, `BUSY` if the plan is in use or already has this prefix.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_prefix_create(
    runtime: *mut dormouse_runtime_t,
    plan: *mut dormouse_plan_t,
    prefix_id: u32,
    layers: u32,
    prefix_out: *mut *mut dormouse_prefix_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(prefix_out, "prefix_out") }?;
        out.write(Prefix::create(runtime, plan, prefix_id, layers)?);
        Ok(())
    })
}

/// Destroys a prefix, in any phase. Its sleeping memory is woken and stays with its owner. Its
/// gradient accumulators are freed. NULL is a no-op.
///
/// Exclusive. Blocks until the memory is awake. Errors: `HANDLE`, `STALE`, `BUSY`, `IO` if memory
/// could not be woken. After `IO` the prefix no longer exists; that memory stays asleep at its
/// addresses and can be freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_prefix_destroy(
    prefix: *mut dormouse_prefix_t,
) -> dormouse_status_t {
    enter(|| Prefix::destroy(prefix))
}

/// Enters phase A, B or C (`DORMOUSE_PHASE_*`), in this order. Entering B also puts the last layers
/// to sleep. Entering C starts the wake of the last layers.
///
/// Exclusive. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` for an unknown phase, `STATE` for a
/// repeated or skipped phase.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_prefix_enter_phase(
    prefix: *mut dormouse_prefix_t,
    phase: i32,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        Prefix::get(prefix)?.enter_phase(phase, stream)
    })
}

/// Marks the begin or end of a layer's forward or backward (`DORMOUSE_EDGE_*`). Between
/// `FORWARD_BEGIN` and `FORWARD_END`, blocks allocated by the calling thread belong to the layer.
/// After `FORWARD_END`, the layer below can fall asleep. `BACKWARD_BEGIN` blocks until the layer and
/// the one below are awake.
///
/// Exclusive; the forward marks of one layer come from one thread. Errors: `NULL`, `HANDLE`, `STALE`,
/// `BUSY`, `ARGUMENT` for an unknown edge or layer, `STATE` for a mark out of order, and
/// `OUT_OF_MEMORY`, `IO` or `CORRUPT` if a layer could not wake; its data is kept.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_prefix_mark_edge(
    prefix: *mut dormouse_prefix_t,
    edge: i32,
    layer: u32,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        Prefix::get(prefix)?.mark_edge(edge, layer, stream)
    })
}

/// Declares `count` storages that autograd saved in `layer`, each by any address inside it. A storage
/// can sleep only if it was also allocated between the layer's forward marks. The others, including
/// memory of another allocator, stay awake; the report counts them.
///
/// Exclusive; call it before the layer's `FORWARD_END`. The array is not kept. `ptrs` may be NULL if
/// `count` is 0. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT`, `STATE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_prefix_add_dormant(
    prefix: *mut dormouse_prefix_t,
    layer: u32,
    ptrs: *const *const c_void,
    count: u64,
) -> dormouse_status_t {
    enter(|| {
        let prefix = Prefix::get(prefix)?;
        // SAFETY: the caller's promise (module docs): `ptrs` is readable for `count` pointers.
        unsafe { prefix.add_dormant(layer, ptrs, count) }
    })
}

/// Declares boundary tensor `slot` of `layer`: `elems` elements of `dtype` (`DORMOUSE_DTYPE_*`) in
/// `bytes` bytes at `ptr`. Its block stays awake. Allocates the zeroed gradient accumulator of `elems`
/// elements, FP64 for an FP64 tensor and FP32 otherwise.
///
/// `gradient_out` receives the accumulator's address and may be NULL. The caller can read the
/// accumulator and add to it in place. A stream other than those passed to this function and to
/// `dormouse_prefix_accumulate` requires `dormouse_mem_record_stream`, or must finish with the
/// accumulator before the prefix is destroyed.
///
/// Exclusive; call it between the layer's forward marks. The tensor stays the caller's and can come
/// from another allocator. The library owns the accumulator; it is valid until
/// `dormouse_prefix_destroy`. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT`, `STATE`,
/// `OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_prefix_add_boundary(
    prefix: *mut dormouse_prefix_t,
    layer: u32,
    slot: u32,
    ptr: *const c_void,
    bytes: u64,
    elems: u64,
    dtype: i32,
    stream: *mut c_void,
    gradient_out: *mut *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::optional(gradient_out, "gradient_out") }?;
        let tensor = convert::tensor(ptr, bytes, elems, dtype)?;
        let gradient = Prefix::get(prefix)?.add_boundary(layer, slot, tensor, stream)?;
        if let Some(out) = out {
            out.write(gradient);
        }
        Ok(())
    })
}

/// Adds `elems` contiguous elements of `dtype` at `grad` to the accumulator of (`layer`, `slot`).
///
/// Exclusive. `grad` stays the caller's. On the NULL stream it is read before the call returns,
/// otherwise in the order of `stream`. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` for another
/// number of elements or a slot that was not declared, `STATE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_prefix_accumulate(
    prefix: *mut dormouse_prefix_t,
    layer: u32,
    slot: u32,
    grad: *const c_void,
    elems: u64,
    dtype: i32,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        let prefix = Prefix::get(prefix)?;
        // SAFETY: the caller's promise (module docs): `grad` is readable for `elems` elements.
        unsafe { prefix.accumulate(layer, slot, grad, elems, dtype, stream) }
    })
}

/// Reports on the prefix so far, as figures and as text: bytes per tier, stall time and its lower
/// bound, rates, the peak, the reasons why memory stayed awake.
///
/// `report_out` receives the figures and may be NULL. `count_out` receives the number of bytes of the
/// text, including the NUL, and may be NULL if no text is wanted. `buffer` receives the text if
/// `capacity` bytes are enough; otherwise it is unchanged. `buffer` may be NULL to query the length,
/// which can grow between two calls.
///
/// Exclusive. On a GPU, blocks until the streams have passed the prefix's latest marks. The caller owns
/// the buffer. Errors: `NULL` if both results are NULL, `VERSION`, `HANDLE`, `STALE`, `BUSY`, `LIMIT` if
/// the buffer is too small (`report_out` and `count_out` are written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_prefix_get_report(
    prefix: *mut dormouse_prefix_t,
    report_out: *mut dormouse_prefix_report_t,
    buffer: *mut c_char,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        if report_out.is_null() && count_out.is_null() {
            return Err(Fault::null("report_out and count_out"));
        }
        // SAFETY: the caller's promise (module docs), here and below.
        let report = unsafe { Out::optional_sized(report_out, "report_out") }?;
        // SAFETY: as above.
        let count = unsafe { Out::optional(count_out, "count_out") }?;
        let (figures, text) = Prefix::get(prefix)?.report()?;
        if let Some(report) = report {
            report.fill(figures);
        }
        if let Some(count) = count {
            // SAFETY: as above: `buffer` is NULL or writable for `capacity` bytes.
            unsafe { count.text(&text, buffer, capacity) }?;
        }
        Ok(())
    })
}
