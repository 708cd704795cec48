//! The heaps of this process: the host's, and one per GPU.
//!
//! The host's heap is created by the first large `malloc` in mode `preload` or by the first runtime, a
//! GPU's by the first runtime or the first request of PyTorch. A heap is never destroyed, because its
//! memory outlives every runtime.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use dormouse_alloc::{Allocator, Margin};
use dormouse_device::cuda::{CudaConfig, CudaDevice};
use dormouse_device::host::{HostConfig, HostDevice};
use dormouse_device::sync::Mutex;
use dormouse_device::{Device, DeviceKind};
use dormouse_timeline::Timeline;

use super::Heap;
use crate::device::{Any, AnyDevice, GPUS_MAX};
use crate::fault::Fault;
use crate::params::{self, Config, Key};
use crate::{allocation_log, dumps, fork, status};

/// Blocks on a GPU are multiples of this and aligned to it, as PyTorch's kernels expect.
const GPU_GRANULE_BYTES: usize = 512;
/// Addresses that a pool reserves at a time. They cost nothing; large ones leave few gaps.
const GPU_SEGMENT_BYTES: usize = 1 << 30;

/// Address range of the host's heap, and the smallest request it serves. Begin and end are 0 without
/// a heap. The preload library reads these words.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Span {
    begin: AtomicUsize,
    pub(super) end: AtomicUsize,
    pub(super) min_bytes: AtomicUsize,
}

pub(super) static SPAN: Span = Span {
    begin: AtomicUsize::new(0),
    end: AtomicUsize::new(0),
    min_bytes: AtomicUsize::new(usize::MAX),
};

/// A heap, or none yet. A pointer, so that a request finds its heap with few instructions.
type Place = OnceLock<&'static Heap>;

static HOST_HEAP: Place = Place::new();
static GPU_HEAPS: [Place; GPUS_MAX] = [const { Place::new() }; GPUS_MAX];
/// Two locks: creating a GPU's heap calls a driver, whose `malloc` can need the host's heap.
static CREATING_HOST: Mutex<()> = Mutex::new(());
static CREATING_GPU: Mutex<()> = Mutex::new(());

