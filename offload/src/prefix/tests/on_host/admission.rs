//! Admission to host memory with room for an exact number of layers. A pool of pinned memory could
//! fragment into pieces that are too small.

use dormouse_device::{DeviceError, Operation};

use crate::engine::tests::soon;
use crate::ids::Tier;
use crate::prefix::{Edge, Phase};
use dormouse_residency::Tier::{Device as Keep, Host, Nvme};
use dormouse_residency::region::RegionState;

use super::both::planned::{enter, follow, states, work};
use super::both::trainer::{LAYER_BYTES, LAYERS, Trainer};
use crate::engine::tests::on_host::both::Plan as Set;

/// What is read ahead waits for host memory in line as well, and needs no mark when there is some.
#[test]
fn layers_in_the_file_come_nearer_as_soon_as_host_memory_has_room() {
    let mut set = Set::default().via_host();
    set.config.host_bytes_max = 2 * LAYER_BYTES;
    let fixture = set.build();
    let last_microbatch = LAYERS as usize + 1;
    let choices = [Nvme, Nvme, Host, Host, Keep, Keep];
    let mut trainer = follow(&fixture, work(&[2, 3], 4), &choices, last_microbatch);
    trainer.forward_all();
    enter(&mut trainer, Phase::B);
    soon("layer 3 sleeps", || trainer.states(3) == [RegionState::Host; 3]);
    trainer.prefix.microbatch(1);
    trainer.settle();
    let (far, near, awake) = (RegionState::Nvme, RegionState::Host, RegionState::Awake);
    assert_eq!(states(&trainer), [far, far, near, near, awake, awake], "host memory is full");
    trainer.prefix.microbatch(0);
    // Layer 3 wakes and leaves its place to layer 1, which is needed before layer 0.
    soon("layer 1 comes", || trainer.states(1) == [RegionState::Host; 3]);
    assert_eq!(states(&trainer), [far, near, near, awake, awake, awake]);
    enter(&mut trainer, Phase::C);
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    trainer.end();
}

/// A layer without room waits in order, and sleeps without another mark once there is room.
#[test]
fn layers_without_a_place_sleep_as_soon_as_there_is_one() {
    let mut set = Set::default().via_host();
    set.config.host_bytes_max = LAYER_BYTES;
    let fixture = set.build();
    let mut trainer = follow(&fixture, work(&[6], 6), &[Nvme, Nvme, Host, Host, Keep, Keep], 99);
    fixture.faults.hold(true, false);
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    // Layer 0 cannot leave host memory, so that none comes after it.
    let awake = RegionState::Awake;
    assert!((1..LAYERS).all(|layer| trainer.states(layer) == [awake; 3]));
    fixture.faults.hold(false, false);
    // Layer 1 first, then layer 2, and layer 3 never: the tier is full for good.
    soon("layer 2 sleeps", || trainer.states(2) == [RegionState::Host; 3]);
    let (far, near) = (RegionState::Nvme, RegionState::Host);
    assert_eq!(states(&trainer), [far, far, near, awake, awake, awake]);
    enter(&mut trainer, Phase::C);
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    trainer.end();
}

/// An allocation that runs short waits for the queue while it progresses. Layers that the plan keeps stay
/// awake, even if others left meanwhile.
#[test]
fn layers_in_the_admission_queue_leave_before_those_that_the_plan_keeps() {
    let mut set = Set::default().via_host();
    set.config.host_bytes_max = 2 * LAYER_BYTES;
    let fixture = set.build();
    let mut trainer = follow(&fixture, work(&[6], 6), &[Nvme, Nvme, Nvme, Nvme, Keep, Keep], 99);
    fixture.faults.hold(true, false);
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    soon("two layers are in host memory", || {
        (0..2).all(|layer| trainer.states(layer).iter().all(|state| state.is_asleep()))
    });
    let hot_bytes = fixture.engine.free_bytes() + 2 * LAYER_BYTES;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            fixture.engine.wait_for_reclaims(1);
            fixture.faults.hold(false, false);
        });
        let hot = trainer.allocate(hot_bytes as usize, 0, 1);
        fixture.engine.free(hot, 0).unwrap();
    });
    let (far, awake) = ([RegionState::Nvme; 3], [RegionState::Awake; 3]);
    soon("all in line have gone", || (0..4).all(|layer| trainer.states(layer) == far));
    assert!((4..LAYERS).all(|layer| trainer.states(layer) == awake));
    enter(&mut trainer, Phase::C);
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    trainer.end();
}

