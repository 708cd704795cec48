//! Streams in the state: keys and slots, the uses of blocks, and pending blocks.

use super::{RangeKind, Record, State};
use crate::AllocError;
use crate::core::Fit;
use crate::history::HistoryAction;
use crate::types::{ArenaId, BlockId, Request};

/// Limit of the registered streams, about eight times the number that torch creates. They stay
/// registered.
pub const STREAMS_MAX: u32 = 1024;
const WORD_BITS: u32 = u64::BITS;
const WORDS: usize = (STREAMS_MAX / WORD_BITS) as usize;

/// A set of streams, by slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StreamSet([u64; WORDS]);

impl StreamSet {
    pub(crate) const EMPTY: Self = Self([0; WORDS]);

    #[inline]
    pub(crate) fn is_empty(self) -> bool {
        self == Self::EMPTY
    }

    #[inline]
    pub(crate) const fn contains(&self, slot: u32) -> bool {
        let (word, bit) = (slot / WORD_BITS, slot % WORD_BITS);
        slot < STREAMS_MAX && self.0[word as usize] >> bit & 1 == 1
    }

    #[inline]
    pub(crate) const fn insert(&mut self, slot: u32) {
        debug_assert!(slot < STREAMS_MAX, "slots are below the limit");
        let (word, bit) = (slot / WORD_BITS, slot % WORD_BITS);
        self.0[word as usize % WORDS] |= 1 << bit;
    }

    pub(crate) fn iter(self) -> impl Iterator<Item = u32> {
        let filled = (0_u32..).zip(self.0).filter(|&(_, bits)| bits != 0);
        let slots = |(word, bits): (u32, u64)| {
            let bits = (0..WORD_BITS).filter(move |&bit| bits >> bit & 1 == 1);
            bits.map(move |bit| word * WORD_BITS + bit)
        };
        filled.flat_map(slots)
    }
}

/// Memory that waits for streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ReleaseSubject {
    /// The range of a freed block that streams other than its own may use.
    Block(u32),
    /// A closed arena that keeps its pages.
    Arena(ArenaId),
}

/// A freed block or closed arena that streams may still use, until their queued work has completed.
#[derive(Debug)]
#[must_use = "it is pending until `finish_pending` or `arena_settle`"]
pub(crate) struct Release {
    pub(crate) subject: ReleaseSubject,
    /// Bytes that are free at this time.
    pub(crate) bytes: u64,
    pub(crate) users: StreamSet,
    /// The number of the free: the events are recorded behind it.
    pub(crate) freed_at: u64,
}

impl State {
    /// Returns the slot of stream `key`: always 0 if the device is not stream-ordered.
    #[inline]
    pub(crate) fn slot_of(&self, key: u64) -> Result<u32, AllocError> {
        self.slot_if_known(key).ok_or(AllocError::UnknownStream { key })
    }

    #[inline]
    pub(super) fn slot_if_known(&self, key: u64) -> Option<u32> {
        if !self.is_stream_ordered {
            return Some(0);
        }
        let mut slots = (0_u32..).zip(&self.stream_keys);
        slots.find(|&(_, &known)| known == key).map(|(slot, _)| slot)
    }

    pub(super) fn streams_known(&self) -> StreamSet {
        let mut all = StreamSet::EMPTY;
        (0_u32..).zip(&self.stream_keys).for_each(|(slot, _)| all.insert(slot));
        all
    }

    /// Whether streams other than its own use block `index`.
    #[inline]
    pub(super) fn has_uses(&self, index: u32) -> bool {
        !self.uses.is_empty() && self.uses.contains_key(&index)
    }

    /// Assigns the next slot to `key`; `false` if it has one.
    pub(crate) fn register_stream(&mut self, key: u64) -> Result<bool, AllocError> {
        if self.stream_keys.contains(&key) {
            return Ok(false);
        }
        if self.stream_keys.len() >= STREAMS_MAX as usize {
            return Err(AllocError::TooManyStreams { limit: STREAMS_MAX });
        }
        if let Some(thread_cache) = &self.thread_cache {
            thread_cache.register_stream(self.stream_keys.len(), key);
        }
        self.stream_keys.push(key);
        self.quiet.add_stream();
        Ok(true)
    }

    pub(crate) fn key_of(&self, slot: usize) -> Option<u64> {
        self.stream_keys.get(slot).copied()
    }

    /// Returns the slot of the stream that may use range `index` when it is free. Segments never change
    /// streams.
    #[inline]
    pub(crate) fn stream_of(&self, index: u32) -> u32 {
        let segment = &self.segments[self.ranges.owner(index) as usize];
        segment.as_ref().map_or(0, |segment| self.pools[segment.pool as usize].stream)
    }

    /// Returns all streams that may use one of `blocks`, their own included. Skips freed blocks.
    pub(crate) fn users(&self, blocks: &[BlockId]) -> StreamSet {
        let mut users = StreamSet::EMPTY;
        for index in blocks.iter().filter_map(|id| self.resolve(*id).ok()) {
            users.insert(self.stream_of(index));
            let others = self.uses.get(&index).copied().unwrap_or_default();
            others.iter().for_each(|slot| users.insert(slot));
        }
        users
    }

    /// Records that stream `key` uses the block around `address` until its free.
    pub(crate) fn record_stream(&mut self, address: usize, key: u64) -> Result<(), AllocError> {
        let slot = self.slot_of(key)?;
        let index = self.find_live(address)?;
        if self.is_stream_ordered && slot != self.stream_of(index) {
            self.take_ownership_or_refuse(index)?;
            self.add_use(index, slot);
        }
        Ok(())
    }

    /// Records a use of block `index` by a stream other than its own.
    #[inline]
    pub(super) fn add_use(&mut self, index: u32, slot: u32) {
        if self.is_stream_ordered && slot != self.stream_of(index) {
            self.uses.entry(index).or_default().insert(slot);
        }
    }

    /// Whether the pool of `request` has a cached range for it.
    pub(crate) fn has_cached(&self, request: &Request, fit: Fit) -> bool {
        let pool = self.pool_if_any(request, fit);
        pool.is_some_and(|pool| self.find_cached(pool, fit).is_some())
    }

    /// Makes a freed block pending. It still counts as active.
    #[cold]
    pub(super) fn begin_pending(&mut self, index: u32) -> Release {
        let bytes = self.range_bytes(index);
        let record = &mut self.records[index as usize];
        let generation = record.generation.wrapping_add(1);
        *record = Record { generation, kind: RangeKind::Pending, ..Record::NOTHING };
        self.stats.pending_bytes.add(bytes);
        self.stats.pending_blocks.add(1);
        let users = self.uses.remove(&index).unwrap_or_default();
        let freed_at = self.ranges.count_free();
        Release { subject: ReleaseSubject::Block(index), bytes, users, freed_at }
    }

    /// Frees a pending block whose uses are complete. Its pages have been free since its free, number `freed_at`.
    pub(crate) fn finish_pending(&mut self, index: u32, freed_at: u64) {
        debug_assert!(self.is_pending(index), "range {index} is not pending");
        let bytes = self.range_bytes(index);
        self.stats.pending_bytes.remove(bytes);
        self.stats.pending_blocks.remove(1);
        self.stats.active_bytes.remove(bytes);
        if self.is_recording() {
            self.note_block(index, HistoryAction::FreeCompleted);
        }
        self.give_freed_at(index, freed_at);
    }

    pub(crate) fn is_pending(&self, index: u32) -> bool {
        self.records.get(index as usize).is_some_and(|record| record.kind == RangeKind::Pending)
    }
}
