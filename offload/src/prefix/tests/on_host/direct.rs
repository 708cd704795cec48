//! What comes of sleeping in the file first, and of doing so straight from the pages: where memory
//! is copied away first, a disk that fails finds it asleep already.

use super::both::trainer::{LAYER_BYTES, LAYERS, Trainer};
use crate::engine::tests::on_host::both::Plan;
use crate::prefix::Phase;

#[test]
fn a_full_disk_leaves_layers_awake_and_the_step_goes_on() {
    let mut plan = Plan::default();
    plan.config.host_bytes_max = 0;
    let fixture = plan.build();
    fixture.faults.fail_writes_after(3 * LAYER_BYTES, libc::ENOSPC);
    let mut trainer = Trainer::new(&fixture);
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.fixture.here()).unwrap();
    trainer.settle();
    trainer.microbatch();
    trainer.prefix.enter(Phase::C, &trainer.fixture.here()).unwrap();
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    let report = trainer.end();
    assert!(report.asleep_bytes_peak > 0 && report.asleep_bytes_peak <= 3 * LAYER_BYTES);
    assert!(
        report.declined.iter().any(|why| why.contains("No space left")),
        "{:?}",
        report.declined
    );
}

/// Two and a half layers may be written today.
#[test]
fn layers_above_the_write_budget_sleep_in_host_memory() {
    let fixture = Plan::default().build();
    fixture.nvme().limit_writes(5 * LAYER_BYTES / 2);
    let mut trainer = Trainer::new(&fixture);
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    trainer.settle();
    assert!((0..LAYERS).all(|l| trainer.states(l).iter().all(|s| s.is_asleep())));
    assert!(fixture.nvme_used() <= 5 * LAYER_BYTES / 2);
    assert_eq!(fixture.nvme_used() + fixture.host_used(), u64::from(LAYERS) * LAYER_BYTES);
    let declined = trainer.prefix.report().declined;
    assert!(declined.iter().all(|why| why.starts_with("the NVMe tier may write")), "{declined:?}");
    assert!(!declined.is_empty());
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    trainer.end();
    fixture.assert_empty();
}
