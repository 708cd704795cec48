//! Growth: the choice of bare pages to map for a request.
//!
//! A block need not begin or end with its new pages. The cached ranges around them serve too, so that
//! blocks share pages with their neighbours and gaps are filled:
//! ```text
//!    block │ cached │ bare ........................ │ cached │ block
//!    block │ the new block ──────────┤ cached │ bare │ cached │ block
//!          └────────┴ mapped for it ──────────┘
//! ```
//! The shortest sufficient gap is used, as far as the size classes distinguish them, and in it the end at
//! which fewer pages are missing. Another gap may need fewer pages: before a request is refused, all gaps
//! are examined.

use super::fill::NEAR_DIVISOR;
use super::{Need, Priority, RANGES_MAX, RangeKind, State, bare_list, cached_list};
use crate::AllocError;
use crate::config::Margin;
use crate::core::Fit;
use crate::history::HistoryAction;
use crate::types::{Block, Request};
use dormouse_device::{AddressRange, Fill};

/// Further ranges that a range being mapped can split into.
pub(super) const RANGES_PER_MAP: u32 = 2;
/// [`State::spare_bytes`] leaves this part of the maximum use, or of the budget, to requests: 1/16. It is more than
/// [`NEAR_DIVISOR`] has, so that they are not yet near the maximum.
const SPARE_DIVISOR: u64 = 16;

/// The place of a block that needs pages mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Growth {
    /// The bare range of the pages.
    bare: u32,
    /// Start of the block.
    start: u32,
    /// The pages to map; none if the cached range beside them suffices.
    map_start: u32,
    map_units: u32,
}

/// A range whose pages are being mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "it is in no list until `complete_map` or `cancel_map`"]
pub(crate) struct Mapping {
    index: u32,
    growth: Growth,
    /// Bytes of cached pages to unmap elsewhere first.
    pub(crate) move_bytes: u64,
    /// A cached range would fit: it is used instead if fewer bytes can be unmapped.
    pub(crate) is_choice: bool,
    /// Start and units of the pages that may be large.
    large_part: Option<(u32, u32)>,
}

impl Growth {
    /// Whether no page is mapped: the cached range at one end of the gap suffices.
    pub(super) const fn is_cached(&self) -> bool {
        self.map_units == 0
    }

    pub(super) const fn map_units(&self) -> u32 {
        self.map_units
    }

    pub(super) const fn bare(&self) -> u32 {
        self.bare
    }

    pub(super) const fn start(&self) -> u32 {
        self.start
    }

    /// Returns start and units of the pages to map.
    pub(super) const fn pages(&self) -> (u32, u32) {
        (self.map_start, self.map_units)
    }
}

impl State {
    /// Returns the growth of `fit` in `pool`.
    pub(super) fn plan_growth(&mut self, pool: u32, fit: Fit) -> Option<Growth> {
        self.ranges.settle_reach();
        if !self.large.is_empty() {
            return self.plan_unsplit(pool, fit);
        }
        let bare = self.ranges.find(bare_list(pool), fit)?;
        if fit.align_units > 1 {
            return Some(self.growth_at(bare, self.ranges.start_in_reach(bare, fit)?, fit));
        }
        self.least_growth_in(bare, fit)
    }

    /// Returns the growth in the reach of `bare`, at the end that needs fewer pages.
    pub(super) fn least_growth_in(&self, bare: u32, fit: Fit) -> Option<Growth> {
        let first = self.growth_at(bare, self.ranges.start_in_reach(bare, fit)?, fit);
        let last = self.growth_at(bare, self.ranges.last_start_in_reach(bare, fit)?, fit);
        if self.large.is_empty() {
            return Some(if last.map_units < first.map_units { last } else { first });
        }
        let own = self.ranges.start_in(bare, fit).map(|start| self.growth_at(bare, start, fit));
        let places = [Some(first), Some(last), own].into_iter().flatten();
        let unsplit = places.filter(|it| !self.large.is_split_by(it.start, fit.units));
        unsplit.min_by_key(Growth::map_units)
    }

    /// Returns the growth in `pool` that needs the fewest pages. Examines every gap.
    #[cold]
    pub(super) fn least_growth(&self, pool: u32, fit: Fit) -> Option<Growth> {
        let bare = self.ranges_of(pool).filter(|&it| self.ranges.list(it) == Some(bare_list(pool)));
        bare.filter_map(|bare| self.least_growth_in(bare, fit)).min_by_key(Growth::map_units)
    }

    /// Returns the least units of pages that `fit` needs in `pool`.
    #[cold]
    pub(super) fn least_map_units(&self, pool: u32, fit: Fit) -> u32 {
        let growth = self.least_growth(pool, fit);
        growth.map_or_else(|| self.whole_units(fit), |growth| growth.map_units)
    }

