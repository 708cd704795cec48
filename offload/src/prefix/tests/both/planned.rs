//! Prefixes that follow a plan.

use super::bench::both::{Fixture, Plan as Set};
use super::trainer::{LABEL, LAYER_BYTES, LAYERS, Trainer, tensor};
use crate::config::ResidencyPolicy;
use crate::engine::PROFILES_MAX;
use crate::engine::tests::{MIB, soon};
use crate::error::OffloadError;
use crate::prefix::{Edge, Phase, PrefixReport};
use crate::step_profile::Clock;
use crate::step_profile::{Pending, Recorder};
use dormouse_kernels::DType;
use dormouse_residency::plan::{DormantGroup, GroupPlan, ResidencyPlan, StepOperation, StepWork};
use dormouse_residency::region::RegionState;

use dormouse_residency::Tier::{self, Device as Keep, Host, Nvme};

/// One prefix of the trainer, with room for the given number of layers in each microbatch and each backward.
pub(crate) fn work(microbatches: &[u64], backward: u64) -> StepWork {
    let layers = LAYERS as usize;
    let room = |layers: u64| StepOperation { compute_ns: 1, room_bytes: layers * LAYER_BYTES };
    let mut operations = vec![room(u64::from(LAYERS)); layers];
    operations.extend(microbatches.iter().map(|&layers| room(layers)));
    operations.extend(vec![room(backward); layers]);
    let last = operations.len() - 1;
    let groups = (0..layers).map(|layer| {
        let (above, freed) = ((layer + 1).min(layers - 1), last - layer);
        DormantGroup { bytes: LAYER_BYTES, made: layer, leaves: above, needed: last - above, freed }
    });
    StepWork { groups: groups.collect(), operations, ..StepWork::default() }
}

pub(crate) fn follow<'a>(
    fixture: &'a Fixture,
    work: StepWork,
    choices: &[Tier],
    wake_from: usize,
) -> Trainer<'a> {
    let mut trainer = Trainer::new(fixture);
    let plan = ResidencyPlan::new(&work, choices, wake_from);
    trainer.prefix.follow(work, plan, 1).unwrap();
    trainer
}

pub(crate) fn enter(trainer: &mut Trainer<'_>, phase: Phase) {
    trainer.prefix.enter(phase, &trainer.stream).unwrap();
    trainer.settle();
}

/// One state a layer, which all of its regions are in.
pub(crate) fn states(trainer: &Trainer<'_>) -> Vec<RegionState> {
    let of = |layer| {
        let states = trainer.states(layer);
        assert!(states.iter().all(|&state| state == states[0]), "{states:?}");
        states[0]
    };
    (0..LAYERS).map(of).collect()
}

#[test]
fn layers_sleep_where_the_plan_says_and_wake_as_room_comes() {
    let in_host = RegionState::Host;
    for (set, promoted) in [(Set::default(), None), (Set::default().via_host(), Some(in_host))] {
        let fixture = set.build();
        let promoted =
            promoted.unwrap_or(if fixture.is_direct() { RegionState::Nvme } else { in_host });
        let work = work(&[2, 3], 4);
        let last_microbatch = LAYERS as usize + 1;
        let mut trainer =
            follow(&fixture, work, &[Nvme, Nvme, Host, Host, Keep, Keep], last_microbatch);
        trainer.forward_all();
        enter(&mut trainer, Phase::B);
        let (far, near, awake) = (RegionState::Nvme, RegionState::Host, RegionState::Awake);
        assert_eq!(states(&trainer), [far, far, near, near, awake, awake]);
        trainer.prefix.microbatch(1);
        trainer.microbatch();
        trainer.settle();
        assert_eq!(states(&trainer)[2..], [near, near, awake, awake], "it is not time to wake");
        assert_eq!(states(&trainer)[..2], [promoted; 2], "host memory has room all the same");
        trainer.prefix.microbatch(0);
        trainer.settle();
        assert_eq!(states(&trainer)[2..], [near, awake, awake, awake], "room for one more");
        trainer.microbatch();
        enter(&mut trainer, Phase::C);
        assert_eq!(states(&trainer)[1..], [promoted, awake, awake, awake, awake]);
        for layer in (0..LAYERS).rev() {
            trainer.backward(layer);
            trainer.settle();
            // Four at a time: as one is done with, the next comes.
            if let Some(next) = layer.checked_sub(4) {
                assert_eq!(trainer.states(next), [awake; 3], "after {layer}");
            }
        }
        assert_eq!(trainer.end().asleep_bytes_at_b, 4 * LAYER_BYTES);
    }
}

