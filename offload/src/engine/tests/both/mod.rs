//! What holds on every device. Included by `on_host` and `on_cuda`, which say what a `TestDevice`
//! is, whose turn it is to use it, and where it lets memory sleep first.

mod campaign;
mod deadlock;
mod faults;
mod figures;
mod life;
mod notes;
mod probes;
pub(crate) mod read;
mod read_file;
mod room;
mod stash;
mod stress;
mod tags;
mod together;
mod tuning;
mod wake_ahead;
mod writes;

use std::sync::Arc;

use dormouse_alloc::{Allocator, Config, Request};
use dormouse_device::Device;
use dormouse_timeline::Timeline;

use super::{ASLEEP_FIRST, TestDevice, Turn, new_device};
use crate::config::{EngineConfig, IO_THREADS_DEFAULT, Route};
use crate::engine::Engine;
use crate::engine::tests::{Held, KIB, MIB, cause, fill, holds, is_zero, poke, real_file, soon};
use crate::engine::transfers::CopyStream;
use crate::error::OffloadError;
use crate::ids::{RegionId, Role, label};
use dormouse_residency::region::RegionState;
use dormouse_storage::sync::held_count;
use dormouse_storage::testing::Faults;
use dormouse_storage::{CHUNK_BYTES, IoEngine, IoOperation, Nvme, NvmeConfig, Rates, share};

type Stream = <TestDevice as Device>::Stream;

/// Everything a test needs, built small. It gives its turn up last.
pub(crate) struct Fixture {
    pub(crate) engine: Arc<Engine<TestDevice>>,
    pub(crate) allocator: Arc<Allocator<TestDevice>>,
    pub(crate) faults: Faults,
    pub(crate) turn: Turn,
}

pub(crate) struct Plan {
    pub(crate) budget_bytes: usize,
    pub(crate) file_bytes: usize,
    pub(crate) config: EngineConfig,
    pub(crate) io_engine: IoEngine,
    /// Changes the allocator's configuration. By default blocks share no page.
    pub(crate) change: fn(&mut Config),
}

/// Requests of one thread at a time.
const QUEUE_DEPTH: usize = 4;

impl Default for Plan {
    fn default() -> Self {
        let config = EngineConfig {
            host_bytes_max: 64 << 20,
            size_floor_bytes: 4096,
            coalesced_bytes_max: 0,
            ..EngineConfig::default()
        };
        let io_engine = IoEngine::Auto;
        let (budget_bytes, file_bytes) = (64 * MIB, 64 * MIB);
        Self { budget_bytes, file_bytes, config, io_engine, change: |_| () }
    }
}

fn new_allocator(budget_bytes: usize) -> Arc<Allocator<TestDevice>> {
    allocator_with(budget_bytes, |_| ())
}

fn allocator_with(budget_bytes: usize, change: fn(&mut Config)) -> Arc<Allocator<TestDevice>> {
    let device = Arc::new(new_device(1 << 30, budget_bytes as u64));
    device.watch(|| held_count() > 0); // I8
    let mut config = Config::new(device.page_bytes(), budget_bytes as u64);
    config.segment_bytes = 16 * MIB;
    config.moves_pages = true;
    change(&mut config);
    let default = default_stream(&device);
    let allocator = Allocator::new(device, config, Arc::new(Timeline::new(1024))).unwrap();
    allocator.register_stream(0, default).unwrap();
    Arc::new(allocator)
}

/// The default stream.
fn default_stream(device: &TestDevice) -> Stream {
    // SAFETY: NULL is the calling thread, or the default stream.
    unsafe { device.foreign_stream(std::ptr::null_mut()).unwrap() }
}

impl Plan {
    pub(crate) fn via_host(mut self) -> Self {
        self.config.route = Route::ViaHost;
        self
    }

    pub(crate) fn build(self) -> Fixture {
        let faults = Faults::new(self.file_bytes as u64);
        self.build_over(faults)
    }

    /// As [`Plan::build`], over a file of that length.
    fn build_over(self, faults: Faults) -> Fixture {
        let turn = Turn::take();
        let allocator = allocator_with(self.budget_bytes, self.change);
        let (bytes, checksums) = (self.file_bytes as u64, self.config.checksums);
        let nvme = match self.io_engine {
            IoEngine::Threads => Nvme::with_storage(Arc::new(faults.clone()), bytes, checksums),
            _ => faults.tier(bytes, checksums, IO_THREADS_DEFAULT, QUEUE_DEPTH),
        };
        Fixture::over(turn, allocator, self.config, faults, nvme)
    }
}

/// Over a file in memory, as if its rates had been measured so.
pub(crate) fn measured(config: EngineConfig, bytes_per_s: u64) -> Fixture {
    let rates =
        Rates { write_bytes_per_s: bytes_per_s, read_bytes_per_s: bytes_per_s, read_latency_ns: 0 };
    let (turn, plan) = (Turn::take(), Plan::default());
    let file_bytes = plan.file_bytes as u64;
    let (allocator, faults) = (new_allocator(plan.budget_bytes), Faults::in_memory(file_bytes));
    let nvme = Nvme::with_storage(Arc::new(faults.clone()), file_bytes, true).measured_as(rates);
    Fixture::over(turn, allocator, config, faults, nvme)
}

