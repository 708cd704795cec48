//! The pinned host pool: exact pieces of pinned memory, under a cap.
//!
//! Pinning takes a GPU's driver a millisecond for a few megabytes, and unpinning waits for the GPU.
//! Memory is therefore pinned in *slabs*, divided for each request, and kept.
//!
//! # Path of a request
//! ```text
//!   open range of a slab of its kind ──► idle slab ──► [slow lock] a new slab; idle ones are
//!            (no device call)                              unpinned to stay under the cap
//!                                                                      │ full
//!                                                                any free range
//! ```
//! A small request gets a piece of a slab whose size grows with the pool. A large one gets a slab of
//! exactly its size, which serves other requests when idle, if that leaves little of it open (`policy`).
//!
//! # Invariants
//! - **P1** Allocated pieces never overlap and are aligned to [`UNIT_BYTES`].
//! - **P2** Pinned bytes, including those being pinned, exceed the cap only by bounce buffers, or after
//!   the cap was lowered. The cap is checked before the device call. (Each slab may exceed it by less
//!   than a system page if that is larger than [`UNIT_BYTES`].)
//! - **P3** A request that fits a free range, or fits under the cap with every idle slab released, is
//!   not refused, unless a [`PinLimit`] refuses its slab then; memory that bounce buffers hold beyond the cap serves no
//!   other request. Bounce buffers are not asked for.
//! - **P4** `free` takes one short lock and calls nothing that waits; if memory is kept it does not call
//!   the device.
//! - **P5** No lock that a free takes is held during a device call.

mod background;
mod error;
mod policy;
mod pool;
mod shared;
mod slab;
mod slabs;

#[cfg(test)]
mod tests;

pub use error::PinnedError;
pub use pool::{PinMode, PinnedBuffer, PinnedPool, PinnedUsage};
pub use slab::{PinLimit, SlabObserver};

/// Unit of sizes and alignment in bytes, as direct I/O requires.
pub const UNIT_BYTES: usize = 4096;
/// Largest cap of a pool, limited by its 32-bit unit counts.
pub const CAP_BYTES_MAX: u64 = (u32::MAX / 4) as u64 * UNIT_BYTES as u64;

/// Settings of a [`PinnedPool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedConfig {
    /// Limit of the pinned bytes, used or not. Only bounce buffers may exceed it. 0: only bounce buffers
    /// are allocated. Clamped to [`CAP_BYTES_MAX`].
    pub cap_bytes: u64,
    /// Whether freed memory stays pinned for the next request.
    pub keeps: bool,
    /// Whether a background thread pins memory in advance. Requires `keeps`.
    pub prepares: bool,
}

impl PinnedConfig {
    /// Creates the default configuration: if pinning `costs` time on the device, memory is kept and pinned
    /// in advance.
    #[must_use]
    pub const fn new(cap_bytes: u64, costs: bool) -> Self {
        Self { cap_bytes, keeps: costs, prepares: costs }
    }
}
