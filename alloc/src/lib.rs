//! A caching allocator on mapped pages: blocks keep their addresses for life, awake or asleep.
//!
//! It divides the one address space of a [`Device`](dormouse_device::Device) among pools, hands
//! out blocks, keeps freed pages mapped for the next request, and holds what is mapped under a
//! budget. It is not a residency manager: it never copies a byte and never decides who sleeps. It
//! is told (through [`Allocator::set_asleep`] and [`Allocator::set_awake`]), and when it runs out
//! of room it asks, through [`Reclaim`]. Host memory for copies comes from a pool of its own,
//! [`pinned`].
//!
//! # Glossary
//! - *granule*: the unit of block sizes ([`Config`]). Less than a page: blocks share pages.
//! - *segment*: a run of addresses that one pool divides; carved from the device's space.
//! - *pool*: who shares segments: the general pool, one per *arena*, and the *spare* pool, which
//!   keeps whole segments of closed arenas (pages and all) for whoever needs a segment next. On a
//!   stream-ordered device each of these is one pool per stream, and where blocks share pages,
//!   *small* ones (up to half a page) have pools beside. Either kind has what is free in the other's
//!   pool before it is refused.
//! - *kept* arena: one whose pages leave it neither for others nor for the device while it is open.
//! - *stream*: an ordered queue of work, named by a key ([`Allocator::know_stream`]). A block's own
//!   stream is the one it was asked for on; *uses* are those of other streams.
//! - *range*: a piece of a segment: a block, *cached* (free, mapped) or *bare* (free, unmapped: whole
//!   pages always). *Gap*: free ranges between two blocks. *Reach*: a bare range with what is
//!   cached right before and after it.
//! - *block*: a range in a caller's hands. *Claimed*: one owner has a say in when it may be
//!   reused. *Doomed*: freed by its user while claimed; reused once the claimant says so. What
//!   sleeps of it are the pages that no other block lies in ([`BlockInfo::pages`]).
//! - *pending*: freed, but perhaps still used by streams other than its own. *Collecting* makes
//!   pending blocks whose uses are over cached ranges. *Quiet*: a stream with no work left that was
//!   queued before it was asked about; *busy*: one that has some.
//! - *front*: small blocks that were freed a moment ago, kept as they are for the next request of
//!   their *class*, in *shards*, one to a thread. *Ledger*: who has such a block.
//! - *mapped*: every page we hold: awake blocks, cached ranges, ranges being mapped or unmapped,
//!   and *staged* pages (promised to a block that is about to wake).
//! - *trim*: unmapping cached ranges. *Move*: a trim so that as many pages can be mapped elsewhere.
//!   *Reclaim*: asking others to put memory to sleep.
//! - Of [`pinned`] host memory: *slab*: what is pinned by one call of the device; *idle* where
//!   nothing is in it. *Piece*: what of a slab is in a caller's hands, as a *buffer*. *Open*: free
//!   units of a slab in use. *Bounce*: a buffer that a load passes through, beyond the cap if need be.
//!
//! # How a request is met
//! ```text
//!  front ──► cached range ──► gap: what is missing ──► a spare or new segment, mapped
//!  (small)    of the pool     in it is mapped │
//!     no device call                          │ over budget, or the device is full
//!                                             ▼
//!           empty the front, trim cached ranges ──► Reclaim, some rounds ──► report
//! ```
//! Where more would be held than ever was in use (and a little), free pages elsewhere leave before
//! others are mapped, if [`Config::moves_pages`] says so and no stream uses them. And where nearly
//! all is in use that ever was, a large block goes where it leaves least of any page stranded, even
//! where pages move for it and others are cached that would do.
//!
//! On a stream-ordered device it is the cache of the request's own stream that comes first, and
//! before a bare range is mapped, pending blocks that are over are collected. A trim takes what is
//! quiet, of any stream; only after `Reclaim` has nothing more to give are pending blocks and busy
//! streams waited for, as many as it takes; and then comes the report.
//!
//! # Invariants
//! - **I1** The ranges of a segment tile it: no gap, no overlap. Free neighbours of one kind are
//!   one range; cached and bare ranges never merge.
//! - **I2** `mapped = awake + pending + cached + staged + in transit` bytes, each counted once, and
//!   it never grows past the budget. It can be above a budget that was lowered below what was
//!   awake; then nothing is handed out until frees and trims have brought it down.
//! - **I3** An asleep block is claimed. A doomed block is claimed, and no lookup finds it. Nor does
//!   one find a pending block: it is nobody's.
//! - **I4** `free` takes short locks (none that another thread has, for small blocks) and calls
//!   nothing that waits. On a stream-ordered device it may
//!   record events, with no lock held.
//! - **I5** No lock is held while [`Reclaim::reclaim`] runs, nor while the device is called (but for
//!   the ladder's own lock, which frees never take).
//! - **I6** The address of a block depends on the order of operations only: no clock, no hash, no
//!   random number has a say. (On a stream-ordered device: as far as said under Streams.)
//! - **I7** A failed call leaves everything as it was.
//! - **I8** Pages are reused on another stream, or unmapped, only after each stream which may have
//!   used them was idle, or has passed an event, after nobody could get them any more.
//!   Where the device records no such event or does not say whether it has completed, they stay:
//!   pending, or cached for their own stream.
//! - **I9** Of the front's blocks each has one owner at a time: its user, the front, or the state.
//!   Who takes one over does so by one compare-and-swap on its word of the ledger.
//! - **I10** A page that a block of a kept arena had stays mapped, and serves that arena alone, until
//!   the arena is closed and then each stream that is known was idle or has passed an event.
//!
//! # What the device must do
//! Map any bare run of pages, and unmap any mapped one: a cached range may have been mapped in
//! several calls, or published by a wake, and a trim may take only its upper end.
//!
//! # Streams
//! Where the device is not stream-ordered ([`is_stream_ordered`]), everything runs on the calling
//! thread: keys are kept and reported, a freed block may be reused at once by anybody, and nothing
//! below applies.
//!
//! On a stream-ordered device a block is freed before its last use has run. Work of the same stream
//! comes after that use by itself, so what a stream frees it has again at once, with no event: every
//! (pool, stream) pair is a pool of its own. Segments never change streams with pages in them.
//! Other streams that use a block are told of by [`Allocator::record_stream`], or by freeing it on
//! one of them; a use that was told of counts until the free, sleep or no sleep. A block with uses
//! is pending from its free on. Events are recorded at the free: a use is over when all that its
//! stream had by then is.
//!
//! The cache of one stream serves another by way of an unmapped range, which is anybody's: under
//! pressure nothing is stranded. Whoever puts a block to sleep has waited for all its streams.
//!
//! **Addresses and time.** As long as no block has uses, no kept arena was closed and the budget has
//! room, addresses depend on the order of operations alone, however fast the device is. Beyond that
//! two things depend on it: a pending block, and what a closed arena kept, serves requests from the
//! first collection on that finds it over, and a trim passes over busy streams, so what is cached
//! afterwards, and what a later request finds, may differ. When either happens does not depend on
//! time as such: pending blocks are collected at requests that the cache cannot meet, at those that
//! find [`PENDING_ASKED_FROM`] or more of them pending, and by trims; ranges are trimmed for requests
//! that do not fit, largest first. (Pages that move are of small ranges, the first that came free.) A
//! third is which shard a thread has: threads that begin in another order may find other small blocks.
//!
//! # Kept arenas
//! A graph of captured work replays on the addresses it was captured with: whenever its owner likes,
//! on whichever stream, and without telling anybody. [`Allocator::arena_create_kept`] opens an arena
//! for it. What is freed of it may serve a later request of the same arena, as in any other; but trims,
//! moves and the budget pass its cached ranges over, its blocks cannot be claimed, so that none
//! sleeps, and it takes over no pages of others, whose work may still be queued. The report of a
//! shortage says how much of what is cached is kept like that.
//!
//! Closing it waits for nobody: events on all known streams show when its pages may go the way of any
//! closed arena's. A stream that is being captured takes no event before the capture's end. A replay
//! that is under way on a stream nobody has told of is not waited for.
//!
//! [`is_stream_ordered`]: dormouse_device::Device::is_stream_ordered
#![forbid(unsafe_code)]

mod allocator;
mod config;
pub mod core;
mod error;
mod front;
mod ladder;
pub mod pinned;
mod reclaim;
mod report;
mod snapshot;
mod state;
mod stats;
mod streams;
mod sync;
mod trim;
mod types;

pub use allocator::{Allocator, WHOLE_PAGES_DIVISOR};
pub use config::Config;
pub use error::AllocError;
pub use front::Place;
pub use reclaim::{Reclaim, Reclaimed};
pub use report::{Cause, Holder, OutOfMemory, TOP_HOLDERS_MAX, Tried};
#[doc(hidden)]
pub use snapshot::SegmentInfo;
pub use state::{ARENAS_MAX, RANGES_MAX, STREAMS_MAX};
pub use stats::{Amount, Stats};
pub use types::{ArenaId, Block, BlockId, BlockInfo, Freed, Request};

pub use ladder::RECLAIM_ROUNDS_MAX;
pub use streams::PENDING_ASKED_FROM;
pub use trim::{TRIM_REFUSALS_MAX, TRIM_ROUNDS_MAX};

/// The largest alignment of a block, in bytes.
pub const ALIGN_BYTES_MAX: usize = 1 << 30;