    /// Takes a cached range of `pool` for `fit`. Examines all ranges.
    #[cold]
    pub(super) fn take_any_cached(&mut self, pool: u32, fit: Fit) -> Option<u32> {
        let list = Some(cached_list(pool));
        let mut cached = self.ranges_of(pool).filter(|&it| self.ranges.list(it) == list);
        let found = cached.find_map(|it| Some((it, self.unsplit_start(it, fit)?)));
        drop(cached);
        let (found, start) = found?;
        let index = self.ranges.take_at(found, start, fit.units)?;
        self.cached_to_used(index);
        Some(index)
    }

    /// Returns all ranges of the segments of `pool`, used ones included.
    fn ranges_of(&self, pool: u32) -> impl Iterator<Item = u32> {
        let segments = self.segments.iter().flatten().filter(move |it| it.pool == pool);
        segments.flat_map(|segment| self.ranges_in(segment))
    }

    /// Returns the growth of a block at `start` in the reach of `bare`.
    pub(super) fn growth_at(&self, bare: u32, start: u32, fit: Fit) -> Growth {
        let page_units = self.geometry.page_units;
        let end = start + fit.units;
        let (bare_start, bare_units) = (self.ranges.start(bare), self.ranges.units(bare));
        let bare_end = bare_start + bare_units;
        let map_start = (start - start % page_units).clamp(bare_start, bare_end);
        // The end of the space is the end of a page.
        let map_end = end.checked_next_multiple_of(page_units).unwrap_or(bare_end);
        let map_end = map_end.clamp(bare_start, bare_end);
        Growth { bare, start, map_start, map_units: map_end.saturating_sub(map_start) }
    }

    /// Returns the units of pages that `fit` needs without cached ranges around them.
    pub(super) fn whole_units(&self, fit: Fit) -> u32 {
        fit.units.checked_next_multiple_of(self.geometry.page_units).unwrap_or(u32::MAX)
    }

    /// Returns the least bytes of pages that contain a block for `need`.
    pub(crate) fn page_bytes_for(&self, need: &Need) -> u64 {
        self.bytes(self.whole_units(need.fit)).max(need.bytes)
    }

    /// Takes a block that needs no new pages out of its cached range.
    pub(super) fn take_beside(&mut self, fit: Fit, growth: Growth) -> Option<u32> {
        let is_before = growth.start < self.ranges.start(growth.bare);
        let sibling = if is_before {
            self.ranges.before(growth.bare)
        } else {
            self.ranges.after(growth.bare)
        };
        let index = self.ranges.take_at(sibling, growth.start, fit.units)?;
        self.cached_to_used(index);
        Some(index)
    }

    /// Removes the ranges of `growth` from the free lists.
    pub(super) fn begin_map(
        &mut self,
        fit: Fit,
        growth: Growth,
        move_bytes: u64,
    ) -> Result<Mapping, AllocError> {
        // `attempt` has checked the limit, except for these ranges.
        let limit = Err(AllocError::TooManyRanges { limit: RANGES_MAX });
        if !self.ranges.reserve_ranges(RANGES_PER_MAP) {
            return limit;
        }
        let Growth { bare, start, map_start, map_units } = growth;
        let large_part = self.large_part(fit, growth);
        let (bare_start, end) = (self.ranges.start(bare), start + fit.units);
        let bare_end = bare_start + self.ranges.units(bare);
        let (before, after) = (self.ranges.before(bare), self.ranges.after(bare));
        let Some(pages) = self.ranges.take_at(bare, map_start, map_units) else {
            self.ranges.unreserve_ranges(RANGES_PER_MAP);
            return limit;
        };
        self.bare_to_used(pages);
        self.mapping_bytes += self.bytes(map_units);
        self.in_transit.push((map_start, map_units));
        let (mut index, mut cached_units) = (pages, 0);
        if start < bare_start
            && let Some(head) = self.ranges.take_at(before, start, bare_start - start)
        {
            self.cached_to_used(head);
            cached_units += bare_start - start;
            self.ranges.join_used(head);
            index = head;
        }
        if end > bare_end
            && let Some(tail) = self.ranges.take_at(after, bare_end, end - bare_end)
        {
            self.cached_to_used(tail);
            cached_units += end - bare_end;
            self.ranges.join_used(index);
        }
        let record = self.record_mut(index);
        record.kind = RangeKind::Mapping;
        record.cached_units = cached_units;
        Ok(Mapping { index, growth, move_bytes, is_choice: false, large_part })
    }

    /// Returns the pages to map, and the part of them in which large pages are.
    pub(crate) fn pages_to_map(&self, mapping: &Mapping) -> (AddressRange, Option<AddressRange>) {
        let granule_bytes = self.geometry.granule_bytes;
        let addresses = |(start, units): (u32, u32)| {
            let start = self.geometry.base + start as usize * granule_bytes;
            AddressRange::new(start, units as usize * granule_bytes)
        };
        (addresses(mapping.growth.pages()), mapping.large_part.map(addresses))
    }

