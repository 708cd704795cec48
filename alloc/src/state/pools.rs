//! Pools: who shares segments. Each arena has one per stream, and so have the requests that name
//! no arena and the spare segments.
//!
//! The pools of one arena are a *family*. The pool of its first stream (slot 0, on a device that
//! is not stream-ordered the only one) lives as long as the arena and names it; those of other
//! streams come with their first segment and go with their last. Where blocks share pages, small
//! ones have pools of their own beside these: among large ones each would keep a page from moving.

use super::{Release, ReleaseSubject, State, cached_list};
use crate::AllocError;
use crate::core::{Fit, NONE};
use crate::types::{ArenaId, Request};

/// Limit of the arenas, including closed ones with blocks.
pub const ARENAS_MAX: u32 = 4096;

/// The family of requests that name no arena.
pub(super) const POOL_GENERAL: u32 = 0;
/// The family of the spare segments, from closed arenas.
pub(super) const POOL_SPARE: u32 = 1;
/// Families that are not arenas.
pub(super) const POOLS_FIXED: u32 = 2;

/// How far a pool is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArenaPhase {
    /// Accepts requests.
    Open,
    /// Gives its segments up one by one as they come free.
    Closed,
    /// No pool at all.
    Vacant,
}

/// Who shares segments.
#[derive(Debug)]
pub(super) struct Pool {
    pub(super) generation: u32,
    pub(super) phase: ArenaPhase,
    pub(super) segments: u32,
    /// The pool of its family's first stream.
    pub(super) family: u32,
    /// Slot of the stream that its cached pages may still be in use by.
    pub(super) stream: u32,
    /// Whether it is for small blocks.
    pub(super) is_small: bool,
    /// Whether pages stay in its family: said of the first of it only, see [`State::keeps`].
    pub(super) keeps_pages: bool,
}

/// A pool's place in its family.
#[inline]
pub(super) const fn place(stream: u32, is_small: bool) -> u32 {
    stream * 2 + is_small as u32
}

impl Pool {
    /// One of the families there always are.
    pub(super) const fn fixed(family: u32) -> Self {
        Self {
            generation: 0,
            phase: ArenaPhase::Open,
            segments: 0,
            family,
            stream: 0,
            is_small: false,
            keeps_pages: false,
        }
    }
}

impl State {
    /// The first pool of an open arena, or the general one.
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

    /// The pool that `request` is served from. Made where there is none: `retire_pool` takes it
    /// away again where it got no segment.
    #[inline]
    pub(super) fn pool_of(&mut self, request: &Request, fit: Fit) -> Result<u32, AllocError> {
        let stream = self.slot_of(request.stream)?;
        let family = self.family_of(request.arena)?;
        Ok(self.member(family, stream, self.is_small(fit)))
    }

    /// Whether a block is one of those that lie apart: up to half a page, where pages are shared.
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

    /// The pool for blocks of the other kind, small or large, of the same family and stream.
    pub(super) fn sibling(&self, pool: u32) -> Option<u32> {
        let Pool { family, stream, is_small, .. } = self.pools[pool as usize];
        self.member_if_any(family, place(stream, !is_small))
    }

    /// The pool of `family` for `stream`.
    #[inline]
    pub(super) fn member(&mut self, family: u32, stream: u32, is_small: bool) -> u32 {
        let place = place(stream, is_small);
        if place == 0 {
            return family;
        }
        // The requests that name no arena are most of all: no search for them.
        match self.general.get(place as usize) {
            Some(&pool) if family == POOL_GENERAL && pool != NONE => pool,
            _ => self.other_member(family, stream, is_small),
        }
    }

    #[cold]
    fn other_member(&mut self, family: u32, stream: u32, is_small: bool) -> u32 {
        let place = place(stream, is_small);
        if let Some(&pool) = self.members.get(&(family, place)) {
            return pool;
        }
        let phase = self.pools[family as usize].phase;
        let pool = self.make_pool(Some(family), phase, stream, is_small);
        self.members.insert((family, place), pool);
        if family == POOL_GENERAL {
            let count = self.general.len().max(place as usize + 1);
            self.general.resize(count, NONE);
            self.general[place as usize] = pool;
        }
        pool
    }

