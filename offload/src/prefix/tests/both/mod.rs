//! What holds on every device. Included by `on_host` and `on_cuda`, which say on which bench.

mod full;
pub(super) mod planned;
mod together;
pub(super) mod trainer;

use dormouse_alloc::{AllocError, Request};
use dormouse_device::Device;
use dormouse_kernels::{DType, KernelError};

use self::trainer::{KEYS, LAYER_BYTES, LAYERS, Trainer, free_whole, tensor};
use super::bench;
use super::bench::ASLEEP_FIRST;
use super::bench::both::Plan;
use crate::config::EngineConfig;
use crate::engine::tests::{A_WHILE, MIB, cause, holds, is_zero, soon};
use crate::prefix::*;
use crate::step_profile::{Clock, MarkPoint, MarkTime};
use dormouse_residency::region::RegionState;
use standin::events;

#[test]
fn windows_allocate_from_an_arena_of_the_prefix_until_phase_b() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::new(&fixture);
    let arena = trainer.prefix.arena();
    assert!(arena.is_some());
    trainer.forward_all();
    assert_eq!(fixture.allocator.lookup(trainer.keys[0]).unwrap().arena, arena);
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    assert_eq!(trainer.prefix.arena(), None);
    let late = fixture.allocator.allocate(&Request { arena, ..Request::new(MIB) });
    assert!(matches!(late, Err(AllocError::UnknownArena { .. })), "{late:?}");
    trainer.end();
    assert_eq!(fixture.allocator.stats().arenas.current, 0, "it went with its last block");
}

#[test]
fn a_prefix_that_ends_in_phase_a_closes_its_arena() {
    let fixture = Plan::default().build();
    let trainer = Trainer::new(&fixture);
    assert_eq!(fixture.allocator.stats().arenas.current, 1);
    trainer.end();
    assert_eq!(fixture.allocator.stats().arenas.current, 0);
}

#[test]
fn a_whole_step() {
    for plan in [Plan::default(), Plan::default().via_host()] {
        let fixture = plan.build();
        let before = fixture.turn.accumulations();
        let mut trainer = Trainer::new(&fixture);
        trainer.forward_all();
        trainer.settle();
        // All but the last layer sleep before A ends.
        for layer in 0..LAYERS - 1 {
            assert!(trainer.states(layer).iter().all(|s| s.is_asleep()), "layer {layer}");
        }
        assert_eq!(trainer.states(LAYERS - 1), [RegionState::Awake; 3]);

        trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
        trainer.settle();
        let dormant = u64::from(LAYERS) * LAYER_BYTES;
        assert_eq!(trainer.prefix.report().asleep_bytes_peak, dormant);
        trainer.microbatch();
        trainer.prefix.microbatch(0);
        trainer.settle();
        assert!((0..LAYERS).all(|l| trainer.states(l).iter().all(|s| s.is_asleep())));
        // The last microbatch's gradients begin the waking; those of the microbatch before did not.
        trainer.microbatch();
        trainer.settle();
        // The window of three: layers 5 and 4 are needed, 3 and 2 are on their way. A GPU wakes more into memory
        // that was in use, which follows from how late layers fell asleep.
        let awake = (0..LAYERS).filter(|&l| trainer.states(l) == [RegionState::Awake; 3]).count();
        let beyond = if fixture.device().is_stream_ordered() { LAYERS as usize } else { 4 };
        assert!((4..=beyond).contains(&awake), "{awake}");

        trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
        fixture.finish(&fixture.here());
        match before.zip(fixture.turn.accumulations()) {
            Some((before, after)) => assert_eq!(after - before, 2 * u64::from(LAYERS)),
            None => trainer.assert_sums(2.0),
        }
        for layer in (0..LAYERS).rev() {
            trainer.backward(layer);
        }
        let report = trainer.end();
        assert_eq!((report.layers, report.dormant_bytes), (LAYERS, dormant));
        assert_eq!(report.asleep_bytes_at_b, dormant);
        assert_eq!(report.layer.iter().map(|l| l.asleep_bytes_at_b).max(), Some(LAYER_BYTES));
        assert_eq!((report.declined.len(), report.left_asleep_bytes), (0, 0));
        assert!(report.nvme_bytes_peak + report.host_bytes_peak >= dormant);
        // When copies end is the disk's affair. That B never holds more than A did, or than the
        // window of layers that it wakes at its end, is not.
        let others = (2 * LAYERS as usize + 1) * KEYS * 4;
        let woken = 4 * LAYER_BYTES + others as u64;
        assert!(report.phase_peak_bytes[1] <= report.phase_peak_bytes[0].max(woken));
        assert!(report.peak_phase.is_some());
        assert!(report.layer.iter().all(|l| l.forward_ns > 0 && l.backward_ns > 0));
        assert_eq!(report.stall_ns, report.layer.iter().map(|l| l.stall_ns).sum::<u64>());
    }
}

