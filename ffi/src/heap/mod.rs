//! Heaps: the allocator of one device, with its timeline and the engine of its runtime.
//!
//! - **P1** At most one heap per device; the host's is published when it is complete.
//! - **P2** A free never blocks; in a forked child it is a no-op.
//! - **P3** Nothing here calls the interposed `malloc`: the library allocates through
//!   [`crate::system`].
//! - **P4** A block belongs to layers and tags of its own heap's device alone. Their numbers are never used again in the
//!   process, since blocks outlive runtimes.

mod copying;
mod limit;
mod registry;
pub(crate) mod symbols;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::panic::catch_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use dormouse_alloc::{AllocError, Allocator, ArenaId, Block, BlockInfo, Cause, Freed, Request};
use dormouse_device::sync::Mutex;
use dormouse_device::{Device, DeviceKind, Fill};
use dormouse_offload::{Engine, OffloadError, allocator_facts};
use dormouse_timeline::{Facts, Snapshot, Timeline};

use crate::boundary::RawStream;
use crate::collect::{self, Window};
use crate::device::{AnyDevice, AnyStream};
use crate::fault::Fault;
use crate::params::{Config, Key};
use crate::{dumps, log, status};

pub(crate) type HeapAllocator = Allocator<AnyDevice>;
pub(crate) type HeapEngine = Engine<AnyDevice>;

/// Maximum number of times that a destroyed runtime yields to frees in progress.
const YIELDS_MAX: usize = 1 << 20;
/// Free bytes that are left alone at a fork: copying the entries of their page tables takes 10 µs.
const FORK_CACHED_BYTES_MAX: u64 = 1 << 20;

/// Returns the snapshot of a device for a dump; `None` before its heap is published.
fn snapshot_of((kind, ordinal): dumps::DeviceId, why: &str) -> Option<Snapshot> {
    let heap = match kind {
        DeviceKind::Host => Heap::get(),
        DeviceKind::Cuda => Heap::get_gpu(ordinal),
    };
    heap.map(|heap| heap.snapshot(why))
}

/// The allocator of one device, and the engine of its runtime while one exists.
#[derive(Debug)]
pub(crate) struct Heap {
    kind: DeviceKind,
    ordinal: u32,
    allocator: Arc<HeapAllocator>,
    timeline: Arc<Timeline>,
    /// Smallest request served in mode `preload`.
    min_bytes: u64,
    reserve_bytes: u64,
    /// Whether a user has set the budget.
    has_chosen_budget: AtomicBool,
    engine: Mutex<Option<Arc<HeapEngine>>>,
    /// Whether any runtime has used the heap: the process trains.
    had_engine: AtomicBool,
    /// What the last engine knew at its end.
    last_facts: Mutex<Facts>,
    /// Number of frees that may hold the engine.
    frees: AtomicUsize,
    /// Streams that the allocator knows, by the caller's handle.
    streams: Mutex<HashMap<u64, AnyStream>>,
}

/// Gives back the host heap's free pages before a fork: the child would get them too, and the parent pay for each of
/// them again. Not in a process that has had a runtime. Not inside the allocator, where a signal handler may fork.
fn before_fork() {
    // libc calls this: a panic must not reach it.
    let _outcome = catch_unwind(|| {
        if let Some(heap) = Heap::get().filter(|heap| !heap.had_engine.load(Ordering::Relaxed))
            && !log::is_deferred()
        {
            log::deferred(|| heap.allocator.try_trim_above(FORK_CACHED_BYTES_MAX));
        }
    });
}

/// Whether a request has failed for want of addresses, not of memory.
fn lacks_addresses(error: &AllocError) -> bool {
    match error {
        AllocError::NoAddresses { .. } => true,
        AllocError::OutOfMemory(report) => report.cause == Cause::AddressSpace,
        _ => false,
    }
}

impl Heap {
    pub(crate) const fn device(&self) -> (DeviceKind, u32) {
        (self.kind, self.ordinal)
    }

    /// Returns the reserved addresses, in bytes.
    pub(crate) const fn reserve_bytes(&self) -> u64 {
        self.reserve_bytes
    }

    /// Returns whether a user has set the budget.
    pub(crate) fn has_chosen_budget(&self) -> bool {
        self.has_chosen_budget.load(Ordering::Relaxed)
    }

    /// Sets the budget to that of `config`.
    pub(crate) fn set_budget(&self, config: &Config) -> Result<(), Fault> {
        self.allocator.set_budget(self.budget_bytes(config))?;
        self.has_chosen_budget.store(config.is_chosen(Key::CpuBudget), Ordering::Relaxed);
        Ok(())
    }

    /// Notes that a user has set the budget while the process runs.
    pub(crate) fn note_chosen_budget(&self) {
        self.has_chosen_budget.store(true, Ordering::Relaxed);
    }

    pub(crate) const fn min_bytes(&self) -> u64 {
        self.min_bytes
    }

