//! Pools of segments. Each arena, the requests without an arena, and the spare segments have one pool per
//! stream.
//!
//! The pools of one arena are a *family*. The pool of its first stream (slot 0, the only one on a device
//! that is not stream-ordered) exists as long as the arena and identifies it; those of other streams exist
//! while they have segments. If blocks share pages, small blocks have separate pools: among large blocks
//! each would keep a page from moving. Huge blocks without an arena have separate pools from the first
//! [`Allocator::watch_unused`](crate::Allocator::watch_unused) on: what smaller blocks fill with large pages has no
//! place for one that splits none.

use super::{Release, ReleaseSubject, State, cached_list};
use crate::AllocError;
use crate::core::{Fit, NONE};
use crate::types::{ArenaId, Request};

/// Limit of the arenas, including closed ones with blocks.
pub const ARENAS_MAX: u32 = 4096;

/// The family of requests without an arena.
pub(super) const POOL_GENERAL: u32 = 0;
/// The family of the spare segments, from closed arenas.
pub(super) const POOL_SPARE: u32 = 1;
/// Families that are not arenas.
pub(super) const POOLS_FIXED: u32 = 2;

/// A block of this part of a segment is huge, once huge blocks have pools: 1/4.
const HUGE_DIVISOR: u32 = 4;

/// State of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArenaPhase {
    /// Accepts requests.
    Open,
    /// Releases each segment when it becomes free.
    Closed,
    /// No pool.
    Vacant,
}

/// The blocks that a pool serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PoolKind {
    /// All that are neither small nor huge.
    Large,
    /// Up to half a page, if blocks share pages.
    Small,
    /// From [`State::huge_units`] on, without an arena.
    Huge,
}

impl PoolKind {
    pub(super) const ALL: [Self; 3] = [Self::Large, Self::Small, Self::Huge];
}

/// A pool.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) generation: u32,
    pub(super) phase: ArenaPhase,
    pub(super) segments: u32,
    /// The pool of its family's first stream.
    pub(super) family: u32,
    /// Slot of the stream that may still use its cached pages.
    pub(super) stream: u32,
    pub(super) kind: PoolKind,
    /// Whether the family keeps its pages. Set in its first pool only: see [`State::keeps`].
    pub(super) keeps_pages: bool,
}

/// Returns the place of a pool in its family. The first pool has place 0.
#[inline]
pub(super) const fn place(stream: u32, kind: PoolKind) -> u32 {
    stream * 4 + kind as u32
}

impl Pool {
    /// Creates the first pool of a family that always exists.
    pub(super) const fn fixed(family: u32) -> Self {
        Self {
            generation: 0,
            phase: ArenaPhase::Open,
            segments: 0,
            family,
            stream: 0,
            kind: PoolKind::Large,
            keeps_pages: false,
        }
    }
}

impl State {
    /// Returns the first pool of an open arena, or the general one.
    #[inline]
    pub(super) fn family_of(&self, arena: Option<ArenaId>) -> Result<u32, AllocError> {
        let Some(ArenaId { index, generation }) = arena else { return Ok(POOL_GENERAL) };
        let is_named = |pool: &Pool| {
            pool.phase == ArenaPhase::Open && pool.generation == generation && pool.family == index
        };
        match self.pools.get(index as usize) {
            Some(pool) if is_named(pool) && index >= POOLS_FIXED => Ok(index),
            _ => Err(AllocError::UnknownArena { index, generation }),
        }
    }

    /// Returns the pool of `request`, and creates it if necessary. `retire_pool` removes one that got no
    /// segment.
    #[inline]
    pub(super) fn pool_of(&mut self, request: &Request, fit: Fit) -> Result<u32, AllocError> {
        let stream = self.slot_of(request.stream)?;
        let family = self.family_of(request.arena)?;
        Ok(self.member(family, stream, self.kind_in(family, fit)))
    }

    /// Returns the pool of `request`, if it exists.
    pub(super) fn pool_if_any(&self, request: &Request, fit: Fit) -> Option<u32> {
        let stream = self.slot_if_known(request.stream)?;
        let family = self.family_of(request.arena).ok()?;
        self.member_if_any(family, place(stream, self.kind_in(family, fit)))
    }

