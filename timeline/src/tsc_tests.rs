use super::*;
use proptest::prelude::*;
use std::cell::Cell;

/// Time passes with each reading. The kernel's clock is within 500 ppm of real time.
struct Machine {
    real_ps: Cell<u128>,
    kernel_ps: Cell<u128>,
    /// Of the kernel's clock.
    ppm: Cell<i128>,
    ticks_per_us: Cell<u128>,
    /// Ticks times 10^6.
    micro_ticks: Cell<u128>,
    reading_ps: Cell<u128>,
}

impl Machine {
    fn new(ticks_per_us: u64, ppm: i64) -> Self {
        Self {
            real_ps: Cell::new(0),
            kernel_ps: Cell::new(5_000_000_000_000),
            ppm: Cell::new(ppm.into()),
            ticks_per_us: Cell::new(ticks_per_us.into()),
            micro_ticks: Cell::new(77_000_000_000_000),
            reading_ps: Cell::new(9_000),
        }
    }

    fn pass(&self, ps: u128) {
        self.real_ps.set(self.real_ps.get() + ps);
        let parts = (1_000_000 + self.ppm.get()) as u128;
        self.kernel_ps.set(self.kernel_ps.get() + ps * parts / 1_000_000);
        self.micro_ticks.set(self.micro_ticks.get() + ps * self.ticks_per_us.get());
    }

    fn jump(&self, ticks: i64) {
        let ticks = i128::from(ticks) * 1_000_000;
        self.micro_ticks.set(self.micro_ticks.get().saturating_add_signed(ticks));
    }

    fn kernel_now(&self) -> u64 {
        (self.kernel_ps.get() / 1_000) as u64
    }
}

impl Source for Machine {
    fn ticks(&self) -> u64 {
        self.pass(self.reading_ps.get());
        (self.micro_ticks.get() / 1_000_000) as u64
    }

    fn kernel_ns(&self) -> u64 {
        self.pass(self.reading_ps.get());
        let ns = self.kernel_now();
        self.pass(self.reading_ps.get());
        ns
    }

    fn fence(&self) {}
}

/// Reads until the rate is measured.
fn measured(machine: &Machine) -> TscClock {
    let clock = TscClock::new();
    clock.now_ns(machine);
    machine.pass(2_000_000_000);
    clock.now_ns(machine);
    assert!(is_used(&clock), "measured");
    clock
}

/// What may happen between two readings.
#[derive(Clone, Copy, Debug)]
enum Pause {
    Ns(u32),
    Seconds(u16),
    /// The kernel corrects its clock.
    Ppm(i16),
    /// Reading the clocks takes this long from here on.
    ReadingPs(u32),
}

fn pauses() -> impl Strategy<Value = Pause> {
    prop_oneof![
        8 => (0u32..600_000).prop_map(Pause::Ns),
        1 => (0u16..5_000).prop_map(Pause::Seconds),
        1 => (-500i16..=500).prop_map(Pause::Ppm),
        1 => (1u32..3_000_000).prop_map(Pause::ReadingPs),
    ]
}

