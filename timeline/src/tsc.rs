//! `CLOCK_MONOTONIC` by the processor's time-stamp counter (TSC), in half the time that the kernel's clock takes.
//!
//! ```text
//!   kernel's clock   ●─────────────────●─────────────────●──   ●: an anchor, a reading of both clocks
//!   readings         ╰───────────────╮ ╰───────────────╮ ╰──   0.2 % slower from one anchor to the next
//! ```
//! - **T1** A reading is not ahead of the kernel's clock, a nanosecond of rounding apart, and at most 2 µs behind it (`LAG_NS_MAX`),
//!   while the kernel corrects that by at most 500 ppm each way. So a reading may be 2 µs lower than an earlier one of another thread.
//! - **T2** A new anchor only moves readings forward. Those of a thread are in order, unless one was the kernel's time: another thread
//!   was setting an anchor, or was interrupted, and the next may be 2 µs lower; or a pause begins, and it is lower by as much as
//!   the counter was ahead.
//! - **T3** A counter that does not keep pace with the kernel's clock (a faster correction, a suspended or migrated machine,
//!   processors that disagree) pauses from the next anchor on: readings are the kernel's. After the pause, of a second at first and twice as
//!   long each time, its rate is measured anew.
//! - **T4** A reading takes no lock and never waits.

use crate::sync::{AtomicU64, Ordering, fence};
use std::ops::RangeInclusive;

/// Time for which an anchor serves.
const ANCHOR_NS: u64 = 250_000;
/// Readings are slower than the counter by 2^-9: more than the kernel corrects its clock by (500 ppm each way) and than
/// the measured rate is off ([`PRECISION_SHIFT`]).
const SLOWER_SHIFT: u32 = 9;
/// The rate is measured over at least this time.
const MEASURED_NS_MIN: u64 = 1_000_000;
/// At both ends of that time the two clocks are read within 2^-13 of it: 122 ppm.
const PRECISION_SHIFT: u32 = 13;
/// The two readings of an anchor are at most this far apart.
const APART_NS_MAX: u64 = 1_000;
/// A counter that falls behind the kernel's clock by more than 2^-8 of the time does not keep pace.
const BEHIND_SHIFT: u32 = SLOWER_SHIFT - 1;
/// Length of the first pause.
const PAUSE_NS: u64 = 1_000_000_000;
/// A pause is at most 2^12 times as long: an hour.
const PAUSE_SHIFT_MAX: u64 = 12;
/// Nanoseconds a tick, times 2^32: counters of 100 MHz to 20 GHz.
const RATES: RangeInclusive<u64> = (1 << 32) / 20..=10 << 32;
/// Most that a reading is behind the kernel's clock.
#[cfg(test)]
pub(crate) const LAG_NS_MAX: u64 = (ANCHOR_NS >> (SLOWER_SHIFT - 1)) + APART_NS_MAX;

/// An anchor that serves no reading: counters start at 0 with the machine, and 2^63 ticks are 58 years at 5 GHz.
const UNSET: u64 = 1 << 63;
const FREE: u64 = 0;
const HELD: u64 = 1;

/// The two clocks.
pub(crate) trait Source {
    /// Reads the counter.
    fn ticks(&self) -> u64;
    /// Reads the kernel's clock.
    fn kernel_ns(&self) -> u64;
    /// Orders what is read before it and after it.
    fn fence(&self);
}

/// The latest anchor. Its fields are stored by the thread that holds `anchoring`.
///
/// Readers take a rate and an offset as one by a sequence lock whose sequence is `anchor_ticks`: [`UNSET`] while they are stored.
#[derive(Debug)]
#[cfg_attr(loom, derive(Default))] // loom's atomics have no constants
#[repr(C, align(64))]
pub(crate) struct TscClock {
    /// The anchor on the counter. In a pause, and before the rate is measured, the reading from which it is measured.
    anchor_ticks: AtomicU64,
    /// Ticks for which the anchor serves. 0 until the rate is measured.
    period_ticks: AtomicU64,
    /// Nanoseconds a tick of readings, times 2^32.
    rate: AtomicU64,
    /// What turns ticks at `rate` into a reading; wraps.
    offset_ns: AtomicU64,
    /// [`HELD`] by the thread that sets an anchor. For ever in a child that was forked meanwhile: its readings are the kernel's.
    anchoring: AtomicU64,
    /// The anchor on the kernel's clock.
    anchor_ns: AtomicU64,
    /// Ticks of a pause; 0 without one.
    rest_ticks: AtomicU64,
    /// How far apart the two clocks were read when measuring began, in ticks.
    first_apart_ticks: AtomicU64,
    pauses: AtomicU64,
}

