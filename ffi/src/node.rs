//! Nodes: one prefix held across phases A, B and C.

use std::ffi::c_void;
use std::sync::Arc;

use dormouse_offload as offload;

use crate::abi::v1::structs as c;
use crate::boundary::{In, RawStream};
use crate::collect::{self, Window};
use crate::device::AnyDevice;
use crate::fault::{self, Fault};
use crate::handles::{Exclusive, Kind, Table};
use crate::heap::HeapEngine;
use crate::plan::Plan;
use crate::runtime::{Runtime, usize_of};
use crate::{convert, status};

static NODES: Table<Node> = Table::new(Kind::Node);

/// Most storages one call may name.
const NAMED_MAX: u64 = 1 << 20;

/// A node of one runtime. The state is exclusive; the rest never changes.
#[derive(Debug)]
pub(crate) struct Node {
    runtime: Arc<Runtime>,
    label: String,
    state: Exclusive<State>,
}

#[derive(Debug)]
struct State {
    node: offload::Node<AnyDevice>,
    accepted_count: u64,
    refused_count: u64,
}

impl Node {
    /// Makes a node and gives its handle.
    pub(crate) fn create(
        runtime: *mut c::dormouse_runtime_t,
        plan: *mut c::dormouse_plan_t,
        node_id: u32,
        layers: u32,
    ) -> Result<*mut c::dormouse_node_t, Fault> {
        let runtime = Runtime::get(runtime)?;
        let window = if plan.is_null() { None } else { Some(Plan::window_for(plan, node_id)?) };
        let label = format!("node {node_id}");
        let engine: &Arc<HeapEngine> = runtime.engine();
        let mut node = engine.node(layers, &label)?;
        if let Some(layers) = window {
            node.set_window(layers);
        }
        let state = Exclusive::new(Kind::Node, State { node, accepted_count: 0, refused_count: 0 });
        let node = Arc::new(Self { runtime, label, state });
        let handle = NODES.insert(Arc::clone(&node))?;
        if !plan.is_null()
            && let Err(fault) = Plan::attach(plan, node_id, &node)
        {
            NODES.remove(handle, |_| Ok(()))?;
            return Err(fault);
        }
        Ok(handle)
    }

    /// The node `handle` names.
    pub(crate) fn get(handle: *mut c::dormouse_node_t) -> Result<Arc<Self>, Fault> {
        NODES.get(handle)
    }

    /// Wakes what sleeps and ends the node, in any phase.
    pub(crate) fn destroy(handle: *mut c::dormouse_node_t) -> Result<(), Fault> {
        if handle.is_null() {
            return Ok(());
        }
        let node = NODES.get(handle)?;
        // The state first: whoever is inside keeps the handle alive for everybody.
        let state = node.state.take()?;
        let open = collect::collecting().window.scope;
        if (0..state.node.layers()).any(|layer| state.node.scope(layer).is_ok_and(|s| s == open)) {
            collect::set_window(Window::NONE);
        }
        let report = state.node.close();
        NODES.remove(handle, |_| Ok(()))?;
        match report.left_asleep_bytes {
            0 => Ok(()),
            bytes => Err(Fault::new(
                status::DORMOUSE_ERR_IO,
                format!(
                    "{bytes} bytes of {} could not be woken and sleep on: {}",
                    node.label,
                    report.declined.join("; ")
                ),
            )),
        }
    }

    /// What `runtime` still has, named.
    pub(crate) fn labels_of(runtime: &Arc<Runtime>) -> Vec<String> {
        let live = NODES.live().into_iter().filter(|node| Arc::ptr_eq(&node.runtime, runtime));
        live.map(|node| node.label.clone()).collect()
    }

    /// A wave of the plan begins, with so many after it. Best effort: a node that is being used or
    /// has failed says so at its own next mark.
    pub(crate) fn wave(&self, after: u32) {
        if let Ok(mut inside) = self.state.enter()
            && let Ok(state) = inside.value()
        {
            state.node.wave(after);
        }
    }

    /// The last part of its subtree begins. Best effort, as above: what does not wake now does so at
    /// the mark that needs it.
    pub(crate) fn begin_wake(&self) {
        if let Ok(mut inside) = self.state.enter()
            && let Ok(state) = inside.value()
        {
            let _at_its_own_mark = state.node.begin_wake();
        }
    }

    /// `dormouse_node_phase`.
    pub(crate) fn phase(&self, phase: i32, stream: RawStream) -> Result<(), Fault> {
        let stream = self.runtime.stream(stream)?;
        let phase = convert::phase(phase)?;
        let mut inside = self.state.enter()?;
        Ok(inside.value()?.node.enter(phase, &stream)?)
    }

