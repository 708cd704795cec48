//! Marks of a trainer that runs ahead of its GPU: the stream of copies in is held.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dormouse_alloc::Request;
use dormouse_kernels::DType;

use super::bench::both::{Fixture, Plan};
use super::bench::side::{Foreign, Read, Side};
use super::both::trainer::{LABEL, LAYER_BYTES, LAYERS, Trainer, free_whole, tensor};
use crate::config::ResidencyPolicy;
use crate::engine::tests::{A_WHILE, Held, MIB, cause, soon};
use crate::error::OffloadError;
use crate::prefix::{Edge, Phase};
use crate::step_profile::MarkPoint;
use dormouse_residency::region::RegionState;

/// A trainer in phase B, all that is dormant asleep, and no page about that has its bytes.
fn in_phase_b(fixture: &Fixture) -> Trainer<'_> {
    let trainer = Trainer::asleep_in_phase_b(fixture);
    fixture.allocator.trim(u64::MAX);
    trainer
}

/// A trainer whose first layer has run, and a stream that uses the first tensor of the layer.
fn used_by_another(fixture: &Fixture) -> (Trainer<'_>, Foreign<'_>) {
    let mut trainer = Trainer::new(fixture);
    let user = Foreign::new(fixture, 7);
    trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
    trainer.forward(0);
    fixture.allocator.record_stream(trainer.saved[0][0].0, 7).unwrap();
    (trainer, user)
}

/// What the trainer's stream finds in the layer's tensors when it has come here.
fn read(trainer: &Trainer<'_>, side: &Side<'_>, layer: u32) -> Vec<(Read, u64)> {
    let saved = &trainer.saved[layer as usize];
    saved.iter().map(|&(at, bytes, seed)| (side.read(at, bytes), seed)).collect()
}

/// Raises the maximum use, near which wakes wait for freed pages (decision 0049).
fn make_room(fixture: &Fixture) {
    let bytes = [2 * LAYERS as usize * LAYER_BYTES as usize, MIB];
    // The use is noted with the next request.
    let blocks = bytes.map(|bytes| fixture.allocator.allocate(&Request::new(bytes)).unwrap());
    for block in blocks {
        fixture.engine.free(block.range.start, 0).unwrap();
    }
    fixture.allocator.trim(u64::MAX);
}

fn awake_layers(trainer: &Trainer<'_>) -> usize {
    let is_awake = |&layer: &u32| trainer.states(layer) == [RegionState::Awake; 3];
    (0..LAYERS).filter(is_awake).count()
}

#[test]
fn the_last_microbatch_wakes_layers_beyond_the_window_into_memory_that_was_in_use() {
    // A budget leaves a layer out.
    for (is_limited, expected) in [(false, LAYERS), (true, LAYERS - 1)] {
        let fixture = Plan::default().build();
        let mut trainer = in_phase_b(&fixture);
        make_room(&fixture);
        if is_limited {
            let stats = fixture.allocator.stats();
            let in_use_bytes = stats.active_bytes.current + stats.staged_bytes.current;
            // A sixteenth is left to requests.
            let room_bytes = u64::from(LAYERS) * LAYER_BYTES - MIB as u64 / 4;
            fixture.allocator.set_budget((in_use_bytes + room_bytes) / 15 * 16).unwrap();
        }
        trainer.prefix.microbatch(1);
        trainer.microbatch();
        trainer.settle();
        assert_eq!(awake_layers(&trainer), 0, "more microbatches come");
        trainer.prefix.microbatch(0);
        trainer.microbatch();
        trainer.settle();
        assert_eq!(awake_layers(&trainer), expected as usize);
        trainer.backward_all_and_end();
    }
}

/// Begins a microbatch, which takes `bytes` and frees them.
fn forward_of(fixture: &Fixture, trainer: &mut Trainer<'_>, after: u32, bytes: usize) {
    trainer.prefix.microbatch(after);
    let activations = fixture.allocate(bytes, 1);
    fixture.engine.free(activations, 0).unwrap();
}