proptest! {
    #[test]
    fn readings_follow_the_kernels_clock_and_never_step_back(
        ticks_per_us in 200u64..6_000, ppm in -500i64..=500, is_new: bool, reading_ps in 1u32..3_000_000,
        pauses in proptest::collection::vec(pauses(), 1..200)
    ) {
        let machine = Machine::new(ticks_per_us, ppm);
        let clock = if is_new { TscClock::new() } else { measured(&machine) };
        machine.reading_ps.set(reading_ps.into());
        let mut last_ns = 0;
        for pause in pauses {
            match pause {
                Pause::Ns(ns) => machine.pass(u128::from(ns) * 1_000),
                Pause::Seconds(s) => machine.pass(u128::from(s) * 1_000_000_000_000),
                Pause::Ppm(ppm) => machine.ppm.set(ppm.into()),
                Pause::ReadingPs(ps) => machine.reading_ps.set(ps.into()),
            }
            let before_ns = machine.kernel_now();
            let ns = clock.now_ns(&machine);
            prop_assert!(ns >= last_ns, "{ns} after {last_ns}");
            prop_assert!(ns <= machine.kernel_now() + 1, "{ns} is ahead of {}", machine.kernel_now());
            prop_assert!(ns + LAG_NS_MAX >= before_ns, "{ns} is behind {before_ns}");
            last_ns = ns;
        }
        prop_assert_eq!(clock.pauses.load(Ordering::Relaxed), 0, "a counter that keeps pace is used");
    }

    #[test]
    fn a_counter_that_jumps_or_changes_its_rate_pauses_for_a_second(
        ticks_per_us in 200u64..1_500, jump_us in prop_oneof![-1_000_000i64..-2, 3i64..1_000_000],
        rate_percent in prop_oneof![Just(100u64), 50u64..99, 101u64..400], idle_ns in 0u32..400_000
    ) {
        let machine = Machine::new(ticks_per_us, 20);
        let clock = measured(&machine);
        machine.pass(u128::from(idle_ns) * 1_000);
        clock.now_ns(&machine);
        if rate_percent == 100 {
            machine.jump(jump_us * ticks_per_us as i64);
        } else {
            machine.ticks_per_us.set(u128::from(ticks_per_us * rate_percent) / 100);
        }
        for _ in 0..3 {
            // The anchor serves longer for a counter that has gone back or has become slower.
            machine.pass(u128::from(ANCHOR_NS) * 1_000);
            clock.now_ns(&machine);
        }
        prop_assert!(!is_used(&clock), "pauses");
        machine.pass(u128::from(PAUSE_NS) * 200);
        expect_the_kernels_clock(&clock, &machine);
        // A thread whose reading of the counter is older than the pause.
        clock.now_from_kernel(&machine, u64::MAX);
        prop_assert!(!is_used(&clock), "pauses");
        machine.pass(u128::from(PAUSE_NS) * 2_000);
        clock.now_ns(&machine);
        prop_assert!(is_used(&clock));
        let before_ns = machine.kernel_now();
        let ns = clock.now_ns(&machine);
        prop_assert!(ns <= machine.kernel_now() + 1 && ns + LAG_NS_MAX >= before_ns);
    }

    #[test]
    fn a_kernels_clock_that_is_corrected_fast_is_followed_from_the_next_anchor_on(
        ppm in prop_oneof![-100_000i64..-500, 500i64..100_000]
    ) {
        let machine = Machine::new(2_450, 0);
        let clock = measured(&machine);
        machine.ppm.set(ppm.into());
        let wrong_ns = LAG_NS_MAX + ANCHOR_NS * ppm.unsigned_abs() / 1_000_000;
        for _ in 0..3_000 {
            let before_ns = machine.kernel_now();
            let ns = clock.now_ns(&machine);
            prop_assert!(ns <= machine.kernel_now() + wrong_ns && ns + wrong_ns >= before_ns);
            machine.pass(1_000_000);
        }
        // Readings are 1,953 ppm slower, and may be 2^-8 and a microsecond an anchor behind.
        if (-1_900..5_500).contains(&ppm) {
            prop_assert!(is_used(&clock), "keeps pace");
        } else if !(-2_100..6_500).contains(&ppm) {
            prop_assert!(!is_used(&clock), "does not keep pace");
        }
        for ppm in [ppm.into(), 0] {
            // A pause begins, if it does, and another one ends.
            machine.ppm.set(ppm);
            for _ in 0..3 {
                clock.now_ns(&machine);
                machine.pass(u128::from(PAUSE_NS) * 2_500);
            }
            clock.now_ns(&machine);
            prop_assert!(is_used(&clock), "at a rate that it has measured anew");
        }
    }
}

fn is_used(clock: &TscClock) -> bool {
    clock.period_ticks.load(Ordering::Relaxed) > 0
}

#[test]
fn pauses_double_up_to_an_hour() {
    let machine = Machine::new(1_000, 0);
    let clock = measured(&machine);
    let jumps = |_| {
        machine.jump(1_000_000);
        clock.now_ns(&machine);
        assert!(!is_used(&clock));
        let rest_ns = clock.rest_ticks.load(Ordering::Relaxed);
        machine.pass(u128::from(rest_ns) * 1_010);
        clock.now_ns(&machine);
        assert!(is_used(&clock));
        // Readings are 2^-9 slower.
        (rest_ns as f64 / PAUSE_NS as f64 * 511.0 / 512.0 * 100.0).round() / 100.0
    };
    let pauses: Vec<f64> = (0..15).map(jumps).collect();
    let doubled = |at: u32| f64::from(1 << at.min(12));
    assert_eq!(pauses, (0..15).map(doubled).collect::<Vec<f64>>());
}

#[track_caller]
fn expect_the_kernels_clock(clock: &TscClock, machine: &Machine) {
    let before_ns = machine.kernel_now();
    let ns = clock.now_ns(machine);
    assert!((before_ns..=machine.kernel_now()).contains(&ns), "{ns} after {before_ns}");
}

