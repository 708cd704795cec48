//! Microbatches and waking: by the plan if there is one, otherwise a window of layers ahead, on a GPU more.

use dormouse_device::Device;
use dormouse_timeline::Lane;

use super::order::{ahead, needed};
use super::{Layer, Prefix};
use crate::engine::{Engine, Waited};
use crate::error::OffloadError;
use crate::ids::RegionId;
use crate::places::Phase;
use crate::step_profile::Part;

/// Limit of the bytes of unused pages that leave at the begin of a microbatch: 256 large pages, 11 ms of the host's
/// time on an H200, which is 50 to 100 ms ahead of its GPU.
pub const UNUSED_BYTES_MAX: u64 = 4 << 30;

impl<D: Device> Prefix<D> {
    /// Begins a microbatch, with `after` more to come. Idempotent.
    ///
    /// Without a plan, waking starts at the first gradient of the last microbatch: by then half of the
    /// microbatch is done, its memory is being freed, and the rest of its backward is enough lead time for a
    /// window of layers. On a GPU it starts with the microbatch, as far as memory goes beside it.
    pub fn microbatch(&mut self, after: u32) {
        if self.microbatches_after.replace(after) != Some(after) {
            self.note_microbatch_memory();
            self.last_microbatch_gradients = (after == 0).then_some(0);
            self.microbatches_begun = self.microbatches_begun.saturating_add(1);
            self.record_begin(Lane::Microbatch, "microbatch", self.microbatches_begun);
            self.begin_part(
                if after == 0 { Part::LastMicrobatch(0) } else { Part::Microbatch },
                None,
            );
            self.give_back_unused(after);
        }
        if let Some(follow) = &mut self.follow {
            follow.microbatch(after);
            let _at_its_own_mark = self.move_by_plan();
        } else if after == 0 {
            self.wake_beside_microbatch();
        }
    }

    /// Notes what the microbatch before took, and where the next one begins.
    fn note_microbatch_memory(&mut self) {
        let allocator = self.engine.allocator();
        if self.follow.is_some() || !allocator.device().is_stream_ordered() {
            return;
        }
        let peak_bytes = allocator.watched_peak(self.microbatch_watch);
        if let Some(base_bytes) = self.microbatch_base_bytes {
            let taken_bytes = peak_bytes.saturating_sub(base_bytes);
            self.microbatch_bytes = self.microbatch_bytes.max(Some(taken_bytes));
        }
        let base_bytes = allocator.stats().allocated_bytes.current;
        let has_left = |layer: &Layer| self.engine.residence(&layer.regions).resident_bytes == 0;
        self.microbatch_base_bytes = self.layers.iter().all(has_left).then_some(base_bytes);
    }

    /// Starts to wake layers with the last microbatch, if it takes no more than one before. Nothing is known of a
    /// microbatch that is the first, nor of any before the first gradient: a caller that runs all forwards first has
    /// shown no backward.
    fn wake_beside_microbatch(&mut self) {
        if let Some(microbatch_bytes) = self.microbatch_bytes.filter(|_| self.has_gradients) {
            self.wake_into_spare(microbatch_bytes);
        }
    }

    /// On a GPU gives pages back that neither of the last two microbatches has used, while something of the prefix
    /// sleeps. In the last microbatch they stay: what wakes needs pages.
    fn give_back_unused(&mut self, after: u32) {
        let allocator = self.engine.allocator();
        if !allocator.device().is_stream_ordered() || self.account.asleep.bytes() == 0 {
            return;
        }
        let now = allocator.watch_unused();
        let [since, last] = std::mem::take(&mut self.unused_from);
        self.unused_from = [last, Some(now)];
        let is_waking = after == 0 || self.wake_began_ns.is_some();
        if let Some(since) = since.filter(|_| !is_waking) {
            allocator.trim_unused(since, UNUSED_BYTES_MAX);
        }
    }

