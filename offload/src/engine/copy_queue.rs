//! The limit on copies queued with the device: a stream accepts a limited number of operations, and
//! thousands of small regions fit the in-flight window.

use std::collections::VecDeque;

use dormouse_device::Device;

use super::Engine;
use super::counters::Copies;
use super::region_blocks::REGION_BLOCKS_MAX;
use crate::ids::RegionId;
use crate::table::Launched;
use dormouse_storage::sync::lock;

/// Limit on copies queued per direction. Each is a wait, a copy per block of the region between two timed
/// events, and a callback; streams hold about 1,024 operations. A copy in on a GPU stops counting once
/// it is queued.
const COPIES_MAX: usize = 32;
const _: () = assert!(COPIES_MAX * (REGION_BLOCKS_MAX + 4) <= 1024);

/// The copies in one direction.
#[derive(Debug, Default)]
pub(super) struct CopyQueue {
    under_way: usize,
    waiting: VecDeque<RegionId>,
}

impl CopyQueue {
    /// Returns true if the copy may start now; otherwise queues it.
    fn take(&mut self, id: RegionId) -> bool {
        let has_room = self.under_way < COPIES_MAX;
        if has_room {
            self.under_way += 1;
        } else {
            self.waiting.push_back(id);
        }
        has_room
    }

    /// Ends one copy and returns the next one to start.
    fn pass(&mut self) -> Option<RegionId> {
        let next = self.waiting.pop_front();
        if next.is_none() {
            self.under_way = self.under_way.saturating_sub(1);
        }
        next
    }
}

impl<D: Device> Engine<D> {
    /// Starts a copy between device pages and the host copy on the direction's stream, or queues it.
    pub(super) fn start_copy(&self, id: RegionId, out: bool) -> Launched {
        if !lock(&self.copy_queues[usize::from(out)]).take(id) {
            return Launched::InFlight;
        }
        let launched = self.try_copy(id, out);
        if matches!(launched, Launched::Over(_)) {
            self.finish_copy(out, 0);
        }
        launched
    }

    /// Ends a copy of `moved_bytes` and starts queued ones, up to one that the device accepts.
    pub(super) fn finish_copy(&self, out: bool, moved_bytes: u64) {
        self.end_time(out, moved_bytes);
        // Ends: each turn removes one, and the actions executed here start no other copy.
        while let Some(id) = { lock(&self.copy_queues[usize::from(out)]).pass() } {
            let Launched::Over(outcome) = self.try_copy(id, out) else { return };
            self.end_time(out, 0);
            self.end_step(id, outcome);
        }
    }

    fn try_copy(&self, id: RegionId, out: bool) -> Launched {
        if !self.device.is_stream_ordered() {
            self.copies(out).begin(self.timeline.now_ns());
        }
        match self.submit_copy(id, out) {
            Ok(launched) => launched,
            Err(e) => Launched::Over(self.failed(id, e)),
        }
    }

    /// Ends the timing of a copy on a device without a clock of its own ([`Engine::note_copy`]), which
    /// does one copy after another.
    fn end_time(&self, out: bool, moved_bytes: u64) {
        if !self.device.is_stream_ordered() {
            self.copies(out).end(self.timeline.now_ns(), moved_bytes);
        }
    }

    pub(super) const fn copies(&self, out: bool) -> &Copies {
        if out { &self.counters.device_to_host } else { &self.counters.host_to_device }
    }
}