/// On this thread: its phases and layers are spans, and it ends with one summary.
#[test]
fn a_step_emits_its_spans_and_one_summary() {
    let house = Plan::default().build();
    let (report, seen) = events::collect(|| {
        let mut trainer = Trainer::new(&house);
        trainer.forward_all();
        trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
        trainer.microbatch();
        trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
        for layer in (0..LAYERS).rev() {
            trainer.backward(layer);
        }
        trainer.end()
    });
    for (name, times) in [("phase", 3), ("forward", LAYERS), ("backward", LAYERS)] {
        assert_eq!(events::with_message(&seen, name).len(), times as usize, "{name}: {seen:?}");
    }
    let ended = events::with_message(&seen, "prefix ended");
    assert_eq!(ended.len(), 1, "{seen:?}");
    assert_eq!((ended[0].target, ended[0].level), ("offload", tracing::Level::INFO));
    assert_eq!(ended[0].fields["layers"], LAYERS.to_string());
    assert_eq!(ended[0].fields["dormant_bytes"], report.dormant_bytes.to_string());
    assert_eq!(ended[0].fields["declined"], "\"\"");
}

/// A layer that sleeps is not asked again, but one that somebody woke is.
#[test]
fn a_layer_that_was_woken_sleeps_again_at_the_next_mark() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::new(&fixture);
    trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
    trainer.forward(0);
    trainer.forward(1);
    trainer.settle();
    assert!(trainer.states(0).iter().all(|s| s.is_asleep()));
    let sleeps = || fixture.engine.stats().sleeps;
    let before = sleeps();
    trainer.forward(2);
    trainer.settle();
    assert_eq!(sleeps() - before, 3, "those of layer 1 alone");
    fixture.engine.wake_address(trainer.saved[0][1].0).unwrap();
    assert_eq!(trainer.states(0)[1], RegionState::Awake);
    trainer.forward(3);
    trainer.settle();
    assert!((0..3).all(|layer| trainer.states(layer).iter().all(|s| s.is_asleep())));
    trainer.end();
}

/// Room for about half of what A saves: it goes through only because layers sleep behind it.
#[test]
fn a_step_in_half_the_memory() {
    let mut plan = Plan { budget_bytes: 7 * MIB, ..Plan::default() };
    // To the file, then, where memory has room for what is on its way there and no more.
    plan.config.host_bytes_max =
        if ASLEEP_FIRST == RegionState::Host { 2 * LAYER_BYTES } else { 0 };
    let fixture = plan.build();
    let mut trainer = Trainer::new(&fixture);
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    trainer.microbatch();
    // Suffixes that need all there is: everything dormant must be out.
    trainer.settle();
    let large = trainer.allocate(6 * MIB, 0, 1);
    fixture.engine.free(large, 0).unwrap();
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
        // What backward left is the trainer's to free, and it does.
        for (address, ..) in std::mem::take(&mut trainer.saved[layer as usize]) {
            fixture.engine.free(address, 0).unwrap();
        }
    }
    assert!(fixture.allocator.stats().mapped_bytes.peak <= 7 * MIB as u64);
    let report = trainer.end();
    let dormant = u64::from(LAYERS) * LAYER_BYTES;
    match ASLEEP_FIRST {
        // A layer that found host memory full stays awake until the next mark.
        RegionState::Host => assert!(report.asleep_bytes_peak >= dormant - MIB as u64),
        _ => assert_eq!(report.asleep_bytes_peak, dormant),
    }
}

