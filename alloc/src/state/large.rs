//! Large pages: places that split none, and the one that gives way to a block.
//!
//! Large blocks have large pages, because the driver's calls cost per page. A large page leaves only as a whole. For
//! every free page to be one that can leave, each large page lies in one block or in one cached range (I11). So a block
//! goes where it splits none. If every cached range that is long enough has one in the way, that page leaves first:
//! the block covers the gap as it covers any other, with pages.

use super::growth::Growth;
use super::{Need, RangeKind, State, bare_list, cached_list};
use crate::core::Fit;
use crate::types::Request;

/// Minimum size of a block with large pages, in large pages. A block of this size contains a whole large page at any
/// start address.
const BLOCK_LARGE_PAGES_MIN: u32 = 2;
/// Limit of the ranges that are examined for a place, smallest first.
const LOOKS_MAX: usize = 64;

impl State {
    /// Whether a block of `units` has large pages where that is possible.
    pub(super) fn is_big(&self, units: u32) -> bool {
        let least_units = self.geometry.large_units.saturating_mul(BLOCK_LARGE_PAGES_MIN);
        units >= least_units && self.large.are_there()
    }

    /// Returns start and units of the pages of `growth` for `fit` that may be large: those of the block alone.
    pub(super) fn large_part(&self, fit: Fit, growth: Growth) -> Option<(u32, u32)> {
        let (start, units) = growth.pages();
        let end = (start + units).min(growth.start() + fit.units);
        let start = start.max(growth.start());
        let part = (start, end.checked_sub(start)?);
        let is_large = self.is_big(fit.units) && self.large.fits(part.0, part.1);
        (is_large && !self.keeps(self.pool_at(growth.bare()))).then_some(part)
    }

    /// Returns the first or the last start of `fit` in range `index` that splits no large page.
    pub(super) fn unsplit_start(&self, index: u32, fit: Fit) -> Option<u32> {
        let splits = |start: u32| self.large.is_split_by(start, fit.units);
        let first = self.ranges.start_in_reach(index, fit).filter(|&start| !splits(start));
        let last = || self.ranges.last_start_in_reach(index, fit).filter(|&start| !splits(start));
        first.or_else(last)
    }

    /// Returns a cached range of `pool` for `fit`, and a start in it that splits no large page.
    #[cold]
    pub(super) fn find_unsplit(&self, pool: u32, fit: Fit) -> Option<(u32, u32)> {
        let cached = self.ranges.no_smaller(cached_list(pool), fit.units).take(LOOKS_MAX);
        cached.into_iter().find_map(|index| Some((index, self.unsplit_start(index, fit)?)))
    }

    /// Takes a piece for `fit` out of a cached range of `pool`. Splits no large page.
    pub(super) fn take_unsplit(&mut self, pool: u32, fit: Fit) -> Option<u32> {
        let found = self.find_cached(pool, fit)?;
        let place = self.unsplit_start(found, fit).map(|start| (found, start));
        let (found, start) = place.or_else(|| self.find_unsplit(pool, fit))?;
        self.ranges.take_at(found, start, fit.units)
    }

    /// Returns the growth of `fit` in the shortest gap of `pool`, of those examined, in which it splits no large page.
    #[cold]
    pub(super) fn plan_unsplit(&self, pool: u32, fit: Fit) -> Option<Growth> {
        let bare = self.ranges.no_smaller(bare_list(pool), fit.units).take(LOOKS_MAX);
        bare.into_iter().find_map(|bare| self.least_growth_in(bare, fit))
    }

    /// Whether a request has no other place in cached ranges than one that splits a large page.
    #[inline]
    pub(crate) fn must_split(&self, request: &Request, need: &Need) -> bool {
        !self.large.is_empty() && self.split_place(request, need.fit).is_some()
    }

    /// Returns a cached range, and the start of the large page in it that the request would split.
    #[cold]
    fn split_place(&self, request: &Request, fit: Fit) -> Option<(u32, u32)> {
        let pool = self.pool_if_any(request, fit)?;
        let index = self.find_cached(pool, fit)?;
        if self.unsplit_start(index, fit).is_some() || self.find_unsplit(pool, fit).is_some() {
            return None;
        }
        let start = self.ranges.start_in_reach(index, fit)?;
        let large = [start + fit.units, start].into_iter().filter(|&at| self.large.floor(at) != at);
        large.map(|at| (index, self.large.floor(at))).next()
    }

    /// Takes the large page that the request would split, to unmap it. It stays counted until `finish_trim`. It
    /// must be known to be quiet.
    pub(crate) fn begin_split(&mut self, request: &Request, fit: Fit) -> Option<u32> {
        let (index, start) = self.split_place(request, fit)?;
        let units = self.geometry.large_units;
        if !self.are_quiet(index, start, units, self.quiet_at()) {
            return None;
        }
        let index = self.ranges.take_at(index, start, units)?;
        self.cached_to_used(index);
        self.record_mut(index).kind = RangeKind::Trimming;
        Some(index)
    }
}
