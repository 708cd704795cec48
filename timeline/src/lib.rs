//! An always-on event ring, and the dumps written from it.
//!
//! The other crates record events from any thread, also inside `malloc`. A dump is written on request: a
//! Perfetto trace ([`pftrace`]) or a self-contained HTML page ([`html`]). The timeline is not a log (no
//! text, no levels), not a profiler (no sampling) and no accounting: exact figures come from the
//! statistics of each crate; a [`live`] page shows a copy of them to other processes.
//!
//! # Glossary
//! - *mark*: a slice (an interval) or an instant, on a [`Lane`].
//! - *gauge*: a value in bytes, recorded at each change ([`Gauge`]).
//! - *begin*: an instant on the lane of phases, microbatches or layers, at the moment one begins on the
//!   trainer's thread.
//! - *facts*: what the owner of the memory adds to a snapshot when a dump is written ([`Facts`]).
//! - *flow*: a number shared by the slices of the same region; viewers connect them.
//! - *anchor*: one moment on several clocks ([`ClockAnchor`]).
//! - *ticket*: the unique number of an event in its ring.
//! - *live page*: a file of one page with the current figures of a process ([`live`]).
//!
//! # From a recording thread to a picture
//! ```text
//!   slice ───┐                         ┌─ marks ring  [ 96 | 97 | 98 | 99 |  …  ]─┐
//!   instant ─┴─► ticket = head + 1 ────┤   each slot: sequence + seven words       ├─► Snapshot ─► pftrace
//!   gauge ──────────────────────────── └─ gauges ring [ 40 | 41 | 42 |  …       ]─┘      │
//!   intern ──► name table, filled word by word ──────────────────────────────────────────┴──────► html
//! ```
//!
//! # Invariants
//! - **I1** Recording takes no lock, allocates nothing, never waits and never fails: it is a few atomic
//!   operations. A full ring loses its oldest events and counts them.
//! - **I2** A snapshot contains only complete events. Events being written are skipped and counted.
//! - **I3** Gauges never evict marks, nor marks gauges: each kind has its own ring.
//! - **I4** A name has one id for the life of its timeline; the table has a fixed size.
//! - **I5** A writer emits a well-formed file for every snapshot: slices that share a lane and
//!   overlap get sub-tracks, every begin has its end, every name is escaped.
//! - **I6** A reader of a live page sees the figures of one update, or an error.

#![deny(unsafe_code)]

mod clock;
mod event;
mod facts;
pub mod html;
mod lanes;
mod levels;
#[cfg(not(loom))]
pub mod live;
mod names;
mod peak;
pub mod pftrace;
#[cfg(all(target_arch = "x86_64", not(miri), not(loom)))]
mod processor;
mod ring;
mod ring_slots;
mod snapshot;
mod spans;
mod stalls;
mod sync;
mod totals;
#[cfg(any(all(target_arch = "x86_64", not(miri), not(loom)), test))]
mod tsc;

pub use clock::{ClockAnchor, now_ns};
pub use event::{Event, Gauge, Lane, Slice};
pub use facts::{BLOCKS_MAX, Facts, LiveBlock};
pub use names::{NAME_BYTES_MAX, NAMES_MAX, NameId, Names};
pub use peak::{Moment, Owner, Peak};
pub use snapshot::{Process, Snapshot};
pub use stalls::{Cause, Stall, stalls};
pub use totals::{LaneTotals, PhaseTotals, Totals, rate_bytes_per_s};

use event::{EVENT_WORDS, GAUGES};
use names::NameTable;
use ring::Ring;
use sync::{AtomicU64, Ordering};

/// Minimum capacity in events of each kind.
pub const CAPACITY_EVENTS_MIN: usize = 64;
/// Maximum capacity in events of each kind (128 MiB of slots per ring).
pub const CAPACITY_EVENTS_MAX: usize = 1 << 21;
/// Memory that a snapshot and its dump take for each event of the capacity, at most: both rings, read, sorted and written. `tests/dump_memory.rs`
/// measures 1,575 for a page whose marks are all waits, 800 for one of all kinds, and less for traces.
pub const DUMP_BYTES_PER_EVENT_MAX: usize = 1600;

/// The recorder. Shared behind an `Arc`; every method is any-thread.
///
/// Address space is taken at creation, about 128 bytes per event of capacity. The pages of a ring come
/// as its first lap reaches them.
#[derive(Debug)]
pub struct Timeline {
    marks: Ring<EVENT_WORDS>,
    gauges: Ring<EVENT_WORDS>,
    latest: [AtomicU64; GAUGES],
    /// Of [`Gauge::DeviceTagged`], by the number of the tag's name.
    latest_by_tag: Box<[AtomicU64]>,
    names: NameTable,
    capacity_events: usize,
    started: ClockAnchor,
}