/// A reading of the kernel's clock between two of the counter.
struct Pair {
    kernel_ns: u64,
    /// The second of the counter.
    ticks: u64,
    /// From the first to the second.
    apart_ticks: u64,
}

impl Pair {
    fn read(source: &impl Source) -> Self {
        let before = source.ticks();
        source.fence();
        let kernel_ns = source.kernel_ns();
        source.fence();
        let ticks = source.ticks();
        Self { kernel_ns, ticks, apart_ticks: ticks.wrapping_sub(before) }
    }
}

impl TscClock {
    /// Returns a clock whose first readings are the kernel's, until the rate of the counter is known.
    #[cfg(not(loom))]
    pub(crate) const fn new() -> Self {
        Self {
            anchor_ticks: AtomicU64::new(0),
            period_ticks: AtomicU64::new(0),
            rate: AtomicU64::new(0),
            offset_ns: AtomicU64::new(0),
            anchoring: AtomicU64::new(0),
            anchor_ns: AtomicU64::new(0),
            rest_ticks: AtomicU64::new(0),
            first_apart_ticks: AtomicU64::new(0),
            pauses: AtomicU64::new(0),
        }
    }

    /// Returns the time in nanoseconds.
    #[inline]
    pub(crate) fn now_ns(&self, source: &impl Source) -> u64 {
        let ticks = source.ticks();
        // Acquire: pairs with the release of `set`; what follows is of this anchor or a later one.
        let anchor_ticks = self.anchor_ticks.load(Ordering::Acquire);
        let since = ticks.wrapping_sub(anchor_ticks);
        if since < self.period_ticks.load(Ordering::Relaxed) {
            let offset_ns = self.offset_ns.load(Ordering::Relaxed);
            let reading = scaled(ticks, self.rate.load(Ordering::Relaxed)).wrapping_add(offset_ns);
            // Pairs with the release fence of `set`: a reader of a later rate or offset sees another anchor.
            fence(Ordering::Acquire);
            if self.anchor_ticks.load(Ordering::Relaxed) == anchor_ticks {
                return reading;
            }
        }
        self.now_from_kernel(source, since)
    }

    /// `since`: ticks since the anchor.
    #[cold]
    #[inline(never)]
    fn now_from_kernel(&self, source: &impl Source, since: u64) -> u64 {
        let rests = |since| since < self.rest_ticks.load(Ordering::Relaxed);
        // A look first: the exchange would take the line from all readers.
        let held = || self.anchoring.load(Ordering::Relaxed) == HELD;
        // Acquire: pairs with the release below; this thread sees all that the last holder has stored.
        let take = || {
            let (yes, no) = (Ordering::Acquire, Ordering::Relaxed);
            self.anchoring.compare_exchange(FREE, HELD, yes, no)
        };
        if rests(since) || held() || take().is_err() {
            return source.kernel_ns();
        }
        let pair = Pair::read(source);
        // The last holder may have begun a pause since this thread read the counter.
        if !rests(self.since_anchor(&pair).1) {
            match self.period_ticks.load(Ordering::Relaxed) {
                0 => self.measure(&pair),
                _ => self.follow(&pair),
            }
        }
        self.anchoring.store(FREE, Ordering::Release);
        pair.kernel_ns
    }

