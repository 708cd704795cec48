//! Making heaps.

use std::collections::HashMap;
use std::sync::{Arc, RwLock};

use dormouse_alloc::Allocator;
use dormouse_device::cuda::{CudaConfig, CudaDevice};
use dormouse_device::host::{self, HostConfig, HostDevice};
use dormouse_device::{Device, DeviceKind};
use dormouse_timeline::Timeline;

use super::Heap;
use crate::device::AnyDevice;
use crate::fault::Fault;
use crate::fork;
use crate::params::{Config, Key};

/// Blocks on a GPU are multiples of this, and begin at one, as kernels of torch's expect.
const GPU_GRANULE_BYTES: usize = 512;
/// Addresses a pool takes at a time: they cost nothing, and gaps at their ends are few.
const GPU_SEGMENT_BYTES: usize = 1 << 30;

/// The host's heap.
pub(super) fn host(config: &Config) -> Result<Heap, Fault> {
    let reserve_bytes = config.number(Key::HeapReserve);
    let addresses = usize::try_from(reserve_bytes).unwrap_or(usize::MAX);
    // The budget is the allocator's to keep and may be raised later: the device holds as much as
    // has addresses.
    let device = HostDevice::new(HostConfig::new(addresses, reserve_bytes))?;
    let heap = over(AnyDevice::Host(device), 0, config.number(Key::AllocBudget), config)?;
    host::guard::install()?;
    Ok(heap)
}

/// The heap of one GPU.
pub(super) fn gpu(ordinal: u32, config: &Config) -> Result<Heap, Fault> {
    let asked = CudaConfig {
        ordinal,
        page_bytes: usize::try_from(config.number(Key::CudaPage)).unwrap_or(usize::MAX),
        ..CudaConfig::default()
    };
    let device = AnyDevice::Cuda(CudaDevice::new(&asked)?);
    let budget_bytes = gpu_budget_bytes(config, &device);
    over(device, ordinal, budget_bytes, config)
}

/// What a GPU may be filled with.
pub(super) fn gpu_budget_bytes(config: &Config, device: &AnyDevice) -> u64 {
    let capacity_bytes = device.memory_info().capacity_bytes;
    match config.number(Key::CudaBudget) {
        0 => capacity_bytes,
        bytes => bytes.min(capacity_bytes),
    }
}

fn over(
    device: AnyDevice,
    ordinal: u32,
    budget_bytes: u64,
    config: &Config,
) -> Result<Heap, Fault> {
    let kind = device.kind();
    let timeline = Arc::new(Timeline::new(config.number(Key::TraceEvents) as usize));
    let settings = match kind {
        // The kernel backs addresses page by page, and malloc's own blocks are the small ones.
        DeviceKind::Host => dormouse_alloc::Config::new(device.page_bytes(), budget_bytes),
        DeviceKind::Cuda => dormouse_alloc::Config {
            segment_bytes: GPU_SEGMENT_BYTES.max(device.page_bytes()),
            moves_pages: true,
            thread_cache: true,
            ..dormouse_alloc::Config::new(GPU_GRANULE_BYTES, budget_bytes)
        },
    };
    let allocator = Allocator::new(Arc::new(device), settings, Arc::clone(&timeline))?;
    fork::watch();
    // Only the host's heap serves `malloc`.
    let min_bytes = if kind == DeviceKind::Host { config.number(Key::HeapMin) } else { 0 };
    Ok(Heap {
        kind,
        ordinal,
        allocator: Arc::new(allocator),
        timeline,
        min_bytes,
        reserve_bytes: config.number(Key::HeapReserve),
        engine: RwLock::new(None),
        streams: RwLock::new(HashMap::new()),
    })
}
