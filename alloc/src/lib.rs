//! A caching allocator on mapped pages. Blocks keep their addresses for life, asleep or awake.
//!
//! It divides the address space of a [`Device`](dormouse_device::Device) among pools, allocates blocks,
//! caches freed pages and keeps the mapped bytes under a budget. It is not a residency manager: it copies
//! no data and does not choose the blocks that sleep. The caller reports residency changes through
//! [`Allocator::set_asleep`] and [`Allocator::set_awake`]; under memory pressure the allocator calls
//! [`Reclaim`]. [`pinned`] is a separate pool of pinned host memory.
//!
//! # Glossary
//! - *granule*: the unit of block sizes ([`Config`]). If it is smaller than a page, blocks share pages.
//! - *segment*: a run of addresses that belongs to one pool.
//! - *pool*: owns segments. There is the general pool, one pool per *arena*, and the *spare* pool, which
//!   holds free segments of closed arenas, with their pages, for reuse. A stream-ordered device has each of
//!   these once per stream. If blocks share pages, *small* blocks (up to half a page) have separate pools, and so have
//!   *huge* ones (a quarter of a segment and more) of the general pool from the first
//!   [`Allocator::watch_unused`] on; a request searches the pools of all kinds before it is refused.
//! - *kept* arena: an arena whose pages serve no other pool and stay mapped while it is open.
//! - *stream*: an ordered queue of work, named by a key ([`Allocator::register_stream`]). A block belongs
//!   to the stream it was requested on; its *uses* are those of other streams.
//! - *range*: a part of a segment: a block, *cached* (free and mapped) or *bare* (free and unmapped,
//!   always whole pages). *Gap*: the free ranges between two blocks. *Reach*: a bare range with the
//!   cached ranges on both sides.
//! - *large page*: an aligned run of pages that the device maps and unmaps as one. Blocks of at least two of them
//!   have them where they cover them alone, if pages move; a block that wakes has them throughout.
//! - *block*: an allocated range. *Claimed*: a claimant (the engine that puts it to sleep) delays its reuse.
//!   *Deferred free*: the user has freed a claimed block; it is reused after the claim ends. Only the pages
//!   that a block shares with no other block can sleep ([`BlockInfo::pages`]).
//! - *pending*: freed, but possibly still used by other streams. *Collecting* turns pending blocks whose
//!   uses have completed into cached ranges. *Idle*: a stream without queued work; *busy*: one with it.
//! - *quiet*: free memory that no queued work of any stream uses any more. *Mark*: an event on a busy stream behind
//!   frees; once it is complete, the stream is through with what was freed before it.
//! - *thread cache*: recently freed small blocks, kept whole for the next request of their size *class*,
//!   in one *shard* per thread. *Ownership table*: names the current owner of each such block.
//! - *mapped*: all pages held: awake blocks, cached ranges, ranges being mapped or unmapped, and
//!   *staged* pages (reserved for a block that is about to wake).
//! - *trim*: unmaps cached ranges. *Move*: a trim that frees pages to be mapped elsewhere. *Unused* since a time: free
//!   pages that no block has used since ([`Allocator::trim_unused`]).
//!   *Reclaim*: asks the runtime to put memory to sleep.
//! - *history*: recorded events of blocks and pages, and of the tiers' pieces ([`Allocator::start_history`]). *Reading*:
//!   all mapped ranges and the history, of one moment.
//! - For [`pinned`] memory: *slab*: memory pinned by one device call; *idle* if it is unused.
//!   *Piece*: the part of a slab that a *buffer* occupies. *Open*: the free part of a slab in use.
//!   *Bounce*: a temporary buffer of a load, which may exceed the cap.
//!
//! # Path of a request
//! ```text
//!  thread cache ──► cached range ──► gap: missing pages ──► a spare or new segment, mapped
//!  (small)          of the pool     are mapped │
//!       no device call                         │ over budget, or the device is full
//!                                              ▼
//!     flush the thread cache, trim cached ranges ──► Reclaim, some rounds ──► report
//! ```
//! With [`Config::moves_pages`], an allocation that would raise the mapped bytes above the previous maximum
//! use plus [`Config::margin`] first unmaps quiet pages elsewhere. If they do not suffice, it waits for its own
//! stream until more are quiet, those that were freed first, and if little is missing then, for other streams: at most
//! 2 s in all, since these may wait for what the host has yet to do. Near this maximum a large block is placed
//! where it strands the fewest bytes, even if pages must move for it and a cached range would fit; nothing
//! is waited for then. A block goes where it splits no large page. If there is no such place in the cache, the
//! large page in the way is unmapped, if it is quiet, and the block maps what it needs of the gap.
//!
//! On a stream-ordered device the cache of the request's own stream is searched first, and completed
//! pending blocks are collected before a bare range is mapped. A trim unmaps quiet pages of any
//! stream. When `Reclaim` is exhausted, the request waits for pending blocks and, on any stream, until enough
//! pages are quiet, those that were freed first. If this does not suffice, it fails with a report.
//!
//! # Invariants
//! - **I1** The ranges of a segment tile it without gaps or overlaps. Free neighbours of the same kind
//!   are one range; cached and bare ranges never merge.
//! - **I2** `mapped = awake + pending + cached + staged + in transit` bytes, each counted once. An
//!   allocation never raises it above the budget. It can exceed a budget that was lowered below the
//!   awake bytes; allocations then fail until frees and trims have reduced it.
//! - **I3** An asleep block is claimed. A block with a deferred free is claimed, and no lookup finds it.
//!   No lookup finds a pending block.
//! - **I4** `free` takes short locks (for small blocks none that another thread holds) and calls nothing
//!   that waits. On a stream-ordered device it may record events, with no lock held.
//! - **I5** No lock is held during [`Reclaim::reclaim`] or a device call, except the ladder lock, which
//!   `free` never takes.
//! - **I6** Block addresses depend on the order of operations only, not on clocks, hashes or random
//!   numbers. (Streams lists the exceptions on a stream-ordered device.)
//! - **I7** A failed call changes nothing.
//! - **I8** Pages are unmapped, and so reused on another stream, only after every registered stream was idle, or has
//!   passed an event, after the last moment at which they were reachable. A block is reused on its own stream only
//!   after the same of the other streams that are recorded with it. If the device cannot record or query such an event,
//!   they stay pending, or cached for their stream. A stream that the device does not know any more is not waited for,
//!   and its own pages stay.
//! - **I9** A small block has exactly one owner: its user, the thread cache or the state. Ownership
//!   changes by one compare-and-swap on its word of the ownership table.
//! - **I10** A page that held a block of a kept arena stays mapped and serves only that arena until the
//!   arena is closed and, after that, every registered stream was idle or has passed an event. A stream that the device
//!   does not know any more is not waited for, unless it has pages of the arena.
//! - **I11** A mapped large page lies in one block or in one cached range. So all whole pages of a cached
//!   range can be unmapped, at most one large page more than was asked for. Kept arenas have no large pages.
//! - **I12** The events of a reading, undone from the newest on, lead from its ranges to those of the oldest event.
//!
//! # Requirements on the device
//! It maps any bare run of pages and unmaps any mapped run that splits no large page: a cached range may have
//! been mapped by several calls, or published by a wake, and a trim may unmap only its upper end.
//!
//! # Streams
//! If the device is not stream-ordered ([`is_stream_ordered`]), all work runs on the calling thread:
//! keys are stored and reported, a freed block may be reused at once, and the rest of this section does
//! not apply.
//!
//! On a stream-ordered device a block is freed before its last use has run. Later work of the same
//! stream is ordered after that use, so a stream reuses its own freed blocks at once and without an
//! event: every (pool, stream) pair is a separate pool. Mapped segments never change streams.
//! Uses by other streams are recorded by [`Allocator::record_stream`], or by freeing the block on
//! another stream; a recorded use holds until the free, including across sleep. A block with uses is
//! pending after its free. Events are recorded at the free: a use is complete when all work that its
//! stream had queued by then is complete.
//!
//! The cache of one stream serves another through unmapped ranges, which any stream may map, so no
//! memory is stranded under pressure. Before a block sleeps, its claimant waits for all its streams.
//!
//! **Unrecorded reads.** A stream may read a block that belongs to another stream without being recorded as a user, if
//! the block's own stream waits for the read after the free. Own-stream reuse is then ordered, and torch's own allocator
//! keeps the pages mapped or waits for the device. So nothing is unmapped while any registered stream may have work that
//! was queued before the free.
//!
//! **Marks.** A trainer's stream is never idle in mid-step. A stream that a trim found busy is marked: each time
//! 1/32 of the maximum use was freed, an event is recorded on it. Frees are numbered. Each page keeps the number
//! of its last free and each mark that of the last free before it, so a complete mark shows which pages the stream
//! is through with. A wait is for the oldest mark that suffices, and for all queued work only if there is none. Marking
//! ends when the stream is found idle.
//!
//! **Run-ahead.** The host queues work long before a device does it. Memory that the host allocates ahead of the device
//! is mapped together with memory that is still to fall asleep. Once a block of a scope was requested, a request near the maximum use waits while its stream is
//! further behind than [`Config::run_ahead`], counted in bytes of such requests. The stream keeps work of three
//! quarters of the limit. A thread of the runtime never waits, and no request for a stream under capture.
//!
//! **Addresses and time.** While no block has uses, no kept arena was closed and the budget is not
//! reached, addresses depend only on the order of operations, not on the speed of the device. Otherwise
//! two results depend on device timing:
//! - A pending block, or the pages of a closed kept arena, serve requests from the first collection that
//!   finds their uses complete. Collections happen at requests that the cache cannot serve, at requests
//!   that find [`PENDING_ASKED_FROM`] or more pending blocks, and in trims.
//! - A trim takes quiet pages only, so the remaining cache may differ. Ranges are trimmed for requests that do
//!   not fit, largest first. (Pages that move come from small ranges, oldest first.)
//!
//! The addresses of small blocks also depend on the shard of the thread, that is, on the order in which
//! threads start.
//!
//! # Kept arenas
//! A captured graph uses the addresses of its capture in each replay, at any time and on any stream; the
//! allocator is not told. [`Allocator::arena_create_kept`] opens an arena for the capture. Memory freed in
//! the arena may serve later requests of the same arena. Trims and moves skip its cached ranges, also over
//! the budget. Its blocks cannot be claimed, so they never sleep. It takes over no pages of other pools,
//! whose work may still be queued. An out-of-memory report states how much of the cache is kept.
//!
//! Closing the arena does not wait: events on all registered streams show when its pages can be released
//! like those of any closed arena. A stream under capture accepts no event before the end of the capture.
//! A replay in progress on an unregistered stream is not waited for.
//!
//! [`is_stream_ordered`]: dormouse_device::Device::is_stream_ordered
#![forbid(unsafe_code)]

