//! What one step runs in: a device of the case's links, its allocator, its engine.

use std::error::Error;
use std::sync::Arc;

use dormouse_alloc::{Allocator, Config};
use dormouse_device::Device;
use dormouse_device::host::{HostConfig, HostDevice};
use dormouse_offload::{Engine, EngineConfig, Route};
use dormouse_storage::{IoEngine, Nvme, NvmeConfig};
use dormouse_timeline::Timeline;

use crate::case::{Case, PAGE_BYTES, Tiers};
use crate::device::Paced;
use crate::disk::Disk;

/// Addresses of the device: more than any case needs.
const RESERVE_BYTES: usize = 4 << 30;
/// Each has one request with the disk. While all of them write, a read waits for one.
const IO_THREADS: usize = 4;
const TIMELINE_EVENTS: usize = 1 << 14;

/// A device with room for the case's layers and microbatches, and for `small_bytes` beside them.
pub(crate) struct Fixture {
    pub(crate) allocator: Arc<Allocator<Paced>>,
    pub(crate) engine: Arc<Engine<Paced>>,
    /// The calling thread, which the allocator knows as 0.
    pub(crate) stream: <Paced as Device>::Stream,
}

impl Fixture {
    pub(crate) fn new(case: &Case, small_bytes: u64) -> Result<Self, Box<dyn Error>> {
        let budget_bytes = case.cap_bytes + small_bytes;
        let mut config = HostConfig::new(RESERVE_BYTES, budget_bytes);
        config.page_bytes = config.page_bytes.max(PAGE_BYTES as usize);
        let host = HostDevice::new(config)?;
        let device = Arc::new(Paced::new(host, case.out_bytes_per_s, case.in_bytes_per_s));
        let timeline = Arc::new(Timeline::new(TIMELINE_EVENTS));
        let settings = Config::new(device.page_bytes(), budget_bytes);
        let allocator = Arc::new(Allocator::new(device, settings, Arc::clone(&timeline))?);
        // SAFETY: NULL is the calling thread.
        let stream = unsafe { allocator.device().foreign_stream(std::ptr::null_mut())? };
        allocator.register_stream(0, stream.clone())?;

        let settings = engine_config(case);
        let disk = settings.nvme.is_some().then(|| disk(case, settings.checksums)).transpose()?;
        let engine = Engine::with_nvme(Arc::clone(&allocator), settings, timeline, disk)?;
        Ok(Self { allocator, engine, stream })
    }
}

fn engine_config(case: &Case) -> EngineConfig {
    let (has_host, has_file) = (case.tiers != Tiers::Direct, case.tiers != Tiers::Host);
    let nvme = NvmeConfig {
        dir: "in memory".into(),
        file_bytes: case.file_bytes(),
        file_bytes_max: 0,
        io_threads: IO_THREADS,
        io_engine: IoEngine::Threads,
        queue_depth: 1,
        write_budget_bytes: 0,
    };
    EngineConfig {
        nvme: has_file.then_some(nvme),
        host_bytes_max: if has_host { case.host_bytes } else { 0 },
        route: if has_host { Route::ViaHost } else { Route::Auto },
        ..EngineConfig::default()
    }
}

fn disk(case: &Case, checksums: bool) -> Result<Arc<Nvme>, Box<dyn Error>> {
    let file_bytes = case.file_bytes();
    let disk = Disk::new(file_bytes, case.write_bytes_per_s, case.read_bytes_per_s)?;
    Ok(Arc::new(Nvme::with_storage(Arc::new(disk), file_bytes, checksums)))
}
