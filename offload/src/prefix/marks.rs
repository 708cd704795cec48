//! Phases and layer marks: when layers fall asleep and when they wake.

use std::mem;

use dormouse_device::{Device, DeviceError};
use dormouse_timeline::{Lane, rate_bytes_per_s};
use tracing::Span;

use super::plan_follower::PlanFollower;
use super::{Prefix, phase_name};
use crate::config::ResidencyPolicy;
use crate::engine::{BytesToLoad, RegionUses, Waited};
use crate::error::OffloadError;
use crate::ids::RegionId;
use crate::places::{Edge, Phase};
use crate::step_profile::{LAST_MICROBATCH_PARTS, MarkPoint, MarkTime, Pending};
use dormouse_residency::tune::Step;
use dormouse_residency::{copy_ns, plan};

impl<D: Device> Prefix<D> {
    /// Enters a phase: A, then B, then C. `stream` is the trainer's. B puts the last layers to sleep too; C
    /// starts waking if [`Prefix::begin_wake`] has not.
    ///
    /// # Errors
    /// `Order`; the prefix is then unchanged.
    pub fn enter(&mut self, phase: Phase, stream: &D::Stream) -> Result<(), OffloadError> {
        let order = self.order.enter(phase)?;
        self.sample();
        self.record_phase();
        self.order = order;
        self.phase_began_ns = self.engine.timeline().now_ns();
        self.progress.set(Some(phase), None, self.phase_began_ns);
        self.record_begin(Lane::Phase, phase_name(phase), 0);
        self.engine.allocator().record_levels();
        self.layer_span = Span::none();
        self.phase_span =
            tracing::debug_span!(target: "offload", "phase", ?phase, prefix = self.number);
        self.sample();
        match phase {
            Phase::A => Ok(()),
            Phase::B => {
                self.close_arena();
                self.retry_declined();
                self.let_sleep(self.layers(), stream)
            }
            Phase::C => self.begin_backward(stream),
        }
    }

    /// Marks the begin or end of one layer's forward or backward, at this point of `stream`. All uses of the
    /// layer's memory on other streams come before it, or are recorded with the allocator. Only
    /// `BackwardBegin` can block, until the layer and the one below are awake; the stream then waits for
    /// their last copies.
    ///
    /// # Errors
    /// `Order`, `Argument`; `WakeFailed` with its cause: the mark is not made and can be repeated, and no byte
    /// has moved.
    pub fn mark(
        &mut self,
        edge: Edge,
        layer: u32,
        stream: &D::Stream,
    ) -> Result<Waited, OffloadError> {
        let order = self.order.mark(edge, layer)?;
        self.progress.set(order.phase(), Some((edge, layer)), self.engine.timeline().now_ns());
        match edge {
            Edge::ForwardBegin => self.record_begin(Lane::Layer, "forward", layer),
            Edge::BackwardBegin => self.record_begin(Lane::Layer, "backward", layer),
            Edge::ForwardEnd | Edge::BackwardEnd => {}
        }
        self.sample();
        let waited = match edge {
            Edge::BackwardBegin => self.begin_backward_of(layer, stream)?,
            Edge::ForwardBegin | Edge::ForwardEnd | Edge::BackwardEnd => Waited::default(),
        };
        self.order = order;
        self.layer_span = match edge {
            Edge::ForwardBegin => {
                tracing::debug_span!(target: "offload", "forward", layer, prefix = self.number)
            }
            Edge::BackwardBegin => {
                tracing::debug_span!(target: "offload", "backward", layer, prefix = self.number, stall_ns = waited.stall_ns)
            }
            Edge::ForwardEnd | Edge::BackwardEnd => Span::none(),
        };
        match (&mut self.follow, edge) {
            (Some(follow), Edge::ForwardBegin) => follow.forward(layer),
            (Some(follow), Edge::ForwardEnd) => follow.forward_ended(layer),
            _ => {}
        }
        match edge {
            Edge::ForwardBegin => self.came_to(MarkPoint::ForwardBegin, stream),
            Edge::BackwardBegin => {}
            Edge::ForwardEnd => {
                self.came_to(MarkPoint::ForwardEnd(layer), stream);
                if layer == 0 {
                    self.plan_by_profile();
                }
                // This layer's output is the input of the next one; the layer below is idle.
                self.let_sleep(layer, stream)?;
            }
            Edge::BackwardEnd => {
                self.came_to(MarkPoint::BackwardEnd(layer), stream);
                self.give_back(layer);
                self.wake_by_plan()?;
            }
        }
        Ok(waited)
    }

