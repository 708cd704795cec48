//! Memory pages, streams, events and copies of a device.
//!
//! The [`Device`] trait is the interface between the runtime and a device; [`host`] and [`cuda`]
//! implement it. Caching and reuse of memory are in `alloc`; tensors, layers and tiers in `offload`.
//!
//! # Glossary
//! - *page*: the unit of physical mapping ([`Device::page_bytes`]).
//! - *large page*: an aligned run of pages that is mapped and unmapped as one ([`Device::large_page_bytes`]).
//! - *range*: page-aligned device virtual addresses ([`AddressRange`]).
//! - *mapped*: a range with pages; *unmapped*: reserved addresses without access.
//! - *span*: a range that is falling asleep, asleep or waking ([`SpanId`]).
//! - *staged*: pages prepared for an asleep span and filled before they become visible.
//! - *parked*: free pages that the device keeps for the next mapping.
//!
//! # Life of a span
//! ```text
//!            freeze             seal                 stage            publish
//!   mapped ─────────► frozen ─────────► asleep ─────────► staged ─────────► mapped
//!              ◄─ thaw ──┘ └─ written:     ▲                 │
//!                             mapped       └───── drop ──────┘
//! ```
//!
//! # Invariants
//! - **I1** All addresses of the device lie in [`Device::address_space`].
//! - **I2** A thread never reads bytes other than the owner's from a range: access ends before pages
//!   leave, pages return with their bytes, and a staged range is filled before it is published.
//! - **I3** A span is in exactly one state, and each transition consumes the one before.
//! - **I4** On the host, an access to an asleep span waits while the process's listener wakes the span; without
//!   one it ends the process with a message. A write to a frozen span cancels the sleep without losing the
//!   write. (A system call with an asleep address fails with `EFAULT`.) On a stream-ordered device an access to an asleep span loses the device,
//!   and a write to a frozen span is not detected: the caller of `freeze` has waited for all writers.
//! - **I5** Mapped bytes never exceed the capacity; parked pages are released first.

mod accounts;
mod error;
mod numa;
mod page_states;
mod pinned;
mod priority;
mod range;
mod signals;
mod worker;

pub mod cuda;
pub mod host;
pub mod sync;
#[cfg(any(feature = "conformance", feature = "faults"))]
mod testing;

pub use error::{DeviceError, Operation};
pub use pinned::PinnedMemory;
pub use range::AddressRange;
pub use signals::with_signals_blocked;
#[cfg(any(feature = "conformance", feature = "faults"))]
pub use testing::Hold;
#[cfg(feature = "conformance")]
pub use testing::conformance;
#[cfg(feature = "faults")]
pub use testing::faulty;
pub use worker::{QUEUE_LEN_MAX, is_runtime_thread, register_runtime_thread, without_waiting};

use std::ffi::c_void;
use std::fmt::Debug;
use std::time::{Duration, Instant};

/// For this time [`Device::synchronize_within`] queries without a pause.
const UNPAUSED_MAX: Duration = Duration::from_micros(200);
/// The pause between two queries after it.
const QUERY_PAUSE: Duration = Duration::from_micros(20);

/// The kind of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// The CPU memory of this process, managed as a device.
    Host,
    /// An NVIDIA GPU through the CUDA driver.
    Cuda,
}

/// Current memory use of a device, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Limit of the mapped bytes.
    pub capacity_bytes: u64,
    /// Mapped bytes.
    pub mapped_bytes: u64,
    /// Staged bytes (included in `mapped_bytes`).
    pub staged_bytes: u64,
    /// Parked bytes (in neither of these).
    pub parked_bytes: u64,
}

/// Initial contents of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Unspecified: possibly the contents of an earlier owner in this process. The cheapest.
    Any,
    /// Zeroes.
    Zero,
}

/// Identifies a span from freeze to publish or forget. Never dereferenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanId(pub u32);