/// The same, with a gradient.
fn microbatch_of(fixture: &Fixture, trainer: &mut Trainer<'_>, after: u32, bytes: usize) {
    forward_of(fixture, trainer, after, bytes);
    trainer.gradient(0);
}

#[test]
fn a_prefix_sleeps_while_all_forwards_run_first() {
    let fixture = Plan::default().build();
    let mut trainer = in_phase_b(&fixture);
    make_room(&fixture);
    for after in (0..3).rev() {
        forward_of(&fixture, &mut trainer, after, MIB);
        trainer.settle();
        assert_eq!(awake_layers(&trainer), 0, "{after} more forwards come, and all backwards");
    }
    trainer.microbatch();
    trainer.settle();
    assert_eq!(awake_layers(&trainer), LAYERS as usize, "its backward wakes it");
    trainer.backward_all_and_end();
}

#[test]
fn the_last_microbatch_begins_with_waking_what_has_room_beside_it() {
    let layer_bytes = LAYER_BYTES as usize;
    // The second is the largest.
    for (sizes, expected) in [
        (&[layer_bytes, 2 * layer_bytes, layer_bytes][..], 3),
        (&[layer_bytes][..], 4),
        (&[5 * layer_bytes][..], 0),
        // Nothing is known of what the first will take.
        (&[][..], 0),
    ] {
        let fixture = Plan::default().build();
        let mut trainer = in_phase_b(&fixture);
        make_room(&fixture);
        let stats = fixture.allocator.stats();
        let in_use_bytes = stats.active_bytes.current + stats.staged_bytes.current;
        // Room for five layers, and a sixteenth that is left to requests.
        let room_bytes = 5 * LAYER_BYTES + MIB as u64 / 4;
        fixture.allocator.set_budget((in_use_bytes + room_bytes).div_ceil(15) * 16).unwrap();
        for (at, &bytes) in sizes.iter().enumerate() {
            microbatch_of(&fixture, &mut trainer, (sizes.len() - at) as u32, bytes);
            trainer.settle();
            assert_eq!(awake_layers(&trainer), 0, "more microbatches come");
        }
        trainer.prefix.microbatch(0);
        trainer.settle();
        assert_eq!(awake_layers(&trainer), expected, "{sizes:?}");
        assert_eq!(trainer.prefix.wake_began_ns.is_some(), expected > 0, "{sizes:?}");
        trainer.microbatch();
        trainer.settle();
        assert_eq!(awake_layers(&trainer), 5, "its first gradient wakes into all that is spare");
        trainer.backward_all_and_end();
    }
}

#[test]
fn a_microbatch_beside_memory_that_leaves_says_nothing_of_what_it_takes() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::new(&fixture);
    let held = fixture.hold_copies_out();
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    make_room(&fixture);
    microbatch_of(&fixture, &mut trainer, 1, MIB);
    held.let_go();
    trainer.settle();
    trainer.prefix.microbatch(0);
    trainer.settle();
    assert_eq!(awake_layers(&trainer), 0);
    trainer.microbatch();
    trainer.backward_all_and_end();
}

#[test]
fn layers_beyond_the_window_wake_as_the_backward_frees_memory() {
    let fixture = Plan::default().build();
    let mut trainer = in_phase_b(&fixture);
    make_room(&fixture);
    // As the activations of the last microbatch, which its backward frees.
    let spare_bytes = fixture.allocator.spare_bytes();
    let activations = fixture.allocate(spare_bytes as usize - MIB, 1);
    trainer.prefix.microbatch(0);
    trainer.gradient(LAYERS - 1);
    trainer.settle();
    assert_eq!(awake_layers(&trainer), 4);
    fixture.engine.free(activations, 0).unwrap();
    trainer.gradient(LAYERS - 2);
    trainer.settle();
    assert_eq!(awake_layers(&trainer), LAYERS as usize);
    trainer.backward_all_and_end();
}

