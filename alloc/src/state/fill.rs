//! Filling gaps: where nearly all is in use that ever was, large blocks go where they strand least.
//!
//! What is free and in no whole page cannot be mapped elsewhere: it is stranded until a block covers
//! it. At the most that is ever in use, all that is held beyond it is stranded. So shortly before
//! that, a block goes where it covers the ends of pages best, even where pages have to be moved for
//! it and others are cached that would do. Otherwise whatever is cached comes first: it costs nothing.

use super::growth::Growth;
use super::{Attempt, Need, Priority, State, bare_list, cached_list};
use crate::AllocError;
use crate::core::Fit;

/// Blocks are placed that way where less of the most that was ever in use is not in use: 1/50.
pub(super) const NEAR_DIVISOR: u64 = 50;
/// And where more than that is held beyond it: 1/64. There is nothing to be gained from less.
const BEYOND_DIVISOR: u64 = 64;
/// Cached ranges that are looked at, and bare ones, the smallest first.
const LOOKS_MAX: usize = 64;
/// What a place costs, by unit: stranded, to be mapped, and left over up to some pages.
const STRANDED_COST: i64 = 32;
const MAPPED_COST: i64 = 10;
const LEFT_COST: i64 = 8;
const LEFT_PAGES_MAX: u32 = 16;
/// Requests that are placed as always after one whose pages did not come: streams are busy.
const PAUSE_REQUESTS: u32 = 256;

/// A place for a block.
#[derive(Clone, Copy)]
enum GapChoice {
    /// In a cached range, from a unit on.
    Cached(u32, u32),
    Bare(Growth),
}

impl State {
    /// Whether a request is to be placed by what it strands.
    #[inline]
    pub(super) fn fills(&mut self, need: &Need) -> bool {
        let is_near = self.in_use_bytes().saturating_add(need.bytes) >= self.near_high_bytes;
        is_near && self.moves_pages && !self.is_small(need.fit) && self.fills_now()
    }

    #[cold]
    fn fills_now(&mut self) -> bool {
        let held_bytes = self.stats.mapped_bytes.current + self.mapping_bytes;
        if held_bytes < self.high_bytes + self.high_bytes / BEYOND_DIVISOR {
            return false;
        }
        let is_paused = self.fill_pause > 0;
        self.fill_pause = self.fill_pause.saturating_sub(1);
        !is_paused
    }

    /// A place for a large block that strands little, where that is called for and there is one.
    #[inline]
    pub(super) fn fill_gap(
        &mut self,
        pool: u32,
        need: &Need,
        priority: Priority,
    ) -> Result<Option<Attempt>, AllocError> {
        if priority != Priority::Normal || need.fit.align_units > 1 || !self.fills(need) {
            return Ok(None);
        }
        if self.keeps(pool) {
            // What moves there does not come back.
            return Ok(None);
        }
        self.fill_closest(pool, need.fit)
    }

    #[cold]
    fn fill_closest(&mut self, pool: u32, fit: Fit) -> Result<Option<Attempt>, AllocError> {
        self.ranges.settle_reach();
        let growth = match self.closest(pool, fit) {
            Some(GapChoice::Cached(range, start)) => {
                let index = self.ranges.take_at(range, start, fit.units);
                return Ok(index.map(|index| {
                    self.cached_to_used(index);
                    Attempt::Cached(index)
                }));
            }
            Some(GapChoice::Bare(growth)) => growth,
            None => return Ok(None),
        };
        let is_choice = self.find_cached(pool, fit).is_some();
        let bytes = self.bytes(growth.map_units());
        let move_bytes = self.move_bytes(growth.map_units(), Priority::Normal);
        let is_too_much = is_choice && move_bytes < self.over_goal_bytes(growth.map_units());
        if is_too_much || self.excess_bytes(bytes, Priority::Normal) > 0 {
            return Ok(None);
        }
        let mut mapping = self.begin_map(fit, growth, move_bytes)?;
        mapping.is_choice = is_choice;
        Ok(Some(Attempt::Bare(mapping)))
    }

    /// The pages for a block placed by choice did not come.
    pub(crate) fn pause_filling(&mut self) {
        self.fill_pause = PAUSE_REQUESTS;
    }

    /// The place in `pool` that costs least of those looked at.
    fn closest(&self, pool: u32, fit: Fit) -> Option<GapChoice> {
        let (mut least, mut best) = (i64::MAX, None);
        let cached = self.ranges.no_smaller(cached_list(pool), fit.units);
        for range in cached.take(LOOKS_MAX) {
            let (start, units) = (self.ranges.start(range), self.ranges.units(range));
            let Some((cost, left_units)) = self.least_cost(start, units, fit, least) else {
                continue;
            };
            for at in [start, start + left_units] {
                let cost = cost + self.cost_beside(start, units, at, fit);
                if cost < least {
                    (least, best) = (cost, Some(GapChoice::Cached(range, at)));
                }
            }
        }
        let bare = self.ranges.no_smaller(bare_list(pool), fit.units);
        for range in bare.take(LOOKS_MAX) {
            let (start, units) = self.ranges.reach(range);
            let cached_units = units - self.ranges.units(range);
            // Wherever the block lies, what is not cached of it is mapped.
            let mapped_least = i64::from(fit.units.saturating_sub(cached_units)) * MAPPED_COST;
            let most = least - mapped_least;
            let Some((cost, left_units)) = self.least_cost(start, units, fit, most) else {
                continue;
            };
            for at in [start, start + left_units] {
                let growth = self.growth_at(range, at, fit);
                let mapped = i64::from(growth.map_units()) * MAPPED_COST;
                debug_assert!(mapped >= mapped_least, "{growth:?} maps less than it has to");
                let cost = cost + mapped + self.cost_beside(start, units, at, fit);
                // What needs no page lies in a cached range.
                if cost < least && !growth.is_cached() {
                    (least, best) = (cost, Some(GapChoice::Bare(growth)));
                }
            }
        }
        best
    }

    /// What any place in a free gap costs at least, and the units it leaves over; `None` where that
    /// is not below `most`, or the gap is too short.
    #[inline]
    fn least_cost(&self, start: u32, units: u32, fit: Fit, most: i64) -> Option<(i64, u32)> {
        let left_units = units.checked_sub(fit.units)?;
        let most_units = LEFT_PAGES_MAX.saturating_mul(self.geometry.page_units);
        let left_cost = i64::from(left_units.min(most_units)) * LEFT_COST;
        let cost = left_cost - self.stranded_cost(start, units);
        (cost < most).then_some((cost, left_units))
    }

    /// What is stranded before and after a block at `at` in a free gap.
    #[inline]
    fn cost_beside(&self, start: u32, units: u32, at: u32, fit: Fit) -> i64 {
        let before_units = at - start;
        let after_units = units - before_units - fit.units;
        self.stranded_cost(start, before_units) + self.stranded_cost(at + fit.units, after_units)
    }

    /// What free units that are in no whole page among them come to.
    #[inline]
    fn stranded_cost(&self, start: u32, units: u32) -> i64 {
        let mask = self.geometry.page_units - 1;
        // More than there are where no page begins or ends between them.
        let ends_units = (start.wrapping_neg() & mask) + (start.wrapping_add(units) & mask);
        i64::from(ends_units.min(units)) * STRANDED_COST
    }
}