/// The plan's rooms and the device's own are both kept to.
#[test]
fn nothing_wakes_into_memory_that_others_have_taken() {
    let fixture = Set::default().via_host().build();
    let last_microbatch = LAYERS as usize;
    let mut trainer =
        follow(&fixture, work(&[6], 6), &[Host, Host, Host, Keep, Keep, Keep], last_microbatch);
    trainer.forward_all();
    enter(&mut trainer, Phase::B);
    let free = fixture.engine.free_bytes();
    let hot = trainer.allocate((free - 2 * LAYER_BYTES) as usize, 0, 1);
    trainer.prefix.microbatch(0);
    trainer.settle();
    let (asleep, awake) = (RegionState::Host, RegionState::Awake);
    assert_eq!(states(&trainer), [asleep, awake, awake, awake, awake, awake]);
    assert_eq!(fixture.engine.stats().wake_failures, 0, "it was not even tried");
    fixture.engine.free(hot, 0).unwrap();
    enter(&mut trainer, Phase::C);
    assert_eq!(states(&trainer), [awake; 6]);
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    trainer.end();
}

/// A plan that is wrong about the room costs time, and nothing else.
#[test]
fn reclaim_can_put_layers_to_sleep_that_the_plan_keeps() {
    let fixture = Set::default().via_host().build();
    let mut trainer = follow(&fixture, work(&[6], 6), &[Keep; 6], 99);
    trainer.forward_all();
    enter(&mut trainer, Phase::B);
    assert_eq!(states(&trainer), [RegionState::Awake; 6]);
    let free = fixture.engine.free_bytes();
    let hot = trainer.allocate((free + LAYER_BYTES) as usize, 0, 1);
    trainer.settle();
    assert!(trainer.states(0).iter().any(|state| state.is_asleep()), "the lowest goes first");
    assert_eq!(trainer.states(LAYERS - 1), [RegionState::Awake; 3]);
    let asleep_bytes = trainer.prefix.report().asleep_bytes_peak;
    fixture.engine.free(hot, 0).unwrap();
    enter(&mut trainer, Phase::C);
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    assert_eq!(trainer.end().asleep_bytes_at_b, asleep_bytes);
}

/// A plan that lets none sleep wakes what somebody took all the same, once backward is to need it.
#[test]
fn reclaimed_layers_that_the_plan_keeps_wake_ahead_in_c() {
    let fixture = Set::default().via_host().build();
    // As plans that keep everything are made.
    let mut trainer = follow(&fixture, work(&[6], 6), &[Keep; 6], 0);
    trainer.forward_all();
    enter(&mut trainer, Phase::B);
    let free = fixture.engine.free_bytes();
    let hot = trainer.allocate((free + 3 * LAYER_BYTES) as usize, 0, 1);
    trainer.settle();
    assert_eq!(trainer.states(1), [RegionState::Host; 3], "it is the lowest that go");
    fixture.engine.free(hot, 0).unwrap();
    trainer.prefix.microbatch(0);
    trainer.settle();
    assert_eq!(
        trainer.states(1),
        [RegionState::Host; 3],
        "nothing is known of the room in the microbatch"
    );
    enter(&mut trainer, Phase::C);
    assert_eq!(states(&trainer), [RegionState::Awake; 6]);
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    trainer.end();
}

/// Children come after the last microbatch: no mark of this prefix's says that the last part begins.
#[test]
fn begin_wake_in_b_follows_the_plan() {
    let fixture = Set::default().via_host().build();
    let last_microbatch = LAYERS as usize + 1;
    let mut trainer = follow(&fixture, work(&[2, 3], 6), &[Host; 6], last_microbatch);
    trainer.forward_all();
    enter(&mut trainer, Phase::B);
    trainer.prefix.microbatch(1);
    trainer.microbatch();
    trainer.settle();
    let (asleep, awake) = (RegionState::Host, RegionState::Awake);
    assert_eq!(states(&trainer), [asleep; 6]);
    for _again_is_harmless in 0..2 {
        trainer.prefix.begin_wake().unwrap();
        trainer.settle();
        assert_eq!(states(&trainer), [asleep, asleep, asleep, awake, awake, awake]);
    }
    enter(&mut trainer, Phase::C);
    assert_eq!(states(&trainer), [awake; 6]);
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    assert_eq!(trainer.end().asleep_bytes_at_b, u64::from(LAYERS) * LAYER_BYTES);
}

/// Dormant bytes that are awake.
fn awake_bytes(trainer: &Trainer<'_>) -> u64 {
    let awake = states(trainer).iter().filter(|&&state| state == RegionState::Awake).count();
    awake as u64 * LAYER_BYTES
}