    /// Returns the kind of the pools of `family` that serve `fit`.
    #[inline]
    pub(super) fn kind_in(&self, family: u32, fit: Fit) -> PoolKind {
        if self.is_small(fit) {
            PoolKind::Small
        } else if family == POOL_GENERAL && fit.units >= self.huge_units {
            PoolKind::Huge
        } else {
            PoolKind::Large
        }
    }

    /// From now on huge blocks have pools of their own, if blocks share pages. Those that are there stay where they are.
    pub(super) fn separate_huge(&mut self) {
        if self.geometry.page_units > 1 {
            self.huge_units = self.geometry.segment_units / HUGE_DIVISOR;
        }
    }

    /// Whether a block is small: up to half a page, if blocks share pages.
    #[inline]
    pub(super) fn is_small(&self, fit: Fit) -> bool {
        fit.units <= self.geometry.page_units / 2
    }

    pub(super) fn member_if_any(&self, family: u32, place: u32) -> Option<u32> {
        match place {
            0 => Some(family),
            place => self.members.get(&(family, place)).copied(),
        }
    }

    /// Returns the pools of the same family and stream for blocks of the other kinds.
    pub(super) fn siblings(&self, pool: u32) -> impl Iterator<Item = u32> {
        let Pool { family, stream, kind, .. } = self.pools[pool as usize];
        let others = PoolKind::ALL.into_iter().filter(move |&other| other != kind);
        others.filter_map(move |other| self.member_if_any(family, place(stream, other)))
    }

    /// Returns the pool of `family` for `stream`, and creates it if necessary.
    #[inline]
    pub(super) fn member(&mut self, family: u32, stream: u32, kind: PoolKind) -> u32 {
        let place = place(stream, kind);
        if place == 0 {
            return family;
        }
        // Most requests have no arena: their pool is found without a search.
        match self.general.get(place as usize) {
            Some(&pool) if family == POOL_GENERAL && pool != NONE => pool,
            _ => self.other_member(family, stream, kind),
        }
    }

    #[cold]
    fn other_member(&mut self, family: u32, stream: u32, kind: PoolKind) -> u32 {
        let place = place(stream, kind);
        if let Some(&pool) = self.members.get(&(family, place)) {
            return pool;
        }
        let phase = self.pools[family as usize].phase;
        let pool = self.make_pool(Some(family), phase, stream, kind);
        self.members.insert((family, place), pool);
        if family == POOL_GENERAL {
            let count = self.general.len().max(place as usize + 1);
            self.general.resize(count, NONE);
            self.general[place as usize] = pool;
        }
        pool
    }

    /// Creates a pool in a vacant slot, by default as the first of a new family.
    fn make_pool(
        &mut self,
        family: Option<u32>,
        phase: ArenaPhase,
        stream: u32,
        kind: PoolKind,
    ) -> u32 {
        let index = self.pools_vacant.pop().unwrap_or_else(|| {
            self.pools.push(Pool { phase: ArenaPhase::Vacant, ..Pool::fixed(0) });
            // Limited by the numbers of arenas and segments.
            let index = u32::try_from(self.pools.len() - 1).unwrap_or(u32::MAX);
            self.ranges.ensure_lists(cached_list(index + 1));
            index
        });
        let pool = &mut self.pools[index as usize];
        let generation = pool.generation;
        let family = family.unwrap_or(index);
        *pool = Pool { generation, phase, segments: 0, family, stream, kind, keeps_pages: false };
        index
    }

    /// Opens an arena, optionally one that keeps its pages.
    pub(crate) fn arena_create(&mut self, keeps_pages: bool) -> Result<ArenaId, AllocError> {
        if self.stats.arenas.current >= u64::from(ARENAS_MAX) {
            return Err(AllocError::TooManyArenas { limit: ARENAS_MAX });
        }
        let index = self.make_pool(None, ArenaPhase::Open, 0, PoolKind::Large);
        self.pools[index as usize].keeps_pages = keeps_pages;
        self.stats.arenas.add(1);
        Ok(ArenaId { index, generation: self.pools[index as usize].generation })
    }

