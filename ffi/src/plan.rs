//! Plans: the schedule's, behind a handle, with the nodes made from it.

use std::ffi::c_char;
use std::sync::{Arc, Weak};

use dormouse_schedule as schedule;
use schedule::{Op, OpId, OpKind, PlanError, Response, Spec, Tokens, Verdict};

use crate::abi::v1::structs as c;
use crate::boundary::In;
use crate::fault::{self, Fault};
use crate::handles::{Exclusive, Kind, Table};
use crate::node::Node;
use crate::runtime::usize_of;
use crate::status;

static PLANS: Table<Plan> = Table::new(Kind::Plan);

/// A plan behind a handle.
#[derive(Debug)]
pub(crate) struct Plan {
    state: Exclusive<State>,
}

#[derive(Debug)]
struct State {
    plan: schedule::Plan,
    /// What `op_out->members` points to, until the next call.
    members: Vec<c::dormouse_member_t>,
    /// Nodes made from this plan, by the number its operations name.
    nodes: Vec<(u32, Weak<Node>)>,
}

impl Plan {
    /// Makes a plan and gives its handle.
    ///
    /// # Safety
    /// `spec` is NULL or a struct that says its size, whose arrays have the lengths it says.
    pub(crate) unsafe fn create(
        spec: *const c::dormouse_spec_t,
    ) -> Result<*mut c::dormouse_plan_t, Fault> {
        // SAFETY: the caller's contract.
        let plan = schedule::Plan::new(unsafe { read_spec(spec) }?)?;
        let state = State { plan, members: Vec::new(), nodes: Vec::new() };
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

    /// The next operation, handed to `fill` while its members are in place.
    pub(crate) fn next(
        handle: *mut c::dormouse_plan_t,
        fill: impl FnOnce(c::dormouse_op_t),
    ) -> Result<(), Fault> {
        Self::with(handle, |state| {
            let State { plan, members, nodes } = state;
            let op = &plan.next_op().clone();
            members.clear();
            if let OpKind::Wave { members: suffixes, .. } = &op.kind {
                members.extend(suffixes.iter().map(member));
            }
            fill(op_of(op, members));
            tell_nodes(op, plan.ops(), nodes);
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
        })
    }

    /// The plan as text.
    pub(crate) fn to_json(handle: *mut c::dormouse_plan_t) -> Result<String, Fault> {
        Self::with(handle, |state| Ok(state.plan.to_json()))
    }

    /// The wake window of the backward of `node`, where the plan has that node.
    pub(crate) fn window_for(
        handle: *mut c::dormouse_plan_t,
        node: u32,
    ) -> Result<Option<u32>, Fault> {
        Self::with(handle, |state| {
            let window = state.plan.ops().iter().find_map(|op| match op.kind {
                OpKind::NodeBackward { node: of, wake_window_layers } if of.0 == node => {
                    Some(wake_window_layers)
                }
                _ => None,
            });
            match window {
                Some(_) => Ok(window),
                None => Err(Fault::argument(format!(
                    "node_id is {node}; a node of the plan is accepted"
                ))),
            }
        })
    }

    /// Remembers a node made from this plan: its last wave begins its waking.
    pub(crate) fn attach(
        handle: *mut c::dormouse_plan_t,
        id: u32,
        node: &Arc<Node>,
    ) -> Result<(), Fault> {
        Self::with(handle, |state| {
            state.nodes.retain(|(_, node)| node.strong_count() > 0);
            if state.nodes.iter().any(|(known, _)| *known == id) {
                return Err(Fault::new(
                    status::DORMOUSE_ERR_BUSY,
                    format!("the plan's node {id} is live already; destroy it first"),
                ));
            }
            state.nodes.push((id, Arc::downgrade(node)));
            Ok(())
        })
    }
}

/// Tells the node an operation works on what it means for its memory.
fn tell_nodes(op: &Op, all: &[Op], nodes: &[(u32, Weak<Node>)]) {
    let live = |id: u32| {
        let node = nodes.iter().find(|(known, _)| *known == id);
        node.and_then(|(_, node)| node.upgrade())
    };
    match op.kind {
        OpKind::Wave { node: of, .. } => {
            if let Some(node) = live(of.0) {
                let is_later = |later: &&Op| {
                    matches!(later.kind, OpKind::Wave { node, .. } if node == of)
                        && later.id.0 > op.id.0
                };
                node.wave(all.iter().filter(is_later).count() as u32);
            }
        }
        OpKind::NodeBackward { node, wake_window_layers } => {
            if let Some(node) = live(node.0) {
                node.set_window(wake_window_layers);
            }
        }
        _ => {}
    }
}

fn member(it: &schedule::Member) -> c::dormouse_member_t {
    c::dormouse_member_t {
        sequence: it.sequence,
        reserved: 0,
        row_begin: it.rows.begin,
        row_end: it.rows.end,
        first_position: it.first_position,
        token_begin: it.tokens.begin,
        token_end: it.tokens.end,
        weight: it.weight,
    }
}

fn op_of(op: &Op, members: &[c::dormouse_member_t]) -> c::dormouse_op_t {
    let mut it = c::dormouse_op_t {
        size: 0,
        version: 0,
        id: op.id.0,
        kind: c::DORMOUSE_OP_DONE,
        node: 0,
        token_begin: 0,
        token_end: 0,
        members: std::ptr::null(),
        member_count: 0,
        last: 0,
        wake_window_layers: 0,
        reserved: 0,
    };
    match &op.kind {
        OpKind::PrefixForward { node, tokens } => {
            it.kind = c::DORMOUSE_OP_PREFIX_FORWARD;
            it.node = node.0;
            (it.token_begin, it.token_end) = (tokens.begin, tokens.end);
        }
        OpKind::Wave { node, last, .. } => {
            it.kind = c::DORMOUSE_OP_WAVE;
            it.node = node.0;
            it.members = members.as_ptr();
            it.member_count = members.len() as u32;
            it.last = u32::from(*last);
        }
        OpKind::NodeBackward { node, wake_window_layers } => {
            it.kind = c::DORMOUSE_OP_NODE_BACKWARD;
            it.node = node.0;
            it.wake_window_layers = *wake_window_layers;
        }
        // Done, and whatever a later schedule adds before this boundary has a number for it.
        _ => {}
    }
    it
}

/// Copies everything a spec points to.
///
/// # Safety
/// As [`Plan::create`].
unsafe fn read_spec(pointer: *const c::dormouse_spec_t) -> Result<Spec, Fault> {
    // SAFETY: the caller's contract, here and for each array below, by the lengths it says.
    let spec = unsafe { In::structure(pointer, "spec") }?;
    if spec.flags & !c::DORMOUSE_SPEC_LAST_LAYER_DEAD != 0 {
        return Err(Fault::argument(format!(
            "spec.flags is {}; 0 and DORMOUSE_SPEC_LAST_LAYER_DEAD ({}) are accepted",
            spec.flags,
            c::DORMOUSE_SPEC_LAST_LAYER_DEAD
        )));
    }
    // SAFETY: as above.
    let model = model(&unsafe { In::structure(spec.model, "spec.model") }?);
    let machine = if spec.machine.is_null() {
        None
    } else {
        // SAFETY: as above.
        Some(machine(&unsafe { In::structure(spec.machine, "spec.machine") }?))
    };
    let count = spec.response_count as usize;
    let offsets = if count == 0 {
        &[]
    } else {
        // SAFETY: as above.
        unsafe { In::slice(spec.response_offsets, count + 1, "spec.response_offsets") }?
    };
    let weights = if spec.weights.is_null() {
        vec![1.0; count]
    } else {
        // SAFETY: as above.
        unsafe { In::slice(spec.weights, count, "spec.weights") }?.to_vec()
    };
    check_ascending(offsets)?;
    // SAFETY: as above.
    let prompt = unsafe { tokens(spec.prompt_ids, 0, spec.prompt_length, "spec.prompt_ids") }?;
    let mut responses = Vec::with_capacity(count);
    for (ends, weight) in offsets.windows(2).zip(weights) {
        let &[begin, end] = ends else { continue };
        // SAFETY: as above: offsets ascend, so each range lies below the last offset.
        let tokens = unsafe { tokens(spec.response_ids, begin, end, "spec.response_ids") }?;
        responses.push(Response { tokens, weight });
    }
    Ok(Spec {
        prompt,
        responses,
        vocab: spec.vocab,
        wave_tokens: spec.wave_tokens,
        wake_window_layers: spec.wake_window_layers,
        last_layer_dead: spec.flags & c::DORMOUSE_SPEC_LAST_LAYER_DEAD != 0,
        model,
        machine,
    })
}

fn check_ascending(offsets: &[u64]) -> Result<(), Fault> {
    let falls = offsets.windows(2).position(|pair| matches!(pair, [a, b] if b < a));
    match falls {
        None => Ok(()),
        Some(at) => Err(Fault::argument(format!(
            "spec.response_offsets falls from {} to {} at {}; ascending offsets are accepted",
            offsets.get(at).copied().unwrap_or(0),
            offsets.get(at + 1).copied().unwrap_or(0),
            at + 1
        ))),
    }
}

/// Token ids `[begin, end)` of an array, or their number where there is no array.
///
/// # Safety
/// `ids` is NULL or readable for `end` values.
unsafe fn tokens(ids: *const i64, begin: u64, end: u64, name: &str) -> Result<Tokens, Fault> {
    let count = end - begin;
    // The schedule says what it accepts; nothing longer is copied.
    if ids.is_null() || count > schedule::TOKENS_MAX {
        return Ok(Tokens::Length(count));
    }
    // SAFETY: the caller's contract.
    let ids = unsafe { In::slice(ids, usize_of(end, name)?, name) }?;
    Ok(Tokens::Ids(ids.get(begin as usize..).unwrap_or_default().to_vec()))
}

fn model(it: &c::dormouse_model_t) -> schedule::ModelShape {
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

fn machine(it: &c::dormouse_machine_t) -> schedule::Machine {
    schedule::Machine {
        flops_per_s: it.flops_per_s,
        device_bytes: it.device_bytes,
        sleep_bytes_per_s: it.sleep_bytes_per_s,
        wake_bytes_per_s: it.wake_bytes_per_s,
        ..schedule::Machine::default()
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
