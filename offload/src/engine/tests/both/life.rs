//! Sleeping, waking and freeing, in every state.

use dormouse_device::{Device, Operation};
use proptest::prelude::*;

use super::*;
use crate::ids::Tier;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    /// What wakes is what slept, bit for bit, by every route and at any size.
    #[test]
    fn bytes_come_back(
        via_host: bool,
        to_host: bool,
        sizes in prop::collection::vec(1..2500 * KIB, 1..8),
        seed: u64,
    ) {
        let plan = if via_host { Plan::default().via_host() } else { Plan::default() };
        let fixture = plan.build();
        let tier = if to_host { Tier::Host } else { Tier::Nvme };
        let regions: Vec<_> = sizes.iter().enumerate()
            .map(|(i, &bytes)| (fixture.region(bytes, seed ^ i as u64), bytes, seed ^ i as u64))
            .collect();
        let ids: Vec<_> = regions.iter().map(|((id, _), ..)| *id).collect();
        let all: u64 = ids.iter().map(|&id| fixture.engine.region_info(id).unwrap().range.bytes as u64).sum();
        let mapped = fixture.device().memory_info().mapped_bytes;

        let outcome = fixture.engine.sleep(&ids, tier, &[]).unwrap();
        prop_assert_eq!((outcome.accepted_bytes, outcome.declined_bytes), (all, 0));
        fixture.engine.wait_settled(&ids).unwrap();
        let asleep = if to_host { RegionState::Host } else { RegionState::Nvme };
        for &id in &ids {
            prop_assert_eq!(fixture.state(id), asleep);
        }
        prop_assert_eq!(fixture.device().memory_info().mapped_bytes, mapped - all);
        prop_assert_eq!(fixture.engine.stats().tiers[tier.index()].regions.current_bytes, all);
        prop_assert_eq!(fixture.host_used() > 0, to_host, "no copy is left behind in host memory");

        fixture.engine.wait_awake(&ids).unwrap();
        for ((_, address), bytes, seed) in &regions {
            prop_assert!(holds(*address, *bytes, *seed));
        }
        fixture.assert_nothing_stored();
        for ((id, address), ..) in regions {
            fixture.engine.release(id).unwrap();
            fixture.engine.free(address, 0).unwrap();
        }
        fixture.assert_empty();
    }
}

