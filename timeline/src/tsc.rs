//! `CLOCK_MONOTONIC` by the processor's time-stamp counter (TSC), in half the time that the kernel's clock takes.
//!
//! ```text
//!   kernel's clock   ●─────────────────●─────────────────●──   ●: an anchor, a reading of both clocks
//!   readings         ╰───────────────╮ ╰───────────────╮ ╰──   0.2 % slower from one anchor to the next
//! ```
//! - **T1** A reading is not ahead of the kernel's clock, a nanosecond of rounding apart, and at most 2 µs behind it (`LAG_NS_MAX`),
//!   while the kernel corrects that by at most 500 ppm each way. So a reading may be 2 µs lower than an earlier one of another thread.
//! - **T2** A new anchor only moves readings forward. Those of a thread are in order, unless one was the kernel's time without a
//!   new anchor: another thread was setting it, or was interrupted; the next may be 2 µs lower.
//! - **T3** A counter that does not keep pace with the kernel's clock (a faster correction, a suspended or migrated machine,
//!   processors that disagree) is not used from the next anchor on, until it has kept pace for a second.
//! - **T4** A reading takes no lock and never waits.

use crate::sync::{AtomicU64, Ordering};
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
/// Time without a counter that has not kept pace, at least.
const PAUSE_NS: u64 = 1_000_000_000;
/// A counter that has paused more often is not used again.
const PAUSES_MAX: u64 = 256;
/// Nanoseconds a tick, times 2^32: counters of 100 MHz to 20 GHz.
const RATES: RangeInclusive<u64> = (1 << 32) / 20..=10 << 32;
/// Most that a reading is behind the kernel's clock.
#[cfg(test)]
pub(crate) const LAG_NS_MAX: u64 = (ANCHOR_NS >> (SLOWER_SHIFT - 1)) + APART_NS_MAX;

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

