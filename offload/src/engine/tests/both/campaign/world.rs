//! One engine and its owner, who knows what every byte must be.

use std::sync::Arc;

use dormouse_alloc::Allocator;
use dormouse_device::Device;

use super::{Fixture, Plan, TestDevice, Turn, new_allocator};
use crate::config::{IO_THREADS_DEFAULT, Route};
use crate::engine::tests::campaign::errors::{Armed, To};
use crate::engine::tests::campaign::script::{Backing, Kind, Script, TIER_UNITS_MAX};
use crate::engine::tests::campaign::tally::Tally;
use crate::engine::tests::{fill, holds, is_zero};
use crate::engine::{StashId, TagId};
use crate::error::OffloadError;
use crate::ids::{RegionId, Tier};
use dormouse_residency::region::RegionState;
use dormouse_storage::Nvme;
use dormouse_storage::testing::Faults;

/// Memory of the device, whatever its budget: all that any tier can hold.
pub(super) const CAPACITY_UNITS: u64 = 4 * TIER_UNITS_MAX;
/// Most that is there at a time, asleep or awake; the rest is for what stashes are copied back to.
pub(super) const LIVE_UNITS_MAX: u64 = 3 * TIER_UNITS_MAX;
/// Requests of one I/O thread at a time.
const QUEUE_DEPTH: usize = 4;

/// What a region must hold.
#[derive(Clone, Copy, Debug)]
pub(super) enum Content {
    Filled(u64),
    Zero,
    /// Filled, or zero where a sleep without backup got to its end.
    Either(u64),
}

/// What patterns of the blocks of one region differ by.
const PART_SEED_STEP: u64 = 1 << 20;

/// One block of the owner's, or some that are one region.
#[derive(Debug)]
pub(super) struct Mine {
    /// `None` where it is not in the engine's care.
    pub(super) id: Option<RegionId>,
    /// Address and bytes of each block. Those freed before the rest were the last.
    pub(super) blocks: Vec<(usize, usize)>,
    /// All of it, with what was freed before the rest.
    pub(super) bytes: usize,
    pub(super) kind: Kind,
    pub(super) content: Content,
    /// Some of its blocks are freed. Where others have left their region (a seal was refused), that may
    /// be the end of it: what is left is its owner's alone, and awake.
    pub(super) is_partial: bool,
    /// Whether its owner knows that it is awake, and may touch it.
    pub(super) is_sure: bool,
}

impl Mine {
    /// Looks at all of it. Awake.
    pub(super) fn verify(&mut self) {
        let seeded = |seed| self.seeded(seed).all(|(at, bytes, seed)| holds(at, bytes, seed));
        let zero = || self.blocks.iter().all(|&(at, bytes)| is_zero(at, bytes));
        match self.content {
            Content::Filled(seed) => assert!(seeded(seed), "other bytes: {self:?}"),
            Content::Zero => assert!(zero(), "other bytes: {self:?}"),
            Content::Either(_) if zero() => self.content = Content::Zero,
            Content::Either(seed) => {
                assert!(seeded(seed), "other bytes: {self:?}");
                self.content = Content::Filled(seed);
            }
        }
    }

    fn seeded(&self, seed: u64) -> impl Iterator<Item = (usize, usize, u64)> {
        let seeds = (seed..).step_by(PART_SEED_STEP as usize);
        self.blocks.iter().zip(seeds).map(|(&(at, bytes), seed)| (at, bytes, seed))
    }

    /// Its first block.
    pub(super) fn first(&self) -> (usize, usize) {
        self.blocks[0]
    }
}

/// Bytes copied away.
#[derive(Debug)]
pub(super) struct Stashed {
    pub(super) id: StashId,
    pub(super) bytes: usize,
    pub(super) seed: u64,
}

/// All of it.
pub(super) struct World {
    // Dropped first.
    pub(super) calm: Calm,
    pub(super) fixture: Fixture,
    pub(super) armed: Armed,
    pub(super) mine: Vec<Mine>,
    pub(super) stashes: Vec<Stashed>,
    /// The one that keeps no bytes, and the one that does.
    pub(super) tags: [TagId; 2],
    pub(super) unit_bytes: usize,
    pub(super) file_bytes: u64,
    last_seed: u64,
}

