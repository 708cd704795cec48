//! Reclaim: dormant regions fall asleep when the allocator has run out.
//!
//! Called with no lock of the allocator held, by threads that may hold any other lock of the program.
//! So it waits only for I/O threads and for work that is queued on a GPU, which take none of them.

use std::cmp::Reverse;

use dormouse_alloc::{Reclaim, Reclaimed};
use dormouse_device::Device;
use dormouse_timeline::{Lane, Slice};

use super::sleep::{Initiator, WithoutPlace, goal_of};
use super::{Engine, RegionData, TableState};
use crate::ids::RegionId;
use crate::table::{Broken, RegionEntry};
use dormouse_residency::region::{PendingRequest, RegionState};
use dormouse_storage::sync::lock;

/// Limit on attempts while all sleeps begun for a request are withdrawn by their owners, or their memory
/// goes to another request.
const TRIES_MAX: u32 = 8;

/// Limit on rounds over the admission queue; each must make progress.
const ADMISSION_ROUNDS_MAX: u32 = 1 << 16;

/// A request for device memory.
#[derive(Clone, Copy)]
struct RoomRequest {
    bytes: u64,
    /// `TableState::sealed_bytes_total` when the request was made.
    sealed_before: u64,
}

impl RoomRequest {
    /// Returns the bytes not freed since.
    const fn left_bytes(self, shared: &TableState) -> u64 {
        self.bytes.saturating_sub(shared.sealed_bytes_total - self.sealed_before)
    }
}

/// The result of a search for regions that may sleep.
struct SleepProgress {
    /// Some region sleeps or is falling asleep.
    any: bool,
    /// The bytes falling asleep meet the request.
    is_enough: bool,
    /// Regions without a place in any tier.
    refused: Vec<WithoutPlace>,
}

impl<D: Device> Engine<D> {
    /// Puts regions to sleep until `bytes` more are falling asleep, furthest next use first, and waits
    /// until they are freed or nothing moves any more.
    pub(super) fn make_room(&self, bytes: u64) -> Reclaimed {
        if dormouse_device::is_runtime_thread() {
            return Reclaimed::default();
        }
        lock(&self.counts).reclaims += 1;
        let start_ns = self.timeline.now_ns();
        let mut reclaimed = Reclaimed::default();
        for _ in 0..TRIES_MAX {
            let has_begun;
            (reclaimed, has_begun) = self.try_to_make_room(bytes);
            if !reclaimed.is_nothing() || !has_begun {
                break;
            }
        }
        let (freed_bytes, end_ns) = (reclaimed.freed_bytes, self.timeline.now_ns());
        let wait = Slice::new(Lane::Stall, self.names.reclaim, start_ns, end_ns);
        self.timeline.slice(Slice { bytes: freed_bytes, ..wait });
        lock(&self.counts).stall_ns += end_ns.saturating_sub(start_ns);
        reclaimed
    }

    /// Returns the bytes reclaimed, and whether anything began.
    fn try_to_make_room(&self, bytes: u64) -> (Reclaimed, bool) {
        let sealed_before = self.table.lock().shared.sealed_bytes_total;
        let need = RoomRequest { bytes, sealed_before };
        self.drain_admission_queue(need);
        let mut begun = self.let_some_sleep(need);
        if !begun.is_enough {
            // Regions in other transitions hold room too, but cannot be turned back.
            let settled = self.table.wait_for(|inner| {
                let between = inner.iter().any(|(_, e)| is_between(e));
                (!between).then_some(())
            });
            if settled.is_err() {
                return (Reclaimed::default(), false);
            }
            let more = self.let_some_sleep(need);
            begun.any |= more.any;
            self.decline_each(more.refused);
        }
        let events_come = self.device.is_stream_ordered();
        let reclaimed = self.table.wait_for(|inner| {
            let freed_bytes = inner.shared.sealed_bytes_total - sealed_before;
            let in_flight_bytes = inner.shared.coming_bytes(events_come);
            let is_over = freed_bytes >= bytes || in_flight_bytes == 0;
            is_over.then_some(Reclaimed { freed_bytes, in_flight_bytes })
        });
        // A broken table frees nothing more.
        (reclaimed.unwrap_or_default(), reclaimed.is_ok() && begun.any)
    }