#[test]
fn a_mark_returns_before_the_bytes_are_there_and_its_stream_waits_for_them() {
    let fixture = Plan::default().build();
    let mut trainer = in_phase_b(&fixture);
    make_room(&fixture);
    let side = Side::on(&fixture, trainer.stream.clone(), 0);
    let held = fixture.hold_copies_in();
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    let mut reads = Vec::new();
    // The trainer queues all of the backward while not one byte has come.
    for layer in (0..LAYERS).rev() {
        trainer.prefix.mark(Edge::BackwardBegin, layer, &trainer.stream).unwrap();
        reads.extend(read(&trainer, &side, layer));
        if let Some(below) = layer.checked_sub(1) {
            reads.extend(read(&trainer, &side, below));
        }
        // As autograd does: some are freed by then, some only later.
        for (address, ..) in trainer.saved[layer as usize].drain(1..) {
            fixture.engine.free(address, 0).unwrap();
        }
        trainer.prefix.mark(Edge::BackwardEnd, layer, &trainer.stream).unwrap();
    }
    assert!(!side.is_done());
    held.let_go();
    side.finish(&reads);
    drop(side);
    trainer.end();
}

/// Needed layers wait for themselves. The window below is late, and no mark has requested it yet.
#[test]
fn a_prefix_closes_when_all_bytes_are_there() {
    let fixture = Plan::default().build();
    let mut trainer = in_phase_b(&fixture);
    let held = fixture.hold_copies_in();
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    trainer.prefix.mark(Edge::BackwardBegin, LAYERS - 1, &trainer.stream).unwrap();
    let has_gone = held.let_go_later();
    let (saved, keys) = (std::mem::take(&mut trainer.saved), std::mem::take(&mut trainer.keys));
    assert_eq!(trainer.prefix.close().left_asleep_bytes, 0);
    assert!(has_gone.load(Ordering::SeqCst));
    free_whole(&fixture, saved, keys);
    fixture.assert_empty();
}

#[test]
fn a_wait_returns_when_all_bytes_of_a_layer_have_arrived() {
    let fixture = Plan::default().build();
    let trainer = in_phase_b(&fixture);
    let has_gone = fixture.hold_copies_in().let_go_later();
    fixture.engine.wait_awake(&trainer.ids(2)).unwrap();
    assert!(has_gone.load(Ordering::SeqCst) && trainer.intact(2));
    trainer.end();
}

/// Forward queues more than there is room for, and the GPU is late with all of it: room is waited
/// for, behind the marks, and there is enough.
#[test]
fn layers_make_room_when_the_gpu_has_passed_their_marks() {
    let fixture = Plan { budget_bytes: 7 * MIB, ..Plan::default() }.build();
    let mut trainer = Trainer::new(&fixture);
    trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
    let (first, engine) = (fixture.hold(&trainer.stream), Arc::clone(&fixture.engine));
    let opener = std::thread::spawn(move || {
        engine.wait_for_reclaims(1);
        first.let_go();
    });
    for layer in 0..LAYERS {
        let late: Held = fixture.hold(&trainer.stream);
        late.let_go_later();
        trainer.forward(layer);
    }
    opener.join().expect("room was short while nothing had run");
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    trainer.settle();
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
        for (address, ..) in std::mem::take(&mut trainer.saved[layer as usize]) {
            fixture.engine.free(address, 0).unwrap();
        }
    }
    assert!(fixture.allocator.stats().mapped_bytes.peak <= 7 * MIB as u64);
    trainer.end();
}

/// Named dormant, asleep by now, and a boundary after all: its stream may read it at once.
#[test]
fn a_boundary_that_slept_is_there_for_its_stream() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::new(&fixture);
    let side = Side::on(&fixture, trainer.stream.clone(), 0);
    trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
    trainer.prefix.mark(Edge::ForwardBegin, 0, &trainer.stream).unwrap();
    let key = trainer.allocate(MIB, trainer.prefix.scope(0).unwrap(), 2);
    assert_eq!(trainer.prefix.dormant(0, &[key]).unwrap().accepted, 1);
    trainer.prefix.mark(Edge::ForwardEnd, 0, &trainer.stream).unwrap();
    trainer.prefix.mark(Edge::ForwardBegin, 1, &trainer.stream).unwrap();
    trainer.prefix.mark(Edge::ForwardEnd, 1, &trainer.stream).unwrap();
    trainer.settle();
    assert_eq!(trainer.states(0), [RegionState::Host]);
    fixture.allocator.trim(u64::MAX);
    let held = fixture.hold_copies_in();
    let boundary = tensor(key, MIB, 100, DType::F32);
    trainer.prefix.boundary(0, 0, boundary, &trainer.stream).unwrap();
    let read = side.read(key, MIB);
    assert!(!side.is_done());
    held.let_go();
    side.finish(&[(read, 2)]);
    drop(side);
    trainer.keys.push(key);
    trainer.end();
}