#[test]
fn only_blocks_allocated_in_the_window_and_named_may_sleep() {
    let mut plan = Plan::default();
    plan.config = EngineConfig { size_floor_bytes: 64 << 10, ..plan.config };
    let fixture = plan.build();
    let mut trainer = Trainer::new(&fixture);
    let weight = trainer.allocate(MIB, 0, 1);
    trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
    trainer.prefix.mark(Edge::ForwardBegin, 0, &trainer.stream).unwrap();
    let scope = trainer.prefix.scope(0).unwrap();
    let saved = trainer.allocate(MIB, scope, 2);
    let unnamed = trainer.allocate(MIB, scope, 3);
    let small = trainer.allocate(4096, scope, 4);
    let tagged = trainer.allocate(MIB, scope, 5);
    let tag = fixture.engine.tag_create("optimizer", true).unwrap();
    fixture.engine.tag_add(tag, tagged).unwrap();
    let foreign = &raw const fixture as usize;
    let named = trainer.prefix.dormant(0, &[weight, saved, small, tagged, foreign]).unwrap();
    assert_eq!((named.accepted, named.accepted_bytes), (1, MIB as u64));
    let refused: Vec<_> = named.refused.iter().map(|r| (r.address, r.reason)).collect();
    use RefusedReason::*;
    assert_eq!(
        refused,
        [(weight, OtherScope), (small, Small), (tagged, Claimed), (foreign, NotOurs)]
    );
    // Named under another layer: it is that of its window.
    let other = trainer.prefix.dormant(1, &[saved]).unwrap();
    assert_eq!(other.refused[0].reason, Claimed);
    trainer.prefix.mark(Edge::ForwardEnd, 0, &trainer.stream).unwrap();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    trainer.settle();
    assert_eq!(trainer.states(0), [ASLEEP_FIRST]);
    assert!(holds(unnamed, MIB, 3) && holds(weight, MIB, 1));
    assert!(matches!(trainer.prefix.dormant(0, &[unnamed]), Err(OffloadError::Order { .. })));
    drop(trainer);
    assert!(holds(saved, MIB, 2), "a dropped prefix wakes what is asleep");
    fixture.engine.tag_destroy(tag).unwrap();
    for address in [weight, saved, unnamed, small, tagged] {
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

#[test]
fn a_boundary_named_dormant_before_is_taken_out() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::new(&fixture);
    trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
    trainer.prefix.mark(Edge::ForwardBegin, 0, &trainer.stream).unwrap();
    let scope = trainer.prefix.scope(0).unwrap();
    let key = trainer.allocate(MIB, scope, 2);
    assert_eq!(trainer.prefix.dormant(0, &[key]).unwrap().accepted, 1);
    trainer.prefix.boundary(0, 0, tensor(key, MIB, 100, DType::F64), &trainer.stream).unwrap();
    // A second boundary tensor in the same block.
    trainer
        .prefix
        .boundary(0, 1, tensor(key + MIB / 2, MIB / 2, 100, DType::Bf16), &trainer.stream)
        .unwrap();
    trainer.prefix.mark(Edge::ForwardEnd, 0, &trainer.stream).unwrap();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    assert!(trainer.ids(0).is_empty() && holds(key, MIB, 2));
    let report = trainer.prefix.report();
    assert_eq!((report.dormant_bytes, report.boundary_bytes), (0, (MIB + MIB / 2) as u64));
    assert_eq!(trainer.prefix.held_bytes, 0);
    fixture.finish(&fixture.here());
    assert!(is_zero(trainer.prefix.gradient(0, 0).unwrap(), 800));
    assert!(is_zero(trainer.prefix.gradient(0, 1).unwrap(), 400));
    drop(trainer);
    fixture.engine.free(key, 0).unwrap();
    fixture.assert_empty();
}

/// What cannot be woken to become a boundary is dormant still, and not forgotten by its layer.
#[test]
fn a_boundary_that_cannot_be_woken_stays_its_layers() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::in_file(&fixture);
    let (bad, ids) = (trainer.ids(0)[0], trainer.ids(0));
    let address = trainer.saved[0][0].0;
    let offset = fixture.engine.extent_offset(bad).unwrap();
    let dormant = u64::from(LAYERS) * LAYER_BYTES;
    fixture.faults.flip_bit(offset);
    let named = tensor(address, MIB, 100, DType::F32);
    let error = trainer.prefix.boundary(0, 7, named, &trainer.stream).unwrap_err();
    assert!(matches!(cause(error), OffloadError::Nvme(_)));
    assert_eq!((trainer.ids(0), trainer.prefix.report().dormant_bytes), (ids, dormant));
    assert!(trainer.prefix.report().stall_ns > 0, "it waited in vain");
    // Once the disk is right it may be declared again, and what is left is woken as ever.
    fixture.faults.flip_bit(offset);
    trainer.prefix.boundary(0, 7, named, &trainer.stream).unwrap();
    assert!(!trainer.ids(0).contains(&bad));
    assert_eq!(trainer.prefix.report().dormant_bytes, dormant - MIB as u64);
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    assert_eq!(trainer.end().left_asleep_bytes, 0);
}

