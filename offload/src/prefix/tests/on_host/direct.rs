//! What comes of sleeping in the file first, and of doing so straight from the pages: where memory
//! is copied away first, a disk that fails finds it asleep already.

use super::both::planned::{follow, work};
use super::both::trainer::{LAYER_BYTES, LAYERS, Trainer};
use crate::engine::tests::MIB;
use crate::engine::tests::on_host::both::Plan;
use crate::ids::Tier;
use crate::prefix::Phase;
use dormouse_residency::Tier::Nvme;

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
    assert!(declined.is_empty(), "all sleep: {declined:?}");
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    trainer.end();
    fixture.assert_empty();
}

/// There is no host memory, and the file takes no more: each region is declined at its mark and once more at the begin of
/// phase B, not at every mark.
#[test]
fn layers_that_no_tier_can_take_are_not_asked_at_every_mark() {
    for is_planned in [false, true] {
        let mut plan = Plan::default();
        plan.config.host_bytes_max = 0;
        let fixture = plan.build();
        fixture.faults.fail_writes_after(0, libc::ENOSPC);
        let (id, address) = fixture.region(MIB, 1);
        fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
        fixture.engine.wait_settled(&[id]).unwrap();
        assert!(fixture.engine.stats().nvme_stopped.is_some());
        fixture.engine.free(address, 0).unwrap();
        let mut trainer = if is_planned {
            follow(&fixture, work(&[6], 6), &[Nvme; LAYERS as usize], 99)
        } else {
            Trainer::new(&fixture)
        };
        let (regions, before) = (3 * u64::from(LAYERS), fixture.engine.stats().declined);
        let declined = || fixture.engine.stats().declined - before;
        trainer.forward_all();
        trainer.settle();
        // The last layer of a forward is asked in phase B.
        assert!(declined() <= regions, "{} of {regions}", declined());
        trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
        trainer.microbatch();
        assert!((regions..=2 * regions).contains(&declined()), "{} of {regions}", declined());
        let report = trainer.backward_all_and_end();
        assert!(report.declined.iter().any(|why| why.contains("takes no more data")), "{report:?}");
    }
}
