//! Checks of the invariants and all statistics by a walk over the whole state, and queries for tests.

use super::blocks::RANGES_PER_CLAIM;
use super::growth::RANGES_PER_MAP;
use super::pools::{ArenaPhase, PoolKind, place};
use super::segments::Segment;
use super::{POOL_GENERAL, POOL_SPARE, POOLS_FIXED, RangeKind, State, bare_list, cached_list};
use crate::core::{Fit, NONE};
use crate::stats::Stats;
use crate::types::{ArenaId, Request};
use dormouse_device::AddressRange;
use std::collections::BTreeMap;

/// The counts of a walk over all segments, in units (`requested` in bytes, `blocks` in blocks).
#[derive(Debug, Default, PartialEq, Eq)]
struct Count {
    allocated: u64,
    active: u64,
    asleep: u64,
    pending: u64,
    pending_blocks: u64,
    cached: u64,
    inactive_split: u64,
    mapping: u64,
    mappings: u32,
    heads: u64,
    trimming: u64,
    requested: u64,
    blocks: u64,
    ranges: u64,
    claims: u32,
    large: u32,
    tagged: BTreeMap<u32, u64>,
}

impl State {
    /// Returns the addresses and pool of every segment.
    pub(crate) fn segments(&self) -> Vec<(AddressRange, u32)> {
        let granule_bytes = self.geometry.granule_bytes;
        let info = |segment: &Segment| {
            let start = self.geometry.base + segment.extent.start_units() as usize * granule_bytes;
            let bytes = segment.extent.units() as usize * granule_bytes;
            (AddressRange::new(start, bytes), segment.pool)
        };
        self.segments.iter().flatten().map(info).collect()
    }

    /// Returns the existing pools that are searched before `request` is refused, its own first.
    pub(crate) fn pools_of_last_resort(&self, request: &Request, fit: Fit) -> Vec<u32> {
        let (Ok(stream), Ok(family)) =
            (self.slot_of(request.stream), self.family_of(request.arena))
        else {
            return Vec::new();
        };
        let own = self.kind_in(family, fit);
        let others = PoolKind::ALL.into_iter().filter(|&kind| kind != own);
        let places = std::iter::once(own).chain(others).map(|kind| place(stream, kind));
        places.filter_map(|place| self.member_if_any(family, place)).collect()
    }

    /// Returns the number and requested bytes of the blocks that are not freed, in pools of small and of large blocks.
    /// Huge blocks count as large.
    pub(crate) fn live_by_kind(&self) -> [(u64, u64); 2] {
        let mut found = [(0, 0); 2];
        for block in self.live_blocks().filter(|it| !it.free_deferred) {
            let kind = self.pools[self.pool_at(block.id.index) as usize].kind;
            let (count, requested) = &mut found[usize::from(kind != PoolKind::Small)];
            *count += 1;
            *requested += block.requested_bytes as u64;
        }
        found
    }

    /// Whether `arena` accepts requests.
    pub(crate) fn is_open(&self, arena: ArenaId) -> bool {
        self.family_of(Some(arena)).is_ok()
    }

    /// Checks I1 to I3, the table of starts, the lists and every statistic. O(ranges and units).
    pub(crate) fn check(&self) -> Result<(), String> {
        self.space.check()?;
        self.ranges.check_lists()?;
        let mut count = Count::default();
        let mut segments_of = vec![0_u32; self.pools.len()];
        for (index, segment) in self.segments.iter().enumerate() {
            if let Some(segment) = segment {
                self.check_segment(index, &mut count)?;
                segments_of[segment.pool as usize] += 1;
            }
        }
        let live = self.records.iter().filter(|record| record.kind != RangeKind::Nothing).count();
        if live as u64 != count.ranges {
            return Err(format!("{live} records in use for {} ranges in segments", count.ranges));
        }
        for &index in self.uses.keys() {
            let kind = self.records.get(index as usize).map(|record| record.kind);
            if !matches!(kind, Some(RangeKind::Live | RangeKind::Pending)) {
                return Err(format!("range {index} has uses, but is {kind:?}"));
            }
        }
        self.check_pools(&segments_of)?;
        self.check_figures(&count)
    }