/// The wait of the first backward is no lead that waking had: the bound would be less by it.
#[test]
fn the_wait_of_the_first_backward_is_no_lead_time() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::in_file(&fixture);
    fixture.faults.hold(false, true);
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    fixture.faults.wait_held(1);
    let faults = fixture.faults.clone();
    let later = std::thread::spawn(move || {
        std::thread::sleep(A_WHILE);
        faults.hold(false, false);
    });
    trainer.backward(LAYERS - 1);
    later.join().unwrap();
    let (prefix, top) = (&mut trainer.prefix, LAYERS as usize - 1);
    prefix.settle_clock();
    let waited_ns = prefix.layers[top].report.stall_ns;
    let due_ns = prefix.clock.times().layer(top).unstalled_due_ns;
    assert!(waited_ns > 0);
    assert!(due_ns.unwrap() + waited_ns <= fixture.engine.timeline().now_ns());
    for layer in (0..LAYERS - 1).rev() {
        trainer.backward(layer);
    }
    trainer.end();
}

#[test]
fn the_bound_is_that_of_the_link_which_takes_longest() {
    for (plan, to_file) in [
        (Plan::default(), true),
        (Plan::default().via_host(), true),
        (Plan::default().via_host(), false),
    ] {
        let fixture = plan.build();
        let mut trainer = Trainer::new(&fixture);
        trainer.forward_all();
        trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
        trainer.settle();
        if to_file {
            trainer.to_file();
            trainer.settle();
        }
        trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
        for layer in (0..LAYERS).rev() {
            trainer.backward(layer);
        }
        // As if backward had begun at once and taken no time: all that has to come is waited for.
        (trainer.prefix.wake_began_ns, trainer.prefix.clock) = (Some(0), Clock::default());
        let timeline = fixture.engine.timeline();
        for layer in (0..LAYERS).rev() {
            trainer.prefix.clock.came_to(MarkPoint::BackwardDue(layer), MarkTime::At(0), timeline);
        }
        let report = trainer.prefix.report();
        let rates = fixture.engine.best_rates();
        let took_ns = |link: bool, bytes_per_s: u64| {
            let bytes = u128::from(LAYERS) * u128::from(LAYER_BYTES);
            if link { (bytes * 1_000_000_000 / u128::from(bytes_per_s)) as u64 } else { 0 }
        };
        let from_file_ns = took_ns(to_file, rates.nvme_to_device_bytes_per_s);
        let from_host_ns = took_ns(!fixture.is_direct(), rates.host_to_device_bytes_per_s);
        assert_eq!(report.stall_bound_ns, from_file_ns.max(from_host_ns));
        trainer.end();
    }
}