    /// Measures the rate from the first reading to this one.
    fn measure(&self, pair: &Pair) {
        let is_first = self.anchor_ns.load(Ordering::Relaxed) == 0;
        let first_apart_ticks = self.first_apart_ticks.load(Ordering::Relaxed);
        // An interrupted first reading would take long to become precise.
        if is_first || pair.apart_ticks < first_apart_ticks / 2 {
            self.begin(pair, self.rest_ticks.load(Ordering::Relaxed));
            return;
        }
        let (ns, ticks) = self.since_anchor(pair);
        let apart_ticks = pair.apart_ticks.saturating_add(first_apart_ticks);
        if ns < MEASURED_NS_MIN || apart_ticks > ticks >> PRECISION_SHIFT {
            return;
        }
        let rate = (u128::from(ns) << 32) / u128::from(ticks.max(1));
        let rate = u64::try_from(rate).ok().filter(|rate| RATES.contains(rate));
        let Some(rate) = rate.map(|rate| rate - (rate >> SLOWER_SHIFT)) else {
            // No counter has such a rate. Measuring never begins again.
            self.begin(pair, u64::MAX);
            return;
        };
        if scaled(pair.apart_ticks, rate) <= APART_NS_MAX {
            self.rest_ticks.store(0, Ordering::Relaxed);
            self.set(pair, rate);
            self.period_ticks.store(ticks_of(ANCHOR_NS, rate), Ordering::Relaxed);
        }
    }

    /// Sets a new anchor, or pauses if the counter has not kept pace since the last one.
    fn follow(&self, pair: &Pair) {
        let rate = self.rate.load(Ordering::Relaxed);
        let (ns, ticks) = self.since_anchor(pair);
        let (read_ns, apart_ns) = (scaled(ticks, rate), scaled(pair.apart_ticks, rate));
        let is_ahead = read_ns > ns.saturating_add(apart_ns).saturating_add(1);
        let is_behind = read_ns.saturating_add(APART_NS_MAX + (ns >> BEHIND_SHIFT)) < ns;
        if is_ahead || is_behind {
            let pauses = self.pauses.fetch_add(1, Ordering::Relaxed);
            self.begin(pair, ticks_of(PAUSE_NS << pauses.min(PAUSE_SHIFT_MAX), rate));
        } else if apart_ns <= APART_NS_MAX && read_ns <= ns {
            // Where readings are ahead of this pair, the next one sets an anchor.
            self.set(pair, rate);
        }
    }

    /// Returns the nanoseconds and ticks from the anchor to `pair`.
    fn since_anchor(&self, pair: &Pair) -> (u64, u64) {
        let ns = pair.kernel_ns.saturating_sub(self.anchor_ns.load(Ordering::Relaxed));
        let ticks = pair.ticks.wrapping_sub(self.anchor_ticks.load(Ordering::Relaxed));
        (ns, ticks)
    }

    /// Begins to measure, after a pause.
    fn begin(&self, pair: &Pair, rest_ticks: u64) {
        self.period_ticks.store(0, Ordering::Relaxed);
        self.rest_ticks.store(rest_ticks, Ordering::Relaxed);
        self.first_apart_ticks.store(pair.apart_ticks, Ordering::Relaxed);
        self.anchor_ns.store(pair.kernel_ns, Ordering::Relaxed);
        self.anchor_ticks.store(pair.ticks, Ordering::Release);
    }

    fn set(&self, pair: &Pair, rate: u64) {
        let offset_ns = pair.kernel_ns.wrapping_sub(scaled(pair.ticks, rate));
        self.anchor_ticks.store(UNSET, Ordering::Relaxed);
        // Pairs with the acquire fence of `now_ns`.
        fence(Ordering::Release);
        self.rate.store(rate, Ordering::Relaxed);
        self.offset_ns.store(offset_ns, Ordering::Relaxed);
        self.anchor_ns.store(pair.kernel_ns, Ordering::Relaxed);
        self.anchor_ticks.store(pair.ticks, Ordering::Release);
    }
}

/// Returns the ticks of a time below 2^42 ns.
fn ticks_of(ns: u64, rate: u64) -> u64 {
    ((u128::from(ns) << 32) / u128::from(rate.max(1))) as u64
}

/// Returns the nanoseconds of `ticks`, modulo 2^64.
#[inline]
fn scaled(ticks: u64, rate: u64) -> u64 {
    ((u128::from(ticks) * u128::from(rate)) >> 32) as u64
}

#[cfg(all(test, loom))]
#[path = "tsc_loom.rs"]
mod loom_tests;
#[cfg(all(test, not(loom)))]
#[path = "tsc_tests.rs"]
mod tests;
