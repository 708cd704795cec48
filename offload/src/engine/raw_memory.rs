//! Where addresses become memory: copies, I/O on spans, accumulators.
//!
//! Each function here is called with ranges that the residency rules keep alive: a step's source
//! and destination belong to the region until the step's completion (R1 of `residency`), the block
//! is not reused before `Finish`, and `Finish` comes after every completion.
#![expect(unsafe_code, reason = "device copies and memory by address; nowhere else in the engine")]

use dormouse_device::{AddressRange, Device, DeviceError};

use dormouse_storage::IoMemory;

/// Memory of a step in flight, for I/O.
pub(crate) fn io_memory(start: usize, bytes: usize) -> IoMemory {
    // SAFETY: R1: frozen pages, staged pages or the host copy of a region whose step is in flight
    // stay until its completion, and only that step touches them; a write to frozen pages is
    // found by seal, which throws the copy away.
    unsafe { IoMemory::new(AddressRange::new(start, bytes)) }
}

/// Memory of a slab, for the file tier to know.
pub(crate) fn slab_memory(range: AddressRange) -> IoMemory {
    // SAFETY: a slab stays from when the pool says that it is pinned until it says that it leaves;
    // what is in it is used by steps in flight alone (R1), each with its own range.
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

/// Zeroes fresh memory of ours in stream order.
pub(crate) fn zero<D: Device>(
    device: &D,
    start: usize,
    bytes: usize,
    stream: &D::Stream,
) -> Result<(), DeviceError> {
    // SAFETY: a block of `bytes` just allocated for that stream: nobody else knows its address yet,
    // and it is freed in the stream's order.
    unsafe { device.zero(start, bytes, stream) }
}
