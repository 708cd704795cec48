//! A caching allocator of whole pages: blocks keep their addresses for life, awake or asleep.
//!
//! It divides the one address space of a [`Device`](dormouse_device::Device) among pools, hands
//! out blocks, keeps freed pages mapped for the next request, and holds what is mapped under a
//! budget. It is not a residency manager: it never copies a byte and never decides who sleeps. It
//! is told (through [`Allocator::set_asleep`] and [`Allocator::set_awake`]), and when it runs out
//! of room it asks, through [`Reclaim`]. It is not a slab allocator for small objects either: the
//! smallest block is one granule.
//!
//! # Glossary
//! - *granule*: the unit of block sizes, a multiple of the device's page ([`Config`]).
//! - *segment*: a run of addresses that one pool divides; carved from the device's space.
//! - *pool*: who shares segments: the general pool, one per *arena*, and the *spare* pool, which
//!   keeps whole segments of closed arenas (pages and all) for whoever needs a segment next.
//! - *range*: a piece of a segment: a block, *cached* (free, mapped) or *bare* (free, unmapped).
//! - *block*: a range in a caller's hands. *Claimed*: one owner has a say in when it may be
//!   reused. *Doomed*: freed by its user while claimed; reused once the claimant says so.
//! - *mapped*: every page we hold: awake blocks, cached ranges, ranges being mapped or unmapped,
//!   and *staged* pages (promised to a block that is about to wake).
//! - *trim*: unmapping cached ranges. *Reclaim*: asking others to put memory to sleep.
//!
//! # How a request is met
//! ```text
//!  cached range of the pool ──► bare range, mapped ──► a spare or new segment, mapped
//!        (no device call)            │ over budget, or the device is full
//!                                    ▼
//!                     trim cached ranges ──► Reclaim, a bounded number of rounds ──► report
//! ```
//!
//! # Invariants
//! - **I1** The ranges of a segment tile it: no gap, no overlap. Free neighbours of one kind are
//!   one range; cached and bare ranges never merge.
//! - **I2** `mapped = awake + cached + staged + in transit` bytes, each counted once, and it never
//!   grows past the budget. It can be above a budget that was lowered below what was awake; then
//!   nothing is handed out until frees and trims have brought it down.
//! - **I3** An asleep block is claimed. A doomed block is claimed, and no lookup finds it.
//! - **I4** `free` takes one short lock and calls nothing that waits.
//! - **I5** No lock is held while [`Reclaim::reclaim`] runs, nor while the device maps or unmaps
//!   (but for the ladder's own lock, which frees never take).
//! - **I6** The address of a block depends on the order of operations only: no clock, no hash, no
//!   random number has a say.
//! - **I7** A failed call leaves everything as it was.
//!
//! # What the device must do
//! Map any bare run of granules, and unmap any mapped one: a cached range may have been mapped in
//! several calls, or published by a wake, and a trim may take only its upper end.
//!
//! # Streams
//! [`Request::stream`] is kept with the block and reported. On the host device everything runs on
//! the calling thread (stream 0), so a freed block may be reused at once by anybody. A
//! stream-ordered device will restrict immediate reuse to the same key; nothing of that is here.
#![forbid(unsafe_code)]

mod allocator;
mod config;
pub mod core;
mod error;
mod ladder;
mod reclaim;
mod report;
mod state;
mod stats;
mod types;

pub use allocator::Allocator;
pub use config::Config;
pub use error::AllocError;
pub use reclaim::{Reclaim, Reclaimed};
pub use report::{Cause, Holder, OutOfMemory, TOP_HOLDERS_MAX, Tried};
pub use state::{ARENAS_MAX, RANGES_MAX};
pub use stats::{Amount, Stats};
pub use types::{ArenaId, Block, BlockId, BlockInfo, Freed, Request};

pub use ladder::{RECLAIM_ROUNDS_MAX, TRIM_REFUSALS_MAX, TRIM_ROUNDS_MAX};

/// The largest alignment of a block, in bytes.
pub const ALIGN_BYTES_MAX: usize = 1 << 30;
