//! Prefix: one shared prefix across phases A, B and C.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use dormouse_offload::Edge;

use super::c::*;
use super::plan::PLANS;
use crate::boundary::{In, Out, RawStream, enter, usize_of};
use crate::collect::{self, Window};
use crate::convert;
use crate::fault::{Fault, c_text};
use crate::handles::{Exclusive, Kind};
use crate::prefix::{PREFIXES, Prefix, PrefixState};
use crate::runtime::Runtime;
use crate::status::{self, dormouse_status_t};

/// Maximum number of storages of one call.
const STORAGES_MAX: u64 = 1 << 20;

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
        let runtime = Runtime::get(runtime)?;
        let wake_window = |plan| PLANS.with(plan, |plan| plan.wake_window_layers(prefix_id));
        let window = (!plan.is_null()).then(|| wake_window(plan)).transpose()?.flatten();
        let label = format!("prefix {prefix_id}");
        let _maker = runtime.begin_making()?;
        let mut prefix = runtime.engine.prefix(layers, &label)?;
        if let Some(layers) = window {
            prefix.set_window(layers);
        }
        let state = PrefixState { prefix, accepted_count: 0, refused_count: 0 };
        let state = Exclusive::new(Kind::Prefix, state);
        let prefix = Arc::new(Prefix { runtime, label, state });
        let handle = PREFIXES.insert(Arc::clone(&prefix))?;
        if !plan.is_null()
            && let Err(fault) = PLANS.with(plan, |plan| plan.prefixes.attach(prefix_id, &prefix))
        {
            PREFIXES.remove(handle)?;
            return Err(fault);
        }
        out.write(handle);
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
    enter(|| {
        if prefix.is_null() {
            return Ok(());
        }
        let it = PREFIXES.get(prefix)?;
        // First, so that a thread inside keeps the handle valid.
        let state = it.state.take()?;
        let open = collect::collecting().window.scope;
        let is_open = |layer| state.prefix.scope(layer).is_ok_and(|scope| scope == open);
        if (0..state.prefix.layers()).any(is_open) {
            collect::set_window(Window::NONE);
        }
        let report = state.prefix.close();
        PREFIXES.remove(prefix)?;
        match report.left_asleep_bytes {
            0 => Ok(()),
            bytes => Err(Fault::new(
                status::DORMOUSE_ERR_IO,
                format!(
                    "{bytes} bytes of {} could not be woken and stay asleep: {}",
                    it.label,
                    report.declined.join("; ")
                ),
            )),
        }
    })
}

/// Enters phase A, B or C (`DORMOUSE_PHASE_*`), in this order. Entering B also puts the last layers
/// to sleep. Entering C starts the wake of the last layers.
///
/// `stream` is the stream that runs the phases: copies out wait for the work queued on it. Work of other streams on
/// dormant memory must be complete, or `dormouse_mem_record_stream` must name them.
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
        let prefix = PREFIXES.get(prefix)?;
        // SAFETY: the caller's promise (module docs).
        let stream = prefix.runtime.heap.stream(unsafe { RawStream::new(stream) })?;
        let phase = convert::phase(phase)?;
        prefix.state.with(|state| Ok(state.prefix.enter(phase, &stream)?))
    })
}

/// Marks the begin or end of a layer's forward or backward (`DORMOUSE_EDGE_*`). Between
/// `FORWARD_BEGIN` and `FORWARD_END`, blocks that the calling thread allocates on the runtime's device
/// belong to the layer. After `FORWARD_END`, the layer below can fall asleep. `BACKWARD_BEGIN` blocks
/// until the layer and the one below are awake; on a GPU work that is queued on `stream` afterwards finds
/// them awake. `stream` is as of `dormouse_prefix_enter_phase`.
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
        let prefix = PREFIXES.get(prefix)?;
        // SAFETY: the caller's promise (module docs).
        let stream = prefix.runtime.heap.stream(unsafe { RawStream::new(stream) })?;
        let edge = convert::edge(edge)?;
        let heap = prefix.runtime.heap;
        prefix.state.with(|PrefixState { prefix, .. }| {
            if edge == Edge::ForwardEnd {
                // First, so that the mark's own blocks belong to no layer; also if the mark is refused.
                collect::set_window(Window::NONE);
            }
            let marked = prefix.mark(edge, layer, &stream);
            let _stall = marked.map_err(|error| heap.fault_of(error))?;
            if edge == Edge::ForwardBegin {
                let (scope, arena) = (prefix.scope(layer)?, prefix.arena());
                collect::set_window(Window { scope, arena, device: Some(heap.device()) });
            }
            Ok(())
        })
    })
}