    fn check_segment(&self, index: usize, count: &mut Count) -> Result<(), String> {
        let Some(segment) = &self.segments[index] else { return Ok(()) };
        let (start, units) = (segment.extent.start_units(), segment.extent.units());
        self.ranges.check_segment_ranges(segment.first, start, units)?;
        let (mut used, mut cached, mut range) = (0_u64, 0_u64, segment.first);
        while range != NONE {
            let range_units = u64::from(self.ranges.units(range));
            if self.ranges.owner(range) as usize != index {
                return Err(format!("range {range} of segment {index} says it is another's"));
            }
            self.check_entry(range)?;
            count.large += self.check_large(range)?;
            match self.ranges.list(range) {
                None => {
                    used += range_units;
                    self.check_used(range, count)?;
                }
                Some(list) if list == cached_list(segment.pool) => cached += range_units,
                Some(list) if list == bare_list(segment.pool) => self.check_bare(range)?,
                Some(list) => return Err(format!("range {range} is in foreign list {list}")),
            }
            range = self.ranges.after(range);
        }
        let counted = (u64::from(segment.used_units), u64::from(segment.cached_units));
        if counted != (used, cached) {
            return Err(format!(
                "segment {index}: {counted:?} on the books, {used}, {cached} found"
            ));
        }
        if used == 0 && cached == 0 {
            return Err(format!("segment {index} holds nothing and was not given up"));
        }
        let is_closed = self.pools[segment.pool as usize].phase == ArenaPhase::Closed;
        if used == 0 && is_closed && !self.keeps(segment.pool) {
            return Err(format!("segment {index} is free but still in a closed pool"));
        }
        count.cached += cached;
        count.inactive_split += if used > 0 { cached } else { 0 };
        Ok(())
    }

    /// The ownership table has an entry for each block that the thread cache may take back, and no other.
    fn check_entry(&self, range: u32) -> Result<(), String> {
        let Some(thread_cache) = &self.thread_cache else { return Ok(()) };
        let entry = thread_cache.ownership().get(self.ranges.start(range));
        let record = self.records.get(range as usize);
        let is_registered = record.is_some_and(|it| it.kind == RangeKind::Live && it.is_registered);
        let is_right = match entry {
            Some(word) => is_registered && word.index() == range,
            None => !is_registered,
        };
        if is_right { Ok(()) } else { Err(format!("range {range}: {entry:?}, {record:?}")) }
    }

    /// Large pages split no range and are mapped. Returns the number of those in the range.
    fn check_large(&self, range: u32) -> Result<u32, String> {
        let (start, units) = (self.ranges.start(range), self.ranges.units(range));
        if self.large.is_split_by(start, units) {
            return Err(format!("range {range} at {start} of {units} units splits a large page"));
        }
        let starts = (start..start + units)
            .filter(|&unit| self.large.around(unit).is_some_and(|(first, _)| first == unit));
        let count = u32::try_from(starts.count()).unwrap_or(u32::MAX);
        let record = self.records.get(range as usize).filter(|_| self.ranges.is_used(range));
        let is_asleep = record.is_some_and(|it| it.asleep);
        let is_bare = self.ranges.list(range).is_some_and(|list| list % 2 == 1);
        if count > 0 && (is_asleep || is_bare) {
            return Err(format!("range {range} has {count} large pages that are not mapped"));
        }
        Ok(count)
    }

    /// A bare range consists of whole pages.
    fn check_bare(&self, range: u32) -> Result<(), String> {
        let units = self.ranges.units(range);
        match self.ranges.whole_pages(range, self.geometry.page_units) {
            (_, whole) if whole == units => Ok(()),
            found => Err(format!("bare range {range} of {units} units: whole pages {found:?}")),
        }
    }

    fn check_used(&self, range: u32, count: &mut Count) -> Result<(), String> {
        let units = u64::from(self.ranges.units(range));
        let granule_bytes = self.geometry.granule_bytes as u64;
        let record = &self.records[range as usize];
        count.ranges += 1;
        match record.kind {
            RangeKind::Nothing => return Err(format!("range {range} is used for nothing")),
            RangeKind::Mapping => {
                count.mappings += 1;
                count.mapping += units - u64::from(record.cached_units);
                count.heads += u64::from(record.cached_units);
            }
            RangeKind::Trimming => count.trimming += units,
            RangeKind::Pending => {
                count.active += units;
                count.pending += units;
                count.pending_blocks += 1;
            }
            RangeKind::Live if self.is_in_cache(range) => {
                count.cached += units;
                count.inactive_split += units;
            }
            RangeKind::Live => {
                if (record.asleep || record.free_deferred) && record.claimed.is_none() {
                    return Err(format!("block {range} breaks I3: {record:?}"));
                }
                let (_, page_units) = self.ranges.whole_pages(range, self.geometry.page_units);
                let asleep = if record.asleep { u64::from(page_units) } else { 0 };
                count.claims += u32::from(record.claimed.is_some());
                if record.tag != 0 && record.claimed.is_none() {
                    *count.tagged.entry(record.tag).or_default() += units * granule_bytes;
                }
                count.asleep += asleep;
                count.active += units - asleep;
                count.allocated += if record.free_deferred { 0 } else { units - asleep };
                count.requested +=
                    if record.free_deferred { 0 } else { self.requested_bytes(range) as u64 };
                count.blocks += u64::from(!record.free_deferred);
                let uses = self.uses.get(&range).copied().unwrap_or_default();
                if uses.contains(self.stream_of(range)) {
                    return Err(format!("block {range} has its own stream for a use: {uses:?}"));
                }
                let start = self.ranges.start(range);
                for unit in start..start + self.ranges.units(range) {
                    if self.starts.find(unit) != range {
                        return Err(format!("unit {unit} of block {range} is not in the table"));
                    }
                }
            }
        }
        Ok(())
    }

