//! Every interleaving of readings while an anchor is set.

use super::*;
use loom::sync::Arc;
use loom::thread;
use std::sync::atomic::AtomicU64 as PlainU64;

/// A tick is a nanosecond. Each reading takes `step`; loom does not interleave within one.
struct Steps {
    now: PlainU64,
    step: u64,
}

impl Source for Steps {
    fn ticks(&self) -> u64 {
        self.now.fetch_add(self.step, std::sync::atomic::Ordering::SeqCst) + self.step
    }

    fn kernel_ns(&self) -> u64 {
        self.ticks()
    }

    fn fence(&self) {}
}

#[test]
fn loom_readings_lie_within_their_calls() {
    loom::model(|| {
        let clock = TscClock::default();
        let machine = Steps { now: PlainU64::new(1_000), step: 40 };
        clock.now_ns(&machine);
        machine.now.store(3_000_000, std::sync::atomic::Ordering::SeqCst);
        clock.now_ns(&machine);
        // The anchor has expired, and the first thread to read sets a new one. A reading with the old offset would be 54 µs
        // behind.
        machine.now.store(30_000_000, std::sync::atomic::Ordering::SeqCst);
        let shared = Arc::new((clock, machine));
        let other = Arc::clone(&shared);
        let reader = thread::spawn(move || read(&other.0, &other.1));
        read(&shared.0, &shared.1);
        reader.join().unwrap();
        assert_eq!(shared.0.pauses.load(Ordering::Relaxed), 0, "still in use");
    });
}

fn read(clock: &TscClock, machine: &Steps) {
    let before_ns = machine.ticks();
    let ns = clock.now_ns(machine);
    let after_ns = machine.ticks();
    assert!(ns <= after_ns, "{ns} is ahead of {after_ns}");
    assert!(ns + LAG_NS_MAX >= before_ns, "{ns} is behind {before_ns}");
}

/// Time stands still.
struct Still {
    ticks: u64,
    kernel_ns: u64,
}

impl Source for Still {
    fn ticks(&self) -> u64 {
        self.ticks
    }

    fn kernel_ns(&self) -> u64 {
        self.kernel_ns
    }

    fn fence(&self) {}
}

#[test]
fn loom_a_rate_and_an_offset_are_read_as_one() {
    loom::model(|| {
        let clock = TscClock::default();
        let pair = |ticks, kernel_ns| Pair { kernel_ns, ticks, apart_ticks: 0 };
        clock.set(&pair(1_000, 1_000), 1 << 32);
        clock.period_ticks.store(5_000, Ordering::Relaxed);
        // Of a thread that is at an anchor for ever.
        clock.anchoring.store(HELD, Ordering::Relaxed);
        let shared = Arc::new(clock);
        let other = Arc::clone(&shared);
        let setter = thread::spawn(move || other.set(&pair(1_500, 90_000), 2 << 32));
        let ns = shared.now_ns(&Still { ticks: 2_000, kernel_ns: 7 });
        assert!([2_000, 91_000, 7].contains(&ns), "{ns}");
        setter.join().unwrap();
    });
}
