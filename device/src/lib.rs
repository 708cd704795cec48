//! What memory, pages, streams, events and copies are.
//!
//! This room says what the runtime may ask of a device, as one [`Device`] trait, and holds the
//! devices that answer. It is not an allocator (no caching, no reuse: that is `alloc`) and knows
//! nothing of tensors, layers or tiers (that is `offload`).
//!
//! # Glossary
//! - *page*: the unit of physical mapping ([`Device::page_bytes`]).
//! - *range*: page-aligned device virtual addresses ([`AddressRange`]).
//! - *mapped*: a range with pages behind it; *unmapped*: addresses reserved, nobody's access.
//! - *span*: a mapped range on its way to sleep, asleep, or waking ([`SpanId`]).
//! - *staged*: pages prepared aside for an asleep span, to be filled before anybody sees them.
//! - *parked*: pages between two owners, kept by the device for the next range that is filled.
//!
//! # Life of a span
//! ```text
//!            freeze             seal                 stage            publish
//!   mapped ─────────► frozen ─────────► asleep ─────────► staged ─────────► mapped
//!              ◄─ thaw ──┘ └─ written:     ▲                 │
//!                             mapped       └──── discard ────┘
//! ```
//!
//! # Invariants
//! - **I1** Every address the device hands out lies in [`Device::address_space`].
//! - **I2** No thread ever reads bytes other than the owner's from a range: access ends before pages
//!   leave, they come back with their bytes, and a staged range is filled before it is published.
//! - **I3** A span is in exactly one state, and each transition consumes the one before.
//! - **I4** A touch of an asleep span is loud; a write to a frozen one cancels the sleep, never
//!   loses the write. (A thread's touch: a system call given such an address fails by itself,
//!   with `EFAULT` on the host.) On a stream-ordered device a touch of an asleep span loses the
//!   device, and a write to a frozen one is not seen: whoever freezes has waited for all writers.
//! - **I5** Mapped bytes never exceed the capacity, and parked pages make way for them.

mod accounts;
mod error;
mod numa;
mod page_states;
mod pinned;
mod priority;
mod range;
mod worker;

pub mod cuda;
pub mod host;
#[cfg(any(feature = "conformance", feature = "faults"))]
mod testing;

pub use error::{DeviceError, Operation};
pub use pinned::PinnedMemory;
pub use range::AddressRange;
#[cfg(any(feature = "conformance", feature = "faults"))]
pub use testing::Hold;
#[cfg(feature = "conformance")]
pub use testing::conformance;
#[cfg(feature = "faults")]
pub use testing::faulty;
pub use worker::{QUEUE_LEN_MAX, enlist, is_ours, without_waiting};

use std::ffi::c_void;
use std::fmt::Debug;
use std::time::Duration;

/// Which device answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// The CPU memory of this process, managed as a device.
    Host,
    /// An NVIDIA GPU through the CUDA driver.
    Cuda,
}

/// What the device holds now, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Physical bytes the device may map at most.
    pub capacity_bytes: u64,
    /// Physical bytes mapped now.
    pub mapped_bytes: u64,
    /// Bytes staged aside now (counted in `mapped_bytes` as well).
    pub staged_bytes: u64,
    /// Bytes parked now (in neither of these).
    pub parked_bytes: u64,
}

/// What pages are to hold when they are handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Whatever an earlier owner in this process left: the cheapest.
    Any,
    /// Zeroes.
    Zero,
}

/// Names one span from freeze to publish or forget. Never dereferenced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanId(pub u32);

/// Whom a stray touch of a span should be blamed on: shown in the message of design §4.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpanLabel {
    /// Owner's name, zero-padded UTF-8 (a tag's name, or the node's label).
    pub name: [u8; 24],
    /// Layer, or `u32::MAX` where there is none.
    pub layer: u32,
}

/// What [`Device::seal`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sealed {
    /// Pages are gone; the span is asleep.
    Asleep,
    /// Somebody wrote to the range after it was frozen. It is mapped and thawed, the span is
    /// gone, and the copy taken of it is stale and must be dropped.
    Written,
}

