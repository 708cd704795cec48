//! The engine on the host device, over a file that fails on command.
#![expect(unsafe_code, reason = "tests play the trainer, who touches memory by address")]

mod faults;
mod life;
mod room;
mod stash;
mod stress;
mod tags;

use std::sync::Arc;

use dormouse_alloc::{Allocator, Config, Request};
use dormouse_device::Device;
use dormouse_device::faulty::Faulty;
use dormouse_device::host::{HostConfig, HostDevice, guard};
use dormouse_timeline::Timeline;

use super::Engine;
use crate::config::{EngineConfig, Route};
use crate::error::OffloadError;
use crate::ids::{RegionId, Role, label};
use crate::nvme::faults::Faults;
use crate::nvme::{Nvme, NvmeConfig};
use crate::residency::State;

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;

pub(crate) type TestDevice = Faulty<HostDevice>;

/// Everything a test needs, built small.
pub(crate) struct House {
    pub(crate) allocator: Arc<Allocator<TestDevice>>,
    pub(crate) engine: Arc<Engine<TestDevice>>,
    pub(crate) faults: Faults,
}

pub(crate) struct Plan {
    pub(crate) budget_bytes: usize,
    pub(crate) file_bytes: usize,
    pub(crate) config: EngineConfig,
}

impl Default for Plan {
    fn default() -> Self {
        let config = EngineConfig {
            host_bytes_max: 64 << 20,
            size_floor_bytes: 4096,
            ..EngineConfig::default()
        };
        Self { budget_bytes: 64 * MIB, file_bytes: 64 * MIB, config }
    }
}

pub(crate) fn new_allocator(budget_bytes: usize) -> Arc<Allocator<TestDevice>> {
    let device = HostDevice::new(HostConfig::new(1 << 30, budget_bytes as u64)).unwrap();
    let device = Arc::new(Faulty::new(device));
    let mut config = Config::new(device.page_bytes(), budget_bytes as u64);
    config.segment_bytes = 16 * MIB;
    Arc::new(Allocator::new(device, config, Arc::new(Timeline::new(1024))).unwrap())
}

impl Plan {
    pub(crate) fn via_host(mut self) -> Self {
        self.config.route = Route::ViaHost;
        self
    }

    pub(crate) fn build(self) -> House {
        let allocator = new_allocator(self.budget_bytes);
        let faults = Faults::new(self.file_bytes as u64);
        let nvme = Nvme::with_storage(
            Arc::new(faults.clone()),
            self.file_bytes as u64,
            self.config.checksums,
        );
        let timeline = Arc::new(Timeline::new(1024));
        let engine =
            Engine::with_nvme(Arc::clone(&allocator), self.config, timeline, Some(Arc::new(nvme)))
                .unwrap();
        House { allocator, engine, faults }
    }
}

pub(crate) fn fill(address: usize, bytes: usize, seed: u64) {
    // SAFETY: a live, awake block of the test's own.
    let words = unsafe { std::slice::from_raw_parts_mut(address as *mut u64, bytes / 8) };
    for (i, word) in words.iter_mut().enumerate() {
        *word = (i as u64 + 1).wrapping_mul(seed | 1);
    }
}

pub(crate) fn holds(address: usize, bytes: usize, seed: u64) -> bool {
    // SAFETY: a live, awake block of the test's own.
    let words = unsafe { std::slice::from_raw_parts(address as *const u64, bytes / 8) };
    words.iter().enumerate().all(|(i, &word)| word == (i as u64 + 1).wrapping_mul(seed | 1))
}

pub(crate) fn is_zero(address: usize, bytes: usize) -> bool {
    // SAFETY: a live, awake block of the test's own.
    let words = unsafe { std::slice::from_raw_parts(address as *const u64, bytes / 8) };
    words.iter().all(|&word| word == 0)
}

/// Writes one word, as a trainer's stray update would.
pub(crate) fn poke(address: usize, value: u64) {
    // SAFETY: a live block of the test's own; where it is frozen the guard lets the write through.
    unsafe { std::ptr::write_volatile(address as *mut u64, value) }
}

pub(crate) fn peek(address: usize) -> u64 {
    // SAFETY: a live, awake block of the test's own.
    unsafe { std::ptr::read_volatile(address as *const u64) }
}

pub(crate) fn install_guard() {
    guard::install().unwrap();
}

impl Engine<TestDevice> {
    /// Yields until room was asked for that often.
    pub(crate) fn wait_for_reclaims(&self, count: u64) {
        while self.stats().reclaims < count {
            std::thread::yield_now();
        }
    }

    /// Where a region's extent begins in the file.
    pub(crate) fn extent_offset(&self, id: RegionId) -> Option<u64> {
        self.body(id, |b| b.extent.as_ref().map(|e| e.offset()))
    }
}

impl House {
    /// The stream of whoever calls.
    pub(crate) fn here(&self) -> <TestDevice as Device>::Stream {
        // SAFETY: NULL is the calling thread.
        unsafe { self.allocator.device().foreign_stream(std::ptr::null_mut()).unwrap() }
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

    pub(crate) fn state(&self, id: RegionId) -> State {
        self.engine.region_info(id).unwrap().state
    }

    pub(crate) fn nvme_used(&self) -> u64 {
        self.engine.stats().tiers[2].used_bytes
    }

    pub(crate) fn host_used(&self) -> u64 {
        self.engine.stats().tiers[1].used_bytes
    }

    /// Waits until no region is left.
    pub(crate) fn drain(&self) {
        self.engine.table.wait_for(|inner| inner.iter().next().is_none().then_some(()));
    }

    /// Nothing is held anywhere once every region is gone.
    pub(crate) fn assert_empty(&self) {
        self.drain();
        self.allocator.check().unwrap();
        let stats = self.engine.stats();
        assert_eq!((stats.inflight_bytes, stats.queued_bytes), (0, 0));
        assert_eq!((self.nvme_used(), self.host_used()), (0, 0));
        assert_eq!(stats.device_faults, 0);
        for tier in stats.tiers {
            assert_eq!((tier.regions.current_bytes, tier.regions.regions), (0, 0));
        }
        for role in stats.roles {
            assert_eq!((role.all.current_bytes, role.asleep.current_bytes), (0, 0));
        }
        let alloc = self.allocator.stats();
        assert_eq!((alloc.asleep_bytes.current, alloc.staged_bytes.current), (0, 0));
        assert!(self.allocator.blocks().is_empty(), "{:?}", self.allocator.blocks());
        let memory = self.allocator.device().memory_info();
        assert_eq!(memory.mapped_bytes, alloc.mapped_bytes.current);
    }
}

pub(crate) fn cause(error: OffloadError) -> OffloadError {
    match error {
        OffloadError::WakeFailed { source, .. } => (*source).clone(),
        other => other,
    }
}

pub(crate) fn real_file(file_bytes: usize) -> NvmeConfig {
    let dir = crate::nvme::faults::disk_dir();
    NvmeConfig { dir, file_bytes: file_bytes as u64, io_threads: 2 }
}