/// Layers that no backward came to had not to be there, and whatever the trainer did between two
/// backwards was time to copy in.
#[test]
fn the_bound_counts_the_layers_whose_backward_was_due() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::in_file(&fixture);
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    let host_to_device = || fixture.engine.best_rates().host_to_device_bytes_per_s;
    soon("copies in are counted", || fixture.is_direct() || host_to_device() > 0);
    let rates = fixture.engine.best_rates();
    let rate = match (rates.nvme_to_device_bytes_per_s, rates.host_to_device_bytes_per_s) {
        (from_file, from_host) if !fixture.is_direct() => from_file.min(from_host),
        (from_file, _) => from_file,
    };
    let took_ns = |layers: u64| {
        let bytes = u128::from(layers) * u128::from(LAYER_BYTES);
        (bytes * 1_000_000_000 / u128::from(rate)) as u64
    };
    let between_ns = took_ns(1) / 2;
    (trainer.prefix.wake_began_ns, trainer.prefix.clock) = (Some(0), Clock::default());
    let timeline = fixture.engine.timeline();
    for (point, ns) in [
        (MarkPoint::BackwardDue(5), 0),
        (MarkPoint::BackwardFailed(5), 7),
        (MarkPoint::BackwardDue(5), 7),
        (MarkPoint::BackwardBegin(5), 10),
        (MarkPoint::BackwardEnd(5), 10),
        (MarkPoint::BackwardDue(2), between_ns + 10),
    ] {
        trainer.prefix.clock.came_to(point, MarkTime::At(ns), timeline);
    }
    assert_eq!(trainer.prefix.report().stall_bound_ns, took_ns(2) - between_ns);
    trainer.end();
}

#[test]
fn accumulators_begin_at_zero_in_memory_used_before() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::new(&fixture);
    let key = trainer.allocate(KEYS * 4, 0, 2);
    let before = trainer.allocate(KEYS * 4, 0, 3);
    fixture.engine.free(before, 0).unwrap();
    trainer
        .prefix
        .boundary(0, 0, tensor(key, KEYS * 4, KEYS, DType::F32), &trainer.stream)
        .unwrap();
    let sum = trainer.prefix.gradient(0, 0).unwrap();
    assert_eq!(sum, before, "the test is void unless the freed block is reused");
    fixture.finish(&fixture.here());
    assert!(is_zero(sum, KEYS * 4));
    drop(trainer);
    fixture.engine.free(key, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn bad_boundaries_and_gradients_are_refused() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::new(&fixture);
    let key = trainer.allocate(MIB, 0, 2);
    let prefix = &mut trainer.prefix;
    assert!(prefix.boundary(LAYERS, 0, tensor(key, 100, 10, DType::F32), &fixture.here()).is_err());
    let none = prefix.boundary(0, 0, tensor(key, 100, 0, DType::F32), &fixture.here()).unwrap_err();
    assert_eq!(none.to_string(), "boundary elements is 0; accepted: 1 to 25");
    assert!(prefix.boundary(0, 0, tensor(key, 100, 26, DType::F32), &fixture.here()).is_err());
    assert!(
        prefix.boundary(0, 0, tensor(key, 100, usize::MAX, DType::F32), &fixture.here()).is_err()
    );
    prefix.boundary(0, 0, tensor(key, 100, 25, DType::F32), &fixture.here()).unwrap();
    assert!(
        prefix.boundary(0, 0, tensor(key, 100, 25, DType::F32), &fixture.here()).is_err(),
        "a slot used before"
    );
    assert!(prefix.gradient(0, 1).is_err());
    let mut add = |slot, at, elems, dtype| {
        // SAFETY: refused before anything is read, or a live block of that many elements.
        #[expect(unsafe_code, reason = "the trainer lends memory by address")]
        unsafe {
            prefix.accumulate(0, slot, at, elems, dtype, &fixture.here())
        }
    };
    assert!(matches!(add(0, key, 24, DType::F32), Err(OffloadError::Argument { .. })));
    assert!(matches!(add(7, key, 25, DType::F32), Err(OffloadError::Argument { .. })));
    let kernel = |r: Result<(), OffloadError>| match r {
        Err(OffloadError::Kernel(e)) => e,
        other => panic!("{other:?}"),
    };
    assert!(matches!(kernel(add(0, key, 25, DType::F64)), KernelError::Types { .. }));
    assert!(matches!(kernel(add(0, key + 1, 25, DType::F32)), KernelError::Address { .. }));
    assert!(add(0, key, 25, DType::F16).is_ok(), "any type with the same accumulator");
    drop(trainer);
    fixture.engine.free(key, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn marks_out_of_order_change_nothing() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::new(&fixture);
    assert!(trainer.prefix.mark(Edge::ForwardBegin, 0, &trainer.stream).is_err());
    assert!(trainer.prefix.begin_wake().is_err());
    trainer.forward_all();
    assert!(trainer.prefix.mark(Edge::BackwardBegin, 5, &trainer.stream).is_err());
    assert!(trainer.prefix.enter(Phase::C, &trainer.stream).is_err());
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    assert!(trainer.prefix.enter(Phase::B, &trainer.stream).is_err());
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    assert!(trainer.prefix.mark(Edge::BackwardEnd, 5, &trainer.stream).is_err());
    assert!(trainer.prefix.mark(Edge::BackwardBegin, 6, &trainer.stream).is_err());
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
        assert!(trainer.prefix.mark(Edge::BackwardBegin, layer, &trainer.stream).is_err());
    }
    trainer.end();
}

