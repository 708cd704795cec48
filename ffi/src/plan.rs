//! Plans behind handles, with the prefixes made from them.

use std::ffi::c_char;
use std::sync::Arc;

use dormouse_schedule as schedule;
use schedule::{NodeId, Op, OpId, PlanError, Verdict};

use crate::abi::v1::structs as c;
use crate::fault::{self, Fault};
use crate::forest::Forest;
use crate::handles::{Exclusive, Kind, Table};
use crate::op::{self, Lists};
use crate::plan_options;
use crate::plan_prefixes::PlanPrefixes;
use crate::prefix::Prefix;
use crate::status;

/// A figure of a prediction that the machine says too little for.
const NOT_KNOWN: f64 = -1.0;

static PLANS: Table<Plan> = Table::new(Kind::Plan);

/// A plan behind a handle.
#[derive(Debug)]
pub(crate) struct Plan {
    state: Exclusive<State>,
}

#[derive(Debug)]
struct State {
    plan: schedule::Plan,
    /// What the last op's pointers point to, until the next call.
    lists: Lists,
    /// The live prefixes made from this plan.
    prefixes: PlanPrefixes,
}

impl Plan {
    /// Plans the sequences of a forest and returns the handle.
    ///
    /// # Safety
    /// `options` is NULL or a struct with its size set, whose arrays have the lengths it states.
    pub(crate) unsafe fn create(
        forest: *mut c::dormouse_forest_t,
        options: *const c::dormouse_plan_options_t,
    ) -> Result<*mut c::dormouse_plan_t, Fault> {
        let plan = Forest::lend(forest, |forest| {
            // SAFETY: the caller's contract.
            let (scoring, options) =
                unsafe { plan_options::read(options, forest.endings().len()) }?;
            Ok(schedule::Plan::new(forest, &scoring, &options)?)
        })?;
        let state = State { plan, lists: Lists::default(), prefixes: PlanPrefixes::default() };
        PLANS.insert(Arc::new(Self { state: Exclusive::new(Kind::Plan, state) }))
    }

    /// Ends a plan; nodes made from it live on.
    pub(crate) fn destroy(handle: *mut c::dormouse_plan_t) -> Result<(), Fault> {
        if handle.is_null() {
            return Ok(());
        }
        PLANS.get(handle)?.state.take()?;
        PLANS.remove(handle, |_| Ok(())).map(drop)
    }

    fn with<T>(
        handle: *mut c::dormouse_plan_t,
        work: impl FnOnce(&mut State) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let plan = PLANS.get(handle)?;
        let mut inside = plan.state.enter()?;
        work(inside.value()?)
    }

    /// The next operation, handed to `fill` while its lists are in place.
    pub(crate) fn next(
        handle: *mut c::dormouse_plan_t,
        fill: impl FnOnce(c::dormouse_op_t),
    ) -> Result<(), Fault> {
        Self::with(handle, |state| {
            let State { plan, lists, prefixes } = state;
            // Ids count up from 0 and index the ops, so that none is copied.
            let at = plan.next_op().id.0 as usize;
            let Some((op, later)) = plan.ops().get(at..).and_then(<[Op]>::split_first) else {
                return Err(Fault::new(status::DORMOUSE_ERR_PANIC, "the plan has no end"));
            };
            fill(lists.fill(op));
            prefixes.begin_op(op, later.first(), plan.options().runtime_residency);
            Ok(())
        })
    }

    /// Says that an operation is done.
    pub(crate) fn complete(handle: *mut c::dormouse_plan_t, op: u64) -> Result<(), Fault> {
        Self::with(handle, |state| Ok(state.plan.complete(OpId(op))?))
    }