    /// Makes a block of the pages, which the device has mapped and filled. Unneeded parts are cached.
    pub(crate) fn complete_map(
        &mut self,
        mapping: Mapping,
        request: &Request,
        need: &Need,
    ) -> Block {
        let Mapping { index, growth, .. } = mapping;
        let pages_bytes = self.bytes(growth.map_units);
        if let Some((start, units)) = mapping.large_part {
            self.large.add(start, units);
        }
        let zeroed = request.fill == Fill::Zero && self.records[index as usize].cached_units == 0;
        self.end_transit(growth);
        self.stats.mapped_bytes.add(pages_bytes);
        self.stats.maps += 1;
        self.note_pages(index, HistoryAction::Mapped, growth.pages());
        self.ranges.unreserve_ranges(RANGES_PER_MAP);
        let block = self.give_ends(index, growth.start, need.fit.units);
        self.publish(block, request, need, zeroed)
    }

    /// The pages of `growth` are no longer being mapped.
    fn end_transit(&mut self, growth: Growth) {
        self.mapping_bytes -= self.bytes(growth.map_units);
        self.in_transit.retain(|&(start, _)| start != growth.map_start);
    }

    /// Ends a failed mapping: the pages are bare again, the other parts cached.
    pub(crate) fn cancel_map(&mut self, mapping: Mapping) {
        let Mapping { index, growth, .. } = mapping;
        self.end_transit(growth);
        self.ranges.unreserve_ranges(RANGES_PER_MAP);
        let pages = self.give_ends(index, growth.map_start, growth.map_units);
        self.give(pages, false);
    }

    /// Returns the bytes of cached pages to unmap before `map_units` are mapped.
    pub(super) fn move_bytes(&self, map_units: u32, priority: Priority) -> u64 {
        if priority != Priority::Normal {
            return 0;
        }
        let over_bytes = self.over_goal_bytes(self.bytes(map_units));
        if over_bytes > 0 && self.has_free_page() { over_bytes } else { 0 }
    }

    /// Returns the bytes by which `bytes` more would exceed the intended maximum, at most all of them; 0 if pages
    /// never move.
    pub(crate) fn over_goal_bytes(&self, bytes: u64) -> u64 {
        let Some(margin) = self.moves_beyond else { return 0 };
        let held_bytes = self.stats.mapped_bytes.current + self.mapping_bytes;
        let goal_bytes = self.high_bytes + margin.of(self.high_bytes);
        (held_bytes + bytes).saturating_sub(goal_bytes).min(bytes)
    }

    /// Returns the cached bytes beyond the margin of what is in use; 0 if pages never move.
    pub(crate) fn over_margin_bytes(&self) -> u64 {
        let Some(margin) = self.moves_beyond else { return 0 };
        self.stats.cached_bytes.current.saturating_sub(margin.of(self.in_use_bytes()))
    }

    /// Returns the most bytes that were ever in use.
    pub(crate) const fn high_bytes(&self) -> u64 {
        self.high_bytes
    }

    /// Whether a whole cached page may be unmapped.
    fn has_free_page(&self) -> bool {
        let page_units = self.geometry.page_units;
        (0_u32..).take(self.pools.len()).any(|pool| {
            let list = cached_list(pool);
            !self.keeps(pool) && self.ranges.with_whole_page(list, page_units, |_| true).is_some()
        })
    }

    /// Updates the maximum use.
    #[inline]
    pub(super) fn note_use(&mut self) {
        let in_use_bytes = self.in_use_bytes();
        if in_use_bytes > self.high_bytes {
            self.high_bytes = in_use_bytes;
            self.near_high_bytes = in_use_bytes - in_use_bytes / NEAR_DIVISOR;
        }
    }

    /// Returns how many more bytes can be in use without coming near the most ever in use, nor near the budget.
    pub(crate) fn spare_bytes(&self) -> u64 {
        let most_bytes = self.stats.budget_bytes.min(self.high_bytes);
        (most_bytes - most_bytes / SPARE_DIVISOR).saturating_sub(self.in_use_bytes())
    }

    /// Returns the bytes of a limit of the run-ahead, if it applies to this request: near the maximum use, once
    /// a block of a scope was requested.
    #[inline]
    pub(crate) fn run_ahead_bytes(
        &mut self,
        limit: Margin,
        request: &Request,
        need: &Need,
    ) -> Option<u64> {
        self.is_run_ahead_limited |= request.scope != 0;
        let is_limited = self.is_run_ahead_limited && self.is_near_maximum(need);
        is_limited.then(|| limit.of(self.high_bytes))
    }

    /// Returns the bytes of blocks and of staged pages.
    #[inline]
    pub(super) fn in_use_bytes(&self) -> u64 {
        self.stats.active_bytes.current + self.stats.staged_bytes.current
    }
}