mod allocator;
mod config;
pub mod core;
mod error;
mod gate;
mod history;
mod ladder;
mod marks;
mod patience;
pub mod pinned;
mod report;
mod run_ahead;
mod state;
mod stats;
mod streams;
mod sync;
#[cfg(any(test, feature = "checks"))]
mod testing;
mod thread_cache;
mod tier_history;
mod trim;
mod types;
mod watches;

pub use allocator::{Allocator, WHOLE_PAGES_DIVISOR};
pub use config::{Config, Margin};
pub use error::AllocError;
pub use gate::Gate;
pub use history::{
    HISTORY_EVENTS_MAX, HistoryAction, HistoryEvent, HistoryOptions, MappedRange, MemoryReading,
    OPERATIONS_MAX, Operations, RangeUse, set_context,
};
pub use ladder::{RECLAIM_ROUNDS_MAX, Reclaim, Reclaimed};
pub use report::{Cause, Holder, OutOfMemory, TOP_HOLDERS_MAX, Tried};
pub use state::{ARENAS_MAX, RANGES_MAX, STREAMS_MAX};
pub use stats::{Amount, PeakWatch, PoolStats, Stats};
pub use streams::{PENDING_ASKED_FROM, UsesEnd};
pub use thread_cache::ThreadShard;
pub use tier_history::TierHistory;
pub use trim::TRIM_REFUSALS_MAX;
pub use types::{ArenaId, Block, BlockId, BlockInfo, Freed, Request};

/// The largest alignment of a block, in bytes.
pub const ALIGN_BYTES_MAX: usize = 1 << 30;
