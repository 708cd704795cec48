//! What the state tells the history, and the mapped ranges of a reading.

use super::pools::{POOLS_FIXED, PoolKind};
use super::{RangeKind, Record, State, bare_list, cached_list};
use crate::core::NONE;
use crate::history::{
    History, HistoryAction, HistoryEvent, HistoryOptions, MappedRange, MemoryReading, Operations,
    RangeUse,
};
use crate::types::{ArenaId, BlockInfo, Request};
use dormouse_device::AddressRange;

impl State {
    /// Starts the history, or changes its options. What the thread cache holds becomes free ranges.
    pub(crate) fn start_history(&mut self, options: HistoryOptions, forgets: bool) {
        self.begin_recording().start_ring(options, forgets);
    }

    /// Ends the history and forgets its events.
    pub(crate) fn stop_history(&mut self) {
        if self.history.as_mut().is_some_and(|it| it.stop_ring()) {
            self.end_recording();
        }
    }

    /// Starts the log of operations. It begins with an allocation for each live block, by address.
    pub(crate) fn start_log(&mut self) {
        let is_held = |block: &BlockInfo| !block.free_deferred;
        let mut held: Vec<BlockInfo> = self.live_blocks().filter(is_held).collect();
        held.sort_unstable_by_key(|block| block.range.start);
        let history = self.begin_recording();
        let allocations = held.iter().filter_map(|block| history.allocation(block.id.index));
        let allocations: Vec<HistoryEvent> = allocations.copied().collect();
        history.start_log(allocations.into_iter());
    }

    /// Ends the log of operations.
    pub(crate) fn stop_log(&mut self) {
        if self.history.as_mut().is_some_and(|it| it.stop_log()) {
            self.end_recording();
        }
    }

    /// Swaps the operations of the log for `taken`, which is empty. `false`: the log is off.
    pub(crate) fn take_operations(&mut self, taken: &mut Operations) -> bool {
        self.history.as_mut().is_some_and(|it| it.take_operations(taken))
    }

    fn begin_recording(&mut self) -> &mut History {
        if self.history.is_none() {
            // Its blocks come and go without the state.
            self.drain_thread_cache(true);
            let mut history = Box::<History>::default();
            for (index, record) in (0_u32..).zip(&self.records) {
                if matches!(record.kind, RangeKind::Live | RangeKind::Pending) {
                    history.set_allocation(index, &self.unrecorded_allocation(index));
                }
            }
            self.history = Some(history);
        }
        self.history.get_or_insert_default()
    }

    fn end_recording(&mut self) {
        self.history = None;
        // What it holds was freed for callers with the state locked.
        self.drain_thread_cache(true);
        if !self.is_thread_cache_closed {
            self.open_thread_cache();
        }
    }

    /// Whether the history is on. The thread cache then serves callers with the state locked alone.
    #[inline]
    pub(crate) const fn is_recording(&self) -> bool {
        self.history.is_some()
    }

    /// The allocation of a block that is older than the history.
    fn unrecorded_allocation(&self, index: u32) -> HistoryEvent {
        let record = &self.records[index as usize];
        let requested_bytes = match record.kind {
            RangeKind::Live => self.requested_bytes(index) as u64,
            _ => self.range_bytes(index),
        };
        let start = self.address_range(index).start;
        HistoryEvent {
            stream: record.stream,
            scope: record.scope,
            tag: record.tag,
            arena: record.arena,
            context: 0,
            ..HistoryEvent::now(HistoryAction::Allocated, start, requested_bytes)
        }
    }

    /// Records an event that concerns no block.
    pub(crate) fn note(&mut self, action: HistoryAction, address: usize, bytes: u64) {
        if let Some(history) = &mut self.history {
            history.push(&HistoryEvent::now(action, address, bytes));
        }
    }

    /// Adds a request that found no memory to the log of operations.
    pub(crate) fn log_out_of_memory(&mut self, request: &Request) {
        if let Some(history) = &mut self.history {
            let now = HistoryEvent::now(HistoryAction::OutOfMemory, 0, request.bytes as u64);
            history.log(&HistoryEvent { stream: request.stream, ..now });
        }
    }

    /// Records a remark on the block around `address`, if there is one.
    pub(crate) fn annotate(&mut self, address: usize) {
        let Ok(index) = self.find_live(address) else { return };
        self.note_block(index, HistoryAction::Annotated);
    }

    /// Records pages of range `index` that were mapped or unmapped.
    pub(super) fn note_pages(&mut self, index: u32, action: HistoryAction, pages: (u32, u32)) {
        let (start, units) = pages;
        if !self.is_recording() || units == 0 {
            return;
        }
        let (address, bytes) = (self.unit_address(start), self.bytes(units));
        let stream = self.key_of(self.stream_of(index) as usize).unwrap_or(0);
        if let Some(history) = &mut self.history {
            history.push(&HistoryEvent { stream, ..HistoryEvent::now(action, address, bytes) });
        }
    }

