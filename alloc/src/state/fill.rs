//! Filling gaps: near the previous maximum use, a large block is placed where it strands the fewest bytes.
//!
//! Free bytes outside whole free pages cannot be mapped elsewhere: they are *stranded* until a block covers
//! them. At the maximum use all mapped bytes beyond it are stranded. So near the maximum a block is placed
//! where it covers the ends of pages best, even if pages must move for it and a cached range would fit.
//! Otherwise cached ranges come first: they cost nothing.

use super::growth::Growth;
use super::{Attempt, Need, Priority, State, bare_list, cached_list};
use crate::AllocError;
use crate::core::Fit;

/// Blocks are placed this way if less than this part of the maximum use is unused: 1/50,
pub(super) const NEAR_DIVISOR: u64 = 50;
/// and if the mapped bytes exceed the maximum use by more than this part: 1/64. Less is not worth the search.
const BEYOND_DIVISOR: u64 = 64;
/// Limit of the cached ranges, and of the bare ones, that are compared, smallest first.
const LOOKS_MAX: usize = 64;
/// Costs of a place per unit: stranded, to be mapped, and left over (up to some pages).
const STRANDED_COST: i64 = 32;
const MAPPED_COST: i64 = 10;
const LEFT_COST: i64 = 8;
const LEFT_PAGES_MAX: u32 = 16;
/// Requests placed in the ordinary way after one whose pages could not be moved: streams are busy.
const PAUSE_REQUESTS: u32 = 256;

/// A place for a block.
#[derive(Clone, Copy)]
enum GapChoice {
    /// A cached range, and the start in it.
    Cached(u32, u32),
    Bare(Growth),
}

impl State {
    /// Whether a request is placed by the bytes it strands.
    #[inline]
    pub(super) fn fills(&mut self, need: &Need) -> bool {
        self.is_near_maximum(need) && self.moves_beyond.is_some() && self.fills_now()
    }

    /// Whether a large block of this size may raise the maximum use, or nearly.
    #[inline]
    pub(super) fn is_near_maximum(&self, need: &Need) -> bool {
        // A block of whole pages strands nothing.
        self.geometry.page_units > 1
            && self.in_use_bytes().saturating_add(need.bytes) >= self.near_high_bytes
            && !self.is_small(need.fit)
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

    /// Takes the place of a large block that strands the fewest bytes, if this applies.
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
            // Pages that move there stay there.
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
        let is_too_much = is_choice && move_bytes < self.over_goal_bytes(bytes);
        if is_too_much || self.excess_bytes(bytes, Priority::Normal) > 0 {
            return Ok(None);
        }
        let mut mapping = self.begin_map(fit, growth, move_bytes)?;
        mapping.is_choice = is_choice;
        Ok(Some(Attempt::Bare(mapping)))
    }

    /// Suspends the filling, after pages for a chosen place could not be moved.
    pub(crate) fn pause_filling(&mut self) {
        self.fill_pause = PAUSE_REQUESTS;
    }

    /// Returns the place in `pool` with the least cost among those compared.
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
                if cost < least && !self.large.is_split_by(at, fit.units) {
                    (least, best) = (cost, Some(GapChoice::Cached(range, at)));
                }
            }
        }
        let bare = self.ranges.no_smaller(bare_list(pool), fit.units);
        for range in bare.take(LOOKS_MAX) {
            let (start, units) = self.ranges.reach(range);
            let cached_units = units - self.ranges.units(range);
            // At any place, the part of the block that is not cached is mapped.
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
                // A place without pages to map is in a cached range, compared above.
                let is_new = cost < least && !growth.is_cached();
                if is_new && !self.large.is_split_by(at, fit.units) {
                    (least, best) = (cost, Some(GapChoice::Bare(growth)));
                }
            }
        }
        best
    }

    /// Returns the least cost of any place in a free gap, and the units left over. `None` if the cost is not
    /// below `most`, or the gap is too short.
    #[inline]
    fn least_cost(&self, start: u32, units: u32, fit: Fit, most: i64) -> Option<(i64, u32)> {
        let left_units = units.checked_sub(fit.units)?;
        let most_units = LEFT_PAGES_MAX.saturating_mul(self.geometry.page_units);
        let left_cost = i64::from(left_units.min(most_units)) * LEFT_COST;
        let cost = left_cost - self.stranded_cost(start, units);
        (cost < most).then_some((cost, left_units))
    }

    /// Returns the cost of the units stranded before and after a block at `at` in a free gap.
    #[inline]
    fn cost_beside(&self, start: u32, units: u32, at: u32, fit: Fit) -> i64 {
        let before_units = at - start;
        let after_units = units - before_units - fit.units;
        self.stranded_cost(start, before_units) + self.stranded_cost(at + fit.units, after_units)
    }

    /// Returns the cost of the free units outside whole pages.
    #[inline]
    fn stranded_cost(&self, start: u32, units: u32) -> i64 {
        let mask = self.geometry.page_units - 1;
        // Exceeds `units` if no page begins or ends in the range.
        let ends_units = (start.wrapping_neg() & mask) + (start.wrapping_add(units) & mask);
        i64::from(ends_units.min(units)) * STRANDED_COST
    }
}