/// The latest anchor. Its fields are stored by the thread that holds `anchoring`. They share one cache line.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct TscClock {
    /// [`HELD`] by the thread that sets an anchor. For ever after [`PAUSES_MAX`], and in a child that was forked meanwhile:
    /// readings are then the kernel's.
    anchoring: AtomicU64,
    /// Nanoseconds a tick of readings, times 2^32. 0 until it is measured, and then constant.
    rate: AtomicU64,
    /// Ticks for which an anchor serves. 0 until the rate is measured, and while the counter pauses.
    period_ticks: AtomicU64,
    /// The anchor on the counter. Until the rate is measured, the first reading; in a pause, when it began.
    anchor_ticks: AtomicU64,
    /// The anchor on the kernel's clock.
    anchor_ns: AtomicU64,
    /// What turns ticks at `rate` into a reading; wraps.
    offset_ns: AtomicU64,
    /// How far apart the clocks were read the first time, in ticks.
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
        Self::of([const { AtomicU64::new(0) }; 8])
    }

    const fn of(zeros: [AtomicU64; 8]) -> Self {
        let [anchoring, rate, period_ticks, anchor_ticks, anchor_ns, offset_ns, first, pauses] =
            zeros;
        Self {
            anchoring,
            rate,
            period_ticks,
            anchor_ticks,
            anchor_ns,
            offset_ns,
            first_apart_ticks: first,
            pauses,
        }
    }

    /// Returns the time in nanoseconds.
    #[inline]
    pub(crate) fn now_ns(&self, source: &impl Source) -> u64 {
        let ticks = source.ticks();
        // Acquire, both: pair with the releases in `start` and `set`. Who sees a period sees the rate. Who sees an anchor sees its
        // offset or a later one, which gives a time within this call, too.
        let period_ticks = self.period_ticks.load(Ordering::Acquire);
        let since = ticks.wrapping_sub(self.anchor_ticks.load(Ordering::Acquire));
        if since < period_ticks {
            let offset_ns = self.offset_ns.load(Ordering::Relaxed);
            return scaled(ticks, self.rate.load(Ordering::Relaxed)).wrapping_add(offset_ns);
        }
        self.now_from_kernel(source, since)
    }

    /// `since`: ticks since the anchor.
    #[cold]
    #[inline(never)]
    fn now_from_kernel(&self, source: &impl Source, since: u64) -> u64 {
        let rate = self.rate.load(Ordering::Relaxed);
        let is_measured = rate != 0;
        let pauses = is_measured
            && self.period_ticks.load(Ordering::Relaxed) == 0
            && scaled(since, rate) < PAUSE_NS;
        // A look first: the exchange would take the line from all readers.
        let held = || self.anchoring.load(Ordering::Relaxed) == HELD;
        // Acquire: pairs with the release below; this thread sees all that the last holder has stored.
        let take = || {
            let (yes, no) = (Ordering::Acquire, Ordering::Relaxed);
            self.anchoring.compare_exchange(FREE, HELD, yes, no)
        };
        if pauses || held() || take().is_err() {
            return source.kernel_ns();
        }
        let pair = Pair::read(source);
        // Read again: another holder may have measured it.
        let rate = self.rate.load(Ordering::Relaxed);
        let may_go_on = if rate == 0 { self.measure(&pair) } else { self.follow(&pair, rate) };
        if may_go_on {
            self.anchoring.store(FREE, Ordering::Release);
        }
        pair.kernel_ns
    }

    /// Measures the rate from the first reading to this one. Returns false for a counter with an implausible rate.
    fn measure(&self, pair: &Pair) -> bool {
        let first_ns = self.anchor_ns.load(Ordering::Relaxed);
        let first_apart_ticks = self.first_apart_ticks.load(Ordering::Relaxed);
        // An interrupted first reading would take long to become precise.
        if first_ns == 0 || pair.apart_ticks < first_apart_ticks / 2 {
            self.anchor_ticks.store(pair.ticks, Ordering::Relaxed);
            self.anchor_ns.store(pair.kernel_ns, Ordering::Relaxed);
            self.first_apart_ticks.store(pair.apart_ticks, Ordering::Relaxed);
            return true;
        }
        let ns = pair.kernel_ns.saturating_sub(first_ns);
        let ticks = pair.ticks.wrapping_sub(self.anchor_ticks.load(Ordering::Relaxed));
        let apart_ticks = pair.apart_ticks.saturating_add(first_apart_ticks);
        if ns < MEASURED_NS_MIN || apart_ticks > ticks >> PRECISION_SHIFT {
            return true;
        }
        let rate = (u128::from(ns) << 32) / u128::from(ticks.max(1));
        let Ok(rate) = u64::try_from(rate) else { return false };
        if !RATES.contains(&rate) {
            return false;
        }
        let rate = rate - (rate >> SLOWER_SHIFT);
        if scaled(pair.apart_ticks, rate) <= APART_NS_MAX {
            self.rate.store(rate, Ordering::Relaxed);
            self.set(pair, rate);
            self.start(rate);
        }
        true
    }

    /// Sets a new anchor, or pauses if the counter has not kept pace since the last one. Returns false after the last pause.
    fn follow(&self, pair: &Pair, rate: u64) -> bool {
        let ns = pair.kernel_ns.saturating_sub(self.anchor_ns.load(Ordering::Relaxed));
        let ticks = pair.ticks.wrapping_sub(self.anchor_ticks.load(Ordering::Relaxed));
        let (read_ns, apart_ns) = (scaled(ticks, rate), scaled(pair.apart_ticks, rate));
        let is_ahead = read_ns > ns.saturating_add(apart_ns).saturating_add(1);
        let is_behind = read_ns.saturating_add(APART_NS_MAX + (ns >> BEHIND_SHIFT)) < ns;
        if is_ahead || is_behind {
            self.period_ticks.store(0, Ordering::Relaxed);
            self.set(pair, rate);
            return self.pauses.fetch_add(1, Ordering::Relaxed) < PAUSES_MAX;
        }
        // Where readings are ahead of this pair, the next one sets an anchor.
        if apart_ns <= APART_NS_MAX && read_ns <= ns {
            self.set(pair, rate);
            if self.period_ticks.load(Ordering::Relaxed) == 0 {
                self.start(rate);
            }
        }
        true
    }

    fn start(&self, rate: u64) {
        self.period_ticks.store((ANCHOR_NS << 32) / rate, Ordering::Release);
    }

    fn set(&self, pair: &Pair, rate: u64) {
        let offset_ns = pair.kernel_ns.wrapping_sub(scaled(pair.ticks, rate));
        self.offset_ns.store(offset_ns, Ordering::Relaxed);
        self.anchor_ns.store(pair.kernel_ns, Ordering::Relaxed);
        self.anchor_ticks.store(pair.ticks, Ordering::Release);
    }
}

/// Returns the nanoseconds of `ticks`, modulo 2^64. Counters start at 0 with the machine: 2^64 ticks are 116 years at 5 GHz.
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
