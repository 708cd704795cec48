//! Memory by address: copies, I/O on spans, accumulators.
//!
//! Callers pass ranges that the residency rules keep alive: a step's source and destination belong to
//! the region until the step completes (R1 of `residency`), and `Finish`, after which the block may be
//! reused, comes after every completion.
#![expect(unsafe_code, reason = "device copies and memory by address; nowhere else in the engine")]

use dormouse_device::{AddressRange, Device, DeviceError};

use dormouse_storage::IoMemory;

/// Returns the memory of a step in flight, for I/O.
pub(crate) fn io_memory(start: usize, bytes: usize) -> IoMemory {
    // SAFETY: R1: frozen pages, staged pages or the host copy of a region whose step is in flight stay
    // until its completion, and only that step touches them; seal finds a write to frozen pages and
    // discards the copy.
    unsafe { IoMemory::new(AddressRange::new(start, bytes)) }
}

/// Returns the memory of a slab, to be registered with the file tier.
pub(crate) fn slab_memory(range: AddressRange) -> IoMemory {
    // SAFETY: a slab stays between the pool's `on_pin` and `on_unpin`; its bytes are used by steps in
    // flight only (R1), each with its own range.
    unsafe { IoMemory::new(range) }
}

/// Queues a copy of a step in flight.
pub(crate) fn copy<D: Device>(
    device: &D,
    destination: usize,
    source: usize,
    bytes: usize,
    stream: &D::Stream,
) -> Result<(), DeviceError> {
    // SAFETY: R1: both ends belong to a step in flight (or to a stash call that waits for the
    // copy) until the stream has passed it; they are different allocations.
    unsafe { device.copy(destination, source, bytes, stream) }
}

/// Copies host memory to a caller's.
pub(crate) fn copy_on_host(destination: usize, source: usize, bytes: usize) {
    let source: *const u8 = std::ptr::with_exposed_provenance(source);
    let destination: *mut u8 = std::ptr::with_exposed_provenance_mut(destination);
    // SAFETY: the source is a bounce buffer of the call, or a valid host copy that the call has shared; the
    // destination is lent by the caller of `Engine::read_asleep`.
    unsafe { std::ptr::copy_nonoverlapping(source, destination, bytes) };
}

/// Zeroes a fresh block in stream order.
pub(crate) fn zero<D: Device>(
    device: &D,
    start: usize,
    bytes: usize,
    stream: &D::Stream,
) -> Result<(), DeviceError> {
    // SAFETY: a block of `bytes` just allocated for that stream: its address is not shared yet, and it is
    // freed in the stream's order.
    unsafe { device.zero(start, bytes, stream) }
}
