//! The window of layers follows the steps, over a file whose measured rate is slow.

use std::time::Duration;

use super::bench::both::{Fixture, Plan, measured};
use super::both::trainer::{LAYERS, Trainer};
use crate::config::{Automatic, EngineConfig};
use crate::engine::tests::MIB;
use crate::prefix::{Phase, PrefixReport};

/// A layer of 1.75 MiB then loads in 87.5 ms, which is much longer than its backward.
const READ_BYTES_PER_S: u64 = 20 << 20;
/// Six layers would load in it.
const LEAD: Duration = Duration::from_millis(600);

/// A step in which phase B uses `beside` bytes more, and wakes begin `lead` before phase C.
fn step(fixture: &Fixture, lead: Duration, beside: usize) -> PrefixReport {
    let mut trainer = Trainer::new(fixture);
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    trainer.settle();
    let used = fixture.allocate(beside, 1);
    fixture.engine.free(used, 0).unwrap();
    trainer.prefix.microbatch(0);
    trainer.microbatch();
    std::thread::sleep(lead);
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    trainer.end()
}

fn fixture(window_layers: bool) -> Fixture {
    let automatic = Automatic { window_layers, ..Automatic::default() };
    measured(EngineConfig { automatic, ..Plan::default().config }, READ_BYTES_PER_S)
}

#[test]
fn a_window_grows_into_memory_that_was_in_use_and_falls_late() {
    let fixture = fixture(true);
    let window = || fixture.engine.window_layers();
    step(&fixture, LEAD, 32 * MIB);
    // All six but the one whose load hides behind four backwards, if those are slow; and one to spare.
    let grown = window();
    assert!((LAYERS..=LAYERS + 1).contains(&grown), "{grown}");
    let seen = fixture.engine.revised().window_layers.unwrap();
    assert_eq!(seen.value, u64::from(grown));
    assert!(seen.reason.contains("a layer loads in 87.50 ms"), "{}", seen.reason);
    // All layers wake in the lead of the next step.
    let peaks = step(&fixture, LEAD, 32 * MIB).phase_peak_bytes;
    assert!(peaks[2] <= peaks[1], "{peaks:?}");
    for _ in 0..7 {
        step(&fixture, Duration::ZERO, 32 * MIB);
        assert!(window() >= grown, "too early");
    }
}

#[test]
fn a_window_that_is_set_stays() {
    let fixture = fixture(false);
    step(&fixture, LEAD, 32 * MIB);
    assert_eq!((fixture.engine.window_layers(), fixture.engine.revised().window_layers), (3, None));
}

#[test]
fn a_window_does_not_grow_beyond_the_memory_of_the_step() {
    let fixture = fixture(true);
    // Less than what the first layers took: phase C may not use more than phase A.
    let report = step(&fixture, LEAD, MIB);
    let room = report.phase_peak_bytes.iter().max().unwrap() / super::both::trainer::LAYER_BYTES;
    assert!(u64::from(fixture.engine.window_layers()) <= room.max(3), "{report:?}");
}
