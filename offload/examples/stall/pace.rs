//! Links of a chosen rate: when each transfer over them is over.

use std::num::NonZeroU64;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const NS_PER_S: u128 = 1_000_000_000;

/// One direction of a link: transfers go over it one after the other, each at the full rate. Pure.
#[derive(Debug)]
struct Pace {
    bytes_per_s: NonZeroU64,
    /// When the last transfer asked for is over.
    free_ns: u64,
}

impl Pace {
    const fn new(bytes_per_s: NonZeroU64) -> Self {
        Self { bytes_per_s, free_ns: 0 }
    }

    /// When `bytes` that are asked for at `now_ns` have gone over, rounded up. Deadlines follow from
    /// deadlines, so a late sleep does not delay the next one.
    fn due_ns(&mut self, now_ns: u64, bytes: u64) -> u64 {
        let taken_ns = (u128::from(bytes) * NS_PER_S).div_ceil(u128::from(self.bytes_per_s.get()));
        let begin_ns = self.free_ns.max(now_ns);
        self.free_ns = begin_ns.saturating_add(u64::try_from(taken_ns).unwrap_or(u64::MAX));
        self.free_ns
    }
}

/// A [`Pace`] on the clock. Any-thread.
#[derive(Debug)]
pub(crate) struct Link {
    epoch: Instant,
    pace: Mutex<Pace>,
}

impl Link {
    pub(crate) fn new(bytes_per_s: NonZeroU64) -> Self {
        Self { epoch: Instant::now(), pace: Mutex::new(Pace::new(bytes_per_s)) }
    }

    /// Takes the next free time of the link, and says when it ends.
    pub(crate) fn take(&self, bytes: usize) -> Instant {
        let mut pace = self.pace.lock().unwrap_or_else(PoisonError::into_inner);
        // No run lasts 500 years.
        let now_ns = self.epoch.elapsed().as_nanos() as u64;
        self.epoch + Duration::from_nanos(pace.due_ns(now_ns, bytes as u64))
    }
}

/// Sleeps until `due`, or not at all where that has been.
pub(crate) fn sleep_until(due: Instant) {
    std::thread::sleep(due.saturating_duration_since(Instant::now()));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A byte a microsecond.
    fn pace() -> Pace {
        Pace::new(NonZeroU64::new(1_000_000).unwrap())
    }

    #[test]
    fn an_idle_link_begins_at_once() {
        assert_eq!(pace().due_ns(500, 7), 7_500);
    }

    #[test]
    fn what_is_asked_for_meanwhile_goes_after_it() {
        let mut pace = pace();
        assert_eq!(pace.due_ns(0, 10), 10_000);
        assert_eq!(pace.due_ns(1, 10), 20_000);
        // Asked for late by an oversleep, it would have been late by that.
        assert_eq!(pace.due_ns(19_999, 10), 30_000);
        assert_eq!(pace.due_ns(40_000, 10), 50_000, "the link was idle for 10");
    }

    #[test]
    fn time_is_rounded_up_and_never_overflows() {
        let mut slow = Pace::new(NonZeroU64::new(3).unwrap());
        assert_eq!(slow.due_ns(0, 1), 333_333_334);
        assert_eq!(slow.due_ns(0, u64::MAX), u64::MAX);
        assert_eq!(slow.due_ns(0, 1), u64::MAX);
        assert_eq!(pace().due_ns(5, 0), 5);
    }
}
