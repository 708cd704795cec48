//! Blocks: allocation, lookup, claims, sleep and frees. Each call checks first and then changes the state.

use super::{Need, Priority, RANGES_MAX, RangeKind, Record, Release, State};
use crate::AllocError;
use crate::core::NONE;
use crate::history::HistoryAction;
use crate::types::{Block, BlockId, BlockInfo, Freed, Request};
use dormouse_device::AddressRange;

/// Further ranges that a claimed block can split into.
pub(super) const RANGES_PER_CLAIM: u32 = 2;

impl State {
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "once for each block")]
    pub(super) fn record_mut(&mut self, index: u32) -> &mut Record {
        let slot = index as usize;
        if slot >= self.records.len() {
            self.make_records(slot + 1);
        }
        &mut self.records[slot]
    }

    #[cold]
    fn make_records(&mut self, count: usize) {
        self.records.resize(count, Record::NOTHING);
    }

    /// Returns the addresses of a range.
    #[inline]
    pub(crate) fn address_range(&self, index: u32) -> AddressRange {
        let granule_bytes = self.geometry.granule_bytes;
        AddressRange::new(
            self.geometry.base + self.ranges.start(index) as usize * granule_bytes,
            self.ranges.units(index) as usize * granule_bytes,
        )
    }

    /// Makes a block of a used, mapped range.
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "most fields of a request are constant in the fast paths"
    )]
    pub(crate) fn publish(
        &mut self,
        index: u32,
        request: &Request,
        need: &Need,
        zeroed: bool,
    ) -> Block {
        let range = self.address_range(index);
        self.starts.insert(self.ranges.start(index), index);
        let record = self.record_mut(index);
        let generation = record.generation;
        *record = Record {
            generation,
            kind: RangeKind::Live,
            tag: request.tag,
            requested_bytes: request.bytes,
            scope: request.scope,
            stream: request.stream,
            arena: request.arena,
            ..Record::NOTHING
        };
        self.count_tagged(index, request.tag);
        self.register(index, request, need);
        let bytes = range.bytes as u64;
        self.settle_near_peak(bytes, request.bytes as u64);
        self.stats.allocated_bytes.add(bytes);
        self.stats.active_bytes.add(bytes);
        self.stats.requested_bytes.add(request.bytes as u64);
        self.stats.allocations.add(1);
        if self.is_recording() {
            self.note_allocated(index, request);
        }
        Block { id: BlockId { index, generation }, range, zeroed }
    }

    /// Returns the slot of the block around `address`, blocks with a deferred free included.
    #[inline]
    fn find(&self, address: usize) -> Option<u32> {
        let unit = address.checked_sub(self.geometry.base)? / self.geometry.granule_bytes;
        let unit = u32::try_from(unit).ok().filter(|&unit| unit < self.geometry.units)?;
        let index = self.starts.find(unit);
        // The range must be used, cover the unit and be a block.
        if index == NONE || !self.ranges.is_used(index) {
            return None;
        }
        let covers = unit.wrapping_sub(self.ranges.start(index)) < self.ranges.units(index);
        let is_live = covers && self.records[index as usize].kind == RangeKind::Live;
        (is_live && !self.is_in_cache(index)).then_some(index)
    }

    /// Returns the slot of the block around `address`, if its user has not freed it.
    #[inline]
    pub(super) fn find_live(&self, address: usize) -> Result<u32, AllocError> {
        let index = self.find(address).ok_or(AllocError::NotABlock { address })?;
        match self.records[index as usize] {
            Record { free_deferred: true, claimed: Some(owner_key), .. } => {
                Err(AllocError::FreeDeferred { start: self.address_range(index).start, owner_key })
            }
            _ => Ok(index),
        }
    }

    /// Returns the slot of block `id`, if it exists. A block with a deferred free exists, one in the thread
    /// cache does not.
    #[inline]
    pub(super) fn resolve(&self, id: BlockId) -> Result<u32, AllocError> {
        let BlockId { index, generation } = id;
        let record = self.records.get(index as usize).unwrap_or(&Record::NOTHING);
        let is_named = record.kind == RangeKind::Live && record.generation == generation;
        if !is_named || self.is_in_cache(index) {
            let current = record.generation;
            return Err(AllocError::StaleBlock { index, generation, current });
        }
        Ok(index)
    }

    /// Returns the block around `address`, except one with a deferred free (I3).
    pub(crate) fn lookup(&self, address: usize) -> Option<BlockInfo> {
        self.find_live(address).ok().map(|index| self.info_at(index))
    }

    /// Returns block `id`, also with a deferred free.
    pub(crate) fn info(&self, id: BlockId) -> Result<BlockInfo, AllocError> {
        self.resolve(id).map(|index| self.info_at(index))
    }

    fn info_at(&self, index: u32) -> BlockInfo {
        let record = &self.records[index as usize];
        BlockInfo {
            id: BlockId { index, generation: record.generation },
            range: self.address_range(index),
            pages: self.pages_of(index),
            requested_bytes: self.requested_bytes(index),
            scope: record.scope,
            tag: record.tag,
            arena: record.arena,
            wakes_large: self.is_big(self.ranges.units(index)),
            claimed: record.claimed,
            asleep: record.asleep,
            free_deferred: record.free_deferred,
            stream: record.stream,
        }
    }

    /// Returns all blocks, those with a deferred free included, in no particular order.
    pub(crate) fn blocks(&self) -> Vec<BlockInfo> {
        self.live_blocks().collect()
    }

    pub(crate) fn live_blocks(&self) -> impl Iterator<Item = BlockInfo> {
        let live =
            (0_u32..).zip(&self.records).filter(|(_, record)| record.kind == RangeKind::Live);
        let held = live.map(|(index, _)| index).filter(|&index| !self.is_in_cache(index));
        held.map(|index| self.info_at(index))
    }

    /// Frees the block that starts at `address`, last used by stream `key`. Defers the free of a claimed
    /// block.
    pub(crate) fn free(
        &mut self,
        address: usize,
        key: u64,
    ) -> Result<(Freed, Option<Release>), AllocError> {
        let slot = self.slot_of(key)?;
        let index = self.find_live(address)?;
        let start = self.address_range(index).start;
        if start != address {
            return Err(AllocError::NotBlockStart { address, start });
        }
        self.take_ownership_or_refuse(index)?;
        let Record { claimed, requested_bytes, .. } = self.records[index as usize];
        self.settle_before_removal(self.awake_bytes(index), requested_bytes as u64);
        self.add_use(index, slot);
        self.note_free_requested(index);
        let record = &mut self.records[index as usize];
        record.free_deferred = claimed.is_some();
        self.stats.requested_bytes.remove(requested_bytes as u64);
        self.stats.allocations.remove(1);
        self.stats.allocated_bytes.remove(self.awake_bytes(index));
        if let Some(owner_key) = claimed {
            return Ok((Freed::Claimed(owner_key), None));
        }
        self.discount_tagged(index);
        Ok((Freed::Done, self.release(index)))
    }

    /// Ends a freed, unclaimed block: it becomes free, or pending if other streams use it.
    fn release(&mut self, index: u32) -> Option<Release> {
        let Record { asleep, claimed, .. } = self.records[index as usize];
        if claimed.is_some() {
            self.ranges.unreserve_ranges(RANGES_PER_CLAIM);
        }
        self.starts.remove(self.ranges.start(index));
        if asleep {
            self.uses.remove(&index);
            self.note_mapped_parts(index, HistoryAction::FreeCompleted);
            self.release_asleep(index);
            return None;
        }
        if self.has_uses(index) {
            return Some(self.begin_pending(index));
        }
        self.stats.active_bytes.remove(self.range_bytes(index));
        self.note_mapped_parts(index, HistoryAction::FreeCompleted);
        self.give(index, true);
        None
    }

    /// Releases an asleep block: its own pages become bare, its parts of shared pages cached.
    fn release_asleep(&mut self, index: u32) {
        self.stats.active_bytes.remove(self.awake_bytes(index));
        self.stats.asleep_bytes.remove(self.pages_of(index).bytes as u64);
        let (first, units) = self.ranges.whole_pages(index, self.geometry.page_units);
        if units == 0 {
            self.give(index, true);
            return;
        }
        let pages = self.give_ends(index, first, units);
        self.give(pages, false);
    }

    /// Returns the pages that block `index` shares with no other block: those that can sleep.
    fn pages_of(&self, index: u32) -> AddressRange {
        let (first, units) = self.ranges.whole_pages(index, self.geometry.page_units);
        if units == 0 {
            return AddressRange::new(self.address_range(index).start, 0);
        }
        let start = self.geometry.base + first as usize * self.geometry.granule_bytes;
        AddressRange::new(start, self.bytes(units) as usize)
    }

    /// Returns the mapped bytes of block `index`.
    pub(super) fn awake_bytes(&self, index: u32) -> u64 {
        let is_asleep = self.records[index as usize].asleep;
        let asleep_bytes = if is_asleep { self.pages_of(index).bytes as u64 } else { 0 };
        self.range_bytes(index) - asleep_bytes
    }

    pub(crate) fn claim(
        &mut self,
        address: usize,
        owner_key: u64,
    ) -> Result<BlockInfo, AllocError> {
        let index = self.find_live(address)?;
        let range = self.address_range(index);
        if let Some(owner_key) = self.records[index as usize].claimed {
            return Err(AllocError::AlreadyClaimed { start: range.start, owner_key });
        }
        let owner = &self.segments[self.ranges.owner(index) as usize];
        if owner.as_ref().is_some_and(|segment| self.keeps(segment.pool)) {
            let seen = "in an arena that keeps its pages";
            return Err(self.wrong_state(index, "claim", seen, "in one whose pages may leave"));
        }
        self.take_ownership_or_refuse(index)?;
        // If freed asleep it splits into up to three ranges, and a free must not fail.
        if !self.ranges.reserve_ranges(RANGES_PER_CLAIM) {
            return Err(AllocError::TooManyRanges { limit: RANGES_MAX });
        }
        self.discount_tagged(index);
        self.records[index as usize].claimed = Some(owner_key);
        Ok(self.info_at(index))
    }

    pub(crate) fn unclaim(&mut self, id: BlockId) -> Result<Option<Release>, AllocError> {
        let index = self.resolve_claimed(id, "unclaim")?;
        let record = &mut self.records[index as usize];
        if record.free_deferred {
            return Ok(self.release(index));
        }
        if record.asleep {
            return Err(self.wrong_state(
                index,
                "unclaim",
                "asleep",
                "awake or with a deferred free",
            ));
        }
        record.claimed = None;
        let tag = record.tag;
        self.count_tagged(index, tag);
        self.ranges.unreserve_ranges(RANGES_PER_CLAIM);
        Ok(None)
    }

    pub(crate) fn finish_free(&mut self, id: BlockId) -> Result<Option<Release>, AllocError> {
        let index = self.resolve(id)?;
        if !self.records[index as usize].free_deferred {
            return Err(self.wrong_state(
                index,
                "finish_free",
                "not freed",
                "freed with the free deferred",
            ));
        }
        Ok(self.release(index))
    }

    pub(crate) fn set_asleep(&mut self, id: BlockId) -> Result<(), AllocError> {
        let index = self.resolve_claimed(id, "set_asleep")?;
        let bytes = self.pages_of(index).bytes as u64;
        let record = &mut self.records[index as usize];
        if record.asleep {
            return Err(self.wrong_state(index, "set_asleep", "asleep", "awake"));
        }
        record.asleep = true;
        let (first, units) = self.ranges.whole_pages(index, self.geometry.page_units);
        self.large.remove(first, units);
        let record = &self.records[index as usize];
        let is_free_deferred = record.free_deferred;
        if !is_free_deferred {
            self.settle_before_removal(bytes, 0);
            self.stats.allocated_bytes.remove(bytes);
        }
        self.stats.active_bytes.remove(bytes);
        self.stats.mapped_bytes.remove(bytes);
        self.stats.asleep_bytes.add(bytes);
        self.note_asleep(index);
        Ok(())
    }

    pub(crate) fn set_awake(&mut self, id: BlockId) -> Result<(), AllocError> {
        let index = self.resolve_claimed(id, "set_awake")?;
        let bytes = self.pages_of(index).bytes as u64;
        if !self.records[index as usize].asleep {
            return Err(self.wrong_state(index, "set_awake", "awake", "asleep"));
        }
        let staged_bytes = self.stats.staged_bytes.current;
        if staged_bytes < bytes {
            return Err(AllocError::NotReserved { asked_bytes: bytes, staged_bytes });
        }
        self.note_awake(index);
        self.settle_near_peak(bytes, 0);
        // Staged bytes are mapped bytes already.
        self.stats.staged_bytes.remove(bytes);
        self.stats.asleep_bytes.remove(bytes);
        self.stats.active_bytes.add(bytes);
        let record = &mut self.records[index as usize];
        record.asleep = false;
        if !record.free_deferred {
            self.stats.allocated_bytes.add(bytes);
        }
        if self.is_big(self.ranges.units(index)) {
            let (first, units) = self.ranges.whole_pages(index, self.geometry.page_units);
            self.large.add(first, units);
        }
        Ok(())
    }

    /// Reserves room for `bytes` to be staged. Fails with the bytes beyond the budget.
    pub(crate) fn reserve_awake(&mut self, bytes: u64, priority: Priority) -> Result<(), u64> {
        match self.excess_bytes(bytes, priority) {
            0 => {
                self.stats.staged_bytes.add(bytes);
                self.stats.mapped_bytes.add(bytes);
                Ok(())
            }
            excess => Err(excess),
        }
    }

    pub(crate) fn unreserve_awake(&mut self, bytes: u64) -> Result<(), AllocError> {
        let staged_bytes = self.stats.staged_bytes.current;
        if bytes > staged_bytes {
            return Err(AllocError::NotReserved { asked_bytes: bytes, staged_bytes });
        }
        self.stats.staged_bytes.remove(bytes);
        self.stats.mapped_bytes.remove(bytes);
        Ok(())
    }

    fn resolve_claimed(&self, id: BlockId, operation: &'static str) -> Result<u32, AllocError> {
        let index = self.resolve(id)?;
        if self.records[index as usize].claimed.is_none() {
            return Err(self.wrong_state(index, operation, "unclaimed", "claimed"));
        }
        Ok(index)
    }

    fn wrong_state(
        &self,
        index: u32,
        operation: &'static str,
        state: &'static str,
        needed: &'static str,
    ) -> AllocError {
        let start = self.address_range(index).start;
        AllocError::WrongState { operation, start, state, needed }
    }
}
