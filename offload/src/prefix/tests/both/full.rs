//! Host memory that dormant layers fill. They reach the file through it.

use super::bench::both::Plan;
use super::trainer::{LAYER_BYTES, LAYERS, Trainer};
use crate::engine::tests::{MIB, soon};
use crate::prefix::Phase;
use dormouse_residency::region::RegionState;

const DORMANT_BYTES: u64 = LAYERS as u64 * LAYER_BYTES;
/// The largest tensor of a layer, a region of its own here.
const REGION_BYTES_MAX: u64 = MIB as u64;

fn all_sleep(trainer: &Trainer<'_>) -> bool {
    (0..LAYERS).all(|layer| trainer.states(layer).iter().all(|state| state.is_asleep()))
}

/// Half a layer too little of it: as much is written, of the layer that is needed last.
#[test]
fn as_many_bytes_move_on_to_the_file_as_host_memory_lacks() {
    let lacking_bytes = LAYER_BYTES / 2;
    let mut plan = Plan::default().via_host();
    plan.config.host_bytes_max = DORMANT_BYTES - lacking_bytes;
    let fixture = plan.build();
    let mut trainer = Trainer::new(&fixture);
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    soon("all sleep", || all_sleep(&trainer));
    trainer.settle();
    let written_bytes = fixture.nvme().usage().written_bytes;
    let most_bytes = lacking_bytes + REGION_BYTES_MAX;
    assert!((lacking_bytes..=most_bytes).contains(&written_bytes), "{written_bytes} bytes");
    assert!(trainer.states(0).contains(&RegionState::Nvme));
    assert_eq!(trainer.states(LAYERS - 1), [RegionState::Host; 3], "needed first");
    let report = trainer.backward_all_and_end();
    assert_eq!((fixture.engine.stats().declined, report.declined), (0, Vec::new()), "all slept");
}

/// The file takes nothing for a while. No mark comes after that, and the layers leave all the same.
#[test]
fn layers_that_found_no_place_leave_in_phase_b() {
    let mut plan = Plan::default().via_host();
    plan.config.host_bytes_max = 2 * LAYER_BYTES;
    let fixture = plan.build();
    let mut trainer = Trainer::new(&fixture);
    fixture.faults.hold(true, false);
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    assert_eq!(trainer.states(LAYERS - 1), [RegionState::Awake; 3]);
    fixture.faults.hold(false, false);
    soon("all sleep", || all_sleep(&trainer));
    trainer.settle();
    assert_eq!(trainer.states(LAYERS - 1), [RegionState::Host; 3], "needed first");
    trainer.backward_all_and_end();
}