    /// What the plan costs and saves.
    pub(crate) fn predict(
        handle: *mut c::dormouse_plan_t,
    ) -> Result<c::dormouse_prediction_t, Fault> {
        let it = Self::with(handle, |state| Ok(state.plan.predict()))?;
        let mut reason = [0_u8; c::DORMOUSE_TEXT_BYTES];
        fault::copy_text(&it.verdict.reason(it.speedup), &mut reason);
        Ok(c::dormouse_prediction_t {
            size: 0,
            version: 0,
            flops_dense: it.flops_dense,
            flops_shared: it.flops_shared,
            speedup: it.speedup,
            token_ratio: it.token_ratio,
            peak_bytes: [it.peak_bytes_a, it.peak_bytes_b, it.peak_bytes_c],
            sleep_bytes: it.sleep_bytes,
            pays: u32::from(it.verdict == Verdict::Pays),
            reserved: 0,
            reason: reason.map(|byte| byte as c_char),
            seconds_dense: it.seconds_dense.unwrap_or(NOT_KNOWN),
            seconds_shared: it.seconds_shared.unwrap_or(NOT_KNOWN),
            sleep_stall_s: it.sleep_stall_s.unwrap_or(NOT_KNOWN),
            wake_stall_s: it.wake_stall_s.unwrap_or(NOT_KNOWN),
            residency_gap: it.residency_gap.unwrap_or(NOT_KNOWN),
            recomputed_rows: it.recomputed_rows,
            device_bytes: it.device_bytes,
            host_bytes: it.host_bytes,
        })
    }

    /// The nodes that operations name, handed to `give`.
    pub(crate) fn nodes(
        handle: *mut c::dormouse_plan_t,
        give: impl FnOnce(&[c::dormouse_plan_node_t]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        Self::with(handle, |state| {
            give(&state.plan.nodes().iter().map(op::plan_node).collect::<Vec<_>>())
        })
    }

    /// The plan as text.
    pub(crate) fn to_json(handle: *mut c::dormouse_plan_t) -> Result<String, Fault> {
        Self::with(handle, |state| Ok(state.plan.to_json()))
    }

    /// The wake window of the backward of `node`, where the plan has that node.
    pub(crate) fn window_for(handle: *mut c::dormouse_plan_t, node: u32) -> Result<u32, Fault> {
        Self::with(handle, |state| {
            state.plan.wake_window_layers(NodeId(node)).ok_or_else(|| {
                Fault::argument(format!(
                    "prefix_id is {node}; a node that the plan runs backward is accepted"
                ))
            })
        })
    }

    /// Remembers a node made from this plan: operations say when it wakes.
    pub(crate) fn attach(
        handle: *mut c::dormouse_plan_t,
        id: u32,
        node: &Arc<Prefix>,
    ) -> Result<(), Fault> {
        Self::with(handle, |state| state.prefixes.attach(id, node))
    }
}

pub(crate) fn check_ascending(offsets: &[u64], name: &str) -> Result<(), Fault> {
    let falls = offsets.windows(2).position(|pair| matches!(pair, [a, b] if b < a));
    match falls {
        None => Ok(()),
        Some(at) => Err(Fault::argument(format!(
            "{name} falls from {} to {} at {}; ascending offsets are accepted",
            offsets.get(at).copied().unwrap_or(0),
            offsets.get(at + 1).copied().unwrap_or(0),
            at + 1
        ))),
    }
}

pub(crate) fn model(it: &c::dormouse_model_t) -> schedule::ModelShape {
    schedule::ModelShape {
        layers: it.layers,
        heads: it.heads,
        kv_heads: it.kv_heads,
        head_dim: it.head_dim,
        dtype_bytes: it.dtype_bytes,
        layer_linear_weights: it.layer_linear_weights,
        kv_linear_weights: it.kv_linear_weights,
        last_layer_prefix_weights: it.last_layer_prefix_weights,
        head_weights: it.head_weights,
        saved_bytes_per_token_layer: it.saved_bytes_per_token_layer,
    }
}

pub(crate) fn machine(it: &c::dormouse_machine_t) -> schedule::Machine {
    schedule::Machine {
        flops_per_s: it.flops_per_s,
        device_bytes: it.device_bytes,
        sleep_bytes_per_s: it.sleep_bytes_per_s,
        wake_bytes_per_s: it.wake_bytes_per_s,
        host_bytes: it.host_bytes,
        nvme_write_bytes_per_s: it.nvme_write_bytes_per_s,
        nvme_read_bytes_per_s: it.nvme_read_bytes_per_s,
        link_bytes_per_s: it.link_bytes_per_s,
        op_overhead_ns: it.op_overhead_ns,
    }
}

impl From<PlanError> for Fault {
    fn from(error: PlanError) -> Self {
        let code = match error {
            PlanError::Order { .. } => status::DORMOUSE_ERR_ORDER,
            _ => status::DORMOUSE_ERR_ARGUMENT,
        };
        Self::new(code, error.to_string())
    }
}