impl Timeline {
    /// Creates a timeline that keeps the newest `capacity_events` marks and as many gauge changes.
    ///
    /// The capacity is clamped to [`CAPACITY_EVENTS_MIN`]..=[`CAPACITY_EVENTS_MAX`].
    pub fn new(capacity_events: usize) -> Self {
        let capacity = capacity_events.clamp(CAPACITY_EVENTS_MIN, CAPACITY_EVENTS_MAX);
        Self {
            marks: Ring::new(capacity),
            gauges: Ring::new(capacity),
            latest: std::array::from_fn(|_| AtomicU64::new(0)),
            latest_by_tag: (0..=NAMES_MAX).map(|_| AtomicU64::new(0)).collect(),
            names: NameTable::new(),
            capacity_events: capacity,
            started: ClockAnchor::now(),
        }
    }

    /// Returns `CLOCK_MONOTONIC` in nanoseconds, the clock of all times in this crate ([`now_ns`]).
    #[inline]
    pub fn now_ns(&self) -> u64 {
        now_ns()
    }

    /// Returns the number of marks that are kept, and of gauge changes.
    pub const fn capacity_events(&self) -> usize {
        self.capacity_events
    }

    /// Returns the id of `name`, always the same for the same name (I4).
    ///
    /// Names are cut to [`NAME_BYTES_MAX`] bytes at a character boundary; beyond [`NAMES_MAX`] names the
    /// result is [`NameId::OTHER`]. Lock-free and allocation-free, but linear: intern a name once and
    /// keep the id.
    pub fn intern(&self, name: &str) -> NameId {
        self.names.intern(name)
    }

    /// Records `slice`, which has ended. Times out of order are put in order: an end before the start counts as
    /// the start.
    #[inline]
    pub fn slice(&self, slice: Slice) {
        self.marks.record(Event::Slice(slice.in_order()).pack());
    }

    /// Records the instant `name` on `lane` now, with a number whose meaning depends on the name.
    #[inline]
    pub fn instant(&self, lane: Lane, name: NameId, value: u64) {
        let at_ns = now_ns();
        self.marks.record(Event::Instant { lane, name, at_ns, value }.pack());
    }

    /// Records the new value of `gauge`, in bytes. Changes of one gauge that race may be recorded out of order: an
    /// owner that needs their order records them under its lock.
    #[inline]
    pub fn gauge(&self, gauge: Gauge, value_bytes: u64) {
        let at_ns = now_ns();
        let previous_bytes = replace(&self.latest[gauge as usize], value_bytes);
        let tag = NameId::OTHER;
        self.gauges.record(Event::Gauge { gauge, tag, at_ns, value_bytes, previous_bytes }.pack());
    }

    /// Records the new value of the device bytes under `tag` ([`Gauge::DeviceTagged`]).
    #[inline]
    pub fn tag_gauge(&self, tag: NameId, value_bytes: u64) {
        let (gauge, at_ns) = (Gauge::DeviceTagged, now_ns());
        let Some(latest) = self.latest_by_tag.get(usize::from(tag.index())) else { return };
        let previous_bytes = replace(latest, value_bytes);
        self.gauges.record(Event::Gauge { gauge, tag, at_ns, value_bytes, previous_bytes }.pack());
    }

    /// Returns all events in the rings, oldest first. Allocates; recording continues.
    pub fn snapshot(&self) -> Snapshot {
        let marks = self.marks.read();
        let gauges = self.gauges.read();
        let mut gauges_now = self.latest.each_ref().map(|latest| latest.load(Ordering::Relaxed));
        let by_tag = self.latest_by_tag.iter().map(|latest| latest.load(Ordering::Relaxed));
        let tags_now: Vec<(NameId, u64)> = (0..)
            .map(NameId::from_index)
            .zip(by_tag)
            .filter(|(_, value_bytes)| *value_bytes > 0)
            .collect();
        gauges_now[Gauge::DeviceTagged as usize] = tags_now.iter().map(|(_, bytes)| bytes).sum();
        let mut snapshot =
            Snapshot::assemble(marks, gauges, gauges_now, self.names.read(), self.started);
        snapshot.tags_now = tags_now;
        snapshot
    }
}

/// Sets a level and returns the one before. Not one atomic operation, which costs 5 ns: changes of one level that race
/// may get the same level before.
#[inline]
fn replace(level: &AtomicU64, value_bytes: u64) -> u64 {
    // Relaxed: no other memory is published through a gauge.
    let previous_bytes = level.load(Ordering::Relaxed);
    level.store(value_bytes, Ordering::Relaxed);
    previous_bytes
}