impl Heap {
    /// Returns the host's heap, if it exists. Takes no lock.
    #[inline]
    pub(crate) fn get() -> Option<&'static Self> {
        HOST_HEAP.get().copied()
    }

    /// Returns the heap of GPU `ordinal`, if it exists. Takes no lock.
    #[inline]
    pub(crate) fn get_gpu(ordinal: u32) -> Option<&'static Self> {
        GPU_HEAPS.get(ordinal as usize)?.get().copied()
    }

    /// Returns the heap of a GPU that PyTorch names, or an error if it does not exist.
    pub(crate) fn existing_gpu(device: i32) -> Result<&'static Self, Fault> {
        Self::get_gpu(device.cast_unsigned()).ok_or_else(|| {
            Fault::argument(format!(
                "CUDA device {device} has no heap; accepted: a GPU that memory was allocated on"
            ))
        })
    }

    /// Returns the heaps of all GPUs.
    pub(crate) fn gpus() -> impl Iterator<Item = &'static Self> {
        GPU_HEAPS.iter().filter_map(|place| place.get().copied())
    }

    /// Returns the heap of the GPU whose memory contains `address`.
    pub(crate) fn gpu_around(address: usize) -> Option<&'static Self> {
        Self::gpus().find(|heap| heap.allocator.contains(address))
    }

    /// Returns the heap of a GPU that PyTorch names. Creates it from the configuration in effect.
    pub(crate) fn gpu(device: i32) -> Result<&'static Self, Fault> {
        let ordinal = u32::try_from(device).unwrap_or(u32::MAX);
        Self::get_gpu(ordinal)
            .map_or_else(|| Self::get_or_create_gpu(ordinal, &*params::in_effect()?), Ok)
    }

    /// Returns the heap of GPU `ordinal`. Creates it from `config`.
    pub(crate) fn get_or_create_gpu(ordinal: u32, config: &Config) -> Result<&'static Self, Fault> {
        let Some(place) = GPU_HEAPS.get(ordinal as usize) else {
            let last = GPUS_MAX - 1;
            return Err(Fault::argument(format!("CUDA device {ordinal}; accepted: 0 to {last}")));
        };
        get_or_create(place, &CREATING_GPU, || {
            let heap = gpu(ordinal, config)?;
            // Before it is published: torch may copy to its first block.
            for other in Self::gpus() {
                open(other, &heap);
                open(&heap, other);
            }
            dumps::watch(config, heap.dumped());
            allocation_log::watch(config, &heap.dumped(), heap.allocator());
            Ok(heap)
        })
    }

    /// Returns the host's heap. Creates it from `config`.
    pub(crate) fn get_or_create(config: &Config) -> Result<&'static Self, Fault> {
        get_or_create(&HOST_HEAP, &CREATING_HOST, || {
            let heap = host(config)?;
            let space = heap.allocator.device().address_space();
            // Before the heap is published (P1): another thread may get a block at once, and free it.
            // Begin before end: a reader between the two sees an empty range.
            SPAN.begin.store(space.start, Ordering::Release);
            SPAN.end.store(space.end(), Ordering::Release);
            fork::set_before(super::before_fork);
            Ok(heap)
        })
    }

    /// Refuses a configuration that differs in settings of this heap's creation.
    pub(crate) fn check_config(&self, config: &Config) -> Result<(), Fault> {
        if self.kind != DeviceKind::Host {
            return Ok(());
        }
        for (key, made_with) in
            [(Key::HeapMin, self.min_bytes), (Key::HeapReserve, self.reserve_bytes)]
        {
            let seen = config.number(key);
            if seen != made_with {
                return Err(Fault::new(
                    status::DORMOUSE_ERR_CONFIG,
                    format!(
                        "{} is {seen}, but the heap exists and was created with {made_with}; set it \
                         before the process starts",
                        key.name()
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Returns the limit on mapped memory in `config`, in bytes.
    pub(crate) fn budget_bytes(&self, config: &Config) -> u64 {
        budget_bytes(config, self.allocator.device())
    }
}

/// Returns the heap at `place`, which `create` creates once, under `lock`. A heap is never freed.
fn get_or_create(
    place: &Place,
    lock: &Mutex<()>,
    create: impl FnOnce() -> Result<Heap, Fault>,
) -> Result<&'static Heap, Fault> {
    if let Some(heap) = place.get() {
        return Ok(heap);
    }
    let _one_at_a_time = lock.lock();
    if let Some(heap) = place.get() {
        return Ok(heap);
    }
    let heap = Box::leak(Box::new(create()?));
    Ok(place.get_or_init(|| heap))
}

fn budget_bytes(config: &Config, device: &AnyDevice) -> u64 {
    if device.kind() == DeviceKind::Host {
        return config.number(Key::CpuBudget);
    }
    let capacity_bytes = device.memory_info().capacity_bytes;
    match config.number(Key::CudaBudget) {
        0 => capacity_bytes,
        bytes => bytes.min(capacity_bytes),
    }
}

/// Addresses of the host's heap for each byte of its tables, at least.
const ADDRESSES_PER_TABLE_BYTE: usize = 1 << 14;
/// Bytes of tables that do not grow with the addresses.
const TABLE_BYTES_MIN: usize = 1 << 20;

fn host(config: &Config) -> Result<Heap, Fault> {
    let reserve_bytes = config.number(Key::HeapReserve);
    let addresses = usize::try_from(reserve_bytes).unwrap_or(usize::MAX);
    // The allocator keeps the budget, which can be raised later. The device's limit is its addresses.
    let device = HostDevice::new(HostConfig::new(addresses, reserve_bytes))?;
    // The allocator makes its tables without checks. Under a low limit this process has no heap instead.
    let table_bytes = TABLE_BYTES_MIN + addresses / ADDRESSES_PER_TABLE_BYTE;
    Vec::<u8>::new().try_reserve_exact(table_bytes).map_err(|_| {
        let message = format!("no memory for the heap's tables ({table_bytes} bytes)");
        Fault::new(status::DORMOUSE_ERR_OUT_OF_MEMORY, message)
    })?;
    with_device(Any::Host(device), 0, config)
}

fn gpu(ordinal: u32, config: &Config) -> Result<Heap, Fault> {
    let bytes = |key| usize::try_from(config.number(key)).unwrap_or(usize::MAX);
    let settings = CudaConfig {
        ordinal,
        page_bytes: bytes(Key::CudaPage),
        large_page_bytes: bytes(Key::CudaLargePage),
        ..CudaConfig::default()
    };
    with_device(Any::Cuda(CudaDevice::new(&settings)?), ordinal, config)
}

/// Lets GPU `peer` access the pages of GPU `heap`. PyTorch's copies between the two need that, and take it as given.
fn open(heap: &Heap, peer: &Heap) {
    if let Err(error) = heap.allocator.device().add_peer(peer.allocator.device()) {
        let (gpu, peer) = (heap.ordinal, peer.ordinal);
        tracing::warn!(
            target: "ffi", gpu, peer, %error,
            "a GPU cannot access the memory of another: copies between their tensors fail in mode allocator"
        );
    }
}

/// Memory that the host's heap may hold beyond the most ever in use, and without a runtime beyond what is in use:
/// freed blocks are reused faster than the kernel gives new pages, but blocks that grow are not to leave a cache
/// behind.
const HOST_MARGIN: Margin = Margin { divisor: 4, bytes_min: 64 << 20 };

fn with_device(device: AnyDevice, ordinal: u32, config: &Config) -> Result<Heap, Fault> {
    let kind = device.kind();
    let budget_bytes = budget_bytes(config, &device);
    let timeline = Arc::new(Timeline::new(config.number(Key::TraceEvents) as usize));
    let settings = match kind {
        // The kernel backs addresses page by page, and libc's malloc has the small blocks.
        DeviceKind::Host => dormouse_alloc::Config {
            moves_pages: true,
            margin: HOST_MARGIN,
            ..dormouse_alloc::Config::new(device.page_bytes(), budget_bytes)
        },
        DeviceKind::Cuda => dormouse_alloc::Config {
            segment_bytes: GPU_SEGMENT_BYTES.max(device.page_bytes()),
            moves_pages: true,
            run_ahead: Some(Margin::RUN_AHEAD),
            thread_cache: true,
            ..dormouse_alloc::Config::new(GPU_GRANULE_BYTES, budget_bytes)
        },
    };
    let allocator = Allocator::new(Arc::new(device), settings, Arc::clone(&timeline))?;
    // Only the host's heap serves `malloc`.
    let min_bytes = if kind == DeviceKind::Host { config.number(Key::HeapMin) } else { 0 };
    Ok(Heap {
        kind,
        ordinal,
        allocator: Arc::new(allocator),
        timeline,
        min_bytes,
        reserve_bytes: config.number(Key::HeapReserve),
        has_chosen_budget: AtomicBool::new(config.is_chosen(Key::CpuBudget)),
        engine: Mutex::new(None),
        had_engine: AtomicBool::new(false),
        last_facts: Mutex::default(),
        frees: AtomicUsize::new(0),
        streams: Mutex::new(HashMap::new()),
    })
}