    /// Wakes the layers for a backward, and records the wait for them, also if it fails: that of the thread,
    /// or on a GPU that of the stream.
    fn begin_backward_of(
        &mut self,
        layer: u32,
        stream: &D::Stream,
    ) -> Result<Waited, OffloadError> {
        let due = self.moment(stream);
        let waited = self.wake_for(layer, stream);
        let begun = self.moment(stream);
        let due = match (due, &begun, &waited) {
            // Other work of the mark is no wait.
            (MarkTime::At(_), &MarkTime::At(ns), Ok(waited)) => {
                MarkTime::At(ns.saturating_sub(waited.stall_ns))
            }
            (due, ..) => due,
        };
        let (timeline, is_there) = (self.engine.timeline(), waited.is_ok());
        self.clock.came_to(MarkPoint::BackwardDue(layer), due, timeline);
        let then = if is_there {
            MarkPoint::BackwardBegin(layer)
        } else {
            MarkPoint::BackwardFailed(layer)
        };
        self.clock.came_to(then, begun, timeline);
        waited
    }

    /// Puts the layers below `end` to sleep, the lowest first, because backward needs it last. A layer without
    /// a place waits for one in line; one that cannot sleep now is tried again at the next mark, one that no tier can
    /// take at the begin of phase B.
    ///
    /// Layers that sleep, are about to or were declined are skipped: most marks check only the layer that has just run.
    fn let_sleep(&mut self, end: u32, stream: &D::Stream) -> Result<(), OffloadError> {
        let awakenings = self.account.awakenings();
        if std::mem::replace(&mut self.awakenings_before, awakenings) != awakenings {
            self.layers.iter_mut().for_each(|layer| layer.is_settled = false);
        }
        let ids = self.sleepers(end);
        if ids.is_empty() {
            return Ok(());
        }
        let RegionUses { known, without_end, events } = match self.uses_end(&ids, stream) {
            Ok(uses) => uses,
            Err(refused) => return self.postpone(refused),
        };
        // Events of an earlier mark say nothing of a use since then.
        self.engine.forbid_reclaim(&without_end);
        self.engine.let_reclaim(&known, &events);
        if let Some(follow) = &self.follow {
            let layers = self.layers.iter_mut().enumerate().take(end as usize);
            layers.filter(|(at, _)| follow.keeps(*at)).for_each(|(_, l)| l.is_settled = true);
            self.sleep_by_plan();
            return Ok(());
        }
        match self.engine.sleep_in_order(&known, &events) {
            Ok(true) => self.settle(end, &without_end),
            Ok(false) => {}
            // The mark is made by now: it cannot be repeated.
            Err(refused) => return self.postpone(refused),
        }
        Ok(())
    }

    /// Lets layers that no tier could take be asked again: the last mark before their memory is needed.
    fn retry_declined(&mut self) {
        let ids: Vec<RegionId> =
            self.layers.iter().flat_map(|layer| &layer.regions).copied().collect();
        self.engine.retry_declined(&ids);
        self.layers.iter_mut().for_each(|layer| layer.is_settled = false);
    }

    /// Leaves layers awake that the device refused to let sleep, for example because a stream is being captured. The next
    /// mark tries again. A lost device is the only error.
    fn postpone(&self, refused: OffloadError) -> Result<(), OffloadError> {
        if let OffloadError::Device(DeviceError::DeviceLost { .. }) = refused {
            return Err(refused);
        }
        self.account.decline(&refused.to_string());
        tracing::debug!(target: "offload", prefix = self.number, reason = %refused, "sleep postponed to the next mark");
        Ok(())
    }

    /// Returns the end of the uses of regions, behind what `stream` has queued: the events that have not completed.
    fn uses_end(
        &self,
        ids: &[RegionId],
        stream: &D::Stream,
    ) -> Result<RegionUses<D>, OffloadError> {
        let reached = self.engine.allocator().device().record(stream)?;
        let mut uses = self.engine.uses_end(ids)?;
        uses.events.push(reached);
        // Before reclaim may have them: a capture may have begun since the record.
        uses.events = self.engine.unended(&uses.events)?;
        Ok(uses)
    }

    /// Plans the step from the last one of this prefix, if the policy is `Fit`. The dormant bytes of the first
    /// layer, as far as they are named by now, tell how much larger this prefix is.
    fn plan_by_profile(&mut self) {
        let first_bytes = self.layers.first().map_or(0, |layer| layer.report.dormant_bytes);
        self.recorder.first_layer(first_bytes);
        if self.engine.config().residency != ResidencyPolicy::Fit || self.follow.is_some() {
            return;
        }
        let profile = self.engine.profile(&self.label, self.layers());
        let work = profile.and_then(|p| p.work(first_bytes, &self.engine.means()));
        let planned = work.and_then(|work| plan::choose(&work).map(|(plan, o)| (work, plan, o)));
        if let Some((work, plan, outcome)) = planned {
            let (slept_bytes, stall_ns) = (outcome.slept_bytes, outcome.stall_ns);
            tracing::debug!(target: "offload", prefix = self.number, slept_bytes, stall_ns, "residency planned");
            if outcome.slept_bytes == 0 {
                self.account.decline("all fits in device memory, by the step before");
            }
            let followed = PlanFollower::new(work, plan, self.layers(), LAST_MICROBATCH_PARTS);
            self.follow = followed.ok().map(|follow| follow.expecting(outcome.stall_ns));
        }
    }

