//! What comes of sleeping in the file first, and of doing so straight from the pages: where memory
//! is copied away first, a disk that fails finds it asleep already.

use super::both::trainer::{LAYER_BYTES, LAYERS, Trainer};
use crate::engine::tests::on_host::both::Plan;
use crate::node::Phase;

#[test]
fn a_full_disk_leaves_layers_awake_and_the_step_goes_on() {
    let mut plan = Plan::default();
    plan.config.host_bytes_max = 0;
    let house = plan.build();
    house.faults.fail_writes_after(3 * LAYER_BYTES, libc::ENOSPC);
    let mut trainer = Trainer::new(&house);
    trainer.forward_all();
    trainer.node.enter(Phase::B, &trainer.house.here()).unwrap();
    trainer.settle();
    trainer.wave();
    trainer.node.enter(Phase::C, &trainer.house.here()).unwrap();
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
