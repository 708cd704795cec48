//! How far the host is ahead of the GPU: what streams and events say of work that was given to them.
//!
//! The streams of the host device are quick. A trainer's GPU is not: work takes time, and the host goes on.
//! With a run-ahead, work counts as done once that number of works was given after it, on any stream, once
//! somebody waited for it, or once a host function behind it was called. So streams are never idle. (The work
//! itself may be done earlier.) With a duration each work takes at least that long. A thread that queries one event
//! [`QUERIES_IN_A_ROW`] times and does nothing else waits for it.
//!
//! An exact run-ahead gives the same answers to the same calls in every run: host functions prove nothing, and a
//! query of work that counts as done waits until the work is done. Benchmarks use it. Tests that hold a stream up
//! cannot: the query would wait for the test's own release.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Queries of one work that count as a wait for it, if a thread asks about nothing else in between and gives no work.
const QUERIES_IN_A_ROW: u32 = 64;

thread_local! {
    /// The work that this thread asked about last, and how many times in a row.
    static ASKED: Cell<(u64, u32)> = const { Cell::new((0, 0)) };
}

/// The most works that a host can be ahead by: what is accepted.
pub(crate) const RUN_AHEAD_MAX: usize = 1 << 20;

/// The run-ahead of a driver. Works are numbered from 1.
#[derive(Default)]
pub(crate) struct Ahead {
    /// None: work is done when the host device has done it.
    works: Option<u64>,
    duration: Duration,
    is_exact: bool,
    /// Number of works. Relaxed, as the next: they guard no other memory.
    given: AtomicU64,
    /// The latest work that somebody waited for.
    waited: AtomicU64,
}

impl Ahead {
    /// A run-ahead of `works`, none for 0, of works that take `duration`.
    pub(crate) fn new(works: u64, duration: Duration, is_exact: bool) -> Self {
        let works = (works > 0).then_some(works);
        Self { works, duration, is_exact: is_exact && works.is_some(), ..Self::default() }
    }

    /// Counts a work. Returns its number.
    pub(crate) fn give(&self) -> u64 {
        ASKED.set((0, 0));
        self.given.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The number of the last work of all streams.
    pub(crate) fn last(&self) -> u64 {
        self.given.load(Ordering::Relaxed)
    }

    /// A stream is queried: the thread does not wait for an event.
    pub(crate) fn ask_stream(&self) {
        ASKED.set((0, 0));
    }

    /// An event behind a work is queried. Enough queries in a row are a wait.
    pub(crate) fn ask(&self, work: u64) {
        let (last, times) = ASKED.get();
        let times = if last == work { times.saturating_add(1) } else { 1 };
        ASKED.set((work, times));
        if times == QUERIES_IN_A_ROW {
            self.wait(work);
        }
    }

    /// Somebody waits for a work, and so for all before it.
    pub(crate) fn wait(&self, work: u64) {
        self.waited.fetch_max(work, Ordering::Relaxed);
    }

    /// The latest work that somebody waited for.
    pub(crate) fn waited(&self) -> u64 {
        self.waited.load(Ordering::Relaxed)
    }

    /// Whether a work counts as done, as far as the run-ahead says. 0: no work. `passed` is the last work of its
    /// stream that a host function proved.
    pub(crate) fn is_reached(&self, work: u64, passed: u64) -> bool {
        let is_known = work <= self.waited() || (!self.is_exact && work <= passed);
        self.works.is_none_or(|works| is_known || work + works <= self.last())
    }

    /// Whether work that counts as done is waited for when it is asked about, so that no thread's speed has a
    /// say.
    pub(crate) fn is_exact(&self) -> bool {
        self.is_exact
    }

    /// Takes the time of one work, on the stream's thread.
    pub(crate) fn work(&self) {
        if !self.duration.is_zero() {
            std::thread::sleep(self.duration);
        }
    }
}
