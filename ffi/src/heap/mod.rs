//! The heap: this process' one allocator over the host device, with its timeline.
//!
//! Made by the first large `malloc` under the preload library or by the first runtime, whichever
//! comes first, and never unmade: memory it handed out outlives every runtime.
//!
//! - **P1** At most one heap; it is published only when it is whole.
//! - **P2** A free never blocks and never waits; in a forked child it does nothing.
//! - **P3** Nothing here reaches the interposed `malloc`: this library allocates through
//!   [`crate::system`].

mod child;
mod symbols;

pub(crate) use symbols::preload_is_open;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use dormouse_alloc::{AllocError, Allocator, Block, Cause, Freed, Request};
use dormouse_device::host::{self, HostConfig, HostDevice};
use dormouse_device::{Device, Fill};
use dormouse_offload::Engine;
use dormouse_timeline::Timeline;

use crate::collect::{self, Window};
use crate::fault::Fault;
use crate::params::{Config, Key};
use crate::{fork, status};

/// The heap's allocator.
pub(crate) type HostAllocator = Allocator<HostDevice>;
/// The engine of the runtime on the host device.
pub(crate) type HostEngine = Engine<HostDevice>;

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
static MAKING: Mutex<()> = Mutex::new(());

/// The one allocator of this process, and the engine of its runtime while there is one.
#[derive(Debug)]
pub(crate) struct Heap {
    allocator: Arc<HostAllocator>,
    timeline: Arc<Timeline>,
    min_bytes: u64,
    reserve_bytes: u64,
    engine: RwLock<Option<Arc<HostEngine>>>,
}

impl Heap {
    /// The heap, if it was made.
    #[inline]
    pub(crate) fn get() -> Option<&'static Self> {
        HEAP.get()
    }

    /// The heap, made from `config` if it was not yet.
    pub(crate) fn get_or_make(config: &Config) -> Result<&'static Self, Fault> {
        if let Some(heap) = HEAP.get() {
            return Ok(heap);
        }
        let _one_at_a_time = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(heap) = HEAP.get() {
            return Ok(heap);
        }
        let made = Self::make(config)?;
        let space = made.allocator.device().address_space();
        let heap = HEAP.get_or_init(|| made);
        // Published last (P1), begin before end: a reader between the two sees an empty range.
        SPAN.begin.store(space.start, Ordering::Release);
        SPAN.end.store(space.end(), Ordering::Release);
        Ok(heap)
    }

    fn make(config: &Config) -> Result<Self, Fault> {
        let reserve_bytes = config.number(Key::HeapReserve);
        let addresses = usize::try_from(reserve_bytes).unwrap_or(usize::MAX);
        // The budget is the allocator's to keep and may be raised later: the device holds as much
        // as has addresses.
        let device = HostDevice::new(HostConfig::new(addresses, reserve_bytes))?;
        let timeline = Arc::new(Timeline::new(config.number(Key::TraceEvents) as usize));
        let page_bytes = device.page_bytes();
        let budget_bytes = config.number(Key::AllocBudget);
        let mut settings = dormouse_alloc::Config::new(page_bytes, budget_bytes);
        settings.leak_report = false; // whoever uses malloc frees nothing at exit
        let allocator = Allocator::new(Arc::new(device), settings, Arc::clone(&timeline))?;
        host::guard::install()?;
        fork::watch();
        Ok(Self {
            allocator: Arc::new(allocator),
            timeline,
            min_bytes: config.number(Key::HeapMin),
            reserve_bytes,
            engine: RwLock::new(None),
        })
    }

    /// Says no to a configuration this heap, made before, cannot follow.
    pub(crate) fn follows(&self, config: &Config) -> Result<(), Fault> {
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

    /// The allocator.
    pub(crate) fn allocator(&self) -> &Arc<HostAllocator> {
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

    /// Puts the engine of a runtime beside the heap, or takes it away.
    pub(crate) fn set_engine(&self, engine: Option<Arc<HostEngine>>) {
        let before = {
            let mut place = self.engine.write().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *place, engine)
        };
        // The last owner joins I/O threads: never under the lock that frees take.
        drop(before);
    }

    /// Allocates for the calling thread, with the layer and tag it collects for.
    pub(crate) fn allocate(
        &self,
        bytes: usize,
        align: usize,
        stream: u64,
        fill: Fill,
    ) -> Result<Block, AllocError> {
        let Window { scope, arena } = collect::window();
        let tag = collect::tag();
        let request = Request { align, stream, fill, scope, tag, arena, ..Request::new(bytes) };
        let outcome = self.allocator.allocate(&request);
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
            return self.allocator.allocate(&Request { arena: None, ..request });
        }
        outcome
    }

    /// Frees the block that starts at `address`; a sleeping one is dropped (P2).
    pub(crate) fn free(&self, address: usize, stream: u64) -> Result<(), Fault> {
        let engine = self.engine.read().unwrap_or_else(PoisonError::into_inner);
        match engine.as_ref() {
            Some(engine) => Ok(engine.free(address, stream)?),
            // A block still claimed by an engine that is gone keeps its addresses: a leak the
            // report of that runtime's node has named.
            None => match self.allocator.free(address, stream)? {
                Freed::Done | Freed::Claimed(_) => Ok(()),
            },
        }
    }

    /// Wakes the block around `address`, where it sleeps, and waits for it.
    pub(crate) fn wake(&self, address: usize) -> Result<(), Fault> {
        let engine = self.engine.read().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(engine) = engine {
            let _stall = engine.wake_address(address)?;
        }
        Ok(())
    }
}
