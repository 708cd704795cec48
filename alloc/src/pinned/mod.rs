//! The pinned host pool: exact pieces of pinned memory, under a cap.
//!
//! Pinning costs a GPU's driver a millisecond for a few megabytes, and unpinning waits for the
//! GPU. So memory is taken from the device in *slabs*, cut to size for each request, and kept.
//!
//! # How a request is met
//! ```text
//!   open range of a slab of its kind ──► idle slab ──► [slow lock] readers seen done ──► a new slab,
//!            (no device call)                                idle ones making way under the cap
//!                                                                                          │
//!                              any range at all ◄── wait for readers (if allowed) ◄────────┘ full
//! ```
//! A small request has its piece cut from a slab that grows with the pool; a large one has a slab
//! of exactly its size, which idle serves others if that leaves little of it open (`policy`).
//!
//! # Invariants
//! - **P1** Pieces that are out, pending ones included, never overlap, and start at [`UNIT_BYTES`].
//! - **P2** What is pinned or being pinned never passes the cap but by bounce buffers, or where the
//!   cap was lowered. It is checked before the device is asked. (By less than a page of the system
//!   each, where those are larger than [`UNIT_BYTES`].)
//! - **P3** No request is refused that fits a free range, or fits under the cap with every idle
//!   slab given up; but what bounce buffers hold beyond the cap serves nothing else.
//! - **P4** `give` and `give_after` take one short lock and call nothing that waits; where memory
//!   is kept they do not call the device.
//! - **P5** A pending piece serves nobody before each of its events was seen complete.
//! - **P6** No lock that a free takes is held while the device is called.

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

/// The unit of sizes and of alignment: what direct I/O asks for.
pub const UNIT_BYTES: usize = 4096;