    /// Closes an arena; each segment leaves it when it becomes free. An unknown id is ignored.
    ///
    /// A kept arena keeps pages that streams may still use until `arena_settle`.
    pub(crate) fn arena_close(&mut self, arena: ArenaId) -> Option<Release> {
        let family = self.family_of(Some(arena)).ok()?;
        let pools = self.pools_of(family);
        for &pool in &pools {
            self.pools[pool as usize].phase = ArenaPhase::Closed;
        }
        let has_pages = pools.iter().any(|&pool| self.pools[pool as usize].segments > 0);
        if self.keeps(family) && has_pages && self.is_stream_ordered {
            let bytes = self.cached_bytes_of(|pool| pool.family == family);
            // A graph may be replayed on any stream, but not on one that is gone.
            let users = self.streams_known();
            let (subject, freed_at) = (ReleaseSubject::Arena(arena), self.frees());
            return Some(Release { subject, bytes, users, freed_at });
        }
        self.release_pages(&pools);
        None
    }

    /// Releases the pages of a closed kept arena that no stream uses any more. Returns its free bytes; 0 if it
    /// no longer exists.
    pub(crate) fn arena_settle(&mut self, ArenaId { index, generation }: ArenaId) -> u64 {
        // The slot may hold another arena: a failed map may have left this one without a segment.
        if self.pools.get(index as usize).is_none_or(|pool| pool.generation != generation) {
            return 0;
        }
        let bytes = self.cached_bytes_of(|pool| pool.family == index);
        let pools = self.pools_of(index);
        self.release_pages(&pools);
        bytes
    }

    /// Whether `stream` has pages of a closed arena: one of its blocks was requested on it.
    pub(crate) fn has_segments_of(&self, arena: ArenaId, stream: u32) -> bool {
        let ArenaId { index, generation } = arena;
        let is_named = |pool: &Pool| pool.generation == generation && pool.family == index;
        self.pools.get(index as usize).is_some_and(is_named)
            && self.pools_of(index).into_iter().any(|pool| {
                let pool = &self.pools[pool as usize];
                pool.stream == stream && pool.segments > 0
            })
    }

    /// Returns the pools of a family, the first one last.
    fn pools_of(&self, family: u32) -> Vec<u32> {
        let others = self.members.range((family, 0)..=(family, u32::MAX));
        others.map(|(_, &pool)| pool).chain([family]).collect()
    }

    /// Releases the free segments of a closed family.
    fn release_pages(&mut self, pools: &[u32]) {
        for &pool in pools {
            self.pools[pool as usize].keeps_pages = false;
        }
        for &pool in pools {
            self.settle_pool(pool);
            self.retire_pool(pool);
        }
    }

    /// Whether the cached ranges of `pool` stay mapped and serve no other family.
    #[inline]
    pub(super) fn keeps(&self, pool: u32) -> bool {
        let family = self.pools[pool as usize].family;
        self.pools[family as usize].keeps_pages
    }

    /// Returns the cached bytes of kept arenas. For reports.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.cached_bytes_of(|pool| self.pools[pool.family as usize].keeps_pages)
    }

    /// Returns the cached bytes of some pools.
    fn cached_bytes_of(&self, which: impl Fn(&Pool) -> bool) -> u64 {
        let segments = self.segments.iter().flatten();
        let some = segments.filter(|segment| which(&self.pools[segment.pool as usize]));
        some.map(|segment| self.bytes(segment.cached_units)).sum()
    }

    /// Removes a pool without segments, unless it is the first of its family and the arena is open or has
    /// other pools.
    #[inline]
    pub(super) fn retire_pool(&mut self, index: u32) {
        if index >= POOLS_FIXED && self.pools[index as usize].segments == 0 {
            self.retire_empty(index);
        }
    }

    #[cold]
    fn retire_empty(&mut self, index: u32) {
        let Pool { phase, family, stream, kind, .. } = self.pools[index as usize];
        if phase == ArenaPhase::Vacant {
            return;
        }
        if family != index {
            let place = place(stream, kind);
            self.members.remove(&(family, place));
            if family == POOL_GENERAL {
                self.general[place as usize] = NONE;
            }
            self.vacate_pool(index);
            self.retire_pool(family);
        } else if phase == ArenaPhase::Closed && !self.has_members(family) {
            self.vacate_pool(index);
            self.stats.arenas.remove(1);
        }
    }

    fn has_members(&self, family: u32) -> bool {
        self.members.range((family, 0)..=(family, u32::MAX)).next().is_some()
    }

    fn vacate_pool(&mut self, index: u32) {
        let pool = &mut self.pools[index as usize];
        pool.generation = pool.generation.wrapping_add(1);
        pool.phase = ArenaPhase::Vacant;
        self.pools_vacant.push(index);
    }
}
