//! The `cuda` device: an NVIDIA GPU through the driver, which is loaded at run time.
//!
//! Its memory is one reserved range. A page, or a large page, is one physical handle, because only whole handles can
//! be unmapped. Mapping and unmapping are host calls, not stream-ordered: **the caller of unmap or seal, or
//! who drops staged pages, has waited for the last use**. An access to an unmapped page loses the GPU's
//! context. The device uses the primary context, as PyTorch does, and creates none.

mod context;
mod entries;
mod error;
mod event;
mod launch;
mod parked;
mod physical;
mod pinned;
mod space;
mod spans;
mod stream;
#[cfg(any(feature = "conformance", feature = "faults"))]
mod testing;

pub use error::Unavailable;
pub use event::Event;
pub use launch::Function;
pub use spans::{SPANS_MAX, Staged};
pub use stream::Stream;

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use crate::sync::Mutex;
use crate::{
    AddressRange, Callback, Device, DeviceError, DeviceKind, Fill, MemoryInfo, Operation, Sealed,
    SpanId, SpanLabel,
};
use entries::{check, is_complete};
use space::Space;

/// Default of the reserved addresses, in capacities: asleep memory keeps its addresses.
const RESERVE_PER_CAPACITY: u64 = 16;

/// Default of the bytes of a large page: the driver's calls for one take less time than a link needs for its bytes.
const LARGE_PAGE_BYTES: usize = 16 << 20;

/// Configuration of a `cuda` device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CudaConfig {
    /// Ordinal of the GPU, as seen by the driver (after `CUDA_VISIBLE_DEVICES`).
    pub ordinal: u32,
    /// Bytes of addresses to reserve, rounded up to whole pages; 0: a multiple of the capacity.
    pub reserve_bytes: usize,
    /// Limit of the mapped bytes (I5); 0: the memory of the GPU.
    pub capacity_bytes: u64,
    /// Unit of mapping: a power of two, at least the driver's granularity; 0: that granularity.
    pub page_bytes: usize,
    /// Bytes of a large page: a power of two, at least the page; 0: 16 MiB, or the page if that
    /// is larger.
    pub large_page_bytes: usize,
}

impl CudaConfig {
    fn page_bytes(&self, granularity_bytes: usize) -> Result<usize, DeviceError> {
        let page_bytes = if self.page_bytes == 0 { granularity_bytes } else { self.page_bytes };
        if page_bytes.is_power_of_two() && page_bytes >= granularity_bytes {
            return Ok(page_bytes);
        }
        let accepted = "0, or a power of two, at least the driver's granularity";
        Err(DeviceError::BadConfig { field: "page_bytes", seen: page_bytes as u64, accepted })
    }

    fn large_page_bytes(&self, page_bytes: usize) -> Result<usize, DeviceError> {
        let seen = match self.large_page_bytes {
            0 => LARGE_PAGE_BYTES.max(page_bytes),
            bytes => bytes,
        };
        if seen.is_power_of_two() && seen >= page_bytes {
            return Ok(seen);
        }
        let accepted = "0, or a power of two, at least the page";
        Err(DeviceError::BadConfig { field: "large_page_bytes", seen: seen as u64, accepted })
    }

    fn reserve_bytes(&self, page_bytes: usize, capacity_bytes: u64) -> Result<usize, DeviceError> {
        let asked = match self.reserve_bytes {
            0 => usize::try_from(capacity_bytes.saturating_mul(RESERVE_PER_CAPACITY)).ok(),
            bytes => Some(bytes),
        };
        let whole = asked.and_then(|bytes| bytes.checked_next_multiple_of(page_bytes));
        whole.ok_or(DeviceError::BadConfig {
            field: "reserve_bytes",
            seen: self.reserve_bytes as u64,
            accepted: "0, or a size whose whole pages fit the address space",
        })
    }
}

/// A GPU.
///
/// Its streams, events and staged pages keep its memory. After the last of them and the device are
/// dropped, its addresses must not be used.
#[derive(Debug)]
pub struct CudaDevice {
    space: Arc<Space>,
    kernels: Mutex<launch::Kernels>,
}

