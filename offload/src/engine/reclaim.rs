//! Room for others: dormant regions fall asleep when the allocator has run out.
//!
//! Called with no lock of the allocator held, by threads that may hold any other lock of the
//! program. So it waits for I/O threads only, and those take none of anybody's locks.

use std::cmp::Reverse;

use dormouse_alloc::{Reclaim, Reclaimed};
use dormouse_device::Device;
use dormouse_timeline::Lane;

use super::counters::bump;
use super::sleep::Who;
use super::{Body, Engine};
use crate::ids::{RegionId, Tier};
use crate::pool;
use crate::residency::{Goal, State, Wish};
use crate::table::Entry;

impl<D: Device> Engine<D> {
    /// Puts regions to sleep until `bytes` more are on their way, furthest next use first, and
    /// waits until that many have gone or nothing moves any more.
    pub(super) fn make_room(&self, bytes: u64) -> Reclaimed {
        if pool::is_worker() {
            return Reclaimed::default();
        }
        bump(&self.counters.reclaims, 1);
        let start_ns = self.timeline.now_ns();
        let sealed_before = self.table.lock().shared.sealed_bytes_total;
        if !self.let_some_sleep(bytes) {
            // What was woken ahead of need holds room too, but cannot be turned back on its way.
            self.table.wait_for(|inner| {
                let between = inner.iter().any(|(_, e)| is_between(e));
                (!between).then_some(())
            });
            self.let_some_sleep(bytes);
        }
        let events_come = self.device.is_stream_ordered();
        let (freed_bytes, in_flight_bytes) = self.table.wait_for(|inner| {
            let shared = &inner.shared;
            let freed = shared.sealed_bytes_total - sealed_before;
            let moving = shared.coming_bytes(events_come);
            (freed >= bytes || moving == 0).then_some((freed, moving))
        });
        let end_ns = self.timeline.now_ns();
        self.timeline.slice(Lane::Stall, self.names.reclaim, start_ns, end_ns, freed_bytes, 0);
        bump(&self.counters.stall_ns, end_ns.saturating_sub(start_ns));
        Reclaimed { freed_bytes, in_flight_bytes }
    }

    /// Lets eligible regions fall asleep; whether that makes up for `bytes`.
    fn let_some_sleep(&self, bytes: u64) -> bool {
        let (candidates, is_enough) = self.candidates(bytes);
        for tier in self.tiers_in_order() {
            let goal = if tier == Tier::Host { Goal::Host } else { Goal::Nvme };
            // What has no place in one tier may have one in the next.
            let _ = self.sleep_to(&candidates, goal, &[], Who::Reclaim);
        }
        is_enough
    }

    /// Awake regions that may sleep, lowest layer first (backward needs those last), as many as
    /// make up for what is not on its way already; and whether they do.
    fn candidates(&self, bytes: u64) -> (Vec<RegionId>, bool) {
        let inner = self.table.lock();
        let mut awake: Vec<(u32, Reverse<u64>, RegionId)> = inner
            .iter()
            .filter(|(_, e)| {
                e.body.is_eligible
                    && e.is_idle()
                    && e.region.state == State::Awake
                    && !e.body.is_waiting_to_sleep()
            })
            .map(|(id, e)| (e.body.label.layer, Reverse(e.body.bytes()), id))
            .collect();
        awake.sort_unstable();
        let mut coming = inner.shared.coming_bytes(self.device.is_stream_ordered());
        let mut chosen = Vec::new();
        for (_, Reverse(region_bytes), id) in awake {
            if coming >= bytes {
                break;
            }
            coming += region_bytes;
            chosen.push(id);
        }
        (chosen, coming >= bytes)
    }
}

/// Holds room that it may give up once it has got where it is going: eligible, or freed by its
/// owner, and on the move other than to sleep (that is counted by the bytes in flight).
fn is_between<D: Device>(entry: &Entry<Body<D>>) -> bool {
    let may_give = entry.body.is_eligible || entry.region.wish == Wish::Drop;
    let falling = matches!(entry.region.state, State::FallingAsleep | State::Spilling);
    may_give && !entry.is_idle() && !falling
}

impl<D: Device> Reclaim for Engine<D> {
    fn reclaim(&self, bytes_needed: u64) -> Reclaimed {
        self.make_room(bytes_needed)
    }
}
