//! Plans and planning queries. No runtime is required.

use std::ffi::c_char;

use dormouse_parallel::query;
use dormouse_schedule as schedule;
use schedule::{NodeId, Op, OpId, Verdict};

use super::c::*;
use super::forest::FORESTS;
use crate::boundary::{Elements, In, Out, enter};
use crate::fault::{Fault, c_text};
use crate::handles::{Exclusive, Kind, Table};
use crate::op::{self, Lists};
use crate::plan_options;
use crate::plan_prefixes::PlanPrefixes;
use crate::status::{DORMOUSE_ERR_PANIC, dormouse_status_t};

/// A figure of a prediction that the machine's rates do not determine.
const UNKNOWN: f64 = -1.0;

pub(crate) static PLANS: Table<Exclusive<Plan>> = Table::new(Kind::Plan);

/// A plan with the prefixes made from it.
#[derive(Debug)]
pub(crate) struct Plan {
    plan: schedule::Plan,
    /// Arrays of the latest op, valid until the next call.
    lists: Lists,
    pub(crate) prefixes: PlanPrefixes,
}

impl Plan {
    /// Returns the wake window of the backward of `node`. `None` if it sleeps and the plan's options leave the window
    /// to the runtime.
    pub(crate) fn wake_window_layers(&self, node: u32) -> Result<Option<u32>, Fault> {
        let window = self.plan.wake_window_layers(NodeId(node)).ok_or_else(|| {
            Fault::argument(format!(
                "prefix_id is {node}; accepted: a node that the plan runs backward"
            ))
        })?;
        let is_set = self.plan.options().wake_window_layers > 0 || window == 0;
        Ok(is_set.then_some(window))
    }
}

/// Creates a plan for the sequences of a forest: its nodes depth first, its leaves in microbatches, and
/// the nodes that sleep or are recomputed, within the memory budgets. A flat group is a forest of depth
/// one: the prompt, and a child for each response. The arrays of `options` are copied. The forest can grow
/// or be destroyed afterwards.
///
/// Exclusive (the forest). The caller owns the handle and releases it with `dormouse_plan_destroy`.
/// Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` for another number of sequences than
/// the forest's, labels outside a sequence, a weight that is not finite, 0 `microbatch_rows` without a
/// device budget, or a budget that no plan meets.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_create(
    forest: *mut dormouse_forest_t,
    options: *const dormouse_plan_options_t,
    plan_out: *mut *mut dormouse_plan_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(plan_out, "plan_out") }?;
        let plan = FORESTS.with(forest, |forest| {
            let forest = forest.frozen();
            // SAFETY: as above, for everything `options` points to.
            let (scoring, options) =
                unsafe { plan_options::read(options, forest.endings().len()) }?;
            Ok(schedule::Plan::new(forest, &scoring, &options)?)
        })?;
        let (lists, prefixes) = (Lists::default(), PlanPrefixes::default());
        out.write(PLANS.insert_exclusive(Plan { plan, lists, prefixes })?);
        Ok(())
    })
}

/// Creates the plan of a plan file, which `dormouse plan --out` writes for each rank. `text` is the whole file.
/// It is copied. A file that was changed or cut, is of another version, or has ops that no plan has, is refused.
/// The second line of the file lists the sequences with their numbers, names, tokens and checksums.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_plan_destroy`. Errors: `NULL`,
/// `ARGUMENT`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_load(
    text: *const c_char,
    plan_out: *mut *mut dormouse_plan_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(plan_out, "plan_out") }?;
        // SAFETY: as above: the text does not change during the call.
        let text = unsafe { In::borrowed_text(text, query::REQUEST_BYTES_MAX, "text") }?;
        let file = schedule::PlanFile::parse(text);
        let plan = file.map_err(|error| Fault::argument(format!("plan file: {error}")))?.plan;
        let (lists, prefixes) = (Lists::default(), PlanPrefixes::default());
        out.write(PLANS.insert_exclusive(Plan { plan, lists, prefixes })?);
        Ok(())
    })
}

/// Destroys a plan. Prefixes created from it stay valid. NULL is a no-op.
///
/// Exclusive. Errors: `HANDLE`, `STALE`, `BUSY` while another thread is inside.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_destroy(plan: *mut dormouse_plan_t) -> dormouse_status_t {
    enter(|| PLANS.destroy(plan))
}

/// Returns the next op. It is the same one until `dormouse_plan_complete_op`.
///
/// Prefixes created from this plan are notified and start to wake their last layers: with
/// `DORMOUSE_PLAN_RUNTIME_RESIDENCY` at the first gradient of the last microbatch, otherwise at the op
/// that names the prefix in `waking`, or at the op before its backward. A backward mark waits for its
/// layers in any case.
///
/// Exclusive. The library owns `op_out->members` and `op_out->scores`; they are valid until the next call
/// with this plan. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_get_op(
    plan: *mut dormouse_plan_t,
    op_out: *mut dormouse_op_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(op_out, "op_out") }?;
        PLANS.with(plan, |Plan { plan, lists, prefixes }| {
            // Ids count up from 0 and index the ops.
            let at = plan.next_op().id.0 as usize;
            let Some((op, later)) = plan.ops().get(at..).and_then(<[Op]>::split_first) else {
                return Err(Fault::new(DORMOUSE_ERR_PANIC, "the plan has no end"));
            };
            out.fill(lists.fill(op));
            prefixes.begin_op(op, later.first(), plan.options().runtime_residency);
            Ok(())
        })
    })
}

