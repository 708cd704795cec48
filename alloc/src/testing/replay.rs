//! Undoes the events of a reading, from the newest on, as viewers do.

use crate::history::{HistoryAction, HistoryEvent, MappedRange, MemoryReading, RangeUse};
use std::collections::BTreeMap;

/// Mapped addresses and the blocks in them.
#[derive(Default)]
struct Memory {
    /// Ends by start. Neighbours are one.
    mapped: BTreeMap<usize, usize>,
    /// Requested bytes by address, and whether the block is freed.
    blocks: BTreeMap<usize, (u64, bool)>,
}

/// Checks that the ranges do not overlap, and that every event is possible: a block is allocated where pages are mapped
/// and no other block is, freed once, and pages come and go whole.
pub(super) fn check_reading(reading: &MemoryReading) -> Result<(), String> {
    let mut memory = Memory::of(&reading.ranges)?;
    for event in reading.events.iter().rev() {
        memory.undo(event).map_err(|problem| format!("{problem}, before {event:?}"))?;
    }
    Ok(())
}

impl Memory {
    fn of(ranges: &[MappedRange]) -> Result<Self, String> {
        let mut memory = Self::default();
        for it in ranges {
            memory.map(it.range.start, it.range.bytes)?;
        }
        for it in ranges.iter().filter(|it| it.usage != RangeUse::Free) {
            if it.requested_bytes == 0 || it.requested_bytes > it.range.bytes as u64 {
                return Err(format!("{} bytes requested in {:?}", it.requested_bytes, it.range));
            }
            memory.add(it.range.start, it.requested_bytes, it.usage == RangeUse::PendingFree)?;
        }
        Ok(memory)
    }

    fn undo(&mut self, event: &HistoryEvent) -> Result<(), String> {
        let HistoryEvent { address, bytes, .. } = *event;
        let pages = usize::try_from(bytes).unwrap_or(usize::MAX);
        match event.action {
            HistoryAction::Allocated | HistoryAction::Awoke => self.take(address, bytes, false),
            HistoryAction::Freed | HistoryAction::FellAsleep => self.add(address, bytes, false),
            HistoryAction::FreeCompleted => self.add(address, bytes, true),
            HistoryAction::FreeRequested => {
                self.take(address, bytes, true)?;
                self.add(address, bytes, false)
            }
            HistoryAction::Mapped => self.unmap(address, pages),
            HistoryAction::Unmapped => self.map(address, pages),
            HistoryAction::Annotated if self.blocks.contains_key(&address) => Ok(()),
            HistoryAction::Annotated => Err(format!("no block at {address:#x}")),
            HistoryAction::OutOfMemory | HistoryAction::Read => Ok(()),
        }
    }

    fn add(&mut self, address: usize, bytes: u64, is_freed: bool) -> Result<(), String> {
        let end = address + usize::try_from(bytes).unwrap_or(usize::MAX);
        let before = self.blocks.range(..end).next_back();
        if before.is_some_and(|(&at, &(bytes, _))| at + bytes as usize > address) {
            return Err(format!("{before:?} is where a block of {bytes} bytes at {address:#x} is"));
        }
        let around = self.mapped.range(..=address).next_back();
        if around.is_none_or(|(_, &mapped_end)| mapped_end < end) {
            return Err(format!("the block at {address:#x} is not mapped: {around:?}"));
        }
        self.blocks.insert(address, (bytes, is_freed));
        Ok(())
    }

    fn take(&mut self, address: usize, bytes: u64, is_freed: bool) -> Result<(), String> {
        match self.blocks.remove(&address) {
            Some(found) if found == (bytes, is_freed) => Ok(()),
            found => Err(format!("{found:?} is at {address:#x}, not {bytes} bytes, {is_freed}")),
        }
    }

    fn map(&mut self, start: usize, bytes: usize) -> Result<(), String> {
        let end = start + bytes;
        let before = self.mapped.range(..end).next_back().map(|(&at, &end)| (at, end));
        let mut joined = (start, end);
        if let Some((at, mapped_end)) = before {
            if mapped_end > start {
                return Err(format!("{start:#x} to {end:#x} is mapped already"));
            }
            if mapped_end == start {
                joined.0 = at;
            }
        }
        if let Some(after_end) = self.mapped.remove(&end) {
            joined.1 = after_end;
        }
        self.mapped.insert(joined.0, joined.1);
        Ok(())
    }

    fn unmap(&mut self, start: usize, bytes: usize) -> Result<(), String> {
        let end = start + bytes;
        let around = self.mapped.range(..=start).next_back().map(|(&at, &end)| (at, end));
        let Some((at, mapped_end)) = around.filter(|&(_, mapped_end)| mapped_end >= end) else {
            return Err(format!("{start:#x} to {end:#x} is not mapped: {around:?}"));
        };
        let inside = self.blocks.range(..end).next_back();
        if inside.is_some_and(|(&at, &(bytes, _))| at + bytes as usize > start) {
            return Err(format!("{inside:?} is in pages that were not there"));
        }
        self.mapped.remove(&at);
        if at < start {
            self.mapped.insert(at, start);
        }
        if end < mapped_end {
            self.mapped.insert(end, mapped_end);
        }
        Ok(())
    }
}
