//! Plans: the ops of a trainer, in order. Pure planning: no runtime is required.

use std::ffi::c_char;

use super::structs::{
    dormouse_forest_t, dormouse_op_t, dormouse_plan_node_t, dormouse_plan_options_t,
    dormouse_plan_t, dormouse_prediction_t,
};
use crate::boundary::{Out, Outcome, enter};
use crate::plan::Plan;
use crate::status::dormouse_status_t;

/// Plans the sequences of a forest: ops for its nodes depth first, leaves in microbatches, and what
/// sleeps or is recomputed, within the memory budgets. A flat group is a forest of depth one: the prompt
/// and a child for each response. Everything `options` points to is copied; the forest may grow or be
/// destroyed afterwards.
///
/// Exclusive: the forest. The caller owns the handle and passes it to `dormouse_plan_destroy`.
/// Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` with the value seen and what is
/// accepted: a sequence count other than the forest's, labels a sequence does not have, a weight that is not
/// finite, 0 microbatch rows without a device budget, a plan that no choice of what sleeps brings within
/// memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_create(
    forest: *mut dormouse_forest_t,
    options: *const dormouse_plan_options_t,
    plan_out: *mut *mut dormouse_plan_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(plan_out, "plan_out") }?;
        // SAFETY: as above, for everything `options` points to.
        out.write(unsafe { Plan::create(forest, options) }?);
        Ok(Outcome::Done)
    })
}

/// Destroys a plan. Prefixes made from it stay valid. NULL is accepted and has no effect.
///
/// Exclusive. Errors: `HANDLE`, `STALE`, `BUSY` while another thread is inside.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_destroy(plan: *mut dormouse_plan_t) -> dormouse_status_t {
    enter(|| {
        Plan::destroy(plan)?;
        Ok(Outcome::Done)
    })
}

/// Returns the next op: the same one until `dormouse_plan_complete_op`. A prefix made from this plan is
/// notified and starts to wake its last layers: with `DORMOUSE_PLAN_RUNTIME_RESIDENCY` at the first gradient
/// of the last microbatch, otherwise when the op begins that names it in `waking`, or the op before its
/// backward. Its marks wait for the layers they need in any case.
///
/// Exclusive. The library owns the arrays of `op_out->members` and `op_out->scores`, which are valid until
/// the next call with this plan.
/// Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_get_op(
    plan: *mut dormouse_plan_t,
    op_out: *mut dormouse_op_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(op_out, "op_out") }?;
        Plan::next(plan, |op| out.fill(op))?;
        Ok(Outcome::Done)
    })
}

/// Completes op `op_id`.
///
/// Exclusive. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ORDER` for any id other than that
/// of the op that `dormouse_plan_get_op` returned last.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_complete_op(
    plan: *mut dormouse_plan_t,
    op_id: u64,
) -> dormouse_status_t {
    enter(|| {
        Plan::complete(plan, op_id)?;
        Ok(Outcome::Done)
    })
}

/// Copies all nodes that ops name, by number. A node reads its ancestors, linked by `parent`.
/// `count_out` receives the number of nodes. `nodes` is written only if `capacity` is sufficient; it may be
/// NULL to query the number.
///
/// Exclusive. The caller owns the array. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT` if the array is
/// too small (`count_out` is still written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_get_nodes(
    plan: *mut dormouse_plan_t,
    nodes: *mut dormouse_plan_node_t,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let needed = unsafe { Out::new(count_out, "count_out") }?;
        // SAFETY: as above: `nodes` is NULL or writable for `capacity` elements.
        Plan::nodes(plan, |all| unsafe { needed.array(all, nodes, capacity) })?;
        Ok(Outcome::Done)
    })
}

/// Returns the predicted cost of the plan: floating-point operations, seconds, bytes.
///
/// Exclusive. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_predict(
    plan: *mut dormouse_plan_t,
    prediction_out: *mut dormouse_prediction_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(prediction_out, "prediction_out") }?;
        out.fill(Plan::predict(plan)?);
        Ok(Outcome::Done)
    })
}

/// Copies the plan as JSON text. `count_out` receives its size in bytes including the NUL. `buffer` is
/// written only if `capacity` is sufficient; it may be NULL to query the size.
///
/// Exclusive. The caller owns the buffer. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT` if the buffer
/// is too small (`count_out` is still written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_get_json(
    plan: *mut dormouse_plan_t,
    buffer: *mut c_char,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let needed = unsafe { Out::new(count_out, "count_out") }?;
        let text = Plan::to_json(plan)?;
        // SAFETY: as above: `buffer` is NULL or writable for `capacity`.
        unsafe { needed.text(&text, buffer, capacity) }?;
        Ok(Outcome::Done)
    })
}