#[test]
fn marks_on_a_lost_device_say_so_and_the_prefix_ends() {
    let fixture = Plan::default().build();
    let mut trainer = in_phase_b(&fixture);
    let held = fixture.hold_copies_in();
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    fixture.lose();
    held.let_go();
    for layer in [LAYERS - 1, 0] {
        let error = trainer.prefix.mark(Edge::BackwardBegin, layer, &trainer.stream).unwrap_err();
        assert!(matches!(cause(error), OffloadError::Device(_)));
    }
    let (saved, keys) = (std::mem::take(&mut trainer.saved), std::mem::take(&mut trainer.keys));
    let asleep: u64 =
        (0..2).map(|layer| trainer.prefix.layers[layer].report.asleep_bytes_at_b).sum();
    assert!(trainer.states(0).iter().all(|&state| state == RegionState::Host));
    let report = trainer.prefix.close();
    assert!(report.left_asleep_bytes >= asleep, "{report:?}");
    for address in saved.into_iter().flatten().map(|it| it.0).chain(keys) {
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.drain();
}

/// A stream that used a layer is captured by another thread just when a mark asks where it is.
#[test]
fn a_capture_that_begins_at_a_mark_postpones_the_sleep_to_the_next_one() {
    let fixture = Plan::default().build();
    let (mut trainer, user) = used_by_another(&fixture);
    fixture.turn.standin.capture_at_record(user.handle);
    trainer.forward(1);
    trainer.settle();
    assert_eq!(trainer.states(0), [RegionState::Awake; 3]);
    let ids = trainer.ids(0);
    assert!(fixture.engine.uses(&ids).is_empty(), "reclaim has no event to wait for");
    user.end_capture();
    (2..LAYERS).for_each(|layer| trainer.forward(layer));
    trainer.settle();
    assert!((0..2).all(|layer| trainer.states(layer).iter().all(|s| s.is_asleep())));
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    let report = trainer.backward_all_and_end();
    assert!(report.declined.iter().any(|it| it.contains("CAPTURE_UNSUPPORTED")), "{report:?}");
    user.destroy();
}

/// A capture begins between the question where a stream is and the wait for that.
#[test]
fn a_refused_wait_for_a_mark_postpones_the_sleep_to_the_next_one() {
    const CAPTURED_EVENT: i32 = 907;
    let fixture = Plan::default().build();
    let mut trainer = Trainer::new(&fixture);
    trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
    trainer.forward(0);
    let held = fixture.hold(&trainer.stream);
    fixture.turn.standin.fail("cuStreamWaitEvent", 1, 1, CAPTURED_EVENT);
    trainer.forward(1);
    held.let_go();
    trainer.settle();
    assert_eq!(trainer.states(0), [RegionState::Awake; 3]);
    trainer.forward(2);
    trainer.settle();
    assert!((0..2).all(|layer| trainer.states(layer).iter().all(|s| s.is_asleep())));
    (3..LAYERS).for_each(|layer| trainer.forward(layer));
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    let report = trainer.backward_all_and_end();
    assert!(report.declined.iter().any(|it| it.contains("CAPTURED_EVENT")), "{report:?}");
}

#[test]
fn a_destroyed_stream_keeps_awake_only_what_it_used() {
    let fixture = Plan::default().build();
    let (mut trainer, user) = used_by_another(&fixture);
    user.destroy();
    (1..LAYERS).for_each(|layer| trainer.forward(layer));
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    trainer.settle();
    let used = fixture.engine.region_at(trainer.saved[0][0].0).unwrap();
    for id in (0..LAYERS).flat_map(|layer| trainer.ids(layer)) {
        assert_eq!(fixture.state(id).is_asleep(), id != used, "{id}");
    }
    let report = trainer.backward_all_and_end();
    assert!(report.declined.iter().any(|it| it.contains("destroyed")), "{report:?}");
}

/// A sleep waits until the trainer's stream is that far. One that is called off before is not forgotten.
#[test]
fn a_withdrawn_sleep_is_admitted_again_at_the_next_mark() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::new(&fixture);
    trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
    trainer.forward(0);
    let held = fixture.hold(&trainer.stream);
    trainer.forward(1);
    assert_eq!(trainer.states(0), [RegionState::Awake; 3]);
    fixture.engine.wake(&trainer.ids(0));
    held.let_go();
    trainer.settle();
    assert_eq!(trainer.states(0), [RegionState::Awake; 3]);
    trainer.forward(2);
    trainer.settle();
    assert!((0..2).all(|layer| trainer.states(layer).iter().all(|s| s.is_asleep())));
    trainer.end();
}

