//! The pinned host pool: exact pieces of pinned memory, under a cap.
//!
//! Pinning takes a GPU's driver a millisecond for a few megabytes, and unpinning waits for the GPU.
//! Memory is therefore pinned in *slabs*, divided for each request, and kept.
//!
//! # Path of a request
//! ```text
//!   open range of a slab of its kind ──► idle slab ──► [slow lock] readers seen done ──► a new slab,
//!            (no device call)                                idle ones making way under the cap
//!                                                                                          │
//!                              any range at all ◄── wait for readers (if allowed) ◄────────┘ full
//! ```
//! A small request gets a piece of a slab whose size grows with the pool. A large one gets a slab of
//! exactly its size, which serves other requests when idle, if that leaves little of it open (`policy`).
//!
//! # Invariants
//! - **P1** Allocated pieces, pending ones included, never overlap and are aligned to [`UNIT_BYTES`].
//! - **P2** Pinned bytes, including those being pinned, exceed the cap only by bounce buffers, or after
//!   the cap was lowered. The cap is checked before the device call. (Each slab may exceed it by less
//!   than a system page if that is larger than [`UNIT_BYTES`].)
//! - **P3** A request that fits a free range, or fits under the cap with every idle slab released, is
//!   not refused; memory that bounce buffers hold beyond the cap serves no other request.
//! - **P4** `free` and `free_after` take one short lock and call nothing that waits; if memory is kept
//!   they do not call the device.
//! - **P5** A pending piece is not reused before all its events have completed.
//! - **P6** No lock that a free takes is held during a device call.

mod background;
mod check;
mod config;
mod error;
mod pending;
mod policy;
mod pool;
mod shared;
mod slab;
mod slabs;

#[cfg(test)]
mod tests;

pub use config::{CAP_BYTES_MAX, PinnedConfig};
pub use error::PinnedError;
pub use pool::{
    EVENTS_MAX, LOOKS_MAX, PINNED_PENDING_ASKED_FROM, PinMode, PinnedBuffer, PinnedPool,
    PinnedUsage, WAIT_ROUNDS_MAX,
};
pub use slab::SlabObserver;

/// Unit of sizes and alignment in bytes, as direct I/O requires.
pub const UNIT_BYTES: usize = 4096;