impl CudaDevice {
    /// Reserves the addresses. Maps no page and starts no thread.
    ///
    /// # Errors
    /// [`Unavailable`], with the reason.
    pub fn new(config: &CudaConfig) -> Result<Self, Unavailable> {
        Ok(Self { space: Arc::new(Space::new(config)?), kernels: Mutex::default() })
    }

    /// Lets `peer` access the pages of this GPU, those mapped now and later. From then on the access of every page that
    /// is mapped costs the driver as much again. Any-thread.
    ///
    /// # Errors
    /// `Refused`, with `CUDA_ERROR_PEER_ACCESS_UNSUPPORTED` if the GPUs have no way to each other's memory; `DeviceLost`.
    pub fn add_peer(&self, peer: &Self) -> Result<(), DeviceError> {
        self.space.add_peer(peer.space.context.device)
    }

    /// Refuses an access to an unmapped page of ours: it would lose the GPU's context.
    fn check_awake(
        &self,
        start: usize,
        bytes: usize,
        operation: Operation,
    ) -> Result<(), DeviceError> {
        let space = self.space.range;
        let end = start.saturating_add(bytes);
        if bytes == 0 || end <= space.start || start >= space.end() {
            return Ok(());
        }
        let ours = AddressRange::new(start, bytes);
        if !space.covers(ours) {
            return Err(DeviceError::bad_range(operation, ours, 1, space));
        }
        let Some(missing) = self.space.physical.first_missing(ours) else { return Ok(()) };
        let state = if self.space.has_span_at(missing) { "asleep" } else { "unmapped" };
        Err(DeviceError::WrongPages { operation, start: missing, state, needed: "mapped" })
    }
}

impl Device for CudaDevice {
    type Stream = Stream;
    type Event = Event;
    type Staged = Staged;

    fn kind(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn is_stream_ordered(&self) -> bool {
        true
    }

    fn page_bytes(&self) -> usize {
        self.space.page_bytes
    }

    fn large_page_bytes(&self) -> usize {
        self.space.large_page_bytes
    }

    fn address_space(&self) -> AddressRange {
        self.space.range
    }

    fn memory_info(&self) -> MemoryInfo {
        self.space.accounts.info(self.space.physical.parked_bytes())
    }

    fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        // If it cannot be entered, the calls report the error.
        let _gpu = self.space.context.enter_paging(Operation::Map);
        work()
    }

    fn map(&self, range: AddressRange, fill: Fill) -> Result<(), DeviceError> {
        self.space.map(range, AddressRange::default(), fill)
    }

    fn map_large(
        &self,
        range: AddressRange,
        large: AddressRange,
        fill: Fill,
    ) -> Result<(), DeviceError> {
        self.space.map(range, large, fill)
    }

    fn limit_parked(&self, total_bytes: u64) {
        self.space.limit_parked(total_bytes);
    }

    fn release_parked(&self) -> u64 {
        self.space.release_parked()
    }

    fn unmap(&self, range: AddressRange) -> Result<(), DeviceError> {
        self.space.unmap(range)
    }

    fn freeze(&self, range: AddressRange, _: SpanLabel) -> Result<SpanId, DeviceError> {
        self.space.freeze(range)
    }

    fn thaw(&self, span: SpanId) -> Result<(), DeviceError> {
        self.space.thaw(span)
    }

    fn seal(&self, span: SpanId) -> Result<Sealed, DeviceError> {
        self.space.seal(span)
    }

    fn stage(&self, span: SpanId, fill: Fill) -> Result<Staged, DeviceError> {
        spans::stage(&self.space, span, fill, false)
    }

    fn stage_large(&self, span: SpanId, fill: Fill) -> Result<Staged, DeviceError> {
        spans::stage(&self.space, span, fill, true)
    }

    fn staged_address(&self, staged: &Staged) -> usize {
        staged.range.start
    }