    /// Keeps the profile of this step for the next one. A step that an exception ended is not kept: its
    /// missing backwards would count as free.
    pub(super) fn keep_profile(&mut self) {
        self.settle_clock();
        let lowest = self.layers.iter().position(|layer| layer.report.dormant_bytes > 0);
        let is_over = lowest.is_some_and(|lowest| self.order.is_done_with(lowest as u32));
        let figures = if is_over { self.step_figures() } else { None };
        self.engine.revise(figures.as_ref());
        let (recorder, clock) = (mem::take(&mut self.recorder), self.clock.hand_over());
        if is_over && recorder.is_whole() {
            let dormant_bytes = self.layers.iter().map(|layer| layer.report.dormant_bytes);
            let step = Pending { recorder, dormant_bytes: dormant_bytes.collect(), clock };
            self.engine.keep_profile(&self.label, self.layers(), step);
        }
    }

    /// Returns the figures of this step that the automatic settings follow. `None` if it followed a plan, which has no
    /// window, or if a stream has not passed its marks yet.
    fn step_figures(&self) -> Option<Step> {
        if self.follow.is_some() || !self.clock.is_settled() {
            return None;
        }
        let (times, began_ns) = (self.clock.times(), self.wake_began_ns?);
        let rates = self.engine.link_rates();
        let (mut step, mut load_ns, mut first_due_ns) = (Step::default(), 0_u64, u64::MAX);
        for (at, layer) in self.layers.iter().enumerate() {
            let BytesToLoad { from_file_bytes, from_host_bytes } = layer.bytes_to_load;
            let Some(due_ns) = times.layer(at).unstalled_due_ns else { continue };
            first_due_ns = first_due_ns.min(due_ns);
            if from_file_bytes + from_host_bytes == 0 {
                continue;
            }
            // From the file through host memory, both links are busy at a time: the slower one counts.
            let file_ns = copy_ns(from_file_bytes.into(), rates.nvme_to_device_bytes_per_s);
            let host_ns = copy_ns(from_host_bytes.into(), rates.host_to_device_bytes_per_s);
            load_ns += file_ns.unwrap_or(0).max(host_ns.unwrap_or(0));
            step.layers += 1;
            step.bytes += from_file_bytes.max(from_host_bytes);
            step.compute_ns += times.layer(at).backward_ns;
            step.largest_bytes = step.largest_bytes.max(layer.report.dormant_bytes);
        }
        Some(Step {
            bytes_per_s: rate_bytes_per_s(step.bytes, load_ns),
            lead_ns: first_due_ns.saturating_sub(began_ns),
            peak_bytes: self.phase_peak_bytes.into_iter().max().unwrap_or_default(),
            beside_bytes: self.recorder.hot_in_backward(),
            ..step
        })
    }

    /// Moves layers to the tiers of the plan, in its order. No layer overtakes another: if one has no place,
    /// those behind it wait.
    pub(super) fn sleep_by_plan(&mut self) {
        let Some(follow) = &self.follow else { return };
        for (at, tier) in follow.to_sleep() {
            let Some(layer) = self.layers.get_mut(at as usize) else { break };
            if !layer.is_settled {
                layer.is_settled = self.engine.sleep_when_admitted(&layer.regions, tier);
            }
        }
    }

    /// Returns the regions of the layers below `end` that are not settled.
    fn sleepers(&self, end: u32) -> Vec<RegionId> {
        let layers = self.layers.iter().take(end as usize);
        layers.filter(|layer| !layer.is_settled).flat_map(|layer| &layer.regions).copied().collect()
    }

    /// Notes that all layers below `end` sleep, are about to, wait in line or were declined, but those with regions in `except`.
    fn settle(&mut self, end: u32, except: &[RegionId]) {
        for layer in self.layers.iter_mut().take(end as usize) {
            layer.is_settled = !layer.regions.iter().any(|id| except.contains(id));
        }
    }

    /// Releases the layer after its backward: blocks that autograd has not freed stay awake with their owner.
    fn give_back(&mut self, layer: u32) {
        let Some(found) = self.layers.get_mut(layer as usize) else { return };
        self.held_bytes = self.held_bytes.saturating_sub(found.report.dormant_bytes);
        for id in std::mem::take(&mut found.regions) {
            // Stale if it has been freed.
            let _ = self.engine.release(id);
        }
    }
}
