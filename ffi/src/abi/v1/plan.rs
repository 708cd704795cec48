//! Plan: what a trainer is told to do. Pure planning, no runtime needed.

use std::ffi::c_char;

use super::structs::{
    dormouse_batch_t, dormouse_forest_t, dormouse_op_t, dormouse_plan_node_t, dormouse_plan_t,
    dormouse_prediction_t, dormouse_spec_t,
};
use crate::boundary::{Out, Outcome, enter};
use crate::plan::Plan;
use crate::status::dormouse_status_t;

/// Makes a plan for one rollout group. Everything `spec` points to is copied.
///
/// Any-thread. The caller owns the handle and gives it to `dormouse_plan_destroy`.
/// Errors: `NULL`, `VERSION`, `ARGUMENT` naming the value seen and what is accepted: an empty
/// response, a prompt shorter than 2, a token id not below `vocab`, a weight that is not finite,
/// 0 microbatch tokens, no responses, offsets that do not ascend.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_create(
    spec: *const dormouse_spec_t,
    plan_out: *mut *mut dormouse_plan_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(plan_out, "plan_out") }?;
        // SAFETY: as above, for everything `spec` points to.
        out.write(unsafe { Plan::create(spec) }?);
        Ok(Outcome::Done)
    })
}

/// Makes the plan of a forest's sequences: its nodes depth first, leaves in microbatches, what sleeps and
/// what is recomputed, within the memory there is. Everything `batch` points to is copied; the
/// forest may grow or end afterwards.
///
/// Exclusive: the forest. The caller owns the handle and gives it to `dormouse_plan_destroy`.
/// Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` naming the value seen and what is
/// accepted: scoring that is not one a sequence, labels a sequence does not have, a batch that no
/// choice of what sleeps brings within memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_create_batch(
    forest: *mut dormouse_forest_t,
    batch: *const dormouse_batch_t,
    plan_out: *mut *mut dormouse_plan_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(plan_out, "plan_out") }?;
        // SAFETY: as above, for everything `batch` points to.
        out.write(unsafe { Plan::create_batch(forest, batch) }?);
        Ok(Outcome::Done)
    })
}

/// Ends a plan. Nodes made from it live on. NULL is fine and does nothing.
///
/// Exclusive. Errors: `HANDLE`, `STALE`, `BUSY` while another thread is inside.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_destroy(plan: *mut dormouse_plan_t) -> dormouse_status_t {
    enter(|| {
        Plan::destroy(plan)?;
        Ok(Outcome::Done)
    })
}

/// The next thing to do. Asked again before `dormouse_plan_complete`, the answer is the same.
/// A node made from this plan is told, and begins to wake its last layers by itself: a flat group's at
/// the first gradient of the last microbatch, a batch's as the op begins that names it in `waking`, or else
/// the op before its backward. Its own marks wait for what is needed in any case.
///
/// Exclusive. What `op_out->members` and `op_out->scores` point to is the library's, valid until the
/// next call with this plan.
/// Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_next(
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

/// Says that operation `op_id` is done.
///
/// Exclusive. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ORDER` for any id but that of the
/// operation `dormouse_plan_next` gave last.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_complete(
    plan: *mut dormouse_plan_t,
    op_id: u64,
) -> dormouse_status_t {
    enter(|| {
        Plan::complete(plan, op_id)?;
        Ok(Outcome::Done)
    })
}

/// Every node that operations name, by number: what a node reads is its ancestors by `parent`.
/// `needed_out` gets how many there are; `nodes` gets them when `capacity` has room for all and is
/// untouched otherwise. `nodes` may be NULL to ask for the number.
///
/// Exclusive. The array is the caller's. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT` when an
/// array was given and is too small (`needed_out` is written then too).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_nodes(
    plan: *mut dormouse_plan_t,
    nodes: *mut dormouse_plan_node_t,
    capacity: u64,
    needed_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let needed = unsafe { Out::new(needed_out, "needed_out") }?;
        // SAFETY: as above: `nodes` is NULL or writable for `capacity` elements.
        Plan::nodes(plan, |all| unsafe { needed.array(all, nodes, capacity) })?;
        Ok(Outcome::Done)
    })
}

/// What the plan costs and saves: floating-point operations, bytes.
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

/// The plan as JSON text. `needed_out` gets its bytes with the NUL; `buffer` gets the text when
/// `capacity_bytes` has room for all of it and is untouched otherwise. `buffer` may be NULL to
/// ask for the length.
///
/// Exclusive. The buffer is the caller's. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT`
/// when a buffer was given and is too small (`needed_out` is written then too).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_to_json(
    plan: *mut dormouse_plan_t,
    buffer: *mut c_char,
    capacity_bytes: u64,
    needed_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let needed = unsafe { Out::new(needed_out, "needed_out") }?;
        let text = Plan::to_json(plan)?;
        // SAFETY: as above: `buffer` is NULL or writable for `capacity_bytes`.
        unsafe { needed.text(&text, buffer, capacity_bytes) }?;
        Ok(Outcome::Done)
    })
}