    fn publish(&self, staged: Staged) -> Result<(), (DeviceError, Staged)> {
        spans::publish(staged)
    }

    fn forget(&self, span: SpanId) -> Result<(), DeviceError> {
        self.space.forget(span)
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<AddressRange, DeviceError> {
        self.space.pinned.allocate(&self.space.context, bytes)
    }

    unsafe fn free_pinned(&self, range: AddressRange) {
        // SAFETY: the caller's contract.
        unsafe { self.space.pinned.free(&self.space.context, range) };
    }

    fn create_stream(&self, name: &str) -> Result<Stream, DeviceError> {
        let (context, range) = (&self.space.context, AddressRange::default());
        let handle = context.call(Operation::CreateStream, range, stream::create)?;
        Ok(Stream::new(&self.space, name, handle, true))
    }

    /// Accepts any stream of the primary context; NULL is its default stream. Refuses the per-thread
    /// handle: events are recorded and waited for on other threads.
    unsafe fn foreign_stream(&self, raw: *mut c_void) -> Result<Stream, DeviceError> {
        let handle = raw.expose_provenance();
        if handle == stream::PER_THREAD {
            let accepted = "NULL, or a created stream";
            return Err(DeviceError::ForeignStream { raw: handle, kind: "cuda", accepted });
        }
        Ok(Stream::new(&self.space, "foreign", handle, false))
    }

    fn record(&self, stream: &Stream) -> Result<Event, DeviceError> {
        self.space.record(stream, false)
    }

    fn record_timed(&self, stream: &Stream) -> Result<Event, DeviceError> {
        self.space.record(stream, true)
    }

    fn age(&self, event: &Event) -> Option<Duration> {
        event.age()
    }

    fn between(&self, earlier: &Event, later: &Event) -> Option<Duration> {
        earlier.until(later)
    }

    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), DeviceError> {
        self.space.queue(stream, Operation::Event, AddressRange::default(), || {
            // SAFETY: both are live; a queued wait keeps the recorded point.
            check(unsafe {
                (self.space.context.entries.stream_wait)(stream.handle(), event.handle(), 0)
            })
        })
    }

    fn is_idle(&self, stream: &Stream) -> Result<bool, DeviceError> {
        self.space.queue(stream, Operation::Event, AddressRange::default(), || {
            // SAFETY: the stream is live; nothing is queued.
            is_complete(unsafe { (self.space.context.entries.stream_query)(stream.handle()) })
        })
    }

    fn query(&self, event: &Event) -> Result<bool, DeviceError> {
        event.is_complete()
    }

    fn synchronize(&self, event: &Event) -> Result<(), DeviceError> {
        event.synchronize()
    }

    unsafe fn copy(
        &self,
        destination: usize,
        source: usize,
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        const OPERATION: Operation = Operation::Copy;
        if bytes == 0 {
            return Ok(());
        }
        self.check_awake(destination, bytes, OPERATION)?;
        self.check_awake(source, bytes, OPERATION)?;
        self.space.queue(stream, OPERATION, AddressRange::new(destination, bytes), || {
            let copy = self.space.context.entries.copy;
            // SAFETY: the caller's contract.
            check(unsafe { copy(destination as u64, source as u64, bytes, stream.handle()) })
        })
    }

    unsafe fn zero(&self, start: usize, bytes: usize, stream: &Stream) -> Result<(), DeviceError> {
        const OPERATION: Operation = Operation::Zero;
        if bytes == 0 {
            return Ok(());
        }
        self.check_awake(start, bytes, OPERATION)?;
        self.space.queue(stream, OPERATION, AddressRange::new(start, bytes), || {
            let set = self.space.context.entries.set_bytes;
            // SAFETY: the caller's contract.
            check(unsafe { set(start as u64, 0, bytes, stream.handle()) })
        })
    }

    fn callback(&self, stream: &Stream, work: Callback) -> Result<(), DeviceError> {
        let event = self.record(stream)?;
        stream.call_after(event, work)
    }
}