    pub(crate) fn allocator(&self) -> &Arc<HeapAllocator> {
        &self.allocator
    }

    pub(crate) fn timeline(&self) -> &Arc<Timeline> {
        &self.timeline
    }

    /// Describes the device and its timeline for a dump.
    pub(crate) fn dumped(&self) -> dumps::Source {
        let device = match self.kind {
            DeviceKind::Host => "host".to_owned(),
            DeviceKind::Cuda => format!("cuda{}", self.ordinal),
        };
        let timeline = Arc::clone(&self.timeline);
        dumps::Source { device, id: (self.kind, self.ordinal), timeline, snapshot_of }
    }

    /// Returns the line of the out-of-memory text `why` that names its dump. Writes the dump, if one is to be written.
    pub(crate) fn dump_line(&self, why: &str) -> Option<String> {
        dumps::out_of_memory(|| self.dumped(), why)
    }

    /// Converts an error of this heap. One for want of memory names its dump.
    pub(crate) fn fault_of(&self, error: impl Into<Fault>) -> Fault {
        let mut fault = error.into();
        if fault.status == status::DORMOUSE_ERR_OUT_OF_MEMORY
            && let Some(line) = self.dump_line(&fault.message)
        {
            fault.message = format!("{}\n{line}", fault.message).into();
        }
        fault
    }

    /// Returns the timeline's contents, with what the engine adds to a dump, and why it is written, if there is a
    /// reason. The levels are exact at this moment.
    pub(crate) fn snapshot(&self, reason: &str) -> Snapshot {
        self.allocator.record_levels();
        let facts = match self.engine() {
            Some(engine) => engine.facts(),
            None => self.facts_without_engine(),
        };
        let mut snapshot = self.timeline.snapshot();
        snapshot.facts = Facts { reason: reason.to_owned(), ..facts };
        snapshot
    }

    /// Returns what is known after the last runtime, or without one. Python destroys its runtime before the exit of the
    /// process, whose dump shows what there was: the largest blocks are those of the moment at which more was in use.
    fn facts_without_engine(&self) -> Facts {
        let (now, last) = (allocator_facts(&self.allocator), self.last_facts.lock().clone());
        let Facts { budget_bytes, peak_bytes, .. } = now;
        let bytes_per_s = last.bytes_per_s;
        let largest = if last.blocks_total.1 >= now.blocks_total.1 { last } else { now };
        Facts { budget_bytes, peak_bytes, bytes_per_s, ..largest }
    }

    /// Returns the engine of the runtime, while one exists.
    pub(crate) fn engine(&self) -> Option<Arc<HeapEngine>> {
        self.engine.lock().clone()
    }

    pub(crate) fn set_engine(&self, engine: Option<Arc<HeapEngine>>) {
        if engine.is_some() {
            self.had_engine.store(true, Ordering::Relaxed);
        }
        let previous = std::mem::replace(&mut *self.engine.lock(), engine);
        // The last owner of an engine joins its I/O threads. It must not be a free (P2).
        for _ in 0..YIELDS_MAX {
            if self.frees.load(Ordering::Acquire) == 0 {
                break;
            }
            std::thread::yield_now();
        }
        if let Some(previous) = previous {
            *self.last_facts.lock() = previous.facts();
        }
    }

    /// Returns the device's stream of `raw` and registers it with the allocator. Refuses a stream of
    /// another device.
    pub(crate) fn stream(&self, raw: RawStream) -> Result<AnyStream, Fault> {
        if let Some(stream) = self.streams.lock().get(&raw.key()) {
            return Ok(stream.clone());
        }
        // SAFETY: the contract of `RawStream::new`.
        let stream = unsafe { self.allocator.device().foreign_stream(raw.get()) }?;
        self.allocator.register_stream(raw.key(), stream.clone())?;
        Ok(self.streams.lock().entry(raw.key()).or_insert(stream).clone())
    }

    /// Returns whether any stream of this heap is being captured into a graph. A stream whose state
    /// cannot be queried may no longer exist and counts as not captured.
    pub(crate) fn sees_capture(&self) -> bool {
        let streams: Vec<AnyStream> = self.streams.lock().values().cloned().collect();
        let device = self.allocator.device();
        streams.iter().any(|stream| device.is_captured(stream).unwrap_or(false))
    }

    /// Returns the live block that contains `address`.
    pub(crate) fn block_at(&self, address: usize) -> Result<BlockInfo, Fault> {
        let block = self.allocator.lookup(address);
        block.ok_or_else(|| AllocError::NotABlock { address }.into())
    }

    /// Allocates a small block from the thread cache, on a thread with no open window or tag.
    #[inline]
    pub(crate) fn allocate_small(&self, bytes: usize, stream: u64) -> Option<usize> {
        if !self.allocator.is_small_size(bytes) {
            return None;
        }
        self.allocator.allocate_small(collect::plain_shard()?, bytes, stream)
    }