    /// `dormouse_node_mark`: opens and closes this thread's collecting window around a forward.
    pub(crate) fn mark(&self, edge: i32, layer: u32, stream: RawStream) -> Result<(), Fault> {
        let stream = self.runtime.stream(stream)?;
        let edge = convert::edge(edge)?;
        let mut inside = self.state.enter()?;
        let node = &mut inside.value()?.node;
        if edge == offload::Edge::ForwardEnd {
            // First, so that nothing the mark does is collected; also when the mark is refused.
            collect::set_window(Window::NONE);
        }
        let _stall = node.mark(edge, layer, &stream)?;
        if edge == offload::Edge::ForwardBegin {
            collect::set_window(Window { scope: node.scope(layer)?, arena: node.arena() });
        }
        Ok(())
    }

    /// `dormouse_node_dormant`.
    ///
    /// # Safety
    /// `pointers` is NULL or readable for `count` pointers.
    pub(crate) unsafe fn dormant(
        &self,
        layer: u32,
        pointers: *const *const c_void,
        count: u64,
    ) -> Result<(), Fault> {
        if count > NAMED_MAX {
            return Err(Fault::argument(format!(
                "count is {count}; 0 to {NAMED_MAX} are accepted"
            )));
        }
        // SAFETY: the caller's contract.
        let pointers = unsafe { In::slice(pointers, usize_of(count, "count")?, "ptrs") }?;
        let addresses: Vec<usize> = pointers.iter().map(|pointer| pointer.addr()).collect();
        let mut inside = self.state.enter()?;
        let state = inside.value()?;
        let named = state.node.dormant(layer, &addresses)?;
        state.accepted_count += u64::from(named.accepted);
        state.refused_count += named.refused.len() as u64;
        Ok(())
    }

    /// `dormouse_node_boundary`.
    pub(crate) fn boundary(
        &self,
        layer: u32,
        slot: u32,
        tensor: offload::Tensor,
        stream: RawStream,
    ) -> Result<(), Fault> {
        let stream = self.runtime.stream(stream)?;
        let mut inside = self.state.enter()?;
        let node = &mut inside.value()?.node;
        // The accumulator is the node's, not the layer's: it is allocated outside the window.
        let window = collect::collecting().window;
        collect::set_window(Window::NONE);
        let made = node.boundary(layer, slot, tensor, &stream);
        collect::set_window(window);
        Ok(made?)
    }

    /// `dormouse_node_accumulate`.
    ///
    /// # Safety
    /// `gradient` is NULL or readable for `elems` elements of `dtype`.
    pub(crate) unsafe fn accumulate(
        &self,
        layer: u32,
        slot: u32,
        gradient: *const c_void,
        elems: u64,
        dtype: i32,
        stream: RawStream,
    ) -> Result<(), Fault> {
        let stream = self.runtime.stream(stream)?;
        if gradient.is_null() {
            return Err(Fault::null("grad"));
        }
        let dtype = convert::dtype(dtype)?;
        let elems = usize_of(elems, "elems")?;
        let mut inside = self.state.enter()?;
        let node = &mut inside.value()?.node;
        // SAFETY: the caller's contract; NULL was turned away.
        unsafe { node.accumulate(layer, slot, gradient.addr(), elems, dtype, &stream) }?;
        Ok(())
    }

    /// `dormouse_node_gradient`.
    pub(crate) fn gradient(&self, layer: u32, slot: u32) -> Result<*mut c_void, Fault> {
        let mut inside = self.state.enter()?;
        let address = inside.value()?.node.gradient(layer, slot)?;
        Ok(std::ptr::with_exposed_provenance_mut(address))
    }

    /// `dormouse_node_explain`.
    pub(crate) fn explain(&self) -> Result<String, Fault> {
        Ok(self.state.enter()?.value()?.node.report().to_string())
    }

    /// `dormouse_node_report`.
    pub(crate) fn report(&self) -> Result<c::dormouse_node_report_t, Fault> {
        let mut inside = self.state.enter()?;
        let state = inside.value()?;
        let report = state.node.report();
        let planned = report.planned.unwrap_or_default();
        let mut declined = [0_u8; c::DORMOUSE_TEXT_BYTES];
        fault::copy_text(&report.declined.join("; "), &mut declined);
        Ok(c::dormouse_node_report_t {
            size: 0,
            version: 0,
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
            reserved: 0,
            declined: declined.map(|byte| byte as std::ffi::c_char),
            is_planned: u32::from(report.planned.is_some()),
            reserved_planned: 0,
            planned_bytes: [planned.kept_bytes, planned.host_bytes, planned.nvme_bytes],
            planned_stall_ns: planned.stall_ns,
        })
    }
}