    /// As [`Self::record_allocated`], out of the way of callers that record rarely.
    #[cold]
    #[inline(never)]
    pub(super) fn note_allocated(&mut self, index: u32, request: &Request) {
        self.record_allocated(index, request);
    }

    /// As [`Self::record_block`], out of the way of callers that record rarely.
    #[cold]
    #[inline(never)]
    pub(super) fn note_block(&mut self, index: u32, action: HistoryAction) {
        self.record_block(index, action);
    }

    /// Records the allocation of block `index`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "half of a recorded request is calls otherwise")]
    pub(super) fn record_allocated(&mut self, index: u32, request: &Request) {
        let start = self.address_range(index).start;
        let Some(history) = &mut self.history else { return };
        let event = HistoryEvent {
            stream: request.stream,
            scope: request.scope,
            tag: request.tag,
            arena: request.arena,
            ..HistoryEvent::now(HistoryAction::Allocated, start, request.bytes as u64)
        };
        history.push_allocation(index, &event);
    }

    /// Records that the caller of block `index` has freed it; something may still use it.
    pub(super) fn note_free_requested(&mut self, index: u32) {
        let Some(history) = &mut self.history else { return };
        if let Some(allocation) = history.allocation(index) {
            let now = HistoryEvent::now(HistoryAction::Freed, allocation.address, allocation.bytes);
            let event = HistoryEvent { stream: allocation.stream, ..now };
            history.log(&event);
        }
        self.note_mapped_parts(index, HistoryAction::FreeRequested);
    }

    /// Records an event of block `index`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as above")]
    pub(super) fn record_block(&mut self, index: u32, action: HistoryAction) {
        if let Some(history) = &mut self.history {
            history.push_change(index, action);
        }
    }

    /// Records an event of what is mapped of block `index`: all of it, or its parts of shared pages while it sleeps.
    pub(super) fn note_mapped_parts(&mut self, index: u32, action: HistoryAction) {
        if !self.is_recording() {
            return;
        }
        if !self.records[index as usize].asleep {
            return self.note_block(index, action);
        }
        for part in self.parts_awake(index) {
            self.note_part(index, part, action);
        }
    }

    fn note_part(&mut self, index: u32, part: AddressRange, action: HistoryAction) {
        let Some(history) = &mut self.history else { return };
        if let Some(allocation) = history.allocation(index) {
            let now = HistoryEvent::now(action, part.start, part.bytes as u64);
            let event = HistoryEvent {
                stream: allocation.stream,
                scope: allocation.scope,
                tag: allocation.tag,
                arena: allocation.arena,
                context: allocation.context,
                ..now
            };
            history.push(&event);
        }
    }

    /// Records that block `index`, already marked as asleep, fell asleep.
    pub(super) fn note_asleep(&mut self, index: u32) {
        if !self.is_recording() {
            return;
        }
        let is_freed = self.records[index as usize].free_deferred;
        let gone = if is_freed { HistoryAction::FreeCompleted } else { HistoryAction::FellAsleep };
        self.note_block(index, gone);
        let pages = self.ranges.whole_pages(index, self.geometry.page_units);
        self.note_pages(index, HistoryAction::Unmapped, pages);
        self.note_mapped_parts(index, HistoryAction::Allocated);
        if is_freed {
            self.note_mapped_parts(index, HistoryAction::FreeRequested);
        }
    }

    /// Records that block `index`, still marked as asleep, awakes.
    pub(super) fn note_awake(&mut self, index: u32) {
        if !self.is_recording() {
            return;
        }
        let is_freed = self.records[index as usize].free_deferred;
        let gone = if is_freed { HistoryAction::FreeCompleted } else { HistoryAction::Freed };
        self.note_mapped_parts(index, gone);
        let pages = self.ranges.whole_pages(index, self.geometry.page_units);
        self.note_pages(index, HistoryAction::Mapped, pages);
        self.note_block(index, HistoryAction::Awoke);
        if is_freed {
            self.note_block(index, HistoryAction::FreeRequested);
        }
    }

    fn unit_address(&self, unit: u32) -> usize {
        self.geometry.base + unit as usize * self.geometry.granule_bytes
    }

    /// Returns the parts of a sleeping block that share their page with others: before and after its own pages.
    fn parts_awake(&self, index: u32) -> impl Iterator<Item = AddressRange> + use<> {
        let whole = self.address_range(index);
        let (first, units) = self.ranges.whole_pages(index, self.geometry.page_units);
        let (from, to) = match units {
            0 => (whole.end(), whole.end()),
            _ => (self.unit_address(first), self.unit_address(first + units)),
        };
        let head = AddressRange::new(whole.start, from - whole.start);
        let tail = AddressRange::new(to, whole.end() - to);
        [head, tail].into_iter().filter(|part| part.bytes > 0)
    }

