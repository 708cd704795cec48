//! Fast paths of the common case: a plain block from cached pages, and its free.
//!
//! If a request needs anything else, both calls change nothing and return so; `attempt` and `free` handle
//! it. They change the state with the same functions, and are separate for speed only.

use super::pools::{POOL_GENERAL, place};
use super::{Need, Priority, RangeKind, State, cached_list};
use crate::core::NONE;
use crate::history::HistoryAction;
use crate::types::{Block, Request};

impl State {
    /// Allocates a block for `request`, without arena and alignment, from a cached range.
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "most fields of a request are constant in the callers"
    )]
    pub(crate) fn allocate_cached(&mut self, request: &Request, need: &Need) -> Option<Block> {
        debug_assert!(request.arena.is_none() && need.fit.align_units == 1, "{request:?}");
        // The thread cache is closed above a lowered budget, where cached pages serve no request either.
        if self.is_thread_cache_closed || !self.has_bookkeeping() {
            return None;
        }
        debug_assert_eq!(self.excess_bytes(0, Priority::OnLadder), 0, "the thread cache is open");
        // Another place may strand fewer bytes, even if it needs device calls.
        if self.is_near_maximum(need) && (self.is_run_ahead_limited || self.fills(need)) {
            return None;
        }
        let kind = self.kind_in(POOL_GENERAL, need.fit);
        let place = place(self.slot_if_known(request.stream)?, kind);
        let pool = *self.general.get(place as usize)?;
        if pool == NONE {
            return None;
        }
        let index = if self.large.is_empty() {
            self.ranges.take_any(cached_list(pool), need.fit.units)?
        } else {
            self.take_unsplit(pool, need.fit)?
        };
        self.note_use();
        self.cached_to_used(index);
        Some(self.publish(index, request, need, false))
    }

    /// Frees the block that starts at `unit`, if it is unclaimed and `key` is its own stream, the only one
    /// that uses it.
    #[inline]
    pub(crate) fn try_free(&mut self, unit: u32, key: u64) -> bool {
        let Some(index) = self.starts.at(unit) else { return false };
        let Some(record) = self.records.get(index as usize) else { return false };
        // An asleep block and one with a deferred free are claimed.
        let is_plain =
            record.kind == RangeKind::Live && record.claimed.is_none() && record.stream == key;
        let is_tagged = record.tag != 0;
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
        if is_tagged {
            self.discount_tagged(index);
        }
        let bytes = self.range_bytes(index);
        self.settle_before_removal(bytes, requested_bytes);
        self.stats.requested_bytes.remove(requested_bytes);
        self.stats.allocations.remove(1);
        self.stats.allocated_bytes.remove(bytes);
        self.stats.active_bytes.remove(bytes);
        self.starts.remove(unit);
        if self.is_recording() {
            self.note_block(index, HistoryAction::Freed);
        }
        self.give(index, true);
        true
    }
}
