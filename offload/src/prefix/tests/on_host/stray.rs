//! Stray accesses to the memory of a prefix: its report counts and names them.

use super::both::trainer::{LABEL, LAYERS, Trainer};
use crate::engine::tests::on_host::both::Plan;
use crate::engine::tests::on_host::stray::rescuer;
use crate::prefix::Phase;
use dormouse_residency::region::RegionState;

/// In phase B a hook reads what layers 4 and 2 saved.
#[test]
fn a_report_counts_and_names_stray_accesses() {
    let fixture = Plan::default().build();
    let _rescuer = rescuer(&fixture);
    let mut trainer = Trainer::new(&fixture);
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    trainer.settle();
    trainer.microbatch();
    assert_eq!(trainer.prefix.report().stray.count, 0);
    assert!(trainer.intact(4) && trainer.intact(2));
    assert_eq!(trainer.states(4), [RegionState::Awake; 3]);
    let report = trainer.prefix.report();
    assert_eq!(report.stray.count, 6, "three regions each");
    let first = report.stray.first.unwrap();
    assert_eq!((first.address, first.label.layer), (trainer.saved[4][0].0, 4));
    assert!(first.label.name.starts_with(LABEL.as_bytes()));
    let text = report.to_string();
    let line = format!("stray: 6 wakes by accesses to sleeping memory; the first: {first}\n");
    assert!(text.contains(&line), "{text}");
    assert!(report.stall_ns > 0, "the trainer waited");
    assert_eq!(fixture.engine.stats().stray, report.stray);
    // The step goes on, and its sums are right.
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    trainer.end();
}