impl World {
    pub(super) fn new(script: &Script) -> Self {
        let unit_bytes = script.unit_bytes as u64;
        let turn = Turn::take();
        let allocator = new_allocator((CAPACITY_UNITS * unit_bytes) as usize);
        let file_bytes = script.file_units * unit_bytes;
        let is_file = matches!(script.backing, Backing::Ring | Backing::FileBlocking);
        let faults = if is_file { Faults::new(file_bytes) } else { Faults::in_memory(file_bytes) };
        let nvme = match script.backing {
            Backing::Blocking | Backing::FileBlocking => {
                Nvme::with_storage(Arc::new(faults.clone()), file_bytes, true)
            }
            _ => faults.tier(file_bytes, true, IO_THREADS_DEFAULT, QUEUE_DEPTH),
        };
        let mut config = Plan::default().config;
        config.host_bytes_max = script.host_units * unit_bytes;
        config.inflight_bytes_max = script.window_units * unit_bytes;
        config.route = if script.via_host { Route::ViaHost } else { Route::Auto };
        let fixture = Fixture::over(turn, allocator, config, faults, nvme);
        let engine = &fixture.engine;
        engine.set_tier_budget(Tier::Device, script.device_units * unit_bytes).unwrap();
        let tags = [("dropped", false), ("kept", true)]
            .map(|(name, backup)| engine.tag_create(name, backup).unwrap());
        Self {
            calm: Calm(Arc::clone(&fixture.allocator), fixture.faults.clone()),
            fixture,
            armed: Armed::default(),
            mine: Vec::new(),
            stashes: Vec::new(),
            tags,
            unit_bytes: script.unit_bytes,
            file_bytes,
            last_seed: 0,
        }
    }

    /// Nothing is held up any more. Before whatever waits.
    pub(super) fn let_go(&self) {
        self.fixture.faults.hold(false, false);
        self.fixture.device().release_events();
    }

    /// Events are not held any more where the engine's calls wait for them: work on a GPU comes to
    /// its end by itself.
    pub(super) fn let_events_go(&self) {
        if self.fixture.device().is_stream_ordered() {
            self.fixture.device().release_events();
        }
    }

    pub(super) fn heal(&self) {
        self.fixture.faults.forget();
        self.fixture.device().heal();
        self.fixture.turn.heal();
    }

    /// Notes an error, which must be one that `to` knows of.
    pub(super) fn met(&self, to: To, error: impl Into<OffloadError>, tally: &mut Tally) {
        tally.error(self.armed.explain(to, error.into()));
    }

    /// Number `at` of the blocks that are so.
    pub(super) fn pick(&self, at: usize, is_so: impl Fn(&Mine) -> bool) -> Option<usize> {
        let so: Vec<_> = (0..self.mine.len()).filter(|&i| is_so(&self.mine[i])).collect();
        (!so.is_empty()).then(|| so[at % so.len()])
    }

    /// As many regions from number `at` on, none of them twice.
    pub(super) fn pick_regions(&self, at: usize, count: usize) -> Vec<usize> {
        let regions: Vec<_> = (0..self.mine.len()).filter(|&i| self.mine[i].id.is_some()).collect();
        let count = count.min(regions.len());
        (0..count).map(|i| regions[(at + i) % regions.len()]).collect()
    }

    /// Region number `at` of those asleep, or of all.
    pub(super) fn pick_asleep(&self, at: usize) -> Vec<usize> {
        let is_asleep = |m: &Mine| m.id.is_some_and(|id| self.stands(id).is_asleep());
        let found = self.pick(at, is_asleep).or_else(|| self.pick(at, |m| m.id.is_some()));
        found.into_iter().collect()
    }

    /// Where a region stands; gone where it has come to its end.
    pub(super) fn stands(&self, id: RegionId) -> RegionState {
        self.fixture.engine.region_info(id).map_or(RegionState::Gone, |info| info.state)
    }

    pub(super) fn ids(&self, places: &[usize]) -> Vec<RegionId> {
        places.iter().filter_map(|&at| self.mine[at].id).collect()
    }

    /// Writes all of a block anew. Awake, or frozen where the guard lets the write through.
    pub(super) fn write(&mut self, at: usize) {
        self.last_seed += 2; // patterns differ by odd seeds
        let mine = &mut self.mine[at];
        mine.seeded(self.last_seed + 1).for_each(|(at, bytes, seed)| fill(at, bytes, seed));
        mine.content = Content::Filled(self.last_seed + 1);
    }

    /// Waits for the default stream. It takes its faults on itself.
    pub(super) fn finish_here(&self) {
        let here = self.fixture.here();
        assert!(self.fixture.engine.await_copies(&here), "the default stream says nothing");
    }
}

/// Where something failed, the engine's threads come to their end all the same.
pub(super) struct Calm(Arc<Allocator<TestDevice>>, Faults);

impl Drop for Calm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.1.forget();
            self.0.device().heal();
            self.0.device().release_events();
        }
    }
}