/// What a GPU works at is not what its trainer has launched.
#[test]
fn layers_last_as_long_as_their_stream_is_at_them() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::new(&fixture);
    trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
    trainer.forward(0);
    let (opened, before) = (fixture.hold(&trainer.stream), Instant::now());
    let marked = |trainer: &mut Trainer<'_>, edge| {
        trainer.prefix.mark(edge, 1, &trainer.stream).unwrap();
    };
    marked(&mut trainer, Edge::ForwardBegin);
    let busy = fixture.hold(&trainer.stream);
    marked(&mut trainer, Edge::ForwardEnd);
    let launched = before.elapsed();
    // Not counted: the layer has not begun.
    std::thread::sleep(A_WHILE);
    opened.let_go();
    std::thread::sleep(2 * A_WHILE);
    busy.let_go();
    let report = trainer.prefix.report();
    let forward = Duration::from_nanos(report.layer[1].forward_ns);
    assert!(
        forward >= A_WHILE && forward <= before.elapsed() - A_WHILE,
        "{forward:?} {launched:?}"
    );
    assert!(Duration::from_nanos(report.layer[0].forward_ns) < before.elapsed());
    trainer.end();
}

#[test]
fn the_wait_of_a_stream_for_copies_is_in_the_report() {
    let fixture = Plan::default().build();
    let mut trainer = in_phase_b(&fixture);
    let held = fixture.hold_copies_in();
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    let waited = trainer.prefix.mark(Edge::BackwardBegin, LAYERS - 1, &trainer.stream).unwrap();
    std::thread::sleep(A_WHILE);
    held.let_go();
    let report = trainer.prefix.report();
    let (top, a_while_ns) = (report.layer[LAYERS as usize - 1], A_WHILE.as_nanos() as u64);
    assert!(top.stall_ns >= a_while_ns && waited.stall_ns < top.stall_ns, "{top:?} {waited:?}");
    assert_eq!(report.stall_ns, top.stall_ns, "once");
    trainer.end();
}

fn microbatch_and_backward(trainer: &mut Trainer<'_>) {
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    trainer.prefix.microbatch(0);
    trainer.microbatch();
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
}

/// Ends a trainer whose stream is held before its last mark.
fn end_ahead<'a>(fixture: &'a Fixture, mut trainer: Trainer<'a>) -> Held {
    let held = fixture.hold(&trainer.stream);
    trainer.prefix.came_to(MarkPoint::BackwardEnd(0), &trainer.stream);
    let Trainer { prefix, saved, keys, .. } = trainer;
    assert_eq!(prefix.close().left_asleep_bytes, 0);
    free_whole(fixture, saved, keys);
    held
}

