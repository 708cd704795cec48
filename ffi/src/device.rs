//! The device of a heap: the host's memory or a GPU, whichever was asked for.
//!
//! The rooms below are written for any one device; here is the only place where a process has
//! several kinds of them. A stream, event or staged page of one kind is refused by the other.

use std::ffi::c_void;
use std::time::Duration;

use dormouse_device::cuda::{self, CudaDevice};
use dormouse_device::host::{self, HostDevice};
use dormouse_device::{
    AddressRange, Callback, Device, DeviceError, DeviceKind, Fill, MemoryInfo, Operation, Sealed,
    SpanId, SpanLabel,
};
use dormouse_kernels::{DType, MergeArgs};
use dormouse_offload::{Compute, OffloadError};

/// A device of either kind.
#[derive(Debug)]
pub(crate) enum AnyDevice {
    Host(HostDevice),
    Cuda(CudaDevice),
}

/// A stream of either kind.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum AnyStream {
    Host(host::Stream),
    Cuda(cuda::Stream),
}

/// An event of either kind.
#[derive(Clone, Debug)]
pub(crate) enum AnyEvent {
    Host(host::Event),
    Cuda(cuda::Event),
}

/// Staged pages of either kind.
#[derive(Debug)]
pub(crate) enum AnyStaged {
    Host(host::Staged),
    Cuda(cuda::Staged),
}

/// Something of one kind given to a device of the other: a defect of ours, said and survived.
fn mixed(operation: Operation) -> DeviceError {
    DeviceError::Refused {
        operation,
        start: 0,
        bytes: 0,
        code: libc::EXDEV,
        reason: "it belongs to a device of another kind".to_owned(),
    }
}

/// `$call` on whichever device there is.
macro_rules! either {
    ($self:ident, $device:ident => $call:expr) => {
        match $self {
            Self::Host($device) => $call,
            Self::Cuda($device) => $call,
        }
    };
}

/// `$call` on the device and `$thing`, where both are of one kind.
macro_rules! same {
    ($self:ident, $thing:expr, $kind:ident, $operation:ident, ($device:ident, $it:ident) => $call:expr) => {
        match ($self, $thing) {
            (Self::Host($device), $kind::Host($it)) => $call,
            (Self::Cuda($device), $kind::Cuda($it)) => $call,
            _ => Err(mixed(Operation::$operation).into()),
        }
    };
}

