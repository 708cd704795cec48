//! The state under the allocator's lock. Pure: units and pools, no device.
//!
//! Life of a range:
//! ```text
//!           begin_map          complete_map
//!    bare ───────────► mapping ────────────► live ◄────── publish ─────┐
//!     ▲ ▲◄── cancel_map ──┘                  │  │                      │
//!     │ └────────── release (asleep) ────────┘  └─ release (awake) ► cached
//!     │           finish_trim                        begin_trim        │
//!     └────────────────────────── trimming ◄───────────────────────────┘
//!                                     └────────── cancel_trim ─────────►
//! ```
//! A live block that other streams use too is pending between `release` and `cached` (`begin_pending`,
//! `finish_pending`).

mod blocks;
mod fast_path;
mod fill;
mod growth;
mod history;
mod kinds;
mod large;
mod pools;
mod quiet;
mod segments;
mod streams;
mod tags;
#[cfg(any(test, feature = "checks"))]
mod testing;
#[cfg(test)]
mod tests;
mod thread_cached;

use crate::config::Margin;
use crate::core::{Fit, LargePages, Ranges, Starts, Tlsf};
use crate::history::History;
use crate::stats::{EarlierPeaks, Stats};
use crate::thread_cache::ThreadCache;
use crate::types::{ArenaId, Request};
use crate::{ALIGN_BYTES_MAX, AllocError};
use growth::Growth;
pub(crate) use growth::Mapping;
pub use pools::ARENAS_MAX;
use pools::{POOL_GENERAL, POOL_SPARE, POOLS_FIXED, Pool};
use quiet::Quiet;
use segments::Segment;
pub(crate) use segments::TrimPurpose;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
pub use streams::STREAMS_MAX;
pub(crate) use streams::{Release, ReleaseSubject, StreamSet};

/// Limit of the ranges (blocks and free ranges).
pub const RANGES_MAX: u32 = 1 << 24;

/// Ranges that one request can add: the first of a new segment, the rests on both sides of its pages and of
/// the cached ranges around them, and those promised while pages are being mapped.
const RANGES_PER_REQUEST: u32 = 7;

/// The use of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RangeKind {
    /// Free, or no range.
    Nothing,
    /// Bare, being mapped for a request.
    Mapping,
    /// A block.
    Live,
    /// Freed; other streams may still use it.
    Pending,
    /// Cached, being unmapped.
    Trimming,
}

/// Properties of the range in a slot.
#[derive(Clone, Copy, Debug)]
struct Record {
    generation: u32,
    kind: RangeKind,
    free_deferred: bool,
    asleep: bool,
    /// The ownership table has its owner and requested bytes.
    is_registered: bool,
    tag: u32,
    claimed: Option<u64>,
    requested_bytes: usize,
    scope: u64,
    stream: u64,
    arena: Option<ArenaId>,
    /// Of a range being mapped: units that were mapped before.
    cached_units: u32,
}

impl Record {
    const NOTHING: Self = Self {
        generation: 0,
        kind: RangeKind::Nothing,
        free_deferred: false,
        asleep: false,
        is_registered: false,
        tag: 0,
        claimed: None,
        requested_bytes: 0,
        scope: 0,
        stream: 0,
        arena: None,
        cached_units: 0,
    };
}

/// A request in units.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    pub(crate) fit: Fit,
    pub(crate) bytes: u64,
    /// Whether the block may go to the thread cache when freed.
    pub(crate) is_small: bool,
}

/// Priority of a request. Requests on the ladder, one at a time, may use the bytes trimmed for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    Normal,
    OnLadder,
    /// On the ladder, before a refusal: every gap is examined.
    LastResort,
}

/// Result of an attempt to find a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// A mapped range, to publish.
    Cached(u32),
    /// A range with missing pages, to map and then to complete or cancel.
    Bare(Mapping),
    /// Bytes beyond the budget.
    OverBudget(u64),
    /// No free address range is long enough.
    NoAddresses,
}