#[test]
fn chunks_larger_than_one_transfer_come_back() {
    let fixture = Plan::default().build();
    let bytes = 9 * MIB + 4096;
    let (id, address) = fixture.region(bytes, 42);
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    assert_eq!(fixture.faults.counts(), (0, 3));
    fixture.engine.wake_address(address + 5 * MIB).unwrap();
    assert!(holds(address, bytes, 42));
    let stats = fixture.engine.stats();
    assert_eq!((stats.nvme_write.bytes, stats.nvme_read.bytes), (bytes as u64, bytes as u64));
    assert_eq!((stats.sleeps, stats.wakes), (1, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn host_memory_spills_to_the_file() {
    for plan in [Plan::default(), Plan::default().via_host()] {
        let fixture = plan.build();
        let (id, address) = fixture.region(MIB, 5);
        fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
        fixture.engine.wait_settled(&[id]).unwrap();
        assert_eq!((fixture.state(id), fixture.nvme_used()), (RegionState::Host, 0));
        fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
        fixture.engine.wait_settled(&[id]).unwrap();
        assert_eq!((fixture.state(id), fixture.host_used()), (RegionState::Nvme, 0));
        fixture.engine.wait_awake(&[id]).unwrap();
        assert!(holds(address, MIB, 5));
        fixture.engine.free(address, 0).unwrap();
        fixture.assert_empty();
    }
}

#[test]
fn a_wake_calls_off_a_sleep_under_way() {
    let threads = Plan { io_engine: IoEngine::Threads, ..Plan::default() };
    for plan in [Plan::default(), Plan::default().via_host(), threads] {
        let fixture = plan.build();
        // One chunk more than any thread has on its way.
        let bytes = 4 * CHUNK_BYTES + MIB;
        let (id, address) = fixture.region(bytes, 3);
        fixture.faults.hold(true, false);
        fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
        fixture.faults.wait_held(1);
        assert_eq!(fixture.state(id), fixture.while_written());
        fixture.engine.wake(&[id]);
        fixture.faults.hold(false, false);
        fixture.engine.wait_awake(&[id]).unwrap();
        assert!(holds(address, bytes, 3));
        let in_flight = match fixture.engine.stats().nvme_io_engine {
            Some(IoEngine::Uring) => share(IoOperation::Write, QUEUE_DEPTH) as u64,
            _ => 1,
        };
        assert_eq!(fixture.faults.counts(), (0, in_flight), "the chunks in flight, and no other");
        assert_eq!(fixture.nvme_used(), 0);
        fixture.engine.free(address, 0).unwrap();
        fixture.assert_empty();
    }
}

#[test]
fn free_never_blocks_and_loses_nothing_in_any_state() {
    // Awake, asleep in the file, in host memory, with nothing kept.
    for tier in [None, Some(Tier::Nvme), Some(Tier::Host)] {
        let fixture = Plan::default().build();
        let (id, address) = fixture.region(MIB, 1);
        if let Some(tier) = tier {
            fixture.engine.sleep(&[id], tier, &[]).unwrap();
            fixture.engine.wait_settled(&[id]).unwrap();
        }
        fixture.engine.free(address, 0).unwrap();
        assert!(fixture.engine.region_info(id).is_err());
        fixture.assert_empty();
    }
    // While being written (direct: falling asleep; via host: spilling).
    for plan in [Plan::default(), Plan::default().via_host()] {
        let fixture = plan.build();
        let (id, address) = fixture.region(MIB, 1);
        fixture.faults.hold(true, false);
        fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
        fixture.faults.wait_held(1);
        freed_while_held(&fixture, address);
    }
    // While being read.
    for plan in [Plan::default(), Plan::default().via_host()] {
        let fixture = plan.build();
        let (id, address) = fixture.region(MIB, 1);
        fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
        fixture.engine.wait_settled(&[id]).unwrap();
        fixture.faults.hold(false, true);
        fixture.engine.wake(&[id]);
        fixture.faults.wait_held(1);
        assert_eq!(fixture.state(id), RegionState::Loading);
        freed_while_held(&fixture, address);
    }
}

/// The I/O cannot end before the free returns: a free that waited for it would hang here.
fn freed_while_held(fixture: &Fixture, address: usize) {
    fixture.engine.free(address, 0).unwrap();
    let blocks = fixture.allocator.blocks();
    assert!(
        blocks.len() == 1 && blocks[0].free_deferred,
        "memory under a copy is not reused: {blocks:?}"
    );
    assert!(fixture.engine.free(address, 0).is_err(), "freed twice");
    fixture.faults.hold(false, false);
    fixture.assert_empty();
}

#[test]
fn the_window_bounds_bytes_in_flight_and_the_rest_waits_its_turn() {
    let mut plan = Plan::default();
    plan.config.inflight_bytes_max = 3 * MIB as u64;
    let fixture = plan.build();
    let regions: Vec<_> = (0..6).map(|i| fixture.region(MIB, i)).collect();
    let (large, large_at) = fixture.region(4 * MIB, 9);
    let mut ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    ids.push(large);
    // By whichever way they go, none gets through.
    fixture.faults.hold(true, false);
    let held = fixture.hold_way(CopyStream::Out);
    let outcome = fixture.engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
    let mib = MIB as u64;
    assert_eq!(outcome.accepted_bytes, 10 * mib);
    let stats = fixture.engine.stats();
    assert_eq!((stats.inflight_bytes, stats.queued_bytes), (3 * mib, 7 * mib));
    // Waiting ones are simply awake: writable, wakeable, freeable.
    poke(regions[5].1, 1);
    fixture.engine.wait_awake(&[regions[5].0]).unwrap();
    fixture.engine.free(regions[4].1, 0).unwrap();
    assert_eq!(fixture.engine.stats().queued_bytes, 5 * mib);
    held.let_go();
    fixture.faults.hold(false, false);
    fixture.engine.wait_settled(&ids).unwrap();
    for (i, &(id, _)) in regions.iter().enumerate().take(4) {
        assert_eq!(fixture.state(id), RegionState::Nvme, "region {i}");
    }
    // One larger than the window went alone, and was not refused.
    assert_eq!(
        (fixture.state(large), fixture.state(regions[5].0)),
        (RegionState::Nvme, RegionState::Awake)
    );
    fixture.engine.wait_awake(&ids).unwrap();
    assert!(holds(large_at, 4 * MIB, 9));
    for (i, &(_, address)) in regions.iter().enumerate() {
        if i < 4 {
            assert!(holds(address, MIB, i as u64));
        }
        if i != 4 {
            fixture.engine.free(address, 0).unwrap();
        }
    }
    fixture.engine.free(large_at, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn the_next_copy_begins_before_the_pages_of_the_last_are_removed() {
    let mut plan = Plan::default();
    plan.config.inflight_bytes_max = MIB as u64;
    let fixture = plan.build();
    let regions: Vec<_> = (0..3).map(|i| fixture.region(MIB, i)).collect();
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    fixture.device().record_calls();
    fixture.engine.sleep(&ids, Tier::Host, &[]).unwrap();
    fixture.engine.wait_settled(&ids).unwrap();
    let calls = fixture.device().take_calls();
    let copies_before = |nth: usize| {
        let (at, _) =
            calls.iter().enumerate().filter(|call| *call.1 == Operation::Seal).nth(nth).unwrap();
        calls[..at].iter().filter(|call| **call == Operation::Copy).count()
    };
    assert_eq!([0, 1, 2].map(copies_before), [2, 3, 3], "{calls:?}");
    for (_, address) in regions {
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

#[test]
fn a_sleep_waits_for_its_events_and_blocks_no_thread() {
    let fixture = Plan::default().build();
    let device = fixture.device();
    let regions: Vec<_> = (0..3).map(|i| fixture.region(MIB, i)).collect();
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    let stream = device.create_stream("compute").unwrap();
    device.hold_events();
    let event = device.record(&stream).unwrap();
    let outcome = fixture.engine.sleep(&ids, Tier::Nvme, &[event]).unwrap();
    assert_eq!(outcome.accepted_bytes, 3 * MIB as u64);
    fixture.engine.table.each(&ids, |entry| assert!(entry.region.wait.is_admitted()));
    assert_eq!(fixture.state(ids[0]), RegionState::Awake);
    // A wake and a free do not wait for the event.
    fixture.engine.wait_awake(&ids[..1]).unwrap();
    fixture.engine.free(regions[1].1, 0).unwrap();
    device.release_events();
    fixture.engine.wait_settled(&ids).unwrap();
    assert_eq!(
        (fixture.state(ids[0]), fixture.state(ids[2])),
        (RegionState::Awake, RegionState::Nvme)
    );
    fixture.engine.free(regions[0].1, 0).unwrap();
    fixture.engine.free(regions[2].1, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn calls_refuse_claimed_foreign_sleeping_and_stale_regions() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    let name = label("again", None);
    let again = fixture.engine.adopt(address + 10, Role::Tagged, name).unwrap_err();
    assert!(matches!(again, OffloadError::Claimed { .. }), "{again}");
    let foreign = fixture.engine.adopt(0x1000, Role::Tagged, name).unwrap_err();
    assert!(matches!(foreign, OffloadError::NotOurs { address: 0x1000 }), "{foreign}");
    assert!(fixture.engine.sleep(&[id], Tier::Device, &[]).is_err());
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    let asleep = fixture.engine.release(id).unwrap_err();
    assert!(matches!(asleep, OffloadError::NotAwake { .. }), "{asleep}");
    assert_eq!(fixture.engine.region_at(address + 99), Some(id));
    fixture.engine.free(address, 0).unwrap();
    fixture.drain();
    assert!(matches!(fixture.engine.release(id), Err(OffloadError::Stale { .. })));
    assert!(fixture.engine.free(address, 0).is_err());
    fixture.engine.wake(&[id]);
    fixture.engine.wait_awake(&[id]).unwrap();
    fixture.assert_empty();
}

#[test]
fn boundary_regions_never_sleep() {
    let fixture = Plan::default().build();
    let address = fixture.allocate(MIB, 1);
    let id = fixture.engine.adopt(address, Role::Boundary, label("k", Some(1))).unwrap();
    let outcome = fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    assert_eq!(outcome.declined.as_deref(), Some("Boundary regions never sleep"));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn after_a_shutdown_nothing_moves_and_nothing_hangs() {
    let fixture = Plan::default().build();
    let (asleep, asleep_at) = fixture.region(MIB, 1);
    let (awake, awake_at) = fixture.region(MIB, 2);
    fixture.engine.sleep(&[asleep], Tier::Nvme, &[]).unwrap();
    if !fixture.engine.is_direct {
        // Streams go on after a shutdown; what has not come to the file by then stays in memory.
        fixture.engine.wait_settled(&[asleep]).unwrap();
    }
    fixture.engine.shutdown();
    // What was in flight has been carried to its end.
    assert_eq!(fixture.state(asleep), RegionState::Nvme);
    let outcome = fixture.engine.sleep(&[awake], Tier::Nvme, &[]).unwrap();
    assert_eq!(outcome.declined_bytes, MIB as u64);
    let error = cause(fixture.engine.wait_awake(&[asleep]).unwrap_err());
    assert!(matches!(error, OffloadError::ShutDown), "{error}");
    assert!(holds(awake_at, MIB, 2));
    fixture.engine.free(asleep_at, 0).unwrap();
    fixture.engine.free(awake_at, 0).unwrap();
    fixture.assert_empty();
}

/// Blocks outlive the engine that adopted them; the next one's regions are others.
#[test]
fn a_block_of_an_earlier_engine_is_no_region_of_a_later_one() {
    let _turn = Turn::take();
    let allocator = new_allocator(16 * MIB);
    let engine = || {
        let timeline = Arc::new(Timeline::new(1024));
        Engine::new(Arc::clone(&allocator), EngineConfig::default(), timeline).unwrap()
    };
    let [old, new] =
        [MIB; 2].map(|bytes| allocator.allocate(&Request::new(bytes)).unwrap().range.start);
    let adopt = |engine: &Engine<TestDevice>, address| {
        engine.adopt(address, Role::Tagged, label("x", None)).unwrap()
    };
    let first = engine();
    let of_first = adopt(&first, old);
    drop(first);
    let second = engine();
    let of_second = adopt(&second, new);
    assert_ne!(of_first, of_second);
    assert_eq!((second.region_at(old), second.region_at(new)), (None, Some(of_second)));
    second.free(new, 0).unwrap();
}
