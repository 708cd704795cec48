//! The common case in one pass: a plain block out of cached pages, and back into them.
//!
//! Both calls change nothing and say so where anything else has to be looked at; `attempt` and
//! `free` do that. They are apart from these for speed alone: what they change they change with the
//! same functions.

use super::pools::place;
use super::{Need, Priority, RANGES_PER_REQUEST, RangeKind, State, cached_list};
use crate::core::NONE;
use crate::types::{Block, Request};

impl State {
    /// Hands out a block for `request`, which names no arena and is not aligned to more than a unit,
    /// where pages are cached for it.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "most of a request is known to be nothing")]
    pub(crate) fn allocate_cached(&mut self, request: &Request, need: &Need) -> Option<Block> {
        debug_assert!(request.arena.is_none() && need.fit.align_units == 1, "{request:?}");
        // Above a budget that was lowered it is: even a cached page is one too many.
        if self.is_thread_cache_closed || !self.ranges.can_make(RANGES_PER_REQUEST) {
            return None;
        }
        debug_assert_eq!(
            self.excess_bytes(0, Priority::OnLadder),
            0,
            "and the thread cache is open"
        );
        // It may be better placed elsewhere, even where that takes calls of the device.
        if self.fills(need) {
            return None;
        }
        let place = place(self.slot_if_known(request.stream)?, self.is_small(need.fit));
        let pool = *self.general.get(place as usize)?;
        if pool == NONE {
            return None;
        }
        let index = self.ranges.take_any(cached_list(pool), need.fit.units)?;
        self.note_use();
        self.cached_to_used(index);
        Some(self.publish(index, request, need, false))
    }

    /// Frees the block that starts at `unit`, where stream `key` is its own and the only one that
    /// uses it, and nobody has a say in it.
    #[inline]
    pub(crate) fn try_free(&mut self, unit: u32, key: u64) -> bool {
        let Some(index) = self.starts.at(unit) else { return false };
        let Some(record) = self.records.get(index as usize) else { return false };
        // What is asleep or has a deferred free is claimed. And the key it was asked for with is its stream's.
        let is_plain =
            record.kind == RangeKind::Live && record.claimed.is_none() && record.stream == key;
        let mut requested_bytes = record.requested_bytes as u64;
        if !is_plain || self.has_uses(index) {
            return false;
        }
        if record.is_registered {
            if !self.hold(index) {
                return false;
            }
            requested_bytes = self.records[index as usize].requested_bytes as u64;
        }
        let bytes = self.range_bytes(index);
        self.settle_before_removal(bytes, requested_bytes);
        self.stats.requested_bytes.remove(requested_bytes);
        self.stats.allocations.remove(1);
        self.stats.allocated_bytes.remove(bytes);
        self.stats.active_bytes.remove(bytes);
        self.starts.remove(unit);
        self.give(index, true);
        true
    }
}