/// Declares `count` storages that autograd saved in `layer`, each by any address inside it. A storage
/// can sleep only if its block was allocated between the layer's forward marks and has 64 KiB or more.
/// The others, including memory of another allocator, stay awake; the report counts them.
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
        let prefix = PREFIXES.get(prefix)?;
        if count > STORAGES_MAX {
            return Err(Fault::argument(format!(
                "count is {count}; accepted: 0 to {STORAGES_MAX}"
            )));
        }
        // SAFETY: the caller's promise (module docs): `ptrs` is readable for `count` pointers.
        let ptrs = unsafe { In::slice(ptrs, usize_of(count, "count")?, "ptrs") }?;
        let addresses: Vec<usize> = ptrs.iter().map(|ptr| ptr.addr()).collect();
        prefix.state.with(|state| {
            let declared = state.prefix.dormant(layer, &addresses)?;
            state.accepted_count += u64::from(declared.accepted);
            state.refused_count += declared.refused.len() as u64;
            Ok(())
        })
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
        // SAFETY: the caller's promise (module docs).
        let (stream, out) =
            unsafe { (RawStream::new(stream), Out::optional(gradient_out, "gradient_out")?) };
        let tensor = convert::tensor(ptr, bytes, elems, dtype)?;
        let prefix = PREFIXES.get(prefix)?;
        let heap = prefix.runtime.heap;
        let stream = heap.stream(stream)?;
        let gradient = prefix.state.with(|PrefixState { prefix, .. }| {
            // The accumulator belongs to the prefix, not to the layer.
            let window = collect::collecting().window;
            collect::set_window(Window::NONE);
            let added = prefix.boundary(layer, slot, tensor, &stream);
            collect::set_window(window);
            added.map_err(|error| heap.fault_of(error))?;
            Ok(prefix.gradient(layer, slot)?)
        })?;
        if let Some(out) = out {
            out.write(std::ptr::with_exposed_provenance_mut(gradient));
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
        let prefix = PREFIXES.get(prefix)?;
        // SAFETY: the caller's promise (module docs).
        let stream = prefix.runtime.heap.stream(unsafe { RawStream::new(stream) })?;
        if grad.is_null() {
            return Err(Fault::null("grad"));
        }
        let (dtype, elems) = (convert::dtype(dtype)?, usize_of(elems, "elems")?);
        prefix.state.with(|PrefixState { prefix, .. }| {
            // SAFETY: the caller's promise (module docs): `grad` is readable for `elems` elements.
            unsafe { prefix.accumulate(layer, slot, grad.addr(), elems, dtype, &stream) }?;
            Ok(())
        })
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
        // SAFETY: the caller's promise (module docs).
        let (report, count) = unsafe {
            (Out::optional_sized(report_out, "report_out")?, Out::optional(count_out, "count_out")?)
        };
        let (figures, text) = PREFIXES.get(prefix)?.state.with(figures)?;
        if let Some(report) = report {
            report.fill(figures);
        }
        if let Some(count) = count {
            // SAFETY: as above: `buffer` is NULL or writable for `capacity` bytes.
            unsafe { count.text(text, buffer, capacity) }?;
        }
        Ok(())
    })
}

/// Returns the report of a prefix as figures and as text.
fn figures(state: &mut PrefixState) -> Result<(dormouse_prefix_report_t, String), Fault> {
    let report = state.prefix.report();
    let planned = report.planned.unwrap_or_default();
    let figures = dormouse_prefix_report_t {
        dormant_bytes: report.dormant_bytes,
        boundary_bytes: report.boundary_bytes,
        asleep_bytes_peak: report.asleep_bytes_peak,
        asleep_at_b_bytes: report.layer.iter().map(|layer| layer.asleep_bytes_at_b).sum(),
        tier_bytes_peak: [0, report.host_bytes_peak, report.nvme_bytes_peak],
        written_bytes: report.written_bytes,
        read_bytes: report.read_bytes,
        write_bytes_per_s: report.write_bytes_per_s,
        read_bytes_per_s: report.read_bytes_per_s,
        stall_ns: report.stall_ns,
        stall_bound_ns: report.stall_bound_ns,
        phase_peak_bytes: report.phase_peak_bytes,
        left_asleep_bytes: report.left_asleep_bytes,
        accepted_count: state.accepted_count,
        refused_count: state.refused_count,
        peak_phase: report.peak_phase.map_or(0, convert::phase_code),
        declined: c_text(&report.declined.join("; ")),
        is_planned: u32::from(report.planned.is_some()),
        planned_bytes: [planned.kept_bytes, planned.host_bytes, planned.nvme_bytes],
        planned_stall_ns: planned.stall_ns,
        stray_wakes: report.stray.count,
        first_stray: c_text(&report.stray.first.map_or_else(String::new, |it| it.to_string())),
        ..dormouse_prefix_report_t::default()
    };
    Ok((figures, report.to_string()))
}
