//! The engine: executes the actions of the region state machine on a device, a file and host memory.
//!
//! It has no thread of its own, but for the one that serves stray accesses (`stray`). A request runs on the caller's thread up to the first transfer; the
//! thread that completes a transfer, an I/O thread or the device's, goes on up to the next. Callers
//! wait for I/O threads; I/O threads wait for the kernel and the device, never for a caller.

mod account;
mod admission;
mod arrival;
mod copy_queue;
mod copy_times;
mod counters;
mod event_wait;
mod executor;
mod host_pool;
mod host_reads;
mod largest;
mod load_queue;
mod owner_levels;
mod profiles;
mod progress;
pub(crate) mod raw_memory;
mod read;
mod reclaim;
mod region_blocks;
mod region_data;
mod regions;
mod sleep;
mod stash;
mod stats;
mod stray;
mod tags;
mod transfers;
mod tuning;
mod wake;
mod wake_ahead;

#[cfg(test)]
#[cfg(not(loom))]
pub(crate) mod tests;

pub use largest::allocator_facts;
pub use region_data::Level;
pub use sleep::{RegionUses, SleepOutcome};
pub use stash::{STASHES_MAX, StashId};
pub use stats::{CopyStats, RoleStats, Stats, TierStats};
pub use stray::{Rescuer, STRAY_WAIT_MAX, StrayAccess, StrayWakes};
pub use tags::{TAG_NAME_BYTES_MAX, TAGS_MADE_MAX, TAGS_MAX, TagId, TagStats};
pub use tuning::Revised;
pub use wake::{WAKE_ATTEMPTS_MAX, Waited};

pub(crate) use account::Account;
#[cfg(test)]
#[cfg(not(loom))]
pub(crate) use profiles::PROFILES_MAX;
pub(crate) use progress::Progress;
pub(crate) use region_blocks::REGION_BLOCKS_MAX;
pub(crate) use region_data::{RegionData, TableState};
pub(crate) use regions::{Adopted, BytesToLoad, LayerResidency};

use std::collections::VecDeque;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};

use dormouse_alloc::pinned::PinnedPool;
use dormouse_alloc::{Allocator, Reclaim};
use dormouse_device::{AddressRange, Device, DeviceKind, SpanLabel};
use dormouse_timeline::{Lane, NameId, Timeline};

use self::counters::Counters;
use crate::config::{EngineConfig, IO_THREADS_DEFAULT, Route};
use crate::error::OffloadError;
use crate::ids::{RegionId, Role, Tier};
use crate::table::Table;
use dormouse_residency::region::RegionState;
use dormouse_residency::tune::Chosen;
use dormouse_storage::IoPool;
use dormouse_storage::sync::Mutex;
use dormouse_storage::{NullQueue, Nvme};

/// Properties of a region.
#[derive(Clone, Debug)]
pub struct RegionInfo {
    /// Its addresses; those of its first block if it has several.
    pub range: AddressRange,
    /// Bytes of the pages of all its blocks.
    pub bytes: u64,
    /// Its role.
    pub role: Role,
    /// Its state.
    pub state: RegionState,
    /// The tier in which its bytes count; `Device` also if there is no copy.
    pub tier: Tier,
    /// Its label, shown when a sleeping page is touched.
    pub label: SpanLabel,
    /// Why the last sleep or wake failed; `None` if it did not, or was called off.
    pub error: Option<Arc<OffloadError>>,
}

/// Interned names of timeline slices.
#[derive(Debug)]
pub(crate) struct Names {
    pub(crate) write: NameId,
    pub(crate) read: NameId,
    pub(crate) copy_out: NameId,
    pub(crate) copy_in: NameId,
    pub(crate) wait: NameId,
    pub(crate) reclaim: NameId,
    pub(crate) declined: NameId,
    pub(crate) sleep_failed: NameId,
    pub(crate) wake_failed: NameId,
    pub(crate) stray: NameId,
}

/// The engine. All methods may be called on any thread.
#[derive(Debug)]
pub struct Engine<D: Device> {
    me: Weak<Self>,
    allocator: Arc<Allocator<D>>,
    device: Arc<D>,
    config: EngineConfig,
    tuning: tuning::Tuning,
    timeline: Arc<Timeline>,
    names: Names,
    is_direct: bool,
    table: Table<RegionData<D>>,
    nvme: Option<Arc<Nvme>>,
    host: PinnedPool<D>,
    /// By [`transfers::CopyStream`].
    streams: Mutex<[Option<D::Stream>; 3]>,
    /// In and out.
    copy_queues: [Mutex<copy_queue::CopyQueue>; 2],
    loads: Mutex<load_queue::LoadQueue>,
    staging: Mutex<wake_ahead::Stagings>,
    counters: Counters,
    /// Counts of single events. The other statistics are filled in when they are read.
    counts: Mutex<Stats>,
    tags: Mutex<tags::Tags>,
    prefixes: Mutex<progress::Prefixes>,
    stashes: Mutex<stash::Stashes>,
    /// Of the moment of the most memory in use at a mark, about.
    largest: Mutex<largest::LargestBlocks>,
    /// Past steps by prefix, the one kept longest ago first.
    profiles: Mutex<VecDeque<profiles::StepProfiles<D>>>,
    pool: IoPool,
}

