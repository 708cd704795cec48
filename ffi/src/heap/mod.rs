//! Heaps: one allocator for each device of this process, with its timeline.
//!
//! The host's is made by the first large `malloc` under the preload library or by the first
//! runtime, a GPU's by the first runtime or torch's first request, whichever comes first. None is
//! ever unmade: memory it handed out outlives every runtime.
//!
//! - **P1** At most one heap a device; the host's is published only when it is whole.
//! - **P2** A free never blocks and never waits; in a forked child it does nothing.
//! - **P3** Nothing here reaches the interposed `malloc`: this library allocates through
//!   [`crate::system`].

mod child;
mod made;
mod symbols;

pub(crate) use symbols::preload_is_open;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use dormouse_alloc::{AllocError, Allocator, ArenaId, Block, Cause, Freed, Request};
use dormouse_device::{Device, DeviceKind, Fill};
use dormouse_offload::{Engine, OffloadError};
use dormouse_timeline::Timeline;

use crate::boundary::RawStream;
use crate::collect::{self, Collecting, Window};
use crate::device::{AnyDevice, AnyStream};
use crate::fault::Fault;
use crate::params::{Config, Key};
use crate::{log, status};

/// A heap's allocator.
pub(crate) type HeapAllocator = Allocator<AnyDevice>;
/// The engine of a runtime.
pub(crate) type HeapEngine = Engine<AnyDevice>;
/// The most GPUs of one process.
pub(crate) const GPUS_MAX: usize = 64;

/// Where blocks lie, for two compares without a lock: begin, end, and the smallest request
/// served. Zero begin and end: no heap yet. The preload library reads these words directly.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Span {
    begin: AtomicUsize,
    end: AtomicUsize,
    min_bytes: AtomicUsize,
}

pub(crate) static SPAN: Span = Span {
    begin: AtomicUsize::new(0),
    end: AtomicUsize::new(0),
    min_bytes: AtomicUsize::new(usize::MAX),
};

