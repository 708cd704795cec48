//! Microbatches and waking: by the plan where there is one, else a window of layers ahead.

use dormouse_device::Device;

use super::Prefix;
use super::order::{Phase, ahead, needed};
use crate::engine::{Engine, Waited};
use crate::error::OffloadError;
use crate::ids::RegionId;
use crate::step_profile::Part;

impl<D: Device> Prefix<D> {
    /// Says that a microbatch begins, and how many come after it. Again is harmless.
    ///
    /// Without a plan the first gradient of the last microbatch begins the waking: by then the microbatch is
    /// half done and its own memory is going, and the rest of its backward is lead time enough for
    /// a window of layers.
    pub fn microbatch(&mut self, after: u32) {
        if self.microbatches_after.replace(after) != Some(after) {
            self.last_microbatch_gradients = (after == 0).then_some(0);
            self.begin_part(
                if after == 0 { Part::LastMicrobatch(0) } else { Part::Microbatch },
                None,
            );
        }
        if let Some(follow) = &mut self.follow {
            follow.microbatch(after);
            let _at_its_own_mark = self.move_by_plan();
        }
    }

    /// A gradient arrived. What cannot move now says so at the mark that needs it.
    pub(super) fn gradient_arrived(&mut self, stream: &D::Stream) {
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
            None => Ok(()),
        };
    }

    /// Phase C begins.
    pub(super) fn begin_backward(&mut self, stream: &D::Stream) -> Result<(), OffloadError> {
        self.begin_part(Part::Backward, Some(stream));
        if let Some(follow) = &mut self.follow {
            follow.backward(self.layers.len().saturating_sub(1) as u32);
            // The plan may have none wake yet, but backward wakes what it needs.
            self.note_begin();
        }
        self.begin_wake()
    }

    /// Starts waking the layers backward needs first: no more microbatches come, or the last part of what is
    /// below the prefix begins. By a plan that is its last microbatch. Again is harmless.
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
                // Where children come after the last microbatch no mark says that their last begins.
                follow.microbatch(0);
                return self.move_by_plan();
            }
            return self.wake_by_plan();
        }
        if self.note_begin() {
            return Ok(());
        }
        let top = self.layers() - 1;
        let ids = self.ids(needed(top).chain(ahead(top, self.window)));
        self.engine.wake_ahead(&ids);
        Ok(())
    }

    /// Notes what sleeps as waking begins. Whether that was done before.
    fn note_begin(&mut self) -> bool {
        if self.wake_began_ns.is_some() {
            return true;
        }
        for layer in &mut self.layers {
            layer.report.asleep_bytes_at_b = self.engine.bytes_not_awake(&layer.regions);
            layer.bytes_to_load = self.engine.bytes_to_load(&layer.regions);
        }
        self.wake_began_ns = Some(self.engine.timeline().now_ns());
        false
    }

    /// Lets sleep what had no place before, and wakes what has room now.
    fn move_by_plan(&mut self) -> Result<(), OffloadError> {
        self.sleep_by_plan();
        self.wake_by_plan()
    }

    /// Wakes layers in the order of need as long as there is room, by the plan and in truth. Where
    /// there is none on the device those in the file come as near as host memory.
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
        // Host memory is for those that leave first.
        let is_leaving = places.iter().any(|place| place.is_leaving) || self.has_sleepers_left();
        if is_leaving || !places.iter().any(|place| place.is_in_file) {
            return Ok(());
        }
        self.engine.promote_when_admitted(&self.ids((0..self.layers()).rev()));
        Ok(())
    }

    /// Whether layers have yet to go where the plan has them.
    fn has_sleepers_left(&self) -> bool {
        let Some(follow) = &self.follow else { return false };
        let is_left = |layer: u32| self.layers.get(layer as usize).is_some_and(|l| !l.is_settled);
        follow.sleepers().any(is_left)
    }

    /// Makes the layers that the backward of `layer` reads awake, with those below on their way.
    pub(super) fn wake_for(
        &mut self,
        layer: u32,
        stream: &D::Stream,
    ) -> Result<Waited, OffloadError> {
        let must = self.ids(needed(layer));
        // From here on nobody puts them to sleep; a sleep under way is called off by the wake.
        self.engine.forbid_reclaim(&must);
        // The needed ones first: they are read first, and room is theirs first. What comes next
        // goes along at once, unless the needed ones have found no room yet.
        self.engine.wake(&must);
        let has_room = self.engine.are_under_way(&must);
        if has_room {
            self.wake_next(layer)?;
        }
        let waited = self.engine.wait_awake_on(&must, stream)?;
        if !has_room {
            self.wake_next(layer)?;
        }
        // Last: until here the plan counts its bytes.
        self.part(layer);
        Ok(waited)
    }

    /// Waits at another place than the begin of a backward, and counts it, in vain too.
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

    /// What slept together is freed block by block from now on: backward does not wait with the first
    /// for the last.
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
        self.engine.wake_ahead(&self.ids(ahead(layer, self.window)));
        Ok(())
    }

    fn ids(&self, layers: impl Iterator<Item = u32>) -> Vec<RegionId> {
        let found = layers.filter_map(|l| self.layers.get(l as usize));
        found.flat_map(|l| l.regions.iter().copied()).collect()
    }
}