impl<D: Device> Engine<D> {
    /// Creates an engine over `allocator`, registers it for reclaim, creates the file and measures it.
    ///
    /// # Errors
    /// `Argument` for a configuration out of range; `Nvme` if the file cannot be created; `Thread`.
    pub fn new(
        allocator: Arc<Allocator<D>>,
        config: EngineConfig,
        timeline: Arc<Timeline>,
    ) -> Result<Arc<Self>, OffloadError> {
        let file = config
            .nvme
            .as_ref()
            .map(|nvme| tuning::create_file(nvme, config.checksums, &config.automatic));
        let (nvme, depth) = file.transpose()?.unzip();
        Self::assemble(allocator, config, timeline, nvme.map(Arc::new), depth.flatten())
    }

    /// As [`Engine::new`], with a file tier of the caller's. Only `io_threads` of `config.nvme` is used.
    ///
    /// # Errors
    /// `Argument`, `Thread`.
    pub fn with_nvme(
        allocator: Arc<Allocator<D>>,
        config: EngineConfig,
        timeline: Arc<Timeline>,
        nvme: Option<Arc<Nvme>>,
    ) -> Result<Arc<Self>, OffloadError> {
        Self::assemble(allocator, config, timeline, nvme, None)
    }

    fn assemble(
        allocator: Arc<Allocator<D>>,
        config: EngineConfig,
        timeline: Arc<Timeline>,
        nvme: Option<Arc<Nvme>>,
        queue_depth: Option<Chosen>,
    ) -> Result<Arc<Self>, OffloadError> {
        config.validate()?;
        let device = Arc::clone(allocator.device());
        let io_threads = config.nvme.as_ref().map_or(IO_THREADS_DEFAULT, |n| n.io_threads);
        let queue = || match &nvme {
            Some(nvme) => nvme.take_queue(),
            None => Box::<NullQueue>::default(),
        };
        let called_off = Arc::new(AtomicBool::new(false));
        let queues = std::iter::repeat_with(queue).take(io_threads).collect();
        let pool = IoPool::start(queues, Arc::clone(&called_off))?;
        let names = Names {
            write: timeline.intern("write"),
            read: timeline.intern("read"),
            copy_out: timeline.intern("copy out"),
            copy_in: timeline.intern("copy in"),
            wait: timeline.intern("wait for wake"),
            reclaim: timeline.intern("wait for room"),
            declined: timeline.intern("sleep declined"),
            sleep_failed: timeline.intern("sleep failed"),
            wake_failed: timeline.intern("wake failed"),
            stray: timeline.intern("stray access"),
        };
        let (on, watched) = (Arc::clone(&device), Arc::clone(&timeline));
        let host = host_pool::open(on, watched, config.host_bytes_max, nvme.as_ref())?;
        let tuning = tuning::Tuning::new(&config, queue_depth);
        tuning.host_limit().into_iter().for_each(|limit| host.limit_by(limit));
        if let Some(nvme) = &nvme {
            let timeline = Arc::clone(&timeline);
            nvme.on_note(move |note| timeline.instant(Lane::Notice, timeline.intern(note), 0));
        }
        let awake: Arc<dyn owner_levels::AwakeBytes> = allocator.clone();
        let owners = owner_levels::OwnerLevels::new(Arc::clone(&timeline), awake);
        let engine = Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            is_direct: device.kind() == DeviceKind::Host && config.route == Route::Auto,
            device,
            allocator,
            tuning,
            config,
            timeline,
            names,
            table: Table::new(TableState { called_off, owners, ..TableState::default() }),
            nvme,
            host,
            streams: Mutex::new([None, None, None]),
            copy_queues: Default::default(),
            loads: Mutex::default(),
            staging: Mutex::new(wake_ahead::Stagings::default()),
            counters: Counters::default(),
            counts: Mutex::default(),
            tags: Mutex::new(tags::Tags::default()),
            prefixes: Mutex::new(progress::Prefixes::new()),
            stashes: Mutex::new(stash::Stashes::default()),
            largest: Mutex::new(largest::LargestBlocks::default()),
            profiles: Mutex::new(VecDeque::new()),
            pool,
        });
        let told = engine.me.clone();
        engine.pool.on_panic(move || {
            if let Some(engine) = told.upgrade() {
                engine.table.break_down();
            }
        });
        let reclaim: Weak<dyn Reclaim> = engine.me.clone();
        engine.allocator.set_reclaim(reclaim);
        Ok(engine)
    }

    /// Returns the allocator.
    #[must_use]
    pub const fn allocator(&self) -> &Arc<Allocator<D>> {
        &self.allocator
    }

    /// Returns the settings.
    #[must_use]
    pub const fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Returns the timeline.
    #[must_use]
    pub const fn timeline(&self) -> &Arc<Timeline> {
        &self.timeline
    }

    /// Accepts no more sleeps and ends the I/O threads after what is in flight. Wakes that wait for host memory
    /// fail. Sleeping regions stay asleep and cannot be woken any more.
    pub fn shutdown(&self) {
        self.table.lock().shared.is_closed = true;
        self.pool.stop();
        self.table.notify();
    }
}

impl<D: Device> Drop for Engine<D> {
    fn drop(&mut self) {
        self.pool.stop();
        let mut buffers = Vec::new();
        {
            let mut inner = self.table.lock();
            let ids: Vec<RegionId> = inner.iter().map(|(id, _)| id).collect();
            for id in ids {
                // A copy that never completed keeps its memory: the pool leaves it pinned.
                let settled = inner.get(id).filter(|entry| entry.region.in_flight.is_none());
                buffers.extend(settled.and_then(|entry| entry.data.host.take()));
            }
        }
        buffers.extend(self.stash_buffers());
        for buffer in buffers {
            self.give(buffer);
        }
        self.allocator.host_tier().note_closed();
        self.allocator.file_tier().note_closed();
    }
}