/// Work a device runs on one of its own threads when a stream has reached it. It is told how the
/// work before it ended: where that is an error, what the copies before it moved is unknown.
pub type Callback = Box<dyn FnOnce(Result<(), DeviceError>) + Send + 'static>;

/// A device: pages, streams, events and copies. All methods are any-thread. None may be called in a
/// forked child: the device's threads are not there.
///
/// Ranges are page-aligned; a misaligned or foreign range is an error, never undefined behaviour.
pub trait Device: Send + Sync + Debug + 'static {
    /// An ordered queue of work. Clones name the same queue; so do those that are equal.
    type Stream: Clone + PartialEq + Send + Sync + Debug + 'static;
    /// A point in a stream. Clones name the same point.
    type Event: Clone + Send + Sync + Debug + 'static;
    /// Pages prepared aside for one span.
    type Staged: Send + Debug + 'static;

    /// Which device this is.
    fn kind(&self) -> DeviceKind;
    /// Whether memory is used in the order of streams, later than the calls that ask for it: the
    /// end of a use is then an event, not the return of a call, and nobody watches for touches.
    fn is_stream_ordered(&self) -> bool;
    /// The unit of physical mapping, a power of two.
    fn page_bytes(&self) -> usize;
    /// The one reserved range that every address handed out lies in (I1).
    fn address_space(&self) -> AddressRange;
    /// Capacity and use now.
    fn memory_info(&self) -> MemoryInfo;

    /// Does `work`. What calls of the device need made ready for them is made ready once for all of
    /// those that it makes on this thread.
    fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        work()
    }

    /// Puts writable pages that hold `fill` behind an unmapped `range`.
    ///
    /// # Errors
    /// `BadRange`; `WrongPages` unless all of it is unmapped; `OutOfMemory` past the capacity;
    /// `Refused` where the system refuses, naming what it said. The range is then as before.
    fn map(&self, range: AddressRange, fill: Fill) -> Result<(), DeviceError>;
    /// From here on pages are parked only as long as mapped and parked bytes come to no more than
    /// `total_bytes` (or the capacity, if that is less). A budget below the capacity says so.
    fn limit_parked(&self, total_bytes: u64);
    /// Gives every parked page back to the system. Returns their bytes.
    fn release_parked(&self) -> u64;
    /// Takes the pages of a mapped `range` away; its bytes are lost, its addresses stay reserved.
    ///
    /// # Errors
    /// `BadRange`; `WrongPages` unless all of it is mapped and in no span; `Refused` by the system.
    /// The range is then as before.
    fn unmap(&self, range: AddressRange) -> Result<(), DeviceError>;

    /// Starts putting a mapped `range` to sleep: from here its bytes can be copied out.
    ///
    /// # Errors
    /// `BadRange`; `WrongPages` unless all of it is mapped and in no span; `TooManySpans` at the
    /// named limit; `Refused` by the system. The range is then as before.
    fn freeze(&self, range: AddressRange, label: SpanLabel) -> Result<SpanId, DeviceError>;
    /// Gives up on a frozen span, written to or not: writable again, nothing lost, the span gone.
    ///
    /// # Errors
    /// `WrongState` for a span that is not frozen. `Refused` by the system: the span is then as
    /// if written to, so that it can be thawed later but never sealed.
    fn thaw(&self, span: SpanId) -> Result<(), DeviceError>;
    /// Takes access to a frozen span and its pages away, unless it was written to meanwhile.
    ///
    /// # Errors
    /// `WrongState` for a span that is not frozen; `Refused` by the system, the span then still
    /// frozen (or written to). Where that cannot be had back the span is asleep for good: staging it
    /// is `WrongState`.
    fn seal(&self, span: SpanId) -> Result<Sealed, DeviceError>;
    /// Prepares pages aside that hold `fill`, for an asleep span. Staged pages that are dropped
    /// without publish are discarded.
    ///
    /// # Errors
    /// `WrongState` for a span that is not asleep; `OutOfMemory` past the capacity; `Refused`. The
    /// span is then still asleep.
    fn stage(&self, span: SpanId, fill: Fill) -> Result<Self::Staged, DeviceError>;
    /// Where staged pages are filled: aside, or, on a stream-ordered device, at the span's own
    /// addresses, for whoever uses them waits for the fill. Valid until publish or discard.
    fn staged_address(&self, staged: &Self::Staged) -> usize;
    /// Puts filled pages behind the span's own addresses; the span is gone. Nobody ever sees other
    /// bytes there than these.
    ///
    /// # Errors
    /// `Refused` by the system; the pages come back to the caller, to be published or discarded,
    /// and the span is still asleep.
    fn publish(&self, staged: Self::Staged) -> Result<(), (DeviceError, Self::Staged)>;
    /// Gives staged pages up; the span is asleep as before.
    fn discard(&self, staged: Self::Staged);
    /// Ends an asleep span whose bytes are not wanted any more; the range is unmapped.
    ///
    /// # Errors
    /// `WrongState` for a span that is not asleep.
    fn forget(&self, span: SpanId) -> Result<(), DeviceError>;

    /// Allocates page-aligned host memory that copies may use directly; at least `bytes`. It counts
    /// against no capacity.
    ///
    /// # Errors
    /// `Refused` by the system.
    fn allocate_pinned(&self, bytes: usize) -> Result<AddressRange, DeviceError>;
    /// Frees what `allocate_pinned` gave.
    ///
    /// # Safety
    /// `range` came from `allocate_pinned` of this device, is freed once, and no copy uses it.
    unsafe fn free_pinned(&self, range: AddressRange);

    /// Creates a stream of our own.
    ///
    /// # Errors
    /// `Refused` where a thread or driver queue cannot be had.
    fn create_stream(&self, name: &str) -> Result<Self::Stream, DeviceError>;
    /// Wraps the caller's stream without owning it. On the host device only NULL, the calling
    /// thread, exists: recording on it is "now", making it wait blocks the caller.
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
    /// As [`Device::record`], for an event whose [`Device::age`] will be asked. It may cost more.
    ///
    /// # Errors
    /// As `record`.
    fn record_timed(&self, stream: &Self::Stream) -> Result<Self::Event, DeviceError> {
        self.record(stream)
    }
    /// How long ago a timed event completed, as the device's own clock has it; `None` where it has
    /// not, or the device has no clock of its own.
    fn age(&self, event: &Self::Event) -> Option<Duration> {
        let _ = event;
        None
    }
    /// How long after `earlier` `later` completed, both timed; `None` where either has not, where it
    /// was before, or where the device has no clock of its own. Cheaper than two ages.
    fn between(&self, earlier: &Self::Event, later: &Self::Event) -> Option<Duration> {
        let _ = (earlier, later);
        None
    }
    /// Makes later work of `stream` wait for `event`.
    ///
    /// # Errors
    /// `DeviceLost`; `Refused`.
    fn wait(&self, stream: &Self::Stream, event: &Self::Event) -> Result<(), DeviceError>;
    /// Whether all work that `stream` had when it was asked about is over. Cheaper than an event,
    /// and says so at once of a stream with nothing to do.
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
    /// Copies `bytes` from `source` to `destination` in stream order.
    ///
    /// # Errors
    /// `DeviceLost`; `Refused`. Nothing was queued then.
    ///
    /// # Safety
    /// Both ranges are valid for the copy from now until the stream has passed it, and do not
    /// overlap.
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
    /// `DeviceLost`; `Refused`. Nothing was queued then.
    ///
    /// # Safety
    /// The range is mapped and the caller's from now until the stream has passed it.
    unsafe fn zero(
        &self,
        start: usize,
        bytes: usize,
        stream: &Self::Stream,
    ) -> Result<(), DeviceError>;
    /// Runs `work` on a thread of the device when `stream` has reached it (on the host's NULL
    /// stream: now, on the caller's), in the order of the stream's callbacks. Later work of the
    /// stream need not wait for it. It may call the device, but must not block on the same stream,
    /// nor panic.
    ///
    /// # Errors
    /// `DeviceLost`; `Refused` where a thread of the device finds a queue full. The work is dropped
    /// unrun.
    fn callback(&self, stream: &Self::Stream, work: Callback) -> Result<(), DeviceError>;
}