/// One step whose microbatch leaves `free_in_microbatch` bytes.
fn step(fixture: &Fixture, free_in_microbatch: u64) -> PrefixReport {
    let mut trainer = Trainer::new(fixture);
    trainer.forward_all();
    step_from_b(trainer, free_in_microbatch)
}

/// The same, but for its phase A.
fn step_from_b(mut trainer: Trainer<'_>, free_in_microbatch: u64) -> PrefixReport {
    let fixture = trainer.fixture;
    enter(&mut trainer, Phase::B);
    trainer.prefix.microbatch(0);
    let free_bytes = fixture.engine.free_bytes() + awake_bytes(&trainer);
    let hot = trainer.allocate((free_bytes - free_in_microbatch) as usize, 0, 1);
    trainer.microbatch();
    fixture.engine.free(hot, 0).unwrap();
    enter(&mut trainer, Phase::C);
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    fixture.finish(&trainer.stream);
    let report = trainer.end();
    // Copies on a GPU are counted by a thread that the device tells of their ends.
    soon("rates of copies in", || {
        let rates = fixture.engine.link_rates();
        rates.host_to_device_bytes_per_s > 0 || rates.nvme_to_device_bytes_per_s > 0
    });
    report
}

#[test]
fn the_fit_policy_plans_the_sleeping_layers_from_the_last_step() {
    for (set, in_host) in [(Set::default().via_host(), true), (Set::default(), false)] {
        let mut set = set;
        set.config.residency = ResidencyPolicy::Fit;
        let fixture = set.build();
        let in_host = in_host || !fixture.is_direct();
        let all = u64::from(LAYERS) * LAYER_BYTES;
        // A sixteenth of some 60 MiB is kept free besides: that is two layers of the four.
        let room = 4 * LAYER_BYTES;
        let first = step(&fixture, room);
        assert_eq!((first.asleep_bytes_peak, first.planned), (all, None), "nothing is known yet");
        let second = step(&fixture, room);
        let planned = second.planned.unwrap();
        assert_eq!(planned.kept_bytes + planned.host_bytes + planned.nvme_bytes, all);
        assert!((1..=3).contains(&(planned.kept_bytes / LAYER_BYTES)), "{planned:?}");
        assert_eq!(planned.nvme_bytes == 0, in_host, "{planned:?}");
        assert_eq!(second.asleep_bytes_peak, all - planned.kept_bytes);
        assert_eq!(fixture.engine.stats().reclaims, 0, "the plan was right");
        // With room for all nothing sleeps, and the report says why.
        let roomy = step(&fixture, all + 16 * MIB as u64);
        assert_eq!(roomy.asleep_bytes_peak, all - planned.kept_bytes, "by the step before");
        let last = step(&fixture, all + 16 * MIB as u64);
        assert_eq!((last.asleep_bytes_peak, last.planned.unwrap().kept_bytes), (0, all));
        assert!(last.declined.iter().any(|why| why.contains("all fits")), "{:?}", last.declined);
    }
}

/// All that there is to know of a plan's sizes.
fn planned_bytes(report: &PrefixReport) -> u64 {
    let planned = report.planned.unwrap();
    planned.kept_bytes + planned.host_bytes + planned.nvme_bytes
}

fn fitting() -> Set {
    let mut set = Set::default().via_host();
    set.config.residency = ResidencyPolicy::Fit;
    set
}

/// More of the first layer is named, or less is, after the plan is made: steps alike are as large as
/// each other all the same.
#[test]
fn the_first_layer_scales_the_next_step() {
    for names_late in [true, false] {
        let fixture = fitting().build();
        let steps = [(); 3].map(|()| {
            let mut trainer = Trainer { names_late, ..Trainer::new(&fixture) };
            trainer.forward_all();
            if !names_late {
                let (address, bytes, _) = trainer.saved[0][1];
                let late = tensor(address, bytes, 1, DType::F32);
                trainer.prefix.boundary(0, 1, late, &trainer.stream).unwrap();
            }
            step_from_b(trainer, 4 * LAYER_BYTES)
        });
        assert!(steps[0].planned.is_none(), "nothing is known yet");
        for step in &steps[1..] {
            assert_eq!(planned_bytes(step), step.dormant_bytes, "named late: {names_late}");
        }
    }
}