/// The trainer is done before its GPU: the step is planned from when that has come to its end.
#[test]
fn a_step_is_planned_from_once_the_stream_has_passed_its_end() {
    let mut plan = Plan::default();
    plan.config.residency = ResidencyPolicy::Fit;
    let fixture = plan.build();
    let step = || {
        let mut trainer = Trainer::new(&fixture);
        trainer.forward_all();
        microbatch_and_backward(&mut trainer);
        trainer
    };
    let mut late = step();
    assert!(late.prefix.report().planned.is_none());
    let held = end_ahead(&fixture, late);
    assert!(fixture.engine.profile(LABEL, LAYERS).is_none(), "the stream is not there");
    held.let_go();
    // A host that is ahead finds out only where it waits.
    fixture.finish(&fixture.here());
    soon("the end of the stream", || fixture.engine.profile(LABEL, LAYERS).is_some());
    assert!(step().end().planned.is_some());
}

/// A trainer that never waits for its GPU is always ahead of it.
#[test]
fn a_trainer_that_is_ahead_of_its_stream_has_its_steps_planned_all_the_same() {
    let mut plan = Plan::default();
    plan.config.residency = ResidencyPolicy::Fit;
    let fixture = plan.build();
    let mut held = None;
    for step in 0..3 {
        let mut trainer = Trainer::new(&fixture);
        trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
        trainer.forward(0);
        assert_eq!(fixture.engine.profile(LABEL, LAYERS).is_some(), step == 2, "step {step}");
        held.take().into_iter().for_each(Held::let_go);
        (1..LAYERS).for_each(|layer| trainer.forward(layer));
        microbatch_and_backward(&mut trainer);
        // The last mark of each step is reached in the middle of the next.
        held = Some(end_ahead(&fixture, trainer));
    }
    held.take().into_iter().for_each(Held::let_go);
}

/// A report waits for every stream that was marked on, not only for the last.
#[test]
fn a_report_waits_for_each_stream_that_was_marked_on() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::new(&fixture);
    trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
    trainer.prefix.mark(Edge::ForwardBegin, 0, &trainer.stream).unwrap();
    let side = Side::new(&fixture, 7);
    let held = fixture.hold(&trainer.stream);
    trainer.prefix.mark(Edge::ForwardEnd, 0, &trainer.stream).unwrap();
    trainer.prefix.mark(Edge::ForwardBegin, 1, &side.stream).unwrap();
    let has_gone = held.let_go_later();
    let report = trainer.prefix.report();
    assert!(has_gone.load(Ordering::SeqCst), "the first stream was held");
    // The other stream's mark was reached before it.
    assert!(report.layer[0].forward_ns >= A_WHILE.as_nanos() as u64 / 2, "{report:?}");
    drop(side);
    trainer.end();
}

/// Accumulators are zeroed and added to on the caller's streams.
#[test]
#[expect(unsafe_code, reason = "the gradient is lent by address")]
fn sums_are_kept_until_every_stream_has_added_to_them() {
    let fixture = Plan::default().build();
    let (first, second) = (Side::new(&fixture, 7), Side::new(&fixture, 8));
    let mut trainer = Trainer::new(&fixture);
    trainer.prefix.enter(Phase::A, &first.stream).unwrap();
    trainer.prefix.mark(Edge::ForwardBegin, 0, &first.stream).unwrap();
    let elems = MIB / 4;
    let not_ours = tensor(MIB, MIB, elems, DType::F32);
    trainer.prefix.boundary(0, 0, not_ours, &first.stream).unwrap();
    let sums = trainer.prefix.gradient(0, 0).unwrap();
    assert_eq!(fixture.allocator.lookup(sums).unwrap().stream, 7);
    trainer.prefix.mark(Edge::ForwardEnd, 0, &first.stream).unwrap();
    trainer.prefix.enter(Phase::B, &first.stream).unwrap();
    let gradient = second.allocate(MIB);
    let held = fixture.hold(&second.stream);
    // SAFETY: a live block of as many elements, freed in the stream's order.
    unsafe { trainer.prefix.accumulate(0, 0, gradient, elems, DType::F32, &second.stream) }
        .unwrap();
    second.free(gradient);
    drop(trainer);
    let meanwhile = first.allocate(MIB);
    assert_ne!(meanwhile, sums);
    held.let_go();
    second.finish(&[]);
    assert_eq!(first.allocate(MIB), sums);
    first.free(meanwhile);
    first.free(sums);
    drop((first, second));
    fixture.assert_empty();
}
