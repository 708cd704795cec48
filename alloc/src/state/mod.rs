//! Everything under the allocator's lock. Pure: it knows units and pools, never the device.
//!
//! Life of a range, as the accounts see it:
//! ```text
//!           begin_map          complete_map
//!    bare ───────────► mapping ────────────► live ◄────── publish ─────┐
//!     ▲ ▲◄── cancel_map ──┘                  │  │                      │
//!     │ └────────── release (asleep) ────────┘  └─ release (awake) ► cached
//!     │           finish_trim                        begin_trim        │
//!     └────────────────────────── trimming ◄───────────────────────────┘
//!                                     └────────── cancel_trim ─────────►
//! ```
//! A live block that other streams than its own use is pending between `release` and `cached`
//! (`begin_pending`, `finish_pending`).

mod blocks;
mod check;
mod pools;
mod segments;
mod streams;
#[cfg(test)]
mod tests;

use crate::core::{Fit, PageTable, Ranges, Tlsf};
use crate::stats::Stats;
use crate::types::{ArenaId, Request};
use crate::{ALIGN_BYTES_MAX, AllocError};
pub use pools::ARENAS_MAX;
use pools::{POOL_GENERAL, POOL_SPARE, POOLS_FIXED, Pool};
use segments::Segment;
pub(crate) use segments::TrimFrom;
use std::collections::{BTreeMap, BTreeSet};
pub use streams::STREAMS_MAX;
pub(crate) use streams::{Leaving, StreamSet};

/// The most ranges (blocks and free ranges) there can be at a time.
pub const RANGES_MAX: u32 = 1 << 24;

/// Ranges one request can add: the gap before, the rest after, and the first of a new segment.
const RANGES_PER_REQUEST: u32 = 3;

/// What a used range is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Free, or no range at all.
    Nothing,
    /// Bare, being mapped for a request that has not returned yet.
    Mapping,
    /// A block.
    Live,
    /// Freed; other streams than its own may still use it.
    Pending,
    /// Cached, being unmapped.
    Trimming,
}

/// What is known of the range in a slot, beside its place.
#[derive(Clone, Copy, Debug)]
struct Record {
    generation: u32,
    kind: Kind,
    doomed: bool,
    asleep: bool,
    tag: u32,
    claimed: Option<u64>,
    requested_bytes: usize,
    scope: u64,
    stream: u64,
    arena: Option<ArenaId>,
}

impl Record {
    const NOTHING: Self = Self {
        generation: 0,
        kind: Kind::Nothing,
        doomed: false,
        asleep: false,
        tag: 0,
        claimed: None,
        requested_bytes: 0,
        scope: 0,
        stream: 0,
        arena: None,
    };
}

/// A request in units.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    pub(crate) fit: Fit,
    pub(crate) bytes: u64,
}

/// Who wants room: those on the ladder, one at a time, may take what was trimmed for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Who {
    Anybody,
    OnLadder,
}

/// What became of one attempt to find a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// A range with pages: publish it.
    Cached(u32),
    /// A range without: map it, then complete or cancel.
    Bare(u32),
    /// Over the budget by so many bytes.
    OverBudget(u64),
    /// No run of addresses is long enough.
    NoAddresses,
}

/// The address space in granules.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    /// Address of unit 0, a multiple of the granule.
    pub(crate) base: usize,
    pub(crate) granule_bytes: usize,
    /// Units in all.
    pub(crate) units: u32,
    /// Units given to a pool at a time.
    pub(crate) segment_units: u32,
}

/// The state.
#[derive(Debug)]
pub(crate) struct State {
    geometry: Geometry,
    ranges: Ranges,
    table: PageTable,
    /// By slot of `ranges`.
    records: Vec<Record>,
    is_stream_ordered: bool,
    /// By range: the streams other than its own that use a block, where there are any.
    uses: BTreeMap<u32, StreamSet>,
    /// By slot.
    stream_keys: Vec<u64>,
    pools: Vec<Pool>,
    pools_vacant: Vec<u32>,
    /// Pools other than the first of their family: family, slot of the stream.
    members: BTreeMap<(u32, u32), u32>,
    segments: Vec<Option<Segment>>,
    segments_vacant: Vec<u32>,
    /// The whole address space, divided into segments.
    space: Tlsf,
    /// Segments of the spare pools: slot of the stream, units, index.
    spare: BTreeSet<(u32, u32, u32)>,
    /// Bytes being mapped now: in the budget, not yet in the figures.
    mapping_bytes: u64,
    /// Bytes that whoever is on the ladder has trimmed for itself: in the budget for others.
    held_back_bytes: u64,
    pub(crate) stats: Stats,
}

/// The list of a pool's cached ranges.
const fn cached_list(pool: u32) -> u32 {
    pool * 2
}

/// The list of a pool's bare ranges.
const fn bare_list(pool: u32) -> u32 {
    pool * 2 + 1
}