/// Completes op `op_id`, which must be the one that `dormouse_plan_get_op` returned last.
///
/// Exclusive. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ORDER` for another id.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_complete_op(
    plan: *mut dormouse_plan_t,
    op_id: u64,
) -> dormouse_status_t {
    enter(|| PLANS.with(plan, |plan| Ok(plan.plan.complete(OpId(op_id))?)))
}

/// Returns the nodes of the plan, indexed by the number that ops use. A node reads K and V of all its
/// ancestors.
///
/// `count_out` receives the number of nodes. `nodes` receives them if `capacity` elements are enough;
/// otherwise it is unchanged. `nodes` may be NULL to query the number.
///
/// Exclusive. The caller owns the array. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT` if the array
/// is too small (`count_out` is written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_get_nodes(
    plan: *mut dormouse_plan_t,
    nodes: *mut dormouse_plan_node_t,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let (count, nodes) = unsafe {
            (Out::new(count_out, "count_out")?, Elements::new(nodes, capacity, "nodes")?)
        };
        let all: Vec<_> =
            PLANS.with(plan, |plan| Ok(plan.plan.nodes().iter().map(op::plan_node).collect()))?;
        count.array(&all, &nodes)
    })
}

/// Returns the predicted cost of the plan.
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
        let it = PLANS.with(plan, |plan| Ok(plan.plan.predict()))?;
        out.fill(dormouse_prediction_t {
            flops_dense: it.flops_dense,
            flops_shared: it.flops_shared,
            speedup: it.speedup,
            token_ratio: it.token_ratio,
            peak_bytes: [it.peak_bytes_a, it.peak_bytes_b, it.peak_bytes_c],
            sleep_bytes: it.sleep_bytes,
            pays: u32::from(it.verdict == Verdict::Pays),
            reason: c_text(&it.verdict.reason(it.speedup)),
            seconds_dense: it.seconds_dense.unwrap_or(UNKNOWN),
            seconds_shared: it.seconds_shared.unwrap_or(UNKNOWN),
            sleep_stall_s: it.sleep_stall_s.unwrap_or(UNKNOWN),
            wake_stall_s: it.wake_stall_s.unwrap_or(UNKNOWN),
            residency_gap: it.residency_gap.unwrap_or(UNKNOWN),
            recomputed_rows: it.recomputed_rows,
            device_bytes: it.device_bytes,
            host_bytes: it.host_bytes,
            ..dormouse_prediction_t::default()
        });
        Ok(())
    })
}

/// Returns the plan as JSON.
///
/// `count_out` receives the number of bytes of the text, including the NUL. `buffer` receives the text
/// if `capacity` bytes are enough; otherwise it is unchanged. `buffer` may be NULL to query the length.
///
/// Exclusive. The caller owns the buffer. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT` if the
/// buffer is too small (`count_out` is written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_plan_get_json(
    plan: *mut dormouse_plan_t,
    buffer: *mut c_char,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let count = unsafe { Out::new(count_out, "count_out") }?;
        let text = PLANS.with(plan, |plan| Ok(plan.plan.to_json()))?;
        // SAFETY: as above: `buffer` is NULL or writable for `capacity`.
        unsafe { count.text(text, buffer, capacity) }
    })
}

/// Answers a JSON request, `{"version": 1, "query": "shares", ...}`, with
/// `{"version": 1, "answer": ...}`. Queries cover rank shares, pipeline stages, layouts, context
/// shards, router accounting, rollout assignment, fitted rates, plans and simulations;
/// docs/queries/ documents each with an example. Equal requests have equal answers.
///
/// `count_out` receives the number of bytes of the answer, including the NUL. `buffer` receives the
/// answer if `capacity` bytes are enough; otherwise it is unchanged. `buffer` may be NULL to query
/// the length, which computes the whole answer.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `ARGUMENT` for an invalid request, with the
/// value and the accepted values in the message, `LIMIT` if the buffer is too small (`count_out` is
/// written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_schedule_query(
    request: *const c_char,
    buffer: *mut c_char,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let count = unsafe { Out::new(count_out, "count_out") }?;
        // SAFETY: as above: the text does not change during the call.
        let request = unsafe { In::borrowed_text(request, query::REQUEST_BYTES_MAX, "request") }?;
        let answer = query::query(request).map_err(|error| Fault::argument(error.to_string()))?;
        // SAFETY: as above: `buffer` is NULL or writable for `capacity` bytes.
        unsafe { count.text(answer, buffer, capacity) }
    })
}
