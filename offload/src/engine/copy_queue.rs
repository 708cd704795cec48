//! Whose turn it is to be copied: a stream takes so many works and refuses those beyond, and small
//! regions by the thousand are less than the window of bytes.

use std::collections::VecDeque;

use dormouse_device::Device;

use super::Engine;
use super::counters::Copies;
use super::region_blocks::REGION_BLOCKS_MAX;
use crate::ids::RegionId;
use crate::table::Launched;
use dormouse_residency::region::Input;
use dormouse_storage::sync::{Mutex, lock};

/// Copies of one direction with the device at a time. Each is some works of its stream: a wait, a copy
/// for each of the region's blocks between two events that time them, and who is told of its end.
/// Streams hold about 1,024. A copy in on a GPU is over once it is queued, and counts no longer.
const COPIES_MAX: usize = 32;
const _: () = assert!(COPIES_MAX * (REGION_BLOCKS_MAX + 4) <= 1024);

/// One direction.
#[derive(Debug, Default)]
struct CopyQueue {
    under_way: usize,
    waiting: VecDeque<RegionId>,
}

impl CopyQueue {
    /// Whether it begins now. Else it is told when.
    fn take(&mut self, id: RegionId) -> bool {
        let has_room = self.under_way < COPIES_MAX;
        if has_room {
            self.under_way += 1;
        } else {
            self.waiting.push_back(id);
        }
        has_room
    }

    /// One is over, and the next has its turn, where there is one.
    fn pass(&mut self) -> Option<RegionId> {
        let next = self.waiting.pop_front();
        if next.is_none() {
            self.under_way = self.under_way.saturating_sub(1);
        }
        next
    }
}

/// Both directions.
#[derive(Debug, Default)]
pub(crate) struct CopyQueues {
    out: Mutex<CopyQueue>,
    inward: Mutex<CopyQueue>,
}

impl CopyQueues {
    const fn of(&self, out: bool) -> &Mutex<CopyQueue> {
        if out { &self.out } else { &self.inward }
    }
}

impl<D: Device> Engine<D> {
    /// Starts a copy between device pages and the host copy, on the direction's own stream, or has
    /// it wait for its turn.
    pub(super) fn start_copy(&self, id: RegionId, out: bool) -> Launched {
        if !lock(self.turns.of(out)).take(id) {
            return Launched::InFlight;
        }
        let launched = self.try_copy(id, out);
        if matches!(launched, Launched::Over(_)) {
            self.finish_copy(out, 0);
        }
        launched
    }

    /// A copy of so many bytes is over: those that wait come next, up to one that is with the device.
    pub(super) fn finish_copy(&self, out: bool, moved_bytes: u64) {
        self.end_time(out, moved_bytes);
        // Ends: each turn removes one, and what is executed here starts no other copy.
        while let Some(id) = { lock(self.turns.of(out)).pass() } {
            let Launched::Over(outcome) = self.try_copy(id, out) else { return };
            self.end_time(out, 0);
            if let Some(actions) = self.table.feed(id, Input::Done(outcome)).actions() {
                self.execute(id, actions);
            }
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

    /// Where the device has no clock of its own ([`Engine::note_copy`]), copies count from when it was
    /// given them; it does one after another.
    fn end_time(&self, out: bool, moved_bytes: u64) {
        if !self.device.is_stream_ordered() {
            self.copies(out).end(self.timeline.now_ns(), moved_bytes);
        }
    }

    pub(super) const fn copies(&self, out: bool) -> &Copies {
        if out { &self.counters.device_to_host } else { &self.counters.host_to_device }
    }
}