/// The address space in granules.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    /// Address of unit 0, the start of a page.
    pub(crate) base: usize,
    pub(crate) granule_bytes: usize,
    /// Units of a page: 1 if a granule is at least a page.
    pub(crate) page_units: u32,
    /// Units of a large page: those of a page if there are none.
    pub(crate) large_units: u32,
    /// Number of units.
    pub(crate) units: u32,
    /// Units of a segment.
    pub(crate) segment_units: u32,
}

/// The state.
#[derive(Debug)]
pub(crate) struct State {
    geometry: Geometry,
    ranges: Ranges,
    starts: Starts,
    /// By slot of `ranges`.
    records: Vec<Record>,
    is_stream_ordered: bool,
    /// Its blocks are live ranges here.
    thread_cache: Option<Arc<ThreadCache>>,
    /// Its bytes when its counts were last added to `stats`.
    thread_cache_bytes: u64,
    /// It accepts no blocks: the mapped bytes exceeded a lowered budget.
    is_thread_cache_closed: bool,
    /// By range: the other streams that use a block.
    uses: BTreeMap<u32, StreamSet>,
    /// By slot.
    stream_keys: Vec<u64>,
    quiet: Quiet,
    large: LargePages,
    pools: Vec<Pool>,
    pools_vacant: Vec<u32>,
    /// Pools other than the first of their family: family, place.
    members: BTreeMap<(u32, u32), u32>,
    /// The general pools, by place, or `NONE`. The first always exists.
    general: Vec<u32>,
    /// The least units of a huge block; `u32::MAX`: none is.
    huge_units: u32,
    segments: Vec<Option<Segment>>,
    segments_vacant: Vec<u32>,
    /// The whole address space, divided into segments.
    space: Tlsf,
    /// The space was longer once.
    is_cut: bool,
    /// Segments of the spare pools: slot of the stream, units, index.
    spare: BTreeSet<(u32, u32, u32)>,
    /// Bytes being mapped: in the budget, not yet in `stats`.
    mapping_bytes: u64,
    /// Start and units of the pages being mapped, at most one per thread.
    in_transit: Vec<(u32, u32)>,
    /// `None`: off. The thread cache is closed while it is on.
    history: Option<Box<History>>,
    /// Bytes trimmed by the request on the ladder for itself. They count against the budget of others.
    held_back_bytes: u64,
    /// Bytes beyond the maximum use from which cached pages are moved; `None`: never.
    moves_beyond: Option<Margin>,
    /// Requests near the maximum use may have to wait: blocks of scopes fall asleep while their streams go on.
    is_run_ahead_limited: bool,
    /// The maximum of the bytes in use.
    high_bytes: u64,
    /// The use from which gaps are filled.
    near_high_bytes: u64,
    /// Number of requests for which the filling is suspended.
    fill_pause: u32,
    /// Of unclaimed blocks, by tag.
    tagged_bytes: BTreeMap<u32, u64>,
    pub(crate) stats: Stats,
    pub(crate) earlier_peaks: EarlierPeaks,
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
    pub(crate) fn new(
        geometry: Geometry,
        budget_bytes: u64,
        is_stream_ordered: bool,
        moves_beyond: Option<Margin>,
        thread_cache: Option<Arc<ThreadCache>>,
    ) -> Self {
        // A page that a block would split leaves first, as pages that move do.
        let large_units =
            if moves_beyond.is_some() { geometry.large_units } else { geometry.page_units };
        let geometry = Geometry { large_units, ..geometry };
        let align_units = ALIGN_BYTES_MAX / geometry.granule_bytes.min(ALIGN_BYTES_MAX);
        let phase = geometry.base / geometry.granule_bytes % align_units;
        Self {
            geometry,
            // The phase is below 2³⁰.
            ranges: Ranges::new(
                POOLS_FIXED * 2,
                RANGES_MAX,
                u32::try_from(phase).unwrap_or(0),
                geometry.page_units > 1,
            ),
            starts: Starts::new(geometry.units),
            records: Vec::new(),
            is_stream_ordered,
            thread_cache,
            thread_cache_bytes: 0,
            is_thread_cache_closed: false,
            uses: BTreeMap::new(),
            stream_keys: Vec::new(),
            quiet: Quiet::new(
                if is_stream_ordered { geometry.units } else { 0 },
                geometry.page_units,
            ),
            large: LargePages::new(geometry.units, geometry.page_units, geometry.large_units),
            pools: vec![Pool::fixed(POOL_GENERAL), Pool::fixed(POOL_SPARE)],
            pools_vacant: Vec::new(),
            members: BTreeMap::new(),
            general: vec![POOL_GENERAL],
            huge_units: u32::MAX,
            segments: Vec::new(),
            segments_vacant: Vec::new(),
            space: Tlsf::new(geometry.units),
            is_cut: false,
            spare: BTreeSet::new(),
            mapping_bytes: 0,
            in_transit: Vec::new(),
            history: None,
            held_back_bytes: 0,
            moves_beyond,
            is_run_ahead_limited: false,
            high_bytes: 0,
            near_high_bytes: 0,
            fill_pause: 0,
            tagged_bytes: BTreeMap::new(),
            stats: Stats { budget_bytes, ..Stats::default() },
            earlier_peaks: EarlierPeaks::default(),
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

    /// Returns the bytes by which `bytes` more would exceed the budget, for `priority`.
    #[inline]
    pub(crate) fn excess_bytes(&self, bytes: u64, priority: Priority) -> u64 {
        let committed_bytes = self.stats.mapped_bytes.current + self.mapping_bytes;
        let held_back_bytes = if priority == Priority::Normal { self.held_back_bytes } else { 0 };
        let all_bytes = committed_bytes.saturating_add(held_back_bytes).saturating_add(bytes);
        all_bytes.saturating_sub(self.stats.budget_bytes)
    }

    /// Holds back trimmed bytes for the request on the ladder.
    pub(crate) fn hold_back(&mut self, bytes: u64) {
        self.held_back_bytes += bytes;
    }

    /// Ends the hold, after the request on the ladder has ended.
    pub(crate) fn release_held_back(&mut self) {
        self.held_back_bytes = 0;
    }

    /// Returns the bytes of the address space, if it was cut.
    pub(crate) fn cut_space_bytes(&self) -> Option<u64> {
        self.is_cut.then(|| self.bytes(self.geometry.units))
    }

    /// Whether `need` fits an empty address space.
    pub(crate) fn could_ever_fit(&self, need: &Need) -> bool {
        let Fit { units, align_units } = need.fit;
        units.checked_add(align_units - 1).is_some_and(|enough| enough <= self.geometry.units)
    }

    /// Returns the bytes of the largest cached and the largest bare range outside kept arenas. For reports.
    pub(crate) fn largest_bytes(&mut self) -> (u64, u64) {
        self.ranges.settle_reach();
        let largest = |list: fn(u32) -> u32| {
            let pools = (0_u32..).take(self.pools.len()).filter(|&pool| !self.keeps(pool));
            let units = pools.map(|pool| self.ranges.largest_units(list(pool)));
            self.bytes(units.max().unwrap_or(0))
        };
        let bare = largest(bare_list).max(self.bytes(self.space.largest_free_units()));
        (largest(cached_list), bare)
    }

    /// Whether the tables have room for one more request. Gets memory for it if necessary.
    #[inline]
    pub(crate) fn has_bookkeeping(&mut self) -> bool {
        self.ranges.can_make(RANGES_PER_REQUEST)
            && (self.records.capacity() >= self.ranges.granted() as usize || self.grow_records())
            && self.starts.can_insert()
    }

    #[cold]
    fn grow_records(&mut self) -> bool {
        let missing = self.ranges.granted() as usize - self.records.len();
        self.records.try_reserve_exact(missing).is_ok()
    }

    /// Attempts to find a range for `need`, which is used from then on.
    pub(crate) fn attempt(
        &mut self,
        request: &Request,
        need: &Need,
        priority: Priority,
    ) -> Result<Attempt, AllocError> {
        if !self.has_bookkeeping() {
            return Err(match self.ranges.slots() {
                RANGES_MAX => AllocError::TooManyRanges { limit: RANGES_MAX },
                ranges => AllocError::NoBookkeeping { ranges },
            });
        }
        self.note_use();
        let pool = self.pool_of(request, need.fit)?;
        let found = self.attempt_in(pool, need, priority);
        self.retire_pool(pool);
        found
    }

    fn attempt_in(
        &mut self,
        pool: u32,
        need: &Need,
        priority: Priority,
    ) -> Result<Attempt, AllocError> {
        // Above a lowered budget even cached pages serve no request. (Held back bytes do not count here: a
        // cached page is in the budget already.)
        let over_bytes = self.excess_bytes(0, Priority::OnLadder);
        if over_bytes > 0 {
            return Ok(Attempt::OverBudget(over_bytes));
        }
        if self.is_thread_cache_closed {
            self.open_thread_cache();
        }
        if let Some(filled) = self.fill_gap(pool, need, priority)? {
            return Ok(filled);
        }
        if let Some(index) = self.take_cached(pool, need.fit) {
            return Ok(Attempt::Cached(index));
        }
        match priority {
            Priority::Normal | Priority::OnLadder => self.grow(pool, need.fit, priority),
            Priority::LastResort => self.attempt_last_resort(pool, need.fit),
        }
    }

    /// The last attempt before a refusal: examines every gap, also in the pools of the other kinds (small, large or
    /// huge blocks). The kinds are separate so that pages can move, not to limit any.
    #[cold]
    fn attempt_last_resort(&mut self, pool: u32, fit: Fit) -> Result<Attempt, AllocError> {
        let mut pools = vec![pool];
        pools.extend(self.siblings(pool));
        for &pool in &pools {
            if let Some(index) = self.take_any_cached(pool, fit) {
                return Ok(Attempt::Cached(index));
            }
        }
        // The pool with fewer missing pages first: the device may be full within the budget.
        pools.sort_by_key(|&it| self.least_map_units(it, fit));
        let mut shortest = None;
        for &pool in &pools {
            match self.grow(pool, fit, Priority::LastResort)? {
                short @ (Attempt::OverBudget(_) | Attempt::NoAddresses) => {
                    shortest.get_or_insert(short);
                }
                found => return Ok(found),
            }
        }
        Ok(shortest.unwrap_or(Attempt::NoAddresses))
    }

    /// Finds a range when no cached one fits: extends a cached range, or maps pages.
    fn grow(&mut self, pool: u32, fit: Fit, priority: Priority) -> Result<Attempt, AllocError> {
        let mut growth = match priority {
            Priority::Normal | Priority::OnLadder => self.plan_growth(pool, fit),
            Priority::LastResort => self.least_growth(pool, fit),
        };
        // A spare segment has pages, so it is better than a new one.
        if growth.is_none() && self.adopt_spare(pool, fit) {
            if let Some(index) = self.take_cached(pool, fit) {
                return Ok(Attempt::Cached(index));
            }
            growth = self.plan_growth(pool, fit);
        }
        if let Some(growth) = growth.filter(Growth::is_cached)
            && let Some(index) = self.take_beside(fit, growth)
        {
            return Ok(Attempt::Cached(index));
        }
        let map_units = growth.as_ref().map_or_else(|| self.whole_units(fit), Growth::map_units);
        let over_bytes = self.excess_bytes(self.bytes(map_units), priority);
        if over_bytes > 0 {
            return Ok(Attempt::OverBudget(over_bytes));
        }
        if growth.is_none() && self.carve_segment(pool, fit) {
            growth = self.plan_growth(pool, fit).or_else(|| self.least_growth(pool, fit));
        }
        let Some(growth) = growth else { return Ok(Attempt::NoAddresses) };
        let move_bytes = self.move_bytes(map_units, priority);
        self.begin_map(fit, growth, move_bytes).map(Attempt::Bare)
    }
}