impl Engine<TestDevice> {
    /// Yields until room was asked for that often.
    pub(crate) fn wait_for_reclaims(&self, count: u64) {
        soon("room is asked for", || self.stats().reclaims >= count);
    }

    /// Where a region's extent begins in the file.
    pub(crate) fn extent_offset(&self, id: RegionId) -> Option<u64> {
        self.body(id, |b| b.extent.as_ref().map(|e| e.offset()))
    }
}

impl Fixture {
    /// An engine over all of that; `nvme` is a tier over `faults`.
    fn over(
        turn: Turn,
        allocator: Arc<Allocator<TestDevice>>,
        config: EngineConfig,
        faults: Faults,
        nvme: Nvme,
    ) -> Self {
        let timeline = Arc::clone(allocator.timeline());
        let engine =
            Engine::with_nvme(Arc::clone(&allocator), config, timeline, Some(Arc::new(nvme)))
                .unwrap();
        Self { engine, allocator, faults, turn }
    }

    pub(crate) fn device(&self) -> &TestDevice {
        self.allocator.device()
    }

    pub(crate) fn nvme(&self) -> &Nvme {
        self.engine.nvme.as_deref().unwrap()
    }

    /// The default stream, which the allocator knows as 0.
    pub(crate) fn here(&self) -> Stream {
        default_stream(self.device())
    }

    /// Waits for all that was put on a stream.
    pub(crate) fn finish(&self, stream: &Stream) {
        self.device().synchronize(&self.device().record(stream).unwrap()).unwrap();
    }

    pub(crate) fn allocate(&self, bytes: usize, seed: u64) -> usize {
        let block = self.allocator.allocate(&Request::new(bytes)).unwrap();
        fill(block.range.start, bytes, seed);
        block.range.start
    }

    /// A filled block under the engine's care.
    pub(crate) fn region(&self, bytes: usize, seed: u64) -> (RegionId, usize) {
        let address = self.allocate(bytes, seed);
        let id = self.engine.adopt(address, Role::Dormant, label("test", Some(0))).unwrap();
        (id, address)
    }

    pub(crate) fn state(&self, id: RegionId) -> RegionState {
        self.engine.region_info(id).unwrap().state
    }

    /// Whether device memory does file I/O itself here.
    pub(crate) fn is_direct(&self) -> bool {
        self.engine.is_direct
    }

    /// Where a region stands while its bytes go to the file.
    pub(crate) fn while_written(&self) -> RegionState {
        if self.engine.is_direct { RegionState::FallingAsleep } else { RegionState::Spilling }
    }

    /// Keeps `stream` from going on.
    pub(crate) fn hold(&self, stream: &Stream) -> Held {
        Held::new(self.device(), stream)
    }

    /// Keeps the engine's own stream of that direction from going on.
    pub(in crate::engine) fn hold_way(&self, way: CopyStream) -> Held {
        self.hold(&self.engine.stream(way).unwrap())
    }

    pub(crate) fn nvme_used(&self) -> u64 {
        self.engine.stats().tiers[2].used_bytes
    }

    pub(crate) fn host_used(&self) -> u64 {
        self.engine.stats().tiers[1].used_bytes
    }

    /// No copy is left in any tier. Where the device is stream-ordered, a host copy goes when the
    /// copy in has passed, a moment after those who wait for that copy.
    pub(crate) fn assert_nothing_stored(&self) {
        if self.device().is_stream_ordered() {
            soon("host copies are given back", || self.host_used() == 0);
        }
        assert_eq!((self.nvme_used(), self.host_used()), (0, 0));
    }

    /// Waits until no region is left.
    pub(crate) fn drain(&self) {
        let gone = self.engine.table.wait_for(|inner| inner.iter().next().is_none().then_some(()));
        assert_eq!(gone, Ok(()));
    }

    /// Nothing is held anywhere once every region is gone.
    pub(crate) fn assert_empty(&self) {
        self.drain();
        if self.device().is_stream_ordered() {
            // What a copy in wrote is freed by its callback, a moment after its event.
            soon("blocks are freed", || self.allocator.blocks().is_empty());
        }
        self.assert_nothing_stored();
        self.allocator.check().unwrap();
        let stats = self.engine.stats();
        assert_eq!((stats.inflight_bytes, stats.queued_bytes), (0, 0));
        // Copies whose end was not reported have no figures.
        assert!(stats.device_faults <= self.turn.refused_answers().unwrap_or(0), "{stats:?}");
        for tier in stats.tiers {
            assert_eq!((tier.regions.current_bytes, tier.regions.regions), (0, 0));
        }
        for role in stats.roles {
            assert_eq!((role.all.current_bytes, role.asleep.current_bytes), (0, 0));
        }
        let alloc = self.allocator.stats();
        assert_eq!((alloc.asleep_bytes.current, alloc.staged_bytes.current), (0, 0));
        assert!(self.allocator.blocks().is_empty(), "{:?}", self.allocator.blocks());
        assert_eq!(self.device().wrong_calls(), [], "I8: the device was called under a lock");
        let memory = self.device().memory_info();
        assert_eq!(memory.mapped_bytes, alloc.mapped_bytes.current);
    }
}
