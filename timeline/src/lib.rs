//! What happened when: an always-on event ring, and the dumps written from it.
//!
//! The other rooms record here while they work, from any thread, inside `malloc` if need be.
//! A dump is a picture taken afterwards: a Perfetto trace ([`pftrace`]) or one self-contained
//! HTML page ([`html`]). It is not a log (no text, no levels), not a profiler (nothing is sampled)
//! and keeps no books: figures that must be exact come from the rooms' own stats.
//!
//! # Glossary
//! - *mark*: a slice (something that took from one time to another) or an instant, on a [`Lane`].
//! - *gauge*: a level in bytes that changes and is recorded at each change ([`Gauge`]).
//! - *flow*: a number shared by the slices that move the same region, so a viewer can join them.
//! - *anchor*: the same moment read off several clocks ([`ClockAnchor`]).
//! - *ticket*: the number of an event in its ring, given out once, never again.
//!
//! # From a recording thread to a picture
//! ```text
//!   slice ───┐                         ┌─ marks ring  [ 96 | 97 | 98 | 99 |  …  ]─┐
//!   instant ─┴─► ticket = head + 1 ────┤   each slot: sequence + five words       ├─► Snapshot ─► pftrace
//!   gauge ──────────────────────────── └─ gauges ring [ 40 | 41 | 42 |  …       ]─┘      │
//!   intern ──► name table, filled word by word ──────────────────────────────────────────┴──────► html
//! ```
//!
//! # Invariants
//! - **I1** Recording takes no lock, allocates nothing, waits for nobody and never fails: a few
//!   atomic operations, then it returns. A full ring loses its oldest events, counted.
//! - **I2** A snapshot holds whole events only. One that was being written is left out, counted.
//! - **I3** Gauges never push marks out, nor marks gauges: each kind has a ring of its own.
//! - **I4** A name has one id for the life of its timeline, and the table never grows.
//! - **I5** A writer emits a well-formed file for every snapshot: slices that share a lane and
//!   overlap get sub-tracks, every begin has its end, every name is escaped.

#![deny(unsafe_code)]

mod clock;
mod event;
pub mod html;
mod json;
mod lanes;
mod names;
pub mod pftrace;
mod ring;
mod snapshot;
mod spans;
mod sync;
mod totals;

pub use clock::{ClockAnchor, now_ns};
pub use event::{Event, Gauge, Lane};
pub use names::{NAME_BYTES_MAX, NAMES_MAX, NameId, Names};
pub use snapshot::{Process, Snapshot};
pub use totals::{LaneTotals, PhaseTotals, Totals};

use event::{EVENT_WORDS, GAUGES};
use names::NameTable;
use ring::Ring;
use std::fmt;
use sync::{AtomicU64, Ordering};

/// Fewest events of each kind a timeline holds.
pub const CAPACITY_EVENTS_MIN: usize = 64;
/// Most events of each kind a timeline holds (128 MiB of slots a ring).
pub const CAPACITY_EVENTS_MAX: usize = 1 << 21;

/// The recorder. Shared behind an `Arc`; every method is any-thread.
///
/// Memory is taken once, here: about 128 bytes for each event of capacity, touched at creation so
/// that recording never faults a page in.
pub struct Timeline {
    marks: Ring<EVENT_WORDS>,
    gauges: Ring<EVENT_WORDS>,
    latest: [AtomicU64; GAUGES],
    names: NameTable,
    started: ClockAnchor,
}

impl Timeline {
    /// A timeline that keeps the newest `capacity_events` marks and as many gauge changes.
    ///
    /// The capacity is brought into [`CAPACITY_EVENTS_MIN`]..=[`CAPACITY_EVENTS_MAX`] and rounded
    /// up to a power of two.
    pub fn new(capacity_events: usize) -> Self {
        let capacity = capacity_events.clamp(CAPACITY_EVENTS_MIN, CAPACITY_EVENTS_MAX);
        Self {
            marks: Ring::new(capacity),
            gauges: Ring::new(capacity),
            latest: std::array::from_fn(|_| AtomicU64::new(0)),
            names: NameTable::new(),
            started: ClockAnchor::now(),
        }
    }

    /// `CLOCK_MONOTONIC` in nanoseconds: the clock of every time in this room.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        now_ns()
    }

    /// The id of `name`, the same for the same name ever after (I4).
    ///
    /// Names are cut to [`NAME_BYTES_MAX`] bytes at a character boundary; past [`NAMES_MAX`]
    /// different ones the answer is [`NameId::OTHER`]. Lock-free and allocation-free, but it walks
    /// a table: intern once and keep the id where it is used often.
    pub fn intern(&self, name: &str) -> NameId {
        self.names.intern(name)
    }

    /// Records that `name` lasted from `start_ns` to `end_ns` on `lane` and moved `bytes`.
    ///
    /// `flow` is 0 for none, else the id of the region moved. An end before its start is taken as
    /// the start. Slices are recorded when they end.
    #[inline]
    pub fn slice(
        &self,
        lane: Lane,
        name: NameId,
        start_ns: u64,
        end_ns: u64,
        bytes: u64,
        flow: u64,
    ) {
        let end_ns = end_ns.max(start_ns);
        self.marks.record(Event::Slice { lane, name, start_ns, end_ns, bytes, flow }.pack());
    }

    /// Records that `name` happened now on `lane`, with a number that means what the name says.
    #[inline]
    pub fn instant(&self, lane: Lane, name: NameId, value: u64) {
        let at_ns = now_ns();
        self.marks.record(Event::Instant { lane, name, at_ns, value }.pack());
    }

    /// Records that `gauge` is at `value_bytes` from now on.
    #[inline]
    pub fn gauge(&self, gauge: Gauge, value_bytes: u64) {
        let at_ns = now_ns();
        let previous_bytes = match self.latest.get(gauge as usize) {
            // Relaxed: a level on its own, nothing is published through it.
            Some(latest) => latest.swap(value_bytes, Ordering::Relaxed),
            None => 0,
        };
        let change = Event::Gauge { gauge, at_ns, value_bytes, previous_bytes };
        self.gauges.record(change.pack());
    }

    /// Everything still held, oldest first. Allocates; recording goes on meanwhile.
    pub fn snapshot(&self) -> Snapshot {
        let marks = self.marks.read();
        let gauges = self.gauges.read();
        let gauges_now = std::array::from_fn(|at| match self.latest.get(at) {
            Some(latest) => latest.load(Ordering::Relaxed),
            None => 0,
        });
        Snapshot::assemble(marks, gauges, gauges_now, self.names.read(), self.started)
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline")
            .field("marks", &self.marks)
            .field("gauges", &self.gauges)
            .field("started", &self.started)
            .finish_non_exhaustive()
    }
}