impl State {
    pub(crate) fn new(geometry: Geometry, budget_bytes: u64, is_stream_ordered: bool) -> Self {
        let align_units = ALIGN_BYTES_MAX / geometry.granule_bytes.min(ALIGN_BYTES_MAX);
        let phase = geometry.base / geometry.granule_bytes % align_units;
        Self {
            geometry,
            // The phase is below 2³⁰.
            ranges: Ranges::new(POOLS_FIXED * 2, RANGES_MAX, u32::try_from(phase).unwrap_or(0)),
            table: PageTable::new(geometry.units),
            records: Vec::new(),
            is_stream_ordered,
            uses: BTreeMap::new(),
            stream_keys: Vec::new(),
            pools: vec![Pool::fixed(POOL_GENERAL), Pool::fixed(POOL_SPARE)],
            pools_vacant: Vec::new(),
            members: BTreeMap::new(),
            segments: Vec::new(),
            segments_vacant: Vec::new(),
            space: Tlsf::new(geometry.units),
            spare: BTreeSet::new(),
            mapping_bytes: 0,
            held_back_bytes: 0,
            stats: Stats { budget_bytes, ..Stats::default() },
        }
    }

    #[inline]
    fn bytes(&self, units: u32) -> u64 {
        u64::from(units) * self.geometry.granule_bytes as u64
    }

    #[inline]
    fn range_bytes(&self, index: u32) -> u64 {
        self.bytes(self.ranges.units(index))
    }

    /// How far `bytes` more would go past the budget, for `who`.
    #[inline]
    pub(crate) fn excess_bytes(&self, bytes: u64, who: Who) -> u64 {
        let committed_bytes = self.stats.mapped_bytes.current + self.mapping_bytes;
        let held_back_bytes = if who == Who::OnLadder { 0 } else { self.held_back_bytes };
        let all_bytes = committed_bytes.saturating_add(held_back_bytes).saturating_add(bytes);
        all_bytes.saturating_sub(self.stats.budget_bytes)
    }

    /// What has just been trimmed is for whoever is on the ladder.
    pub(crate) fn hold_back(&mut self, bytes: u64) {
        self.held_back_bytes += bytes;
    }

    /// Whoever was on the ladder has what it needs, or has given up.
    pub(crate) fn let_go(&mut self) {
        self.held_back_bytes = 0;
    }

    /// Whether the address space is long enough for `need`, were it empty.
    pub(crate) fn could_ever_fit(&self, need: &Need) -> bool {
        let Fit { units, align_units } = need.fit;
        units.checked_add(align_units - 1).is_some_and(|enough| enough <= self.geometry.units)
    }

    /// The largest cached and the largest bare range there is, in bytes. Walks: for reports.
    pub(crate) fn largest_bytes(&self) -> (u64, u64) {
        let largest = |list: fn(u32) -> u32| {
            let pools = 0_u32..;
            let units =
                pools.zip(&self.pools).map(|(pool, _)| self.ranges.largest_units(list(pool)));
            self.bytes(units.max().unwrap_or(0))
        };
        let bare = largest(bare_list).max(self.bytes(self.space.largest_free_units()));
        (largest(cached_list), bare)
    }

    /// One attempt to find a range for `need`. What it returns is used from here on.
    pub(crate) fn attempt(
        &mut self,
        request: &Request,
        need: &Need,
        who: Who,
    ) -> Result<Attempt, AllocError> {
        if !self.ranges.can_make(RANGES_PER_REQUEST) {
            return Err(AllocError::TooManyRanges { limit: RANGES_MAX });
        }
        let pool = self.pool_of(request)?;
        let found = self.attempt_in(pool, need, who);
        self.retire_pool(pool);
        Ok(found)
    }

    fn attempt_in(&mut self, pool: u32, need: &Need, who: Who) -> Attempt {
        // Above a budget that was lowered, even a cached page is one too many. (What is held back
        // for somebody does not count here: a cached page is in the budget already.)
        let over_bytes = self.excess_bytes(0, Who::OnLadder);
        if over_bytes > 0 {
            return Attempt::OverBudget(over_bytes);
        }
        if let Some(index) = self.take_cached(pool, need.fit) {
            return Attempt::Cached(index);
        }
        // A spare segment has pages: better than mapping, but only where one is needed anyway.
        let has_room = self.ranges.find(bare_list(pool), need.fit).is_some();
        if !has_room
            && self.adopt_spare(pool, need.fit)
            && let Some(index) = self.take_cached(pool, need.fit)
        {
            return Attempt::Cached(index);
        }
        let over_bytes = self.excess_bytes(need.bytes, who);
        if over_bytes > 0 {
            return Attempt::OverBudget(over_bytes);
        }
        let mut bare = self.take_bare(pool, need.fit);
        if bare.is_none() && self.carve_segment(pool, need.fit) {
            bare = self.take_bare(pool, need.fit);
        }
        bare.map_or(Attempt::NoAddresses, Attempt::Bare)
    }
}