    /// Returns all mapped ranges and, `with_events`, those before this moment. Their last one is this reading.
    pub(crate) fn reading(&mut self, with_events: bool) -> MemoryReading {
        if with_events {
            self.note(HistoryAction::Read, 0, self.stats.active_bytes.current);
        }
        self.unrecorded_reading(with_events)
    }

    /// Returns a reading that the history does not mention.
    pub(crate) fn unrecorded_reading(&self, with_events: bool) -> MemoryReading {
        let history = self.history.as_ref();
        let events = history.filter(|_| with_events).map(|it| it.events());
        MemoryReading {
            ranges: self.mapped_ranges(),
            events: events.unwrap_or_default(),
            event_count: history.map_or(0, |it| it.event_count()),
            recorded: history.map_or(0, |it| it.recorded()),
            events_max: history.map_or(0, |it| it.events_max()),
        }
    }

    /// Returns all mapped ranges, by segment and address.
    pub(crate) fn mapped_ranges(&self) -> Vec<MappedRange> {
        let mut found = Vec::new();
        for (segment, it) in (0_u32..).zip(&self.segments) {
            let Some(it) = it else { continue };
            let pool = &self.pools[it.pool as usize];
            let family = &self.pools[pool.family as usize];
            let arena = ArenaId { index: pool.family, generation: family.generation };
            let free = MappedRange {
                range: AddressRange::default(),
                usage: RangeUse::Free,
                segment,
                requested_bytes: 0,
                stream: self.key_of(pool.stream as usize).unwrap_or(0),
                is_small: pool.kind == PoolKind::Small,
                arena: (pool.family >= POOLS_FIXED).then_some(arena),
                scope: 0,
                tag: 0,
                context: 0,
            };
            let mut index = it.first;
            while index != NONE {
                if self.ranges.list(index) != Some(bare_list(it.pool)) {
                    self.add_mapped(&mut found, index, free);
                }
                index = self.ranges.after(index);
            }
        }
        found
    }

    /// Adds what is mapped of a range that is not bare. `free` describes its pool.
    fn add_mapped(&self, found: &mut Vec<MappedRange>, index: u32, free: MappedRange) {
        let range = self.address_range(index);
        let is_cached = self.ranges.list(index).is_some();
        debug_assert!(
            !is_cached || self.ranges.list(index) == Some(cached_list(self.pool_at(index))),
            "range {index} is in a foreign list"
        );
        let record = self.records.get(index as usize).unwrap_or(&Record::NOTHING);
        match record.kind {
            _ if is_cached => found.push(MappedRange { range, ..free }),
            RangeKind::Nothing | RangeKind::Trimming => found.push(MappedRange { range, ..free }),
            RangeKind::Mapping => {
                let bare = self.pages_in_transit(index);
                let head = AddressRange::new(range.start, bare.start - range.start);
                let tail = AddressRange::new(bare.end(), range.end() - bare.end());
                let mapped = [head, tail].into_iter().filter(|part| part.bytes > 0);
                found.extend(mapped.map(|range| MappedRange { range, ..free }));
            }
            RangeKind::Live if self.is_in_cache(index) => {
                found.push(MappedRange { range, ..free });
            }
            RangeKind::Live | RangeKind::Pending => {
                let is_freed = record.free_deferred || record.kind == RangeKind::Pending;
                let usage = if is_freed { RangeUse::PendingFree } else { RangeUse::Allocated };
                let allocation = self.history.as_ref().and_then(|it| it.allocation(index));
                let allocation =
                    allocation.copied().unwrap_or_else(|| self.unrecorded_allocation(index));
                let block = MappedRange {
                    range,
                    usage,
                    requested_bytes: allocation.bytes,
                    scope: allocation.scope,
                    tag: allocation.tag,
                    context: allocation.context,
                    ..free
                };
                if record.asleep {
                    found.extend(self.parts_awake(index).map(|range| MappedRange {
                        range,
                        requested_bytes: range.bytes as u64,
                        ..block
                    }));
                } else {
                    found.push(block);
                }
            }
        }
    }

    /// Returns the pages that are being mapped for range `index`.
    fn pages_in_transit(&self, index: u32) -> AddressRange {
        let (start, units) = (self.ranges.start(index), self.ranges.units(index));
        let is_within = |&&(at, _): &&(u32, u32)| at.wrapping_sub(start) < units;
        let pages = self.in_transit.iter().find(is_within).copied();
        debug_assert!(
            pages.is_some(),
            "range {index} is being mapped, and its pages are not listed"
        );
        let (at, units) = pages.unwrap_or((start, units));
        AddressRange::new(self.unit_address(at), self.bytes(units) as usize)
    }
}