    fn check_pools(&self, segments_of: &[u32]) -> Result<(), String> {
        for (index, pool) in self.pools.iter().enumerate() {
            if pool.segments != segments_of[index] {
                return Err(format!(
                    "pool {index} counts {} segments: {segments_of:?}",
                    pool.segments
                ));
            }
        }
        self.check_families()?;
        for &(stream, units, index) in &self.spare {
            let pool = self.segments[index as usize].as_ref().map(|segment| segment.pool);
            let pool = pool.map(|pool| &self.pools[pool as usize]);
            if !pool.is_some_and(|it| it.family == POOL_SPARE && it.stream == stream) {
                return Err(format!("segment {index} of {units} units is not spare: {pool:?}"));
            }
        }
        let spare = self.pools.iter().filter(|pool| pool.family == POOL_SPARE);
        if spare.map(|pool| pool.segments as usize).sum::<usize>() != self.spare.len() {
            return Err(format!("{} spare segments are listed", self.spare.len()));
        }
        Ok(())
    }

    /// Each pool that exists is the first of its family or listed in `members`.
    fn check_families(&self) -> Result<(), String> {
        let (mut arenas, mut others) = (0_u64, 0);
        for (index, pool) in (0_u32..).zip(&self.pools) {
            let first = &self.pools[pool.family as usize];
            let is_right = match (pool.phase, pool.family == index) {
                (ArenaPhase::Vacant, _) => pool.segments == 0 && self.pools_vacant.contains(&index),
                (_, true) if index < POOLS_FIXED => !pool.keeps_pages,
                (_, true) => place(pool.stream, pool.kind) == 0,
                (phase, false) => {
                    others += 1;
                    let listed = self.members.get(&(pool.family, place(pool.stream, pool.kind)));
                    let is_listed = listed == Some(&index) && !pool.keeps_pages;
                    let is_general = pool.family == POOL_GENERAL;
                    let is_kind = pool.kind != PoolKind::Huge || is_general;
                    pool.segments > 0 && phase == first.phase && is_listed && is_kind
                }
            };
            if !is_right {
                return Err(format!("pool {index} is out of place: {pool:?}"));
            }
            let is_arena = pool.family == index && pool.phase != ArenaPhase::Vacant;
            arenas += u64::from(is_arena && index >= POOLS_FIXED);
        }
        if others != self.members.len() || arenas != self.stats.arenas.current {
            return Err(format!("{others} pools of other streams, {arenas} arenas"));
        }
        Ok(())
    }

    fn check_figures(&self, count: &Count) -> Result<(), String> {
        let granule_bytes = self.geometry.granule_bytes as u64;
        let Stats { staged_bytes, mapped_bytes, .. } = self.stats;
        let pages = count.active + count.cached + count.trimming + count.heads;
        let segments = self.segments.iter().flatten().count() as u64;
        for (name, figure, found) in [
            ("allocated", self.stats.allocated_bytes, count.allocated * granule_bytes),
            ("active", self.stats.active_bytes, count.active * granule_bytes),
            ("asleep", self.stats.asleep_bytes, count.asleep * granule_bytes),
            ("pending", self.stats.pending_bytes, count.pending * granule_bytes),
            ("pending blocks", self.stats.pending_blocks, count.pending_blocks),
            ("cached", self.stats.cached_bytes, count.cached * granule_bytes),
            ("split", self.stats.inactive_split_bytes, count.inactive_split * granule_bytes),
            ("mapped", mapped_bytes, pages * granule_bytes + staged_bytes.current),
            ("requested", self.stats.requested_bytes, count.requested),
            ("allocations", self.stats.allocations, count.blocks),
            ("segments", self.stats.segments, segments),
        ] {
            let is_possible = figure.added_total >= figure.peak && figure.peak >= found;
            if figure.current != found || !is_possible {
                return Err(format!("{name}: {figure:?} on the books, {found} found"));
            }
        }
        let promised = count.claims * RANGES_PER_CLAIM + count.mappings * RANGES_PER_MAP;
        if self.ranges.promised() != promised {
            return Err(format!("{} ranges promised, not {promised}", self.ranges.promised()));
        }
        if self.tagged_bytes != count.tagged {
            return Err(format!("tags: {:?}, {:?} found", self.tagged_bytes, count.tagged));
        }
        if self.large.count() != count.large {
            let (counted, found) = (self.large.count(), count.large);
            return Err(format!("{counted} large pages, {found} found"));
        }
        if self.mapping_bytes != count.mapping * granule_bytes {
            return Err(format!("mapping: {} bytes, {} units", self.mapping_bytes, count.mapping));
        }
        Ok(())
    }
}