    /// Notes a gradient. A layer that cannot sleep or wake now returns its error at the mark that needs it.
    pub(super) fn gradient_arrived(&mut self, stream: &D::Stream) {
        self.has_gradients = true;
        let Some(arrived) = &mut self.last_microbatch_gradients else { return };
        let is_first = *arrived == 0;
        *arrived += 1;
        let arrived = *arrived;
        if let Some(part) = self.recorder.gradients(arrived, self.slots.len()) {
            self.begin_part(part, Some(stream));
        }
        let _at_its_own_mark = match &mut self.follow {
            Some(follow) => {
                follow.gradients(arrived, self.slots.len());
                self.move_by_plan()
            }
            None if is_first => self.begin_wake(),
            None => {
                self.wake_beyond_window();
                Ok(())
            }
        };
    }

    /// Begins phase C.
    pub(super) fn begin_backward(&mut self, stream: &D::Stream) -> Result<(), OffloadError> {
        self.begin_part(Part::Backward, Some(stream));
        if let Some(follow) = &mut self.follow {
            follow.backward(self.layers.len().saturating_sub(1) as u32);
            // Even if the plan lets none wake yet, backward wakes the layers that it needs.
            self.note_begin();
        }
        self.begin_wake()
    }

    /// Starts waking the layers that backward needs first: no more microbatches come, or the last part of the
    /// subtree begins. A plan treats this as its last microbatch. Idempotent.
    ///
    /// # Errors
    /// `Order` before phase B.
    pub fn begin_wake(&mut self) -> Result<(), OffloadError> {
        if !matches!(self.order.phase(), Some(Phase::B | Phase::C)) {
            let seen = format!("phase {:?}", self.order.phase());
            let expected = "phase B or C".to_owned();
            return Err(OffloadError::Order { what: "waking", seen, expected });
        }
        if let Some(follow) = &mut self.follow {
            if self.order.phase() == Some(Phase::B) {
                // If child nodes run after the last microbatch, no mark says that the last of them begins.
                follow.microbatch(0);
                return self.move_by_plan();
            }
            return self.wake_by_plan();
        }
        if std::mem::replace(&mut self.has_asked_window, true) {
            return Ok(());
        }
        self.note_begin();
        // Layers that have found no place by now stay awake: what wakes leaves places to them, and they are needed.
        self.engine.withdraw_waiting(&self.ids(0..self.layers()));
        let top = self.layers() - 1;
        self.engine.wake_ahead(&self.ids(needed(top)));
        self.wake_window(top);
        Ok(())
    }

    /// Starts to wake the window below `layer`, and then what [`Prefix::wake_beyond_window`] adds.
    fn wake_window(&mut self, layer: u32) {
        self.engine.wake_ahead(&self.ids(ahead(layer, self.window)));
        self.awake_from = self.awake_from.min(layer.saturating_sub(self.window));
        self.wake_beyond_window();
    }

    /// On a GPU starts to wake further layers, as long as this does not raise the most memory in use. A window
    /// is only as much lead time as the host has: its marks come some layers before the GPU needs them, and the
    /// link may take longer than the backward.
    fn wake_beyond_window(&mut self) {
        if self.has_asked_window && self.engine.allocator().device().is_stream_ordered() {
            self.wake_into_spare(0);
        }
    }

    /// Starts to wake further layers, in the order of need, as long as `reserve_bytes` stay spare.
    fn wake_into_spare(&mut self, reserve_bytes: u64) {
        while let Some(next) = self.awake_from.checked_sub(1) {
            let ids = self.ids(std::iter::once(next));
            let place = self.engine.residence(&ids);
            let spare_bytes = self.engine.allocator().spare_bytes();
            if place.bytes - place.resident_bytes > spare_bytes.saturating_sub(reserve_bytes) {
                return;
            }
            self.note_begin();
            self.awake_from = next;
            self.engine.wake_ahead(&ids);
        }
    }

    /// Records the sleeping bytes when waking begins. Idempotent.
    fn note_begin(&mut self) {
        if self.wake_began_ns.is_some() {
            return;
        }
        for layer in &mut self.layers {
            layer.report.asleep_bytes_at_b = self.engine.bytes_not_awake(&layer.regions);
            layer.bytes_to_load = self.engine.bytes_to_load(&layer.regions);
        }
        self.wake_began_ns = Some(self.engine.timeline().now_ns());
    }

    /// Puts layers to sleep that had no place before, and wakes layers that have room now.
    fn move_by_plan(&mut self) -> Result<(), OffloadError> {
        self.sleep_by_plan();
        self.wake_by_plan()
    }