/// The owner of a span, as named in the message about an access to it while asleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanLabel {
    /// Owner's name, zero-padded UTF-8 (a tag's name, or the prefix's label).
    pub name: [u8; 24],
    /// Layer, or `u32::MAX` if there is none.
    pub layer: u32,
}

/// Result of [`Device::seal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sealed {
    /// The pages are released; the span is asleep.
    Asleep,
    /// The range was written to after the freeze. It is mapped and thawed, the span no longer exists,
    /// and the caller must drop its stale copy.
    Written,
}

/// Work that a device runs on one of its threads when a stream reaches it. The argument is the result
/// of the earlier work: after an error, the contents of copies are undefined.
pub type Callback = Box<dyn FnOnce(Result<(), DeviceError>) + Send + 'static>;

/// A device: pages, streams, events and copies. All methods are any-thread. None may be called in a
/// forked child, which lacks the device's threads.
///
/// Ranges are page-aligned; a misaligned or foreign range is an error, not undefined behaviour.
pub trait Device: Send + Sync + Debug + 'static {
    /// An ordered queue of work. Clones and equal values identify the same queue.
    type Stream: Clone + PartialEq + Send + Sync + Debug + 'static;
    /// A point in a stream. Clones identify the same point.
    type Event: Clone + Send + Sync + Debug + 'static;
    /// Staged pages of one span.
    type Staged: Send + Debug + 'static;

    /// Returns the kind of the device.
    fn kind(&self) -> DeviceKind;
    /// Whether memory is used in stream order, after the calls that queue the work return: the end of a
    /// use is then an event, and accesses to asleep spans are not detected.
    fn is_stream_ordered(&self) -> bool;
    /// Returns the unit of physical mapping, a power of two.
    fn page_bytes(&self) -> usize;
    /// Returns the bytes of a large page, a power of two; those of a page if the device has none.
    fn large_page_bytes(&self) -> usize {
        self.page_bytes()
    }
    /// Returns the reserved range of all addresses of the device (I1). It starts at a multiple of the large page. Its end can fall ([`host::HostDevice::shrink`]).
    fn address_space(&self) -> AddressRange;
    /// Returns the capacity and the current use.
    fn memory_info(&self) -> MemoryInfo;

    /// Runs `work`, entering the device once for all its calls on this thread.
    fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        work()
    }

    /// Maps writable pages with contents `fill` at an unmapped `range`.
    ///
    /// # Errors
    /// `BadRange`; `WrongPages` unless all of it is unmapped; `OutOfMemory` beyond the
    /// capacity; `Refused` with the reason of the system. The range is unchanged.
    fn map(&self, range: AddressRange, fill: Fill) -> Result<(), DeviceError>;
    /// As [`Device::map`], with large pages in `large`, a part of `range`: each aligned one that lies wholly in it is
    /// mapped as one, and can be unmapped or frozen only together with all of its pages. The rest is pages.
    ///
    /// # Errors
    /// As `map`.
    fn map_large(
        &self,
        range: AddressRange,
        large: AddressRange,
        fill: Fill,
    ) -> Result<(), DeviceError> {
        let _ = large;
        self.map(range, fill)
    }
    /// Limits the sum of mapped and parked bytes to `total_bytes` (or the capacity, if less): pages
    /// beyond it are not parked.
    fn limit_parked(&self, total_bytes: u64);
    /// Returns all parked pages to the system. Returns their bytes.
    fn release_parked(&self) -> u64;
    /// Unmaps a mapped `range`; its contents are lost, its addresses stay reserved.
    ///
    /// # Errors
    /// `BadRange`; `WrongPages` unless all of it is mapped, in no span and whole large pages; `Refused` by the
    /// system. The range is unchanged.
    fn unmap(&self, range: AddressRange) -> Result<(), DeviceError>;

    /// Starts putting a mapped `range` to sleep: its bytes can be copied out from now on.
    ///
    /// # Errors
    /// `BadRange`; `WrongPages` unless all of it is mapped, in no span and whole large pages; `TooManySpans` at the
    /// limit; `Refused` by the system. The range is unchanged.
    fn freeze(&self, range: AddressRange, label: SpanLabel) -> Result<SpanId, DeviceError>;
    /// Cancels a frozen span, written to or not: the range is writable, and the span ends.
    ///
    /// # Errors
    /// `WrongState` for a span that is not frozen. `Refused` by the system: the span then
    /// counts as written to; it can be thawed later but not sealed.
    fn thaw(&self, span: SpanId) -> Result<(), DeviceError>;
    /// Removes access to a frozen span and releases its pages, unless it was written to.
    ///
    /// # Errors
    /// `WrongState` for a span that is not frozen; `Refused` by the system; the span is then still
    /// frozen (or written to). If that state cannot be restored, the span stays asleep and staging it
    /// is `WrongState`.
    fn seal(&self, span: SpanId) -> Result<Sealed, DeviceError>;
    /// Prepares pages with contents `fill` for an asleep span. Dropping them releases them; the span
    /// stays asleep.
    ///
    /// # Errors
    /// `WrongState` for a span that is not asleep; `OutOfMemory` beyond the capacity; `Refused`.
    /// The span is still asleep.
    fn stage(&self, span: SpanId, fill: Fill) -> Result<Self::Staged, DeviceError>;
    /// As [`Device::stage`], with large pages as in [`Device::map_large`] in all of the span.
    ///
    /// # Errors
    /// As `stage`.
    fn stage_large(&self, span: SpanId, fill: Fill) -> Result<Self::Staged, DeviceError> {
        self.stage(span, fill)
    }
    /// Returns the address at which staged pages are filled: a separate one, or the span's own on a
    /// stream-ordered device, where users wait for the fill. Valid until publish or drop.
    fn staged_address(&self, staged: &Self::Staged) -> usize;
    /// Maps filled pages at the span's addresses and ends the span. No other contents are ever visible
    /// there.
    ///
    /// # Errors
    /// `Refused` by the system. The pages are returned, to be published or dropped, and the span is
    /// still asleep.
    fn publish(&self, staged: Self::Staged) -> Result<(), (DeviceError, Self::Staged)>;
    /// Ends an asleep span and drops its contents; the range is unmapped.
    ///
    /// # Errors
    /// `WrongState` for a span that is not asleep.
    fn forget(&self, span: SpanId) -> Result<(), DeviceError>;

    /// Allocates at least `bytes` of page-aligned host memory for direct copies. It does not count
    /// against the capacity.
    ///
    /// # Errors
    /// `Refused` by the system.
    fn allocate_pinned(&self, bytes: usize) -> Result<AddressRange, DeviceError>;
    /// Frees memory of `allocate_pinned`.
    ///
    /// # Safety
    /// `range` is from `allocate_pinned` of this device, is freed once, and no copy uses it.
    unsafe fn free_pinned(&self, range: AddressRange);

    /// Creates a stream.
    ///
    /// # Errors
    /// `Refused` if no thread or driver queue is available.
    fn create_stream(&self, name: &str) -> Result<Self::Stream, DeviceError>;
    /// Wraps the caller's stream without owning it. The host device accepts only NULL, the calling
    /// thread: an event recorded on it is complete, and making it wait blocks the caller.
    ///
    /// # Errors
    /// `ForeignStream` for a handle the device cannot use.
    ///
    /// # Safety
    /// `raw` is NULL or a live stream of this device that outlives the wrapper's use.
    unsafe fn foreign_stream(&self, raw: *mut c_void) -> Result<Self::Stream, DeviceError>;
    /// Records a new event on `stream`.
    ///
    /// # Errors
    /// `DeviceLost`; `Refused`.
    fn record(&self, stream: &Self::Stream) -> Result<Self::Event, DeviceError>;
    /// Records an event that [`Device::age`] accepts. May cost more than [`Device::record`].
    ///
    /// # Errors
    /// As `record`.
    fn record_timed(&self, stream: &Self::Stream) -> Result<Self::Event, DeviceError> {
        self.record(stream)
    }
    /// Returns the time since a timed event completed, by the device's clock; `None` if it has not
    /// completed or the device has no clock.
    fn age(&self, event: &Self::Event) -> Option<Duration> {
        let _ = event;
        None
    }
    /// Returns the time between the completion of two timed events; `None` if either has not completed,
    /// if `later` completed first, or if the device has no clock. Cheaper than two ages.
    fn between(&self, earlier: &Self::Event, later: &Self::Event) -> Option<Duration> {
        let _ = (earlier, later);
        None
    }
    /// Makes later work of `stream` wait for `event`.
    ///
    /// # Errors
    /// `DeviceLost`; `Refused`.
    fn wait(&self, stream: &Self::Stream, event: &Self::Event) -> Result<(), DeviceError>;
    /// Whether all work queued on `stream` so far has completed. Cheaper than an event.
    ///
    /// # Errors
    /// `DeviceLost`; `Refused`.
    fn is_idle(&self, stream: &Self::Stream) -> Result<bool, DeviceError> {
        self.query(&self.record(stream)?)
    }
    /// Whether `event` has completed.
    ///
    /// # Errors
    /// `DeviceLost`.
    fn query(&self, event: &Self::Event) -> Result<bool, DeviceError>;
    /// Blocks the caller until `event` has completed.
    ///
    /// # Errors
    /// `DeviceLost`.
    fn synchronize(&self, event: &Self::Event) -> Result<(), DeviceError>;
    /// Blocks the caller until `event` has completed, for at most about `limit`. Returns whether it has. Queries the
    /// event again and again: first without a pause, since most waits are short.
    ///
    /// # Errors
    /// `DeviceLost`.
    fn synchronize_within(
        &self,
        event: &Self::Event,
        limit: Duration,
    ) -> Result<bool, DeviceError> {
        let begin = Instant::now();
        loop {
            // Before the query: the process may be stopped in between.
            let waited = begin.elapsed();
            if self.query(event)? {
                return Ok(true);
            }
            if waited >= limit {
                return Ok(false);
            }
            if waited < UNPAUSED_MAX {
                std::thread::yield_now();
            } else {
                std::thread::sleep(QUERY_PAUSE);
            }
        }
    }
    /// Copies `bytes` from `source` to `destination` in stream order.
    ///
    /// # Errors
    /// `DeviceLost`; `Refused`. Nothing is queued.
    ///
    /// # Safety
    /// Both ranges stay valid until the stream has passed the copy, and do not overlap.
    unsafe fn copy(
        &self,
        destination: usize,
        source: usize,
        bytes: usize,
        stream: &Self::Stream,
    ) -> Result<(), DeviceError>;
    /// Writes zeroes to `bytes` at `start` in stream order.
    ///
    /// # Errors
    /// `DeviceLost`; `Refused`. Nothing is queued.
    ///
    /// # Safety
    /// The range is mapped and the caller's until the stream has passed the call.
    unsafe fn zero(
        &self,
        start: usize,
        bytes: usize,
        stream: &Self::Stream,
    ) -> Result<(), DeviceError>;
    /// Runs `work` on a thread of the device when `stream` reaches it (on the host's NULL stream: now,
    /// on the calling thread), in the order of the stream's callbacks. Later work of the stream may
    /// run before it. `work` may call the device, but must not block on the same stream or panic.
    ///
    /// # Errors
    /// `DeviceLost`; `Refused` if the queue is full and the caller is a thread of the runtime. The
    /// work is dropped without running.
    fn callback(&self, stream: &Self::Stream, work: Callback) -> Result<(), DeviceError>;
}