    /// A pool in a vacant slot; of its own family where none is given.
    fn make_pool(
        &mut self,
        family: Option<u32>,
        phase: ArenaPhase,
        stream: u32,
        is_small: bool,
    ) -> u32 {
        let index = self.pools_vacant.pop().unwrap_or_else(|| {
            self.pools.push(Pool { phase: ArenaPhase::Vacant, ..Pool::fixed(0) });
            // As many as there are arenas and segments, and these are limited.
            let index = u32::try_from(self.pools.len() - 1).unwrap_or(u32::MAX);
            self.ranges.ensure_lists(cached_list(index + 1));
            index
        });
        let pool = &mut self.pools[index as usize];
        let generation = pool.generation;
        let family = family.unwrap_or(index);
        *pool =
            Pool { generation, phase, segments: 0, family, stream, is_small, keeps_pages: false };
        index
    }

    /// Opens an arena, which may keep its pages.
    pub(crate) fn arena_create(&mut self, keeps_pages: bool) -> Result<ArenaId, AllocError> {
        if self.stats.arenas.current >= u64::from(ARENAS_MAX) {
            return Err(AllocError::TooManyArenas { limit: ARENAS_MAX });
        }
        let index = self.make_pool(None, ArenaPhase::Open, 0, false);
        self.pools[index as usize].keeps_pages = keeps_pages;
        self.stats.arenas.add(1);
        Ok(ArenaId { index, generation: self.pools[index as usize].generation })
    }

    /// Closes an arena; its segments leave it as they come free. Any other id is ignored.
    ///
    /// One that keeps its pages goes on doing so where streams may still use them: until
    /// `arena_settle`.
    pub(crate) fn arena_close(&mut self, arena: ArenaId) -> Option<Release> {
        let family = self.family_of(Some(arena)).ok()?;
        let pools = self.pools_of(family);
        for &pool in &pools {
            self.pools[pool as usize].phase = ArenaPhase::Closed;
        }
        let has_pages = pools.iter().any(|&pool| self.pools[pool as usize].segments > 0);
        if self.keeps(family) && has_pages && self.is_stream_ordered {
            let bytes = self.cached_bytes_of(|pool| pool.family == family);
            // A graph is replayed on any stream.
            let users = self.streams_known();
            return Some(Release { subject: ReleaseSubject::Arena(arena), bytes, users });
        }
        self.release_pages(&pools);
        None
    }

    /// No stream uses the pages of a closed arena any more: they may leave it. Returns the bytes
    /// that are free of it: none where it is gone by now.
    pub(crate) fn arena_settle(&mut self, ArenaId { index, generation }: ArenaId) -> u64 {
        // The slot may be another arena's, where a failed map left this one without a segment.
        if self.pools.get(index as usize).is_none_or(|pool| pool.generation != generation) {
            return 0;
        }
        let bytes = self.cached_bytes_of(|pool| pool.family == index);
        let pools = self.pools_of(index);
        self.release_pages(&pools);
        bytes
    }

    /// The pools of a family, its first one last.
    fn pools_of(&self, family: u32) -> Vec<u32> {
        let others = self.members.range((family, 0)..=(family, u32::MAX));
        others.map(|(_, &pool)| pool).chain([family]).collect()
    }

    /// Gives up what is free of a closed family.
    fn release_pages(&mut self, pools: &[u32]) {
        for &pool in pools {
            self.pools[pool as usize].keeps_pages = false;
        }
        for &pool in pools {
            self.settle_pool(pool);
            self.retire_pool(pool);
        }
    }

    /// Whether the cached ranges of `pool` serve nobody else, and stay mapped.
    #[inline]
    pub(super) fn keeps(&self, pool: u32) -> bool {
        let family = self.pools[pool as usize].family;
        self.pools[family as usize].keeps_pages
    }

    /// Free bytes that arenas keep to themselves. Walks: for reports.
    pub(crate) fn kept_bytes(&self) -> u64 {
        self.cached_bytes_of(|pool| self.pools[pool.family as usize].keeps_pages)
    }

    /// Free, mapped bytes of some pools.
    fn cached_bytes_of(&self, which: impl Fn(&Pool) -> bool) -> u64 {
        let segments = self.segments.iter().flatten();
        let some = segments.filter(|segment| which(&self.pools[segment.pool as usize]));
        some.map(|segment| self.bytes(segment.cached_units)).sum()
    }

    /// Frees the slot of a pool that has no segment and will not be asked for one: any but the
    /// first of its family, and that one once the arena is closed and the others are gone.
    #[inline]
    pub(super) fn retire_pool(&mut self, index: u32) {
        if index >= POOLS_FIXED && self.pools[index as usize].segments == 0 {
            self.retire_empty(index);
        }
    }

    #[cold]
    fn retire_empty(&mut self, index: u32) {
        let Pool { phase, family, stream, is_small, .. } = self.pools[index as usize];
        if phase == ArenaPhase::Vacant {
            return;
        }
        if family != index {
            let place = place(stream, is_small);
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