static HEAP: OnceLock<Heap> = OnceLock::new();
/// For the process, as all statics are; behind a pointer, so that every call finds its own quickly.
static GPU_HEAPS: [OnceLock<&'static Heap>; GPUS_MAX] = [const { OnceLock::new() }; GPUS_MAX];
/// One lock each, for making a GPU's heap calls a driver, whose `malloc` may need the host's made.
static MAKING_HOST: Mutex<()> = Mutex::new(());
static MAKING_GPU: Mutex<()> = Mutex::new(());

/// One device's allocator, and the engine of its runtime while there is one.
#[derive(Debug)]
pub(crate) struct Heap {
    kind: DeviceKind,
    ordinal: u32,
    allocator: Arc<HeapAllocator>,
    timeline: Arc<Timeline>,
    min_bytes: u64,
    reserve_bytes: u64,
    engine: RwLock<Option<Arc<HeapEngine>>>,
    /// Streams the allocator knows, by the caller's handle.
    streams: RwLock<HashMap<u64, AnyStream>>,
}

impl Heap {
    /// The host's heap, if it was made.
    #[inline]
    pub(crate) fn get() -> Option<&'static Self> {
        HEAP.get()
    }

    /// The heap of GPU `ordinal`, if it was made.
    #[inline]
    pub(crate) fn get_gpu(ordinal: u32) -> Option<&'static Self> {
        GPU_HEAPS.get(ordinal as usize)?.get().copied()
    }

    /// Every GPU's heap there is.
    pub(crate) fn gpus() -> impl Iterator<Item = &'static Self> {
        GPU_HEAPS.iter().filter_map(|place| place.get().copied())
    }

    /// The GPU's heap that `address` lies in.
    pub(crate) fn gpu_around(address: usize) -> Option<&'static Self> {
        Self::gpus().find(|heap| heap.allocator.contains(address))
    }

    /// The heap of GPU `ordinal`, made from `config` if it was not yet.
    pub(crate) fn get_or_make_gpu(ordinal: u32, config: &Config) -> Result<&'static Self, Fault> {
        let Some(place) = GPU_HEAPS.get(ordinal as usize) else {
            return Err(Fault::argument(format!(
                "CUDA device {ordinal}; 0 to {} are accepted",
                GPUS_MAX - 1
            )));
        };
        if let Some(heap) = place.get() {
            return Ok(heap);
        }
        let _one_at_a_time = MAKING_GPU.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(heap) = place.get() {
            return Ok(heap);
        }
        let made = made::gpu(ordinal, config)?;
        Ok(place.get_or_init(|| Box::leak(Box::new(made))))
    }

    /// The host's heap, made from `config` if it was not yet.
    pub(crate) fn get_or_make(config: &Config) -> Result<&'static Self, Fault> {
        if let Some(heap) = HEAP.get() {
            return Ok(heap);
        }
        let _one_at_a_time = MAKING_HOST.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(heap) = HEAP.get() {
            return Ok(heap);
        }
        let made = made::host(config)?;
        let space = made.allocator.device().address_space();
        let heap = HEAP.get_or_init(|| made);
        // Published last (P1), begin before end: a reader between the two sees an empty range.
        SPAN.begin.store(space.start, Ordering::Release);
        SPAN.end.store(space.end(), Ordering::Release);
        Ok(heap)
    }

    /// Which kind of device, and which of them.
    pub(crate) const fn device(&self) -> (DeviceKind, u32) {
        (self.kind, self.ordinal)
    }

    /// The device's stream for the caller's; one the device has not is turned away.
    pub(crate) fn stream(&self, raw: RawStream) -> Result<AnyStream, Fault> {
        let known = self.streams.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(stream) = known.get(&raw.key()) {
            return Ok(stream.clone());
        }
        drop(known);
        // SAFETY: what a `RawStream` is.
        let stream = unsafe { self.allocator.device().foreign_stream(raw.get()) }?;
        self.allocator.register_stream(raw.key(), stream.clone())?;
        let mut known = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        Ok(known.entry(raw.key()).or_insert(stream).clone())
    }

    /// Whether any stream this heap knows is being captured into a graph. One it cannot ask about
    /// is not: it may be gone.
    pub(crate) fn sees_capture(&self) -> bool {
        let known = self.streams.read().unwrap_or_else(PoisonError::into_inner);
        let streams: Vec<AnyStream> = known.values().cloned().collect();
        drop(known);
        let device = self.allocator.device();
        streams.iter().any(|stream| device.is_captured(stream).unwrap_or(false))
    }

    /// Says no to a configuration this heap, made before, cannot follow.
    pub(crate) fn follows(&self, config: &Config) -> Result<(), Fault> {
        if self.kind != DeviceKind::Host {
            return Ok(());
        }
        for (key, name, made_with) in [
            (Key::HeapMin, "DORMOUSE_HEAP_MIN_BYTES", self.min_bytes),
            (Key::HeapReserve, "DORMOUSE_HEAP_RESERVE_BYTES", self.reserve_bytes),
        ] {
            let asked = config.number(key);
            if asked != made_with {
                return Err(Fault::new(
                    status::DORMOUSE_ERR_CONFIG,
                    format!(
                        "{name} is {asked}, but the heap exists and was made with {made_with}; \
                         set it before the process starts"
                    ),
                ));
            }
        }
        Ok(())
    }

    /// What `config` lets this heap map.
    pub(crate) fn budget_bytes(&self, config: &Config) -> u64 {
        match self.kind {
            DeviceKind::Host => config.number(Key::AllocBudget),
            DeviceKind::Cuda => made::gpu_budget_bytes(config, self.allocator.device()),
        }
    }

    /// The allocator.
    pub(crate) fn allocator(&self) -> &Arc<HeapAllocator> {
        &self.allocator
    }

    /// The timeline.
    pub(crate) fn timeline(&self) -> &Arc<Timeline> {
        &self.timeline
    }

    /// Smallest request the preload door serves, in bytes.
    pub(crate) fn min_bytes(&self) -> u64 {
        self.min_bytes
    }

    /// The engine of the runtime, while there is one.
    pub(crate) fn engine(&self) -> Option<Arc<HeapEngine>> {
        self.engine.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts the engine of a runtime beside the heap, or takes it away.
    pub(crate) fn set_engine(&self, engine: Option<Arc<HeapEngine>>) {
        let before = {
            let mut place = self.engine.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *place, engine)
        };
        // The last owner joins I/O threads: never under the lock that frees take.
        drop(before);
    }

    /// Allocates a small block from the thread cache, on a thread with no open window or tag.
    #[inline]
    pub(crate) fn allocate_small(&self, bytes: usize, stream: u64) -> Option<usize> {
        if !self.allocator.is_small_size(bytes) {
            return None;
        }
        self.allocator.allocate_small(collect::shard_of_plain()?, bytes, stream)
    }

    /// Allocates from cached pages, on a thread with no open window or tag.
    #[inline]
    pub(crate) fn try_allocate(&self, bytes: usize, stream: u64) -> Option<usize> {
        collect::shard_of_plain()?;
        self.allocator.try_allocate(bytes, stream)
    }

    /// Allocates for the calling thread, with the layer and tag it collects for: what the two above
    /// do not have.
    pub(crate) fn allocate(
        &self,
        bytes: usize,
        align: usize,
        stream: u64,
        fill: Fill,
    ) -> Result<Block, AllocError> {
        let Collecting { window: Window { scope, arena }, tag, .. } = collect::settled();
        // What is collected is to sleep: all of it can where it has its pages to itself.
        let whole_pages = scope != 0 || tag != 0;
        let request = Request { bytes, align, stream, arena, scope, tag, fill, whole_pages };
        let outcome = log::deferred(|| self.allocator.allocate(&request));
        let elsewhere = match &outcome {
            // A window left open on this thread after its node's phase A.
            Err(AllocError::UnknownArena { .. }) => true,
            // No addresses for one more segment: the general pool's may have room.
            Err(AllocError::OutOfMemory(report)) => {
                arena.is_some() && report.cause == Cause::AddressSpace
            }
            _ => false,
        };
        if elsewhere {
            let request = Request { arena: None, ..request };
            return log::deferred(|| self.allocator.allocate(&request));
        }
        outcome
    }

    /// Frees a small block into the thread cache; `false` if [`Self::try_free`] is needed. `bytes` is
    /// the size as the caller knows it.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as `Allocator::free_small`")]
    pub(crate) fn free_small(&self, address: usize, bytes: usize, stream: u64) -> bool {
        self.allocator.is_small_size(bytes) && self.allocator.free_small(address, stream)
    }

    /// Allocates for a graph that is being captured, from its own arena and from nowhere else.
    ///
    /// Nobody collects it: a graph replays on its memory, so it never sleeps.
    pub(crate) fn allocate_for_graph(
        &self,
        bytes: usize,
        align: usize,
        stream: u64,
        arena: ArenaId,
    ) -> Result<Block, AllocError> {
        let request = Request { align, stream, arena: Some(arena), ..Request::new(bytes) };
        log::deferred(|| self.allocator.allocate(&request))
    }

    /// Frees a block that is unclaimed and used by `stream`, its own, alone; `false` if
    /// [`Self::free_on`] is needed.
    #[inline]
    pub(crate) fn try_free(&self, address: usize, stream: u64) -> bool {
        self.allocator.try_free(address, stream)
    }

    /// Frees a block last used by `stream`, and registers the stream if it is new.
    pub(crate) fn free_on(&self, address: usize, stream: RawStream) -> Result<(), Fault> {
        match self.free_block(address, stream.key()) {
            Err(OffloadError::Alloc(error))
                if matches!(*error, AllocError::UnknownStream { .. }) =>
            {
                let _known = self.stream(stream)?;
                Ok(self.free_block(address, stream.key())?)
            }
            freed => Ok(freed?),
        }
    }

    /// Frees the block that starts at `address`; a sleeping one is dropped (P2).
    pub(crate) fn free(&self, address: usize, stream: u64) -> Result<(), Fault> {
        // The engine claims no block of the thread cache: its lock is not needed.
        if self.allocator.free_small(address, stream) {
            return Ok(());
        }
        Ok(self.free_block(address, stream)?)
    }

    fn free_block(&self, address: usize, stream: u64) -> Result<(), OffloadError> {
        let engine = self.engine.read().unwrap_or_else(PoisonError::into_inner);
        log::deferred(|| match engine.as_ref() {
            Some(engine) => engine.free(address, stream),
            // A block still claimed by an engine that is gone keeps its addresses: a leak that the
            // report of that runtime's prefix has named.
            None => match self.allocator.free(address, stream)? {
                Freed::Done | Freed::Claimed(_) => Ok(()),
            },
        })
    }

    /// Wakes the block around `address`, where it sleeps, and waits for it.
    pub(crate) fn wake(&self, address: usize) -> Result<(), Fault> {
        if let Some(engine) = self.engine() {
            let _stall = log::deferred(|| engine.wake_address(address))?;
        }
        Ok(())
    }
}