impl AnyDevice {
    /// Whether a GPU's stream is being captured into a graph.
    pub(crate) fn is_captured(&self, stream: &AnyStream) -> Result<bool, DeviceError> {
        match (self, stream) {
            (Self::Cuda(device), AnyStream::Cuda(stream)) => device.is_captured(stream),
            _ => Ok(false),
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
        match self {
            Self::Host(device) => device.stage(span, fill).map(AnyStaged::Host),
            Self::Cuda(device) => device.stage(span, fill).map(AnyStaged::Cuda),
        }
    }

    fn staged_address(&self, staged: &AnyStaged) -> usize {
        match (self, staged) {
            (Self::Host(device), AnyStaged::Host(staged)) => device.staged_address(staged),
            (Self::Cuda(device), AnyStaged::Cuda(staged)) => device.staged_address(staged),
            _ => 0,
        }
    }

    fn publish(&self, staged: AnyStaged) -> Result<(), (DeviceError, AnyStaged)> {
        match (self, staged) {
            (Self::Host(device), AnyStaged::Host(staged)) => {
                device.publish(staged).map_err(|(error, staged)| (error, AnyStaged::Host(staged)))
            }
            (Self::Cuda(device), AnyStaged::Cuda(staged)) => {
                device.publish(staged).map_err(|(error, staged)| (error, AnyStaged::Cuda(staged)))
            }
            (_, staged) => Err((mixed(Operation::Publish), staged)),
        }
    }

    fn forget(&self, span: SpanId) -> Result<(), DeviceError> {
        either!(self, device => device.forget(span))
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<AddressRange, DeviceError> {
        either!(self, device => device.allocate_pinned(bytes))
    }

    unsafe fn free_pinned(&self, range: AddressRange) {
        // SAFETY: the caller's, of the same device.
        either!(self, device => unsafe { device.free_pinned(range) });
    }

    fn create_stream(&self, name: &str) -> Result<AnyStream, DeviceError> {
        match self {
            Self::Host(device) => device.create_stream(name).map(AnyStream::Host),
            Self::Cuda(device) => device.create_stream(name).map(AnyStream::Cuda),
        }
    }

    unsafe fn foreign_stream(&self, raw: *mut c_void) -> Result<AnyStream, DeviceError> {
        match self {
            // SAFETY: the caller's, of the same device.
            Self::Host(device) => unsafe { device.foreign_stream(raw) }.map(AnyStream::Host),
            // SAFETY: the caller's, of the same device.
            Self::Cuda(device) => unsafe { device.foreign_stream(raw) }.map(AnyStream::Cuda),
        }
    }

    fn record(&self, stream: &AnyStream) -> Result<AnyEvent, DeviceError> {
        match (self, stream) {
            (Self::Host(device), AnyStream::Host(stream)) => {
                device.record(stream).map(AnyEvent::Host)
            }
            (Self::Cuda(device), AnyStream::Cuda(stream)) => {
                device.record(stream).map(AnyEvent::Cuda)
            }
            _ => Err(mixed(Operation::Event)),
        }
    }

    fn record_timed(&self, stream: &AnyStream) -> Result<AnyEvent, DeviceError> {
        match (self, stream) {
            (Self::Host(device), AnyStream::Host(stream)) => {
                device.record_timed(stream).map(AnyEvent::Host)
            }
            (Self::Cuda(device), AnyStream::Cuda(stream)) => {
                device.record_timed(stream).map(AnyEvent::Cuda)
            }
            _ => Err(mixed(Operation::Event)),
        }
    }

    fn age(&self, event: &AnyEvent) -> Option<Duration> {
        match (self, event) {
            (Self::Host(device), AnyEvent::Host(event)) => device.age(event),
            (Self::Cuda(device), AnyEvent::Cuda(event)) => device.age(event),
            _ => None,
        }
    }

    fn between(&self, earlier: &AnyEvent, later: &AnyEvent) -> Option<Duration> {
        match (self, earlier, later) {
            (Self::Host(device), AnyEvent::Host(earlier), AnyEvent::Host(later)) => {
                device.between(earlier, later)
            }
            (Self::Cuda(device), AnyEvent::Cuda(earlier), AnyEvent::Cuda(later)) => {
                device.between(earlier, later)
            }
            _ => None,
        }
    }

    fn wait(&self, stream: &AnyStream, event: &AnyEvent) -> Result<(), DeviceError> {
        match (self, stream, event) {
            (Self::Host(device), AnyStream::Host(stream), AnyEvent::Host(event)) => {
                device.wait(stream, event)
            }
            (Self::Cuda(device), AnyStream::Cuda(stream), AnyEvent::Cuda(event)) => {
                device.wait(stream, event)
            }
            _ => Err(mixed(Operation::Event)),
        }
    }

    fn is_idle(&self, stream: &AnyStream) -> Result<bool, DeviceError> {
        same!(self, stream, AnyStream, Event, (device, stream) => device.is_idle(stream))
    }

    fn query(&self, event: &AnyEvent) -> Result<bool, DeviceError> {
        same!(self, event, AnyEvent, Event, (device, event) => device.query(event))
    }

    fn synchronize(&self, event: &AnyEvent) -> Result<(), DeviceError> {
        same!(self, event, AnyEvent, Event, (device, event) => device.synchronize(event))
    }

    unsafe fn copy(
        &self,
        destination: usize,
        source: usize,
        bytes: usize,
        stream: &AnyStream,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's, of the same device.
        same!(self, stream, AnyStream, Copy, (device, stream) => unsafe {
            device.copy(destination, source, bytes, stream)
        })
    }

    unsafe fn zero(
        &self,
        start: usize,
        bytes: usize,
        stream: &AnyStream,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's, of the same device.
        same!(self, stream, AnyStream, Zero, (device, stream) => unsafe {
            device.zero(start, bytes, stream)
        })
    }

    fn callback(&self, stream: &AnyStream, work: Callback) -> Result<(), DeviceError> {
        same!(self, stream, AnyStream, Callback, (device, stream) => device.callback(stream, work))
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
        // SAFETY: the caller's, of the same device.
        same!(self, stream, AnyStream, Launch, (device, stream) => unsafe {
            device.accumulate(accumulator, source, elems, dtype, stream)
        })
    }

    unsafe fn merge_lse(&self, args: &MergeArgs, stream: &AnyStream) -> Result<(), OffloadError> {
        // SAFETY: the caller's, of the same device.
        same!(self, stream, AnyStream, Launch, (device, stream) => unsafe {
            device.merge_lse(args, stream)
        })
    }
}
