//! Room for others: dormant regions fall asleep when the allocator has run out.
//!
//! Called with no lock of the allocator held, by threads that may hold any other lock of the
//! program. So it waits for I/O threads and for what a GPU has been given to do, and those take
//! none of anybody's locks.

use std::cmp::Reverse;

use dormouse_alloc::{Reclaim, Reclaimed};
use dormouse_device::Device;
use dormouse_timeline::Lane;

use super::counters::bump;
use super::sleep::Initiator;
use super::{Engine, RegionData, TableState};
use crate::ids::{RegionId, Tier};
use crate::table::{Broken, RegionEntry};
use dormouse_residency::region::{PendingRequest, RegionState, SleepGoal};

/// How often room is tried to be made where all sleeps that began for it were called off: by their
/// owners, whose memory is needed after all or freed, and gone to somebody quicker.
const TRIES_MAX: u32 = 8;

/// Rounds over the admission queue, as long as each round makes progress.
const ADMISSION_ROUNDS_MAX: u32 = 1 << 16;

/// Room that somebody is short of.
#[derive(Clone, Copy)]
struct RoomRequest {
    bytes: u64,
    /// What `TableState::sealed_bytes_total` was when he came.
    sealed_before: u64,
}

impl RoomRequest {
    /// What has not gone since.
    const fn left_bytes(self, shared: &TableState) -> u64 {
        self.bytes.saturating_sub(shared.sealed_bytes_total - self.sealed_before)
    }
}

/// What a look for regions that may sleep came to.
struct SleepProgress {
    /// Something sleeps or is on its way there.
    any: bool,
    /// It makes up for what is needed.
    is_enough: bool,
}

impl<D: Device> Engine<D> {
    /// Puts regions to sleep until `bytes` more are on their way, furthest next use first, and
    /// waits until that many have gone or nothing moves any more.
    pub(super) fn make_room(&self, bytes: u64) -> Reclaimed {
        if dormouse_device::is_runtime_thread() {
            return Reclaimed::default();
        }
        bump(&self.counters.reclaims, 1);
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
        self.timeline.slice(Lane::Stall, self.names.reclaim, start_ns, end_ns, freed_bytes, 0);
        bump(&self.counters.stall_ns, end_ns.saturating_sub(start_ns));
        reclaimed
    }

    /// What came of it, and whether anything had begun.
    fn try_to_make_room(&self, bytes: u64) -> (Reclaimed, bool) {
        let sealed_before = self.table.lock().shared.sealed_bytes_total;
        let need = RoomRequest { bytes, sealed_before };
        self.drain_admission_queue(need);
        let mut begun = self.let_some_sleep(need);
        if !begun.is_enough {
            // What is on its way elsewhere holds room too, but cannot be turned back.
            let settled = self.table.wait_for(|inner| {
                let between = inner.iter().any(|(_, e)| is_between(e));
                (!between).then_some(())
            });
            if settled.is_err() {
                return (Reclaimed::default(), false);
            }
            begun.any |= self.let_some_sleep(need).any;
        }
        let events_come = self.device.is_stream_ordered();
        let reclaimed = self.table.wait_for(|inner| {
            let freed_bytes = inner.shared.sealed_bytes_total - sealed_before;
            let in_flight_bytes = inner.shared.coming_bytes(events_come);
            let is_over = freed_bytes >= bytes || in_flight_bytes == 0;
            is_over.then_some(Reclaimed { freed_bytes, in_flight_bytes })
        });
        // What is broken brings nothing more, for whoever asked to be told so.
        (reclaimed.unwrap_or_default(), reclaimed.is_ok() && begun.any)
    }

    /// Lets those sleep that wait for a place to, as long as that comes on: they are to leave
    /// anyway, and others in their stead would only come back.
    fn drain_admission_queue(&self, need: RoomRequest) {
        let mut before = None;
        for _ in 0..ADMISSION_ROUNDS_MAX {
            // The whole pump, not only admissions: no other thread may come to start the admitted sleeps.
            self.pump();
            let now = self.table.wait_for(|inner| {
                let shared = &inner.shared;
                let is_over = need.left_bytes(shared) == 0 || shared.admission_queue.is_empty();
                let is_moving = shared.inflight_bytes + shared.queued_bytes > 0
                    || inner.iter().any(|(_, entry)| !entry.is_idle());
                let seen = (shared.admission_queue.len(), shared.sealed_bytes_total);
                (is_over || !is_moving).then_some((!is_over).then_some(seen))
            });
            // Where nothing moves any more a place may have come at that moment.
            match now {
                Ok(Some(now)) if Some(now) != before => before = Some(now),
                Ok(_) | Err(Broken) => return,
            }
        }
    }

    /// Lets eligible regions fall asleep.
    fn let_some_sleep(&self, need: RoomRequest) -> SleepProgress {
        let (mut left, mut begun) = self.candidates(need);
        for tier in self.tiers_in_order() {
            let goal = if tier == Tier::Host { SleepGoal::Host } else { SleepGoal::Nvme };
            // What has no place in one tier may have one in the next. One by one: each waits for
            // its own uses alone.
            left.retain(|&id| {
                let outcome = self.sleep_to(&[id], goal, &[], Initiator::Reclaim).ok();
                begun.any |= outcome.as_ref().is_some_and(|o| o.accepted_bytes > 0);
                outcome.is_none_or(|o| o.declined_bytes > 0)
            });
        }
        if !left.is_empty() && !self.is_direct {
            self.make_room_in_host(need.bytes);
        }
        begun.is_enough &= left.is_empty();
        begun
    }

    /// Lets what rests in host memory go on to the file, lowest layer first, as far as `bytes` go:
    /// that is the way there for everything, so as long as host memory is full nothing sleeps.
    fn make_room_in_host(&self, bytes: u64) {
        let mut resting: Vec<(u32, u64, RegionId)> = {
            let inner = self.table.lock();
            let in_host =
                inner.iter().filter(|(_, e)| e.is_idle() && e.region.state == RegionState::Host);
            in_host.map(|(id, e)| (e.data.label.layer, e.data.bytes(), id)).collect()
        };
        resting.sort_unstable();
        let mut left = bytes;
        for (_, region_bytes, id) in resting {
            // Where the file takes no more, it takes no other either.
            if left == 0 || self.spill(id).is_err() {
                break;
            }
            left = left.saturating_sub(region_bytes);
        }
    }

    /// Awake regions that may sleep, lowest layer first (backward needs those last), as many as
    /// make up for what is not on its way already.
    fn candidates(&self, need: RoomRequest) -> (Vec<RegionId>, SleepProgress) {
        let inner = self.table.lock();
        // Under one lock: what seals meanwhile is neither coming nor asked for again.
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
        (chosen, SleepProgress { any, is_enough: coming >= bytes })
    }
}

/// On its way to where it gives room up or may do so: in device memory, where it is eligible or
/// its owner has freed it, or in host memory, which others pass through. What is falling asleep is
/// counted by the bytes in flight.
fn is_between<D: Device>(entry: &RegionEntry<RegionData<D>>) -> bool {
    let may_give = entry.data.is_eligible || entry.region.pending == PendingRequest::Drop;
    match entry.region.state {
        RegionState::FallingAsleep => false,
        RegionState::Spilling | RegionState::Promoting => !entry.region.direct,
        // Its last copy has still to come to its end.
        RegionState::Gone => true,
        _ => may_give && !entry.is_idle(),
    }
}

impl<D: Device> Reclaim for Engine<D> {
    fn reclaim(&self, bytes_needed: u64) -> Reclaimed {
        self.make_room(bytes_needed)
    }
}