/// What waits for a place is its owner's still.
#[test]
fn layers_that_wait_for_a_place_are_freed_and_needed_as_any_other() {
    let mut set = Set::default().via_host();
    set.config.host_bytes_max = LAYER_BYTES;
    let fixture = set.build();
    let mut trainer = follow(&fixture, work(&[6], 6), &[Nvme, Host, Host, Host, Host, Host], 99);
    fixture.faults.hold(true, false);
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    let freed = trainer.saved[1].pop().unwrap();
    fixture.engine.free(freed.0, 0).unwrap();
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    trainer.prefix.mark(Edge::BackwardBegin, LAYERS - 1, &trainer.stream).unwrap();
    fixture.faults.hold(false, false);
    trainer.settle();
    // The two that backward needs are out of the line for good; others have gone on.
    for needed in [LAYERS - 1, LAYERS - 2] {
        assert_eq!(trainer.states(needed), [RegionState::Awake; 3], "layer {needed}");
    }
    trainer.prefix.mark(Edge::BackwardEnd, LAYERS - 1, &trainer.stream).unwrap();
    for layer in (0..LAYERS - 1).rev() {
        trainer.backward(layer);
    }
    trainer.end();
}

/// Without a plan, and with a tier that stays full: each layer is declined once, not again at every mark.
#[test]
fn layers_that_wait_for_a_place_are_not_asked_again() {
    let mut set = Set::default().via_host();
    set.config.host_bytes_max = 2 * LAYER_BYTES;
    let fixture = set.build();
    fixture.engine.set_tier_budget(Tier::Nvme, 0).unwrap();
    let mut trainer = Trainer::new(&fixture);
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    trainer.settle();
    let awake = RegionState::Awake;
    assert!((2..LAYERS).all(|layer| trainer.states(layer) == [awake; 3]));
    assert_eq!(fixture.engine.stats().declined, 0, "they wait");
    let declined = trainer.backward_all_and_end().declined;
    assert_eq!(fixture.engine.stats().declined, 3 * u64::from(LAYERS - 2), "once each");
    // One waited at the head of the queue; the file had no place for what would make room for it.
    let of_file: Vec<_> = declined.iter().filter(|why| why.contains("NVMe")).collect();
    assert!(of_file.len() == 1 && !of_file[0].contains("times"), "{declined:?}");
}

/// What wakes leaves places in host memory, and none of the layers that are needed next takes one.
#[test]
fn layers_that_found_no_place_stay_awake_once_others_wake() {
    let mut set = Set::default().via_host();
    set.config.host_bytes_max = LAYER_BYTES;
    let fixture = set.build();
    fixture.engine.set_tier_budget(Tier::Nvme, 0).unwrap();
    let mut trainer = Trainer::new(&fixture);
    trainer.prefix.set_window(1);
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    trainer.settle();
    let sleeps = fixture.engine.stats().sleeps;
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    fixture.engine.wake(&trainer.ids(0));
    soon("host memory is empty", || fixture.host_used() == 0);
    trainer.settle();
    assert_eq!(fixture.engine.stats().sleeps, sleeps);
    (0..LAYERS).rev().for_each(|layer| trainer.backward(layer));
    trainer.end();
}

/// The system refuses the memory for one in line, which is no reason to forget it.
#[test]
fn a_layer_that_leaves_the_line_awake_is_asked_again_at_the_next_mark() {
    let mut set = Set::default().via_host();
    set.config.host_bytes_max = LAYER_BYTES;
    let fixture = set.build();
    fixture.engine.set_tier_budget(Tier::Nvme, 0).unwrap();
    let mut trainer = Trainer::new(&fixture);
    trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
    (0..3).for_each(|layer| trainer.forward(layer));
    trainer.settle();
    let first = trainer.ids(1)[0];
    assert_eq!(trainer.states(1), [RegionState::Awake; 3]);
    fixture.device().fail(Operation::Pin, 1, DeviceError::TooManySpans { limit: 1 });
    fixture.engine.set_tier_budget(Tier::Host, 64 << 20).unwrap();
    trainer.settle();
    assert_eq!(fixture.state(first), RegionState::Awake);
    trainer.forward(3);
    soon("it sleeps", || fixture.state(first) == RegionState::Host);
    trainer.forward(4);
    trainer.forward(5);
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    trainer.backward_all_and_end();
}