/// Another thread reads, and sets an anchor, while the kernel's clock is read for one.
#[test]
fn an_anchor_that_would_move_readings_back_is_not_set() {
    struct Interrupted<'a> {
        machine: &'a Machine,
        clock: &'a TscClock,
        read_ns: Cell<u64>,
    }
    impl Source for Interrupted<'_> {
        fn ticks(&self) -> u64 {
            self.machine.ticks()
        }
        fn kernel_ns(&self) -> u64 {
            let ns = self.machine.kernel_ns();
            self.machine.pass(900_000);
            self.read_ns.set(self.clock.now_ns(self.machine));
            ns
        }
        fn fence(&self) {}
    }
    let machine = Machine::new(2_450, 0);
    let clock = measured(&machine);
    machine.pass(20_000_000);
    let read_ns = Cell::new(0);
    let interrupted = Interrupted { machine: &machine, clock: &clock, read_ns };
    // As of a thread whose reading of the counter is older than the anchor that it sees.
    clock.now_from_kernel(&interrupted, u64::MAX);
    let before_ns = interrupted.read_ns.get();
    let after_ns = clock.now_ns(&machine);
    assert!(before_ns > 0 && after_ns >= before_ns, "{after_ns} after {before_ns}");
}

/// The kernel's clock is read at the end of the first pair and at the beginning of the next ones.
#[test]
fn a_rate_is_measured_over_a_time_that_makes_it_precise() {
    struct Uneven<'a>(&'a Machine, Cell<u128>, Cell<u128>);
    impl Source for Uneven<'_> {
        fn ticks(&self) -> u64 {
            self.0.ticks()
        }
        fn kernel_ns(&self) -> u64 {
            self.0.pass(self.1.replace(0));
            let ns = self.0.kernel_ns();
            self.0.pass(self.2.get());
            ns
        }
        fn fence(&self) {}
    }
    let machine = Machine::new(2_450, 0);
    let uneven = Uneven(&machine, Cell::new(1_500_000), Cell::new(0));
    let clock = TscClock::new();
    clock.now_ns(&uneven);
    uneven.2.set(900_000);
    for _ in 0..400 {
        machine.pass(100_000_000);
        let ns = clock.now_ns(&uneven);
        assert!(ns <= machine.kernel_now() + 1, "{ns} is ahead of {}", machine.kernel_now());
    }
    assert!(is_used(&clock), "measured within 40 ms");
}

#[test]
fn an_interrupted_first_reading_is_replaced() {
    let machine = Machine::new(2_450, 0);
    let clock = TscClock::new();
    machine.reading_ps.set(10_000_000_000);
    clock.now_ns(&machine);
    machine.reading_ps.set(9_000);
    for _ in 0..3 {
        machine.pass(2_000_000_000);
        clock.now_ns(&machine);
    }
    assert!(is_used(&clock), "measured within 6 ms");
}

#[test]
fn between_anchors_only_the_counter_is_read() {
    struct Counted<'a>(&'a Machine, Cell<u32>);
    impl Source for Counted<'_> {
        fn ticks(&self) -> u64 {
            self.0.ticks()
        }
        fn kernel_ns(&self) -> u64 {
            self.1.set(self.1.get() + 1);
            self.0.kernel_ns()
        }
        fn fence(&self) {}
    }
    let machine = Machine::new(2_450, 0);
    let clock = measured(&machine);
    let counted = Counted(&machine, Cell::new(0));
    let began_ps = machine.real_ps.get();
    while machine.real_ps.get() < began_ps + 10_000_000_000 {
        clock.now_ns(&counted);
    }
    assert!((39..=41).contains(&counted.1.get()), "{} anchors in 10 ms", counted.1.get());
}

#[test]
fn a_counter_with_an_implausible_rate_is_not_used() {
    for ticks_per_us in [0, 50, 30_000] {
        let machine = Machine::new(ticks_per_us, 0);
        let clock = TscClock::new();
        for _ in 0..4 {
            machine.pass(2_000_000_000);
            expect_the_kernels_clock(&clock, &machine);
        }
        assert!(!is_used(&clock));
        assert_eq!(clock.rest_ticks.load(Ordering::Relaxed), u64::MAX, "for ever");
    }
}

#[test]
fn a_thread_that_finds_another_at_the_anchor_reads_the_kernels_clock() {
    let machine = Machine::new(2_450, 0);
    let clock = measured(&machine);
    machine.pass(1_000_000_000);
    clock.anchoring.store(HELD, Ordering::Relaxed);
    let anchor_ticks = clock.anchor_ticks.load(Ordering::Relaxed);
    let before_ns = machine.kernel_now();
    let ns = clock.now_ns(&machine);
    assert!((before_ns..=machine.kernel_now()).contains(&ns));
    assert_eq!(clock.anchor_ticks.load(Ordering::Relaxed), anchor_ticks, "the holder sets it");
}