    /// Wakes layers in the order of need, as far as both the plan and the device have room. Without room on
    /// the device, layers in the file are promoted to host memory.
    pub(super) fn wake_by_plan(&mut self) -> Result<(), OffloadError> {
        let Some(follow) = &self.follow else { return Ok(()) };
        let layers = self.layers.iter();
        let places: Vec<_> = layers.map(|layer| self.engine.residence(&layer.regions)).collect();
        let chosen = follow.to_wake(&places);
        if follow.is_waking_time() {
            self.note_begin();
        }
        let promised_bytes: u64 = places.iter().map(|place| place.promised_bytes).sum();
        let mut free_bytes = self.engine.free_bytes().saturating_sub(promised_bytes);
        let mut waking = Vec::new();
        for layer in chosen {
            let Some(place) = places.get(layer as usize) else { break };
            let asked_bytes = place.bytes - place.resident_bytes;
            if asked_bytes > free_bytes {
                break;
            }
            free_bytes -= asked_bytes;
            waking.extend(self.ids(std::iter::once(layer)));
        }
        self.engine.wake_ahead(&waking);
        // Layers that fall asleep have precedence for host memory.
        let is_leaving = places.iter().any(|place| place.is_leaving) || self.has_sleepers_left();
        if is_leaving || !places.iter().any(|place| place.is_in_file) {
            return Ok(());
        }
        self.engine.promote_when_admitted(&self.ids((0..self.layers()).rev()));
        Ok(())
    }

    /// Returns true if layers have not yet moved to the tiers of the plan.
    fn has_sleepers_left(&self) -> bool {
        let Some(follow) = &self.follow else { return false };
        let is_left = |layer: u32| self.layers.get(layer as usize).is_some_and(|l| !l.is_settled);
        follow.sleepers().any(is_left)
    }

    /// Wakes the layers that the backward of `layer` reads, and starts to wake those below.
    pub(super) fn wake_for(
        &mut self,
        layer: u32,
        stream: &D::Stream,
    ) -> Result<Waited, OffloadError> {
        let must = self.ids(needed(layer));
        // From here on reclaim cannot put them to sleep; the wake cancels a sleep in progress.
        self.engine.forbid_reclaim(&must);
        // The needed layers first, so that their reads and their room come first. The next layers follow at
        // once, unless the needed ones have found no room yet.
        self.engine.wake(&must);
        let has_room = self.engine.are_under_way(&must);
        if has_room {
            self.wake_next(layer)?;
        }
        let waited = self.engine.wait_awake_on(&must, stream)?;
        if !has_room {
            self.wake_next(layer)?;
        }
        // Last, because until here the plan counts its bytes.
        self.part(layer);
        Ok(waited)
    }

    /// Waits elsewhere than at the begin of a backward, and counts the stall, also if the wait fails.
    pub(super) fn wait(
        &mut self,
        wait: impl FnOnce(&Engine<D>) -> Result<Waited, OffloadError>,
    ) -> Result<(), OffloadError> {
        let began_ns = self.engine.timeline().now_ns();
        let waited = wait(&self.engine);
        let so_far_ns = self.engine.timeline().now_ns().saturating_sub(began_ns);
        self.other_stall_ns += waited.as_ref().map_or(so_far_ns, |waited| waited.stall_ns);
        waited.map(drop)
    }

    /// Splits regions of several blocks: from now on each block is freed by itself, while the backward runs.
    fn part(&mut self, layer: u32) {
        let Some(found) = self.layers.get_mut(layer as usize) else { return };
        let engine = &self.engine;
        found.regions.retain(|&id| !(engine.has_several_blocks(id) && engine.release(id).is_ok()));
    }

    fn wake_next(&mut self, layer: u32) -> Result<(), OffloadError> {
        if let Some(follow) = &mut self.follow {
            follow.backward(layer);
            return self.wake_by_plan();
        }
        self.wake_window(layer);
        Ok(())
    }

    fn ids(&self, layers: impl Iterator<Item = u32>) -> Vec<RegionId> {
        let found = layers.filter_map(|l| self.layers.get(l as usize));
        found.flat_map(|l| l.regions.iter().copied()).collect()
    }
}
