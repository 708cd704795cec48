//! Prefix: one prefix held across phases A, B and C.

use std::ffi::{c_char, c_void};

use super::structs::{
    dormouse_plan_t, dormouse_prefix_report_t, dormouse_prefix_t, dormouse_runtime_t,
};
use crate::boundary::{Out, Outcome, RawStream, enter};
use crate::convert;
use crate::prefix::Prefix;
use crate::status::dormouse_status_t;

/// Makes a prefix of `layers` layers. `plan` may be NULL; with a plan, `prefix_id` is the prefix its
/// operations name and the plan's window holds. Where residency is `fit`, the last step of the prefix
/// with this `prefix_id` and as many layers is what the next is planned from.
///
/// Any-thread. The caller owns the handle and gives it to `dormouse_prefix_destroy`.
/// Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for 0 layers or too many, or a prefix that the plan
/// runs no backward of, `BUSY` when the plan already has this prefix or a thread inside.
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
        Ok(Outcome::Done)
    })
}

/// Ends a prefix in any phase: whatever still sleeps is woken and left to its owner, accumulators
/// are freed. NULL is fine and does nothing.
///
/// Exclusive; blocks while the last blocks wake. Errors: `HANDLE`, `STALE`, `BUSY`; `IO` when
/// bytes could not be woken: the prefix is gone all the same, those bytes sleep on at their
/// addresses, and freeing them is legal.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_prefix_destroy(
    prefix: *mut dormouse_prefix_t,
) -> dormouse_status_t {
    enter(|| {
        Prefix::destroy(prefix)?;
        Ok(Outcome::Done)
    })
}

/// Enters phase A, B or C (`DORMOUSE_PHASE_*`), the only legal order. B puts the last layers to
/// sleep as well; C raises the wake window.
///
/// Exclusive. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` for an unknown phase,
/// `STATE` for a repeated or skipped one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_prefix_enter_phase(
    prefix: *mut dormouse_prefix_t,
    phase: i32,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        Prefix::get(prefix)?.phase(phase, stream)?;
        Ok(Outcome::Done)
    })
}

/// Marks an edge of `layer` (`DORMOUSE_EDGE_*`). Between `FORWARD_BEGIN` and `FORWARD_END` the
/// blocks the calling thread allocates are collected as the layer's; `FORWARD_END` lets the
/// layer below fall asleep. `BACKWARD_BEGIN` blocks until the layer and the one below are awake.
///
/// Exclusive; forward marks of one layer come from one thread. Errors: `NULL`, `HANDLE`,
/// `STALE`, `BUSY`, `ARGUMENT` for an unknown edge or layer, `STATE` for a mark out of place,
/// and those of a wake (`OUT_OF_MEMORY`, `IO`, `CORRUPT`): nothing is lost then.
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
        Prefix::get(prefix)?.mark(edge, layer, stream)?;
        Ok(Outcome::Done)
    })
}

/// Names `count` storages that the prefix graph saved in `layer`: any address inside each. Only
/// those also collected in the layer's forward window may sleep; the others stay awake and are
/// counted in the report, foreign addresses too.
///
/// Exclusive; before the layer's `FORWARD_END`. The array is read and not kept. `ptrs` may be
/// NULL when `count` is 0. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT`, `STATE`.
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
        unsafe { prefix.dormant(layer, ptrs, count) }?;
        Ok(Outcome::Done)
    })
}

/// Presents boundary tensor `slot` of `layer`: `elems` elements of `dtype` (`DORMOUSE_DTYPE_*`)
/// in `bytes` bytes at `ptr`. Its block never sleeps. Makes the zeroed accumulator of `elems`
/// elements, FP64 for FP64 and FP32 for every other dtype.
///
/// Exclusive; inside the layer's forward window. The memory stays the caller's; memory of
/// another allocator is accepted and simply never sleeps. Errors: `NULL`, `HANDLE`, `STALE`,
/// `BUSY`, `ARGUMENT`, `STATE`, `OUT_OF_MEMORY`.
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
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        Prefix::get(prefix)?.boundary(
            layer,
            slot,
            convert::tensor(ptr, bytes, elems, dtype)?,
            stream,
        )?;
        Ok(Outcome::Done)
    })
}

/// Adds `elems` elements of `dtype` at `grad` into the accumulator of (`layer`, `slot`).
///
/// Exclusive. `grad` is contiguous, read before the call returns (NULL stream) and stays the
/// caller's. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` for another count of elements
/// or a slot without boundary, `STATE`.
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
        unsafe { prefix.accumulate(layer, slot, grad, elems, dtype, stream) }?;
        Ok(Outcome::Done)
    })
}

/// The accumulator of (`layer`, `slot`). The trainer may read it and add into it in place. Streams
/// other than those of `dormouse_prefix_add_boundary` and `dormouse_prefix_accumulate` are named to
/// `dormouse_mem_record_stream`, or are done with it before the prefix ends.
///
/// Exclusive. Borrowed: the library's, valid until `dormouse_prefix_destroy`.
/// Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` for a slot without boundary.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_prefix_get_gradient(
    prefix: *mut dormouse_prefix_t,
    layer: u32,
    slot: u32,
    ptr_out: *mut *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(ptr_out, "ptr_out") }?;
        out.write(Prefix::get(prefix)?.gradient(layer, slot)?);
        Ok(Outcome::Done)
    })
}

/// What the prefix did so far: bytes per tier, stall and its bound, rates, reasons. On a GPU it waits
/// for the streams of the prefix's marks to come to the last of them.
///
/// Exclusive. Blocks. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_prefix_get_report(
    prefix: *mut dormouse_prefix_t,
    report_out: *mut dormouse_prefix_report_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(report_out, "report_out") }?;
        out.fill(Prefix::get(prefix)?.report()?);
        Ok(Outcome::Done)
    })
}

/// The same for a reader: which phase sets the peak, bytes by tier, the plan, rates, the longest
/// waits beside what could be, and why something stayed awake. `needed_out` gets its bytes with the
/// NUL; `buffer` gets the text when `capacity_bytes` has room for all of it and is untouched
/// otherwise. `buffer` may be NULL to ask for the length, which figures that grow may change. Waits as
/// `dormouse_prefix_get_report` does.
///
/// Exclusive. Blocks. The buffer is the caller's. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT`
/// when a buffer was given and is too small (`needed_out` is written then too).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_prefix_explain(
    prefix: *mut dormouse_prefix_t,
    buffer: *mut c_char,
    capacity_bytes: u64,
    needed_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let needed = unsafe { Out::new(needed_out, "needed_out") }?;
        let text = Prefix::get(prefix)?.explain()?;
        // SAFETY: as above: `buffer` is NULL or writable for `capacity_bytes`.
        unsafe { needed.text(&text, buffer, capacity_bytes) }?;
        Ok(Outcome::Done)
    })
}