/// What an exception left is no step to plan the next from.
#[test]
fn a_step_whose_backward_stopped_half_way_leaves_the_one_before_it_to_plan_from() {
    let fixture = fitting().build();
    let _nothing_is_known_yet = step(&fixture, 4 * LAYER_BYTES);
    let before = fixture.engine.profile(LABEL, LAYERS).unwrap();
    for (open, done) in [(true, 0), (true, 2), (false, 2), (true, LAYERS - 1)] {
        let mut trainer = Trainer::new(&fixture);
        trainer.forward_all();
        enter(&mut trainer, Phase::B);
        trainer.prefix.microbatch(0);
        trainer.microbatch();
        enter(&mut trainer, Phase::C);
        let mut layers = (0..LAYERS).rev();
        layers.by_ref().take(done as usize).for_each(|layer| trainer.backward(layer));
        let opened = layers.next().filter(|_| open);
        if let Some(layer) = opened {
            trainer.prefix.mark(Edge::BackwardBegin, layer, &trainer.stream).unwrap();
        }
        fixture.finish(&trainer.stream);
        trainer.end();
        let kept = fixture.engine.profile(LABEL, LAYERS).unwrap();
        assert_eq!(kept, before, "{done} layers were done with, and {opened:?} was open");
    }
    let _whole = step(&fixture, 4 * LAYER_BYTES);
    assert_ne!(fixture.engine.profile(LABEL, LAYERS).unwrap(), before);
}

/// A step without microbatch marks is not planned: the memory that its microbatches leave is unknown.
#[test]
fn a_step_without_microbatch_marks_keeps_the_earlier_profile() {
    let fixture = fitting().build();
    let _nothing_is_known_yet = step(&fixture, 4 * LAYER_BYTES);
    let before = fixture.engine.profile(LABEL, LAYERS).unwrap();
    let mut trainer = Trainer::new(&fixture);
    trainer.forward_all();
    enter(&mut trainer, Phase::B);
    trainer.microbatch();
    enter(&mut trainer, Phase::C);
    (0..LAYERS).rev().for_each(|layer| trainer.backward(layer));
    fixture.finish(&trainer.stream);
    trainer.end();
    assert_eq!(fixture.engine.profile(LABEL, LAYERS).unwrap(), before);
}

/// A prefix of a tree is planned from its own step before, whatever others of as many layers took.
#[test]
fn profiles_are_kept_by_the_names_of_prefixes() {
    let fixture = fitting().build();
    let all = u64::from(LAYERS) * LAYER_BYTES;
    let step = |label: &str, free_in_microbatch: u64| {
        let mut trainer = Trainer::of(&fixture, label);
        trainer.forward_all();
        step_from_b(trainer, free_in_microbatch).planned.map(|planned| planned.kept_bytes)
    };
    let root = || step("prefix 0", 4 * LAYER_BYTES);
    let child = || step("prefix 3", all + 16 * MIB as u64);
    assert_eq!((root(), child()), (None, None), "nothing is known of either");
    for _again in 0..2 {
        assert!(root().is_some_and(|kept_bytes| kept_bytes < all), "by its own step");
        assert_eq!(child(), Some(all));
    }
}

/// Whose last step was kept longest ago is forgotten first.
#[test]
fn prefixes_beyond_the_limit_take_the_place_of_the_oldest() {
    let fixture = Set::default().build();
    let keep = |at: usize| {
        let (recorder, clock) = (Recorder::default(), Clock::default());
        let step = Pending { recorder, dormant_bytes: vec![1], clock };
        fixture.engine.keep_profile(&format!("prefix {at}"), 1, step);
    };
    let is_kept = |at: usize| fixture.engine.profile(&format!("prefix {at}"), 1).is_some();
    (0..PROFILES_MAX).for_each(keep);
    assert!((0..PROFILES_MAX).all(is_kept));
    keep(0);
    keep(PROFILES_MAX);
    assert!(!is_kept(1), "the oldest");
    assert!(is_kept(0) && (2..=PROFILES_MAX).all(is_kept));
    assert!(fixture.engine.profile("prefix 0", 2).is_none(), "of as many layers");
}

#[test]
fn a_plan_for_another_prefix_is_refused() {
    let fixture = Set::default().build();
    let mut trainer = Trainer::new(&fixture);
    let plan = |groups: usize| ResidencyPlan { groups: vec![GroupPlan::default(); groups] };
    let mut refused = |work: StepWork, choices: usize, parts: usize| match trainer.prefix.follow(
        work,
        plan(choices),
        parts,
    ) {
        Err(OffloadError::Argument { what, .. }) => what,
        other => panic!("{other:?}"),
    };
    let fewer = StepWork { groups: work(&[6], 6).groups[..5].to_vec(), ..work(&[6], 6) };
    assert_eq!(refused(fewer, 6, 1), "groups of the work");
    assert_eq!(refused(work(&[6], 6), 7, 1), "groups of the plan");
    assert_eq!(refused(work(&[6], 6), 6, 2), "operations");
    assert_eq!(refused(work(&[], 6), 6, 0), "operations");
    trainer.end();
}