    /// Serves the admission queue first, while it makes progress: its regions are to leave anyway, and others
    /// would only come back.
    fn drain_admission_queue(&self, need: RoomRequest) {
        let mut before = None;
        for _ in 0..ADMISSION_ROUNDS_MAX {
            // The whole pump: no other thread may start the admitted sleeps.
            self.pump();
            let now = self.table.wait_for(|inner| {
                let shared = &inner.shared;
                let is_over = need.left_bytes(shared) == 0 || shared.admission_queue.is_empty();
                let is_moving = shared.inflight_bytes + shared.queued_bytes > 0
                    || inner.iter().any(|(_, entry)| !entry.is_idle());
                let seen = (shared.admission_queue.len(), shared.sealed_bytes_total);
                (is_over || !is_moving).then_some((!is_over).then_some(seen))
            });
            // A place may have become free just as everything stopped moving.
            match now {
                Ok(Some(now)) if Some(now) != before => before = Some(now),
                Ok(_) | Err(Broken) => return,
            }
        }
    }

    /// Puts eligible regions to sleep.
    fn let_some_sleep(&self, need: RoomRequest) -> SleepProgress {
        let (mut left, mut begun) = self.candidates(need);
        for tier in self.tiers_in_order() {
            let goal = goal_of(tier);
            begun.refused.clear();
            // The next tier may have room if this one has none. One region at a time: each waits for its
            // own uses only.
            left.retain(|&id| {
                let asked = self.try_sleep(&[id], goal, &[], Initiator::Reclaim);
                self.pump();
                let Ok(outcome) = asked else { return true };
                begun.any |= outcome.accepted_bytes > 0;
                begun.refused.extend(outcome.without_place);
                outcome.declined_bytes > 0
            });
        }
        if !left.is_empty() && !self.is_direct {
            self.make_room_in_host(&left);
        }
        begun.is_enough &= left.is_empty();
        begun
    }

    /// Moves regions from host memory to the file, lowest layer first, until those of `passing` have room in
    /// it: everything passes through host memory, so while it is full nothing sleeps. They may be larger than
    /// the request that they are to sleep for.
    fn make_room_in_host(&self, passing: &[RegionId]) {
        let mut left = 0;
        let mut resting: Vec<(u32, u64, RegionId)> = {
            let mut inner = self.table.lock();
            for &id in passing {
                left += inner.get(id).map_or(0, |entry| entry.data.bytes());
            }
            let in_host =
                inner.iter().filter(|(_, e)| e.is_idle() && e.region.state == RegionState::Host);
            in_host.map(|(id, e)| (e.data.label.layer, e.data.bytes(), id)).collect()
        };
        resting.sort_unstable();
        for (_, region_bytes, id) in resting {
            // If the file declines one, it declines all.
            if left == 0 || self.spill(id).is_err() {
                break;
            }
            left = left.saturating_sub(region_bytes);
        }
    }

    /// Returns awake regions that may sleep, lowest layer first (backward needs those last), as many as the
    /// request needs beyond the bytes already falling asleep.
    fn candidates(&self, need: RoomRequest) -> (Vec<RegionId>, SleepProgress) {
        let inner = self.table.lock();
        // Under one lock, so that a seal meanwhile is counted once.
        let bytes = need.left_bytes(&inner.shared);
        let mut awake: Vec<(u32, Reverse<u64>, RegionId)> = inner
            .iter()
            .filter(|(_, e)| {
                e.data.is_eligible
                    && e.is_idle()
                    && e.region.state == RegionState::Awake
                    && !e.region.wait.is_admitted()
            })
            .map(|(id, e)| (e.data.label.layer, Reverse(e.data.bytes()), id))
            .collect();
        awake.sort_unstable();
        let mut coming = inner.shared.coming_bytes(self.device.is_stream_ordered());
        let any = coming > 0;
        let mut chosen = Vec::new();
        for (_, Reverse(region_bytes), id) in awake {
            if coming >= bytes {
                break;
            }
            coming += region_bytes;
            chosen.push(id);
        }
        (chosen, SleepProgress { any, is_enough: coming >= bytes, refused: Vec::new() })
    }
}

/// Returns true for a region in transition that may give up memory: device memory, if it is eligible or
/// freed by its owner, or host memory, which others pass through. Regions falling asleep are counted
/// by the bytes in flight.
fn is_between<D: Device>(entry: &RegionEntry<RegionData<D>>) -> bool {
    let may_give = entry.data.is_eligible || entry.region.pending == PendingRequest::Drop;
    match entry.region.state {
        RegionState::FallingAsleep => false,
        RegionState::Spilling | RegionState::Promoting => !entry.region.direct,
        // Its last copy is still running.
        RegionState::Gone => true,
        _ => may_give && !entry.is_idle(),
    }
}

impl<D: Device> Reclaim for Engine<D> {
    fn reclaim(&self, bytes_needed: u64) -> Reclaimed {
        self.make_room(bytes_needed)
    }

    fn owner_name(&self, tag: u32, scope: u64) -> Option<String> {
        self.name_of(tag, scope)
    }

    fn activity(&self) -> Option<String> {
        self.progress_text()
    }
}