#[test]
fn a_prefix_ends_in_any_phase_with_everything_given_back() {
    for last in 0..4 {
        let fixture = Plan::default().build();
        let mut trainer = Trainer::new(&fixture);
        if last == 0 {
            trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
            trainer.prefix.mark(Edge::ForwardBegin, 0, &trainer.stream).unwrap(); // a window left open
        }
        if last > 0 {
            trainer.forward_all();
        }
        if last > 1 {
            trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
        }
        if last > 2 {
            trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
            trainer.backward(LAYERS - 1);
        }
        let (saved, keys) = (std::mem::take(&mut trainer.saved), std::mem::take(&mut trainer.keys));
        let report = trainer.prefix.close();
        assert_eq!(report.left_asleep_bytes, 0);
        free_whole(&fixture, saved, keys);
        fixture.assert_empty();
    }
}

#[test]
fn a_corrupted_layer_is_an_error_of_its_mark_and_the_rest_goes_on() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::in_file(&fixture);
    let bad = trainer.ids(5)[0];
    let info = fixture.engine.region_info(bad).unwrap();
    let offset = fixture.engine.extent_offset(bad).unwrap();
    fixture.faults.flip_bit(offset);
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    let error = trainer.prefix.mark(Edge::BackwardBegin, 5, &trainer.stream).unwrap_err();
    let OffloadError::WakeFailed { start, .. } = error else { panic!("{error}") };
    assert_eq!(start, info.range.start);
    assert!(matches!(cause(error), OffloadError::Nvme(_)));
    let in_vain_ns = trainer.prefix.report().layer[5].stall_ns;
    assert!(in_vain_ns > 0);
    // The mark has not happened: once the disk is right, it may be made again.
    fixture.faults.flip_bit(offset);
    for layer in (0..LAYERS).rev() {
        trainer.backward(layer);
    }
    assert!(trainer.end().layer[5].stall_ns >= in_vain_ns);
}

#[test]
fn memory_that_cannot_wake_stays_asleep_is_reported_and_can_be_freed() {
    let fixture = Plan::default().build();
    let trainer = Trainer::in_file(&fixture);
    let offset = fixture.engine.extent_offset(trainer.ids(2)[0]).unwrap();
    fixture.faults.flip_bit(offset);
    let report = trainer.end();
    assert_eq!(report.left_asleep_bytes, MIB as u64);
    assert_eq!(report.declined.len(), 1);
    assert!(report.declined[0].contains("CRC-32C"), "{:?}", report.declined);
}

#[test]
fn prefixes_have_limits_and_scopes_of_their_own() {
    let fixture = Plan::default().build();
    assert!(fixture.engine.prefix(0, "n").is_err());
    assert!(fixture.engine.prefix(LAYERS_MAX + 1, "n").is_err());
    let (a, b) = (fixture.engine.prefix(2, "a").unwrap(), fixture.engine.prefix(2, "b").unwrap());
    let scopes = [a.scope(0), a.scope(1), b.scope(0), b.scope(1)].map(Result::unwrap);
    for (i, scope) in scopes.iter().enumerate() {
        assert!(*scope != 0 && !scopes[..i].contains(scope));
    }
    assert!(a.scope(2).is_err());
    assert_eq!(fixture.device().memory_info().mapped_bytes, 0);
}