    /// Allocates from cached pages, on a thread with no open window or tag.
    #[inline]
    pub(crate) fn try_allocate(&self, bytes: usize, stream: u64) -> Option<usize> {
        self.allocator.try_allocate(collect::plain_shard()?, bytes, stream)
    }

    /// Allocates a block for the layer and the tag of this heap's device that are open on the calling thread.
    pub(crate) fn allocate(
        &self,
        bytes: usize,
        align: usize,
        stream: u64,
        fill: Fill,
    ) -> Result<Block, AllocError> {
        self.allocate_collected(Request { align, stream, fill, ..Request::new(bytes) })
    }

    /// Allocates a block of whole pages, as [`Self::allocate`]. `align` of 0 is that of a page.
    pub(crate) fn allocate_pages(
        &self,
        bytes: usize,
        align: usize,
        stream: u64,
    ) -> Result<Block, AllocError> {
        let align = if align == 0 { self.allocator.device().page_bytes() } else { align };
        let whole = Request { align, stream, whole_pages: true, ..Request::new(bytes) };
        self.allocate_collected(whole)
    }

    fn allocate_collected(&self, request: Request) -> Result<Block, AllocError> {
        let (Window { scope, arena, .. }, tag) = collect::settled(self.device());
        // All of a block can sleep only if it shares no page.
        let whole_pages = request.whole_pages || scope != 0 || tag != 0;
        let request = Request { arena, scope, tag, whole_pages, ..request };
        let outcome = log::deferred(|| self.allocator.allocate(&request));
        let elsewhere = match &outcome {
            // A window left open on this thread after its prefix's phase A.
            Err(AllocError::UnknownArena { .. }) => true,
            // No addresses for one more segment: the general pool may have room.
            Err(error) => arena.is_some() && lacks_addresses(error),
            Ok(_) => false,
        };
        if elsewhere {
            let request = Request { arena: None, ..request };
            return log::deferred(|| self.allocator.allocate(&request));
        }
        outcome
    }

    /// Allocates from `arena` for a graph that is being captured. The block belongs to no layer and no
    /// tag: a graph replays on its memory, so it never sleeps.
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

    /// Frees a small block into the thread cache; `false` if [`Self::try_free`] is needed. `bytes` is
    /// the size as the caller knows it.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as `Allocator::free_small`")]
    pub(crate) fn free_small(&self, address: usize, bytes: usize, stream: u64) -> bool {
        self.allocator.is_small_size(bytes) && self.allocator.free_small(address, stream)
    }

    /// Frees an unclaimed block that only its own `stream` used; `false` if [`Self::free_on`] is
    /// needed.
    #[inline]
    pub(crate) fn try_free(&self, address: usize, stream: u64) -> bool {
        self.allocator.try_free(address, stream)
    }

    /// Frees a block that `stream` used last, and registers the stream if it is new.
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

    /// Frees the block that starts at `address`. The data of a sleeping block is discarded (P2).
    pub(crate) fn free(&self, address: usize, stream: u64) -> Result<(), Fault> {
        // The engine claims no block of the thread cache: its lock is not needed.
        if self.allocator.free_small(address, stream) {
            return Ok(());
        }
        Ok(self.free_block(address, stream)?)
    }

    fn free_block(&self, address: usize, stream: u64) -> Result<(), OffloadError> {
        // Before the engine is read: `set_engine` waits until this free has dropped it.
        self.frees.fetch_add(1, Ordering::SeqCst);
        let freed = log::deferred(|| match self.engine() {
            Some(engine) => engine.free(address, stream),
            // A block that a destroyed engine still claims keeps its addresses. The report of the
            // prefix has named this leak.
            None => match self.allocator.free(address, stream)? {
                Freed::Done | Freed::Claimed(_) => Ok(()),
            },
        });
        self.frees.fetch_sub(1, Ordering::Release);
        freed
    }

    /// Gives back what a free has left beyond the margin of what is in use, as libc gives back large blocks. Not in
    /// a process that has had a runtime: what a trainer frees is allocated again in the next step. Never waits.
    pub(crate) fn give_back(&self) {
        if !self.had_engine.load(Ordering::Relaxed) {
            log::deferred(|| self.allocator.trim_beyond_margin());
        }
    }

    /// Unmaps cached pages but `pad_bytes`, and returns whether the system got any pages.
    pub(crate) fn trim(&self, pad_bytes: u64) -> bool {
        let cached_bytes = self.allocator.stats().cached_bytes.current;
        let parked_bytes = self.allocator.device().memory_info().parked_bytes;
        let trimmed_bytes =
            log::deferred(|| self.allocator.trim(cached_bytes.saturating_sub(pad_bytes)));
        trimmed_bytes > 0 || parked_bytes > 0
    }

    /// Wakes the block that contains `address`, if it sleeps, and waits for it.
    pub(crate) fn wake(&self, address: usize) -> Result<(), Fault> {
        if let Some(engine) = self.engine() {
            let _stall = log::deferred(|| engine.wake_address(address))?;
        }
        Ok(())
    }
}
