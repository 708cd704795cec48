//! The device of a heap: the host or a GPU.
//!
//! The crates below are generic over one device; only this module mixes two kinds. A stream, event or
//! staged page of one kind is refused by a device of the other.

use std::ffi::c_void;
use std::time::Duration;

use dormouse_device::cuda::{self, CudaDevice};
use dormouse_device::host::{self, HostDevice};
use dormouse_device::{
    AddressRange, Callback, Device, DeviceError, DeviceKind, Fill, MemoryInfo, Operation, Sealed,
    SpanId, SpanLabel,
};
use dormouse_kernels::{DType, MergeArgs};
use dormouse_offload::{Compute, OffloadError, merge_lse};

/// Maximum number of GPUs of one process.
pub(crate) const GPUS_MAX: usize = 64;

/// A value of either kind of device.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Any<H, C> {
    Host(H),
    Cuda(C),
}

pub(crate) type AnyDevice = Any<HostDevice, CudaDevice>;
pub(crate) type AnyStream = Any<host::Stream, cuda::Stream>;
pub(crate) type AnyEvent = Any<host::Event, cuda::Event>;
pub(crate) type AnyStaged = Any<host::Staged, cuda::Staged>;

/// The error for values of different kinds, a defect of this crate.
fn wrong_kind(operation: Operation) -> DeviceError {
    DeviceError::Refused {
        operation,
        start: 0,
        bytes: 0,
        code: libc::EXDEV,
        reason: "it belongs to a device of another kind".to_owned(),
    }
}

/// `$call` on the device of `$self` and on `$thing`s of the same kind; `$otherwise` if a kind differs.
/// With `=> Any`, the result is of that kind too.
macro_rules! either {
    ($self:ident, $device:ident => $call:expr) => {
        match $self {
            Any::Host($device) => $call,
            Any::Cuda($device) => $call,
        }
    };
    ($self:ident, $device:ident => $call:expr => Any) => {
        match $self {
            Any::Host($device) => $call.map(Any::Host),
            Any::Cuda($device) => $call.map(Any::Cuda),
        }
    };
    ($self:ident, $($thing:ident),+; $device:ident => $call:expr, else $otherwise:expr) => {
        match ($self, $($thing),+) {
            (Any::Host($device), $(Any::Host($thing)),+) => $call,
            (Any::Cuda($device), $(Any::Cuda($thing)),+) => $call,
            _ => $otherwise,
        }
    };
    ($self:ident, $thing:ident; $device:ident => $call:expr => Any, else $otherwise:expr) => {
        match ($self, $thing) {
            (Any::Host($device), Any::Host($thing)) => $call.map(Any::Host),
            (Any::Cuda($device), Any::Cuda($thing)) => $call.map(Any::Cuda),
            _ => $otherwise,
        }
    };
}

impl AnyDevice {
    /// Lets the GPU `peer` access this one's pages. On the host there is nothing to do.
    pub(crate) fn add_peer(&self, peer: &Self) -> Result<(), DeviceError> {
        match (self, peer) {
            (Any::Cuda(device), Any::Cuda(peer)) => device.add_peer(peer),
            _ => Ok(()),
        }
    }

    /// Returns whether a GPU's stream is being captured into a graph.
    pub(crate) fn is_captured(&self, stream: &AnyStream) -> Result<bool, DeviceError> {
        match (self, stream) {
            (Any::Cuda(device), Any::Cuda(stream)) => device.is_captured(stream),
            _ => Ok(false),
        }
    }

    /// Merges two partial attention outputs on a GPU.
    ///
    /// # Safety
    /// As [`merge_lse`].
    pub(crate) unsafe fn merge_lse(
        &self,
        args: &MergeArgs,
        stream: &AnyStream,
    ) -> Result<(), OffloadError> {
        match (self, stream) {
            // SAFETY: the caller's contract, for the same device.
            (Any::Cuda(device), Any::Cuda(stream)) => unsafe { merge_lse(device, args, stream) },
            _ => Err(wrong_kind(Operation::Launch).into()),
        }
    }
}

impl Device for AnyDevice {
    type Stream = AnyStream;
    type Event = AnyEvent;
    type Staged = AnyStaged;

    fn kind(&self) -> DeviceKind {
        either!(self, device => device.kind())
    }

    fn is_stream_ordered(&self) -> bool {
        either!(self, device => device.is_stream_ordered())
    }

    fn page_bytes(&self) -> usize {
        either!(self, device => device.page_bytes())
    }

    fn large_page_bytes(&self) -> usize {
        either!(self, device => device.large_page_bytes())
    }

    fn address_space(&self) -> AddressRange {
        either!(self, device => device.address_space())
    }

    fn memory_info(&self) -> MemoryInfo {
        either!(self, device => device.memory_info())
    }

    fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        either!(self, device => device.during(work))
    }

    fn map(&self, range: AddressRange, fill: Fill) -> Result<(), DeviceError> {
        either!(self, device => device.map(range, fill))
    }

    fn map_large(
        &self,
        range: AddressRange,
        large: AddressRange,
        fill: Fill,
    ) -> Result<(), DeviceError> {
        either!(self, device => device.map_large(range, large, fill))
    }

    fn limit_parked(&self, total_bytes: u64) {
        either!(self, device => device.limit_parked(total_bytes));
    }

    fn release_parked(&self) -> u64 {
        either!(self, device => device.release_parked())
    }

    fn unmap(&self, range: AddressRange) -> Result<(), DeviceError> {
        either!(self, device => device.unmap(range))
    }

    fn freeze(&self, range: AddressRange, label: SpanLabel) -> Result<SpanId, DeviceError> {
        either!(self, device => device.freeze(range, label))
    }

    fn thaw(&self, span: SpanId) -> Result<(), DeviceError> {
        either!(self, device => device.thaw(span))
    }

    fn seal(&self, span: SpanId) -> Result<Sealed, DeviceError> {
        either!(self, device => device.seal(span))
    }

    fn stage(&self, span: SpanId, fill: Fill) -> Result<AnyStaged, DeviceError> {
        either!(self, device => device.stage(span, fill) => Any)
    }

    fn stage_large(&self, span: SpanId, fill: Fill) -> Result<AnyStaged, DeviceError> {
        either!(self, device => device.stage_large(span, fill) => Any)
    }

    fn staged_address(&self, staged: &AnyStaged) -> usize {
        either!(self, staged; device => device.staged_address(staged), else 0)
    }

    fn publish(&self, staged: AnyStaged) -> Result<(), (DeviceError, AnyStaged)> {
        match (self, staged) {
            (Any::Host(device), Any::Host(staged)) => {
                device.publish(staged).map_err(|(error, staged)| (error, Any::Host(staged)))
            }
            (Any::Cuda(device), Any::Cuda(staged)) => {
                device.publish(staged).map_err(|(error, staged)| (error, Any::Cuda(staged)))
            }
            (_, staged) => Err((wrong_kind(Operation::Publish), staged)),
        }
    }

    fn forget(&self, span: SpanId) -> Result<(), DeviceError> {
        either!(self, device => device.forget(span))
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<AddressRange, DeviceError> {
        either!(self, device => device.allocate_pinned(bytes))
    }

    unsafe fn free_pinned(&self, range: AddressRange) {
        // SAFETY: the caller's contract, for the same device.
        either!(self, device => unsafe { device.free_pinned(range) });
    }

    fn create_stream(&self, name: &str) -> Result<AnyStream, DeviceError> {
        either!(self, device => device.create_stream(name) => Any)
    }

    unsafe fn foreign_stream(&self, raw: *mut c_void) -> Result<AnyStream, DeviceError> {
        // SAFETY: the caller's contract, for the same device.
        either!(self, device => unsafe { device.foreign_stream(raw) } => Any)
    }

    fn record(&self, stream: &AnyStream) -> Result<AnyEvent, DeviceError> {
        either!(self, stream; device => device.record(stream) => Any, else Err(wrong_kind(Operation::Event)))
    }

    fn record_timed(&self, stream: &AnyStream) -> Result<AnyEvent, DeviceError> {
        either!(self, stream; device => device.record_timed(stream) => Any, else Err(wrong_kind(Operation::Event)))
    }

    fn age(&self, event: &AnyEvent) -> Option<Duration> {
        either!(self, event; device => device.age(event), else None)
    }

    fn between(&self, earlier: &AnyEvent, later: &AnyEvent) -> Option<Duration> {
        either!(self, earlier, later; device => device.between(earlier, later), else None)
    }

    fn wait(&self, stream: &AnyStream, event: &AnyEvent) -> Result<(), DeviceError> {
        either!(self, stream, event; device => device.wait(stream, event), else Err(wrong_kind(Operation::Event)))
    }

    fn is_idle(&self, stream: &AnyStream) -> Result<bool, DeviceError> {
        either!(self, stream; device => device.is_idle(stream), else Err(wrong_kind(Operation::Event)))
    }

    fn query(&self, event: &AnyEvent) -> Result<bool, DeviceError> {
        either!(self, event; device => device.query(event), else Err(wrong_kind(Operation::Event)))
    }

    fn synchronize(&self, event: &AnyEvent) -> Result<(), DeviceError> {
        either!(self, event; device => device.synchronize(event), else Err(wrong_kind(Operation::Event)))
    }

    unsafe fn copy(
        &self,
        destination: usize,
        source: usize,
        bytes: usize,
        stream: &AnyStream,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's contract, for the same device.
        either!(self, stream; device => unsafe { device.copy(destination, source, bytes, stream) },
            else Err(wrong_kind(Operation::Copy)))
    }

    unsafe fn zero(
        &self,
        start: usize,
        bytes: usize,
        stream: &AnyStream,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's contract, for the same device.
        either!(self, stream; device => unsafe { device.zero(start, bytes, stream) },
            else Err(wrong_kind(Operation::Zero)))
    }

    fn callback(&self, stream: &AnyStream, work: Callback) -> Result<(), DeviceError> {
        either!(self, stream; device => device.callback(stream, work),
            else Err(wrong_kind(Operation::Callback)))
    }
}

impl Compute for AnyDevice {
    unsafe fn accumulate(
        &self,
        accumulator: usize,
        source: usize,
        elems: usize,
        dtype: DType,
        stream: &AnyStream,
    ) -> Result<(), OffloadError> {
        either!(self, stream;
            // SAFETY: the caller's contract, for the same device.
            device => unsafe { device.accumulate(accumulator, source, elems, dtype, stream) },
            else Err(wrong_kind(Operation::Launch).into()))
    }
}
