//! Prefixes: one prefix held across phases A, B and C.

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

static PREFIXES: Table<Prefix> = Table::new(Kind::Prefix);

/// Most storages one call may name.
const NAMED_MAX: u64 = 1 << 20;

/// A prefix of one runtime. The state is exclusive; the rest never changes.
#[derive(Debug)]
pub(crate) struct Prefix {
    runtime: Arc<Runtime>,
    label: String,
    state: Exclusive<State>,
}

#[derive(Debug)]
struct State {
    prefix: offload::Prefix<AnyDevice>,
    accepted_count: u64,
    refused_count: u64,
}

impl Prefix {
    /// Makes a prefix and gives its handle.
    pub(crate) fn create(
        runtime: *mut c::dormouse_runtime_t,
        plan: *mut c::dormouse_plan_t,
        prefix_id: u32,
        layers: u32,
    ) -> Result<*mut c::dormouse_prefix_t, Fault> {
        let runtime = Runtime::get(runtime)?;
        let window = if plan.is_null() { None } else { Some(Plan::window_for(plan, prefix_id)?) };
        let label = format!("prefix {prefix_id}");
        let engine: &Arc<HeapEngine> = runtime.engine();
        let mut prefix = engine.prefix(layers, &label)?;
        if let Some(layers) = window {
            prefix.set_window(layers);
        }
        let state =
            Exclusive::new(Kind::Prefix, State { prefix, accepted_count: 0, refused_count: 0 });
        let prefix = Arc::new(Self { runtime, label, state });
        let handle = PREFIXES.insert(Arc::clone(&prefix))?;
        if !plan.is_null()
            && let Err(fault) = Plan::attach(plan, prefix_id, &prefix)
        {
            PREFIXES.remove(handle, |_| Ok(()))?;
            return Err(fault);
        }
        Ok(handle)
    }

    /// The prefix `handle` names.
    pub(crate) fn get(handle: *mut c::dormouse_prefix_t) -> Result<Arc<Self>, Fault> {
        PREFIXES.get(handle)
    }

    /// Wakes what sleeps and ends the prefix, in any phase.
    pub(crate) fn destroy(handle: *mut c::dormouse_prefix_t) -> Result<(), Fault> {
        if handle.is_null() {
            return Ok(());
        }
        let prefix = PREFIXES.get(handle)?;
        // The state first: whoever is inside keeps the handle alive for everybody.
        let state = prefix.state.take()?;
        let open = collect::collecting().window.scope;
        if (0..state.prefix.layers())
            .any(|layer| state.prefix.scope(layer).is_ok_and(|s| s == open))
        {
            collect::set_window(Window::NONE);
        }
        let report = state.prefix.close();
        PREFIXES.remove(handle, |_| Ok(()))?;
        match report.left_asleep_bytes {
            0 => Ok(()),
            bytes => Err(Fault::new(
                status::DORMOUSE_ERR_IO,
                format!(
                    "{bytes} bytes of {} could not be woken and sleep on: {}",
                    prefix.label,
                    report.declined.join("; ")
                ),
            )),
        }
    }

    /// What `runtime` still has, named.
    pub(crate) fn labels_of(runtime: &Arc<Runtime>) -> Vec<String> {
        let live =
            PREFIXES.live().into_iter().filter(|prefix| Arc::ptr_eq(&prefix.runtime, runtime));
        live.map(|prefix| prefix.label.clone()).collect()
    }

    /// A microbatch of the plan begins, with so many after it. Best effort: a prefix that is being used or
    /// has failed says so at its own next mark.
    pub(crate) fn microbatch(&self, after: u32) {
        if let Ok(mut inside) = self.state.enter()
            && let Ok(state) = inside.value()
        {
            state.prefix.microbatch(after);
        }
    }

    /// The last part of its subtree begins. Best effort, as above: what does not wake now does so at
    /// the mark that needs it.
    pub(crate) fn begin_wake(&self) {
        if let Ok(mut inside) = self.state.enter()
            && let Ok(state) = inside.value()
        {
            let _at_its_own_mark = state.prefix.begin_wake();
        }
    }

    /// `dormouse_prefix_enter_phase`.
    pub(crate) fn enter_phase(&self, phase: i32, stream: RawStream) -> Result<(), Fault> {
        let stream = self.runtime.stream(stream)?;
        let phase = convert::phase(phase)?;
        let mut inside = self.state.enter()?;
        Ok(inside.value()?.prefix.enter(phase, &stream)?)
    }

    /// `dormouse_prefix_mark_edge`: opens and closes this thread's collecting window around a forward.
    pub(crate) fn mark_edge(&self, edge: i32, layer: u32, stream: RawStream) -> Result<(), Fault> {
        let stream = self.runtime.stream(stream)?;
        let edge = convert::edge(edge)?;
        let mut inside = self.state.enter()?;
        let prefix = &mut inside.value()?.prefix;
        if edge == offload::Edge::ForwardEnd {
            // First, so that nothing the mark does is collected; also when the mark is refused.
            collect::set_window(Window::NONE);
        }
        let _stall = prefix.mark(edge, layer, &stream)?;
        if edge == offload::Edge::ForwardBegin {
            collect::set_window(Window { scope: prefix.scope(layer)?, arena: prefix.arena() });
        }
        Ok(())
    }

    /// `dormouse_prefix_add_dormant`.
    ///
    /// # Safety
    /// `pointers` is NULL or readable for `count` pointers.
    pub(crate) unsafe fn add_dormant(
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
        let named = state.prefix.dormant(layer, &addresses)?;
        state.accepted_count += u64::from(named.accepted);
        state.refused_count += named.refused.len() as u64;
        Ok(())
    }

    /// `dormouse_prefix_add_boundary`: the address of the gradient accumulator.
    pub(crate) fn add_boundary(
        &self,
        layer: u32,
        slot: u32,
        tensor: offload::Tensor,
        stream: RawStream,
    ) -> Result<*mut c_void, Fault> {
        let stream = self.runtime.stream(stream)?;
        let mut inside = self.state.enter()?;
        let prefix = &mut inside.value()?.prefix;
        // The accumulator belongs to the prefix, not to the layer.
        let window = collect::collecting().window;
        collect::set_window(Window::NONE);
        let added = prefix.boundary(layer, slot, tensor, &stream);
        collect::set_window(window);
        added?;
        Ok(std::ptr::with_exposed_provenance_mut(prefix.gradient(layer, slot)?))
    }

    /// `dormouse_prefix_accumulate`.
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
        let prefix = &mut inside.value()?.prefix;
        // SAFETY: the caller's contract; NULL was turned away.
        unsafe { prefix.accumulate(layer, slot, gradient.addr(), elems, dtype, &stream) }?;
        Ok(())
    }

    /// `dormouse_prefix_get_report`: the figures and the text.
    pub(crate) fn report(&self) -> Result<(c::dormouse_prefix_report_t, String), Fault> {
        let mut inside = self.state.enter()?;
        let state = inside.value()?;
        let report = state.prefix.report();
        let text = report.to_string();
        let planned = report.planned.unwrap_or_default();
        let mut declined = [0_u8; c::DORMOUSE_TEXT_BYTES];
        fault::copy_text(&report.declined.join("; "), &mut declined);
        let figures = c::dormouse_prefix_report_t {
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
        };
        Ok((figures, text))
    }
}
