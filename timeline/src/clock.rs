//! The monotonic clock of all events, and two clocks that align dumps with other traces.

/// Readings from which the anchor with the smallest error is chosen.
const ANCHOR_TRIES: usize = 5;

/// A moment on several clocks, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockAnchor {
    /// `CLOCK_MONOTONIC`, the clock of events: theirs are up to 2 µs behind it ([`now_ns`]).
    pub monotonic_ns: u64,
    /// `CLOCK_REALTIME`: Unix time, the clock of logs and profilers.
    pub realtime_ns: u64,
    /// `CLOCK_BOOTTIME`, the clock of system traces; it includes suspend.
    pub boottime_ns: u64,
    /// Upper bound on the time between the readings.
    pub error_ns: u64,
}

impl ClockAnchor {
    /// Reads all clocks several times and returns the reading with the smallest error.
    pub fn now() -> Self {
        let first = Self::read();
        let tries = (1..ANCHOR_TRIES).map(|_| Self::read());
        tries.fold(first, |best, next| if next.error_ns < best.error_ns { next } else { best })
    }

    fn read() -> Self {
        let before_ns = monotonic_ns();
        let realtime_ns = read_ns(libc::CLOCK_REALTIME);
        let boottime_ns = read_ns(libc::CLOCK_BOOTTIME);
        let error_ns = monotonic_ns().saturating_sub(before_ns);
        Self { monotonic_ns: before_ns + error_ns / 2, realtime_ns, boottime_ns, error_ns }
    }

    /// Converts `monotonic_ns` to Unix time; 0 for a time before the epoch.
    pub fn unix_ns(&self, monotonic_ns: u64) -> u64 {
        let unix_ns =
            i128::from(self.realtime_ns) + i128::from(monotonic_ns) - i128::from(self.monotonic_ns);
        u64::try_from(unix_ns.max(0)).unwrap_or(u64::MAX)
    }
}

/// Returns `CLOCK_MONOTONIC` in nanoseconds: no lock, no allocation, about 10 ns on x86-64, where it reads the processor's
/// time-stamp counter and is at most 2 µs behind the kernel's clock, never ahead, while that is corrected by at most 500 ppm.
/// Readings of two threads, one after the other, may be 2 µs out of order.
#[inline]
pub fn now_ns() -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri), not(loom)))]
    return crate::processor::now_ns(monotonic_ns);
    #[cfg(not(all(target_arch = "x86_64", not(miri), not(loom))))]
    monotonic_ns()
}

/// Reads the kernel's clock.
fn monotonic_ns() -> u64 {
    read_ns(libc::CLOCK_MONOTONIC)
}

#[inline]
fn read_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    #[expect(unsafe_code, reason = "the standard library does not expose raw clock values")]
    // SAFETY: `time` is a live timespec that the call may write to, and keeps no pointer to.
    let status = unsafe { libc::clock_gettime(clock, &raw mut time) };
    // The call fails only for an unknown clock.
    debug_assert_eq!(status, 0, "clock {clock} exists on every supported Linux");
    // Clocks are never negative, so neither cast can lose a sign.
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn now_is_between_readings_of_the_kernels_clock() {
        let (mut last_ns, end_ns) = (0, read_ns(libc::CLOCK_MONOTONIC) + 20_000_000);
        while last_ns < end_ns {
            let (before_ns, ns) = (read_ns(libc::CLOCK_MONOTONIC), now_ns());
            assert!(ns + crate::tsc::LAG_NS_MAX >= before_ns, "{ns} is far behind {before_ns}");
            let after_ns = read_ns(libc::CLOCK_MONOTONIC);
            assert!(ns <= after_ns, "{ns} is ahead of {after_ns}");
            last_ns = ns;
        }
    }

    #[test]
    fn an_anchor_lies_between_readings_of_each_clock() {
        let [mono, real, boot] =
            [libc::CLOCK_MONOTONIC, libc::CLOCK_REALTIME, libc::CLOCK_BOOTTIME].map(read_ns);
        let anchor = ClockAnchor::now();
        assert!((mono..=read_ns(libc::CLOCK_MONOTONIC)).contains(&anchor.monotonic_ns));
        assert!((real..=read_ns(libc::CLOCK_REALTIME)).contains(&anchor.realtime_ns));
        assert!((boot..=read_ns(libc::CLOCK_BOOTTIME)).contains(&anchor.boottime_ns));
    }

    #[test]
    fn unix_time_moves_with_the_monotonic_clock_in_both_directions() {
        let anchor =
            ClockAnchor { monotonic_ns: 1_000, realtime_ns: 500_000, ..Default::default() };
        assert_eq!(anchor.unix_ns(1_000), 500_000);
        assert_eq!(anchor.unix_ns(1_250), 500_250);
        assert_eq!(anchor.unix_ns(900), 499_900);
        let late = ClockAnchor { monotonic_ns: 1_000, realtime_ns: 10, ..Default::default() };
        assert_eq!(late.unix_ns(0), 0, "times before the epoch are 0");
    }
}
