//! Memory so tight that somebody must sleep.

use dormouse_alloc::Freed;

use super::*;
use crate::engine::sleep::Initiator;
use crate::ids::Tier;
use dormouse_residency::region::{RegionWait, SleepGoal};

#[test]
fn an_allocation_without_room_puts_eligible_regions_to_sleep() {
    let fixture = Plan { budget_bytes: 8 * MIB, ..Plan::default() }.build();
    let regions: Vec<_> = (0..6).map(|i| fixture.region(MIB, i)).collect();
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    fixture.engine.let_reclaim(&ids[..5], &[]);
    let address = fixture.allocate(6 * MIB, 99);
    let asleep = ids.iter().filter(|&&id| fixture.state(id) == ASLEEP_FIRST).count();
    assert!(asleep >= 4, "{asleep} asleep");
    assert_eq!(fixture.state(ids[5]), RegionState::Awake, "not eligible");
    assert!(fixture.engine.stats().reclaims >= 1);
    assert!(fixture.allocator.stats().mapped_bytes.peak <= 8 * MIB as u64);
    fixture.engine.free(address, 0).unwrap();
    fixture.engine.wait_awake(&ids).unwrap();
    for (i, &(_, address)) in regions.iter().enumerate() {
        assert!(holds(address, MIB, i as u64));
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

#[test]
fn nothing_eligible_is_an_honest_out_of_memory() {
    let fixture = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.build();
    let (_, address) = fixture.region(3 * MIB, 1);
    let error = fixture.allocator.allocate(&Request::new(2 * MIB)).unwrap_err();
    assert!(matches!(error, dormouse_alloc::AllocError::OutOfMemory(_)), "{error}");
    assert!(holds(address, 3 * MIB, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn a_wake_without_room_makes_room_or_says_why_not() {
    let fixture = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.build();
    let (a, a_at) = fixture.region(3 * MIB, 1);
    fixture.engine.sleep(&[a], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[a]).unwrap();
    let (b, b_at) = fixture.region(3 * MIB, 2);

    let error = cause(fixture.engine.wait_awake(&[a]).unwrap_err());
    assert!(error.is_out_of_memory(), "{error}");
    assert_eq!((fixture.state(a), fixture.state(b)), (RegionState::Nvme, RegionState::Awake));

    fixture.engine.let_reclaim(&[b], &[]);
    fixture.engine.wait_awake(&[a]).unwrap();
    assert!(holds(a_at, 3 * MIB, 1));
    assert_eq!(fixture.state(b), ASLEEP_FIRST);

    fixture.engine.free(a_at, 0).unwrap();
    fixture.engine.wait_awake(&[b]).unwrap();
    assert!(holds(b_at, 3 * MIB, 2));
    fixture.engine.free(b_at, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn room_is_made_of_the_lowest_layers_first() {
    let fixture = Plan { budget_bytes: 8 * MIB, ..Plan::default() }.build();
    let mut ids = Vec::new();
    for layer in [2, 0, 1] {
        let address = fixture.allocate(2 * MIB, 0);
        let name = label("n", Some(layer));
        ids.push((layer, fixture.engine.adopt(address, Role::Dormant, name).unwrap(), address));
    }
    let all: Vec<_> = ids.iter().map(|i| i.1).collect();
    fixture.engine.let_reclaim(&all, &[]);
    let address = fixture.allocate(3 * MIB, 0);
    for &(layer, id, _) in &ids {
        let expected = if layer == 0 { ASLEEP_FIRST } else { RegionState::Awake };
        fixture.engine.wait_settled(&[id]).unwrap();
        assert_eq!(fixture.state(id), expected, "layer {layer}");
    }
    fixture.engine.free(address, 0).unwrap();
    for (_, _, address) in ids {
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

#[test]
fn without_the_file_room_is_made_in_host_memory() {
    let mut plan = Plan { budget_bytes: 4 * MIB, ..Plan::default() };
    plan.config.host_bytes_max = 8 << 20;
    let fixture = plan.build();
    fixture.engine.set_tier_budget(Tier::Nvme, 0).unwrap();
    let (id, address) = fixture.region(3 * MIB, 1);
    fixture.engine.let_reclaim(&[id], &[]);
    let other = fixture.allocate(2 * MIB, 2);
    assert_eq!(fixture.state(id), RegionState::Host);
    fixture.engine.free(other, 0).unwrap();
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, 3 * MIB, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// Host memory is full of small regions. The region that reclaim puts to sleep is larger than the missing
/// bytes, and its copy to the file passes through host memory.
#[test]
fn as_much_leaves_host_memory_as_passes_through_it() {
    let mut plan = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.via_host();
    plan.config.host_bytes_max = MIB as u64;
    let fixture = plan.build();
    let small: Vec<_> = (0..4).map(|i| fixture.region(MIB / 4, i)).collect();
    let ids: Vec<_> = small.iter().map(|r| r.0).collect();
    fixture.engine.sleep(&ids, Tier::Host, &[]).unwrap();
    fixture.engine.wait_settled(&ids).unwrap();
    assert!(ids.iter().all(|&id| fixture.state(id) == RegionState::Host));
    let (id, address) = fixture.region(MIB, 9);
    fixture.engine.let_reclaim(&[id], &[]);
    let other = fixture.allocate(3 * MIB + MIB / 16, 10);
    assert!(fixture.state(id).is_asleep());
    fixture.engine.free(other, 0).unwrap();
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 9));
    fixture.engine.free(address, 0).unwrap();
    fixture.engine.wait_awake(&ids).unwrap();
    for (i, &(_, address)) in small.iter().enumerate() {
        assert!(holds(address, MIB / 4, i as u64));
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

/// A sleep that was to make room is called off by its owner, who lets go again: so it is not that
/// there is no room to be made.
#[test]
fn room_is_made_though_a_sleep_is_called_off() {
    let fixture = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.build();
    let (id, address) = fixture.region(3 * MIB, 1);
    fixture.engine.let_reclaim(&[id], &[]);
    fixture.faults.hold(true, false);
    let held = fixture.hold_way(CopyStream::Out);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| fixture.allocate(3 * MIB, 2));
        soon("it falls asleep", || fixture.state(id) == RegionState::FallingAsleep);
        fixture.engine.wake(&[id]);
        held.let_go();
        fixture.faults.hold(false, false);
        let other = waiter.join().unwrap();
        assert_eq!(fixture.state(id), ASLEEP_FIRST);
        fixture.engine.free(other, 0).unwrap();
    });
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, 3 * MIB, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// Layers woken ahead hold the room that a needed one wants: they go back to sleep for it.
#[test]
fn layers_woken_ahead_make_room_for_a_needed_one() {
    let fixture = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.build();
    let (needed, needed_at) = fixture.region(3 * MIB, 1);
    fixture.engine.sleep(&[needed], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[needed]).unwrap();
    let (ahead, ahead_at) = fixture.region(2 * MIB, 2);
    fixture.engine.sleep(&[ahead], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[ahead]).unwrap();
    fixture.engine.let_reclaim(&[ahead], &[]);
    // Its read is held up: when the needed one asks for room, it can neither stay nor turn back.
    fixture.faults.hold(false, true);
    fixture.engine.wake(&[ahead]);
    fixture.faults.wait_held(1);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| fixture.engine.wait_awake(&[needed]).unwrap());
        fixture.engine.wait_for_reclaims(1);
        fixture.faults.hold(false, false);
        waiter.join().unwrap();
    });
    assert!(holds(needed_at, 3 * MIB, 1));
    assert_eq!(fixture.state(ahead), ASLEEP_FIRST);
    fixture.engine.free(needed_at, 0).unwrap();
    fixture.engine.wait_awake(&[ahead]).unwrap();
    assert!(holds(ahead_at, 2 * MIB, 2));
    fixture.engine.free(ahead_at, 0).unwrap();
    fixture.assert_empty();
}

/// A prefix calls a layer needed between reclaim's look and its agreement: the layer stays awake.
#[test]
fn reclaim_checks_eligibility_again_under_the_lock() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    let reclaim = |engine: &Engine<TestDevice>| {
        engine.sleep_to(&[id], SleepGoal::Nvme, &[], Initiator::Reclaim).unwrap().declined_bytes
    };
    assert_eq!(reclaim(&fixture.engine), MIB as u64, "chosen while eligible, not so any more");
    assert_eq!((fixture.state(id), fixture.nvme_used()), (RegionState::Awake, 0));
    fixture.engine.let_reclaim(&[id], &[]);
    assert_eq!(reclaim(&fixture.engine), 0);
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// Small regions by the thousand, all on their way at once: more than a stream takes works.
#[test]
fn more_copies_than_a_stream_can_queue_all_complete() {
    const REGIONS: u64 = 1500;
    let bytes = 4096;
    let fixture = Plan::default().build();
    let regions: Vec<_> = (0..REGIONS).map(|i| fixture.region(bytes, i)).collect();
    let ids: Vec<_> = regions.iter().map(|&(id, _)| id).collect();
    let held = fixture.hold_way(CopyStream::Out);
    fixture.engine.sleep(&ids, Tier::Host, &[]).unwrap();
    held.let_go();
    fixture.engine.wait_settled(&ids).unwrap();
    let stats = fixture.engine.stats();
    assert_eq!((stats.sleeps, stats.sleep_failures), (REGIONS, 0));

    // A GPU's driver blocks callers that queue more, which is no failure either.
    let held = (!fixture.device().is_stream_ordered()).then(|| fixture.hold_way(CopyStream::In));
    fixture.engine.wake(&ids);
    held.into_iter().for_each(Held::let_go);
    fixture.engine.wait_awake(&ids).unwrap();
    let stats = fixture.engine.stats();
    assert_eq!((stats.wakes, stats.wake_failures), (REGIONS, 0));
    for (i, (_, address)) in regions.into_iter().enumerate() {
        assert!(holds(address, bytes, i as u64));
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

/// Room in host memory appears without an event that would start the queue. An allocation that runs short
/// starts it.
#[test]
fn an_allocation_serves_the_admission_queue() {
    let mut plan = Plan { budget_bytes: 4 * MIB, ..Plan::default() };
    plan.config.host_bytes_max = 0;
    let fixture = plan.build();
    let (id, address) = fixture.region(3 * MIB, 1);
    fixture.engine.let_reclaim(&[id], &[]);
    assert!(fixture.engine.sleep_when_admitted(&[id], Tier::Host));
    assert_eq!(fixture.state(id), RegionState::Awake, "there is no place");
    // Not through the engine, which is not notified.
    fixture.engine.host.set_cap(8 << 20);
    let other = fixture.allocate(3 * MIB, 2);
    assert_eq!(fixture.state(id), RegionState::Host);
    fixture.engine.free(other, 0).unwrap();
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, 3 * MIB, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn one_in_line_sleeps_when_its_tier_is_given_room() {
    let mut plan = Plan::default();
    plan.config.host_bytes_max = 0;
    let fixture = plan.build();
    let (id, address) = fixture.region(MIB, 1);
    fixture.engine.let_reclaim(&[id], &[]);
    assert!(fixture.engine.sleep_when_admitted(&[id], Tier::Host));
    fixture.engine.set_tier_budget(Tier::Host, 8 << 20).unwrap();
    soon("it sleeps", || fixture.state(id) == RegionState::Host);
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// The file has room for it and no run of free units that is long enough: it waits for one.
#[test]
fn one_in_line_waits_for_a_place_in_one_piece() {
    let fixture = Plan { file_bytes: 3 * MIB, ..Plan::default() }.build();
    let blocks: Vec<_> = (0..3).map(|seed| fixture.region(MIB, seed)).collect();
    let ids: Vec<_> = blocks.iter().map(|part| part.0).collect();
    fixture.engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&ids).unwrap();
    let middle = ids.iter().position(|&id| fixture.engine.extent_offset(id) == Some(MIB as u64));
    let middle = middle.unwrap();
    for (at, &(_, address)) in blocks.iter().enumerate().filter(|(at, _)| *at != middle) {
        fixture.engine.free(address, 0).unwrap();
        soon("it is gone", || fixture.engine.region_info(ids[at]).is_err());
    }
    let (id, address) = fixture.region(2 * MIB, 7);
    fixture.engine.let_reclaim(&[id], &[]);
    assert!(fixture.engine.sleep_when_admitted(&[id], Tier::Nvme));
    fixture.engine.wait_settled(&[id]).unwrap();
    assert_eq!((fixture.state(id), fixture.nvme_used()), (RegionState::Awake, MIB as u64));
    fixture.engine.free(blocks[middle].1, 0).unwrap();
    soon("it sleeps", || fixture.state(id) == RegionState::Nvme);
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, 2 * MIB, 7));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// A sleep that was agreed on held the place of the one in line, and is over before it began: its
/// region is released, or its event wait never opens.
#[test]
fn one_in_line_sleeps_when_another_sleep_is_given_up() {
    for is_released in [true, false] {
        let mut plan = Plan::default();
        plan.config.host_bytes_max = MIB as u64;
        let fixture = plan.build();
        let (first, second) = (fixture.region(MIB, 1), fixture.region(MIB, 2));
        let stream = fixture.device().create_stream("compute").unwrap();
        let held = fixture.hold(&stream);
        let event = fixture.device().record(&stream).unwrap();
        fixture.engine.sleep(&[first.0], Tier::Host, &[event]).unwrap();
        fixture.engine.let_reclaim(&[second.0], &[]);
        assert!(fixture.engine.sleep_when_admitted(&[second.0], Tier::Host));
        assert_eq!(
            (fixture.state(second.0), fixture.host_used()),
            (RegionState::Awake, MIB as u64)
        );
        if is_released {
            fixture.engine.release(first.0).unwrap();
        } else {
            let wait = fixture.engine.table.with(first.0, |entry| entry.region.wait);
            let Some(RegionWait::Events { ticket, .. }) = wait else { panic!("{wait:?}") };
            fixture.engine.call_off(&[first.0], ticket);
        }
        soon("it sleeps", || fixture.state(second.0) == RegionState::Host);
        held.let_go();
        fixture.finish(&stream);
        if is_released {
            assert!(matches!(fixture.allocator.free(first.1, 0), Ok(Freed::Done)));
        } else {
            assert_eq!(fixture.state(first.0), RegionState::Awake);
            fixture.engine.free(first.1, 0).unwrap();
        }
        fixture.engine.free(second.1, 0).unwrap();
        drop(stream);
        fixture.assert_empty();
    }
}

/// A copy on its way to the file has host memory only until it is there.
#[test]
fn one_in_line_sleeps_when_a_stash_has_been_written() {
    let mut plan = Plan::default();
    plan.config.host_bytes_max = MIB as u64;
    let fixture = plan.build();
    let ((id, address), stashed) = (fixture.region(MIB, 1), fixture.allocate(2 * MIB, 2));
    fixture.engine.let_reclaim(&[id], &[]);
    fixture.faults.hold(true, false);
    let stash = std::thread::scope(|scope| {
        // SAFETY: a live, awake block of the test's own.
        let put = || unsafe { fixture.engine.stash_put(stashed, 2 * MIB, 1, &fixture.here()) };
        let putting = scope.spawn(put);
        fixture.faults.wait_held(1);
        assert!(fixture.engine.sleep_when_admitted(&[id], Tier::Host));
        let seen = (fixture.state(id), fixture.host_used());
        fixture.faults.hold(false, false);
        assert_eq!(seen, (RegionState::Awake, 2 * MIB as u64));
        putting.join().unwrap().unwrap()
    });
    soon("it sleeps", || fixture.state(id) == RegionState::Host);
    fixture.engine.stash_drop(stash).unwrap();
    fixture.engine.free(stashed, 0).unwrap();
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// Others use the device too: less of it is left than the budget allows.
#[test]
fn a_wake_has_the_free_pages_of_a_device_smaller_than_the_budget() {
    let change = |config: &mut Config| config.budget_bytes = 64 * MIB as u64;
    let plan = Plan { budget_bytes: 16 * MIB, change, ..Plan::default() };
    let fixture = plan.build();
    let (id, address) = fixture.region(8 * MIB, 1);
    let (other, kept) = fixture.region(MIB, 2);
    fixture.engine.let_reclaim(&[other], &[]);
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    let free = [MIB; 14].map(|bytes| fixture.allocate(bytes, 3));
    for start in free {
        fixture.engine.free(start, 0).unwrap();
    }
    assert!(fixture.allocator.stats().cached_bytes.current > 12 * MIB as u64);
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, 8 * MIB, 1));
    assert_eq!(fixture.state(other), RegionState::Awake, "no region sleeps where free pages do");
    for start in [address, kept] {
        fixture.engine.free(start, 0).unwrap();
    }
    fixture.assert_empty();
}

/// A region that cannot sleep because it wakes is no reason to write others to the file.
#[test]
fn a_busy_region_moves_none_to_the_file() {
    let fixture = Plan::default().via_host().build();
    let (resting, resting_at) = fixture.region(MIB, 1);
    let (busy, busy_at) = fixture.region(MIB, 2);
    fixture.engine.let_reclaim(&[resting, busy], &[]);
    fixture.engine.sleep(&[resting], Tier::Host, &[]).unwrap();
    fixture.engine.sleep(&[busy], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[resting, busy]).unwrap();
    let written_bytes = fixture.nvme().usage().written_bytes;
    fixture.faults.hold(false, true);
    fixture.engine.wake(&[busy]);
    fixture.faults.wait_held(1);
    assert!(
        !fixture.engine.sleep_in_order(&[resting, busy], &[]).unwrap(),
        "it is to be asked again"
    );
    fixture.faults.hold(false, false);
    fixture.engine.wait_awake(&[busy]).unwrap();
    assert_eq!(fixture.state(resting), RegionState::Host);
    assert_eq!(fixture.nvme().usage().written_bytes, written_bytes);
    assert!(fixture.engine.sleep_in_order(&[busy], &[]).unwrap());
    for address in [resting_at, busy_at] {
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

/// Eight regions in the file, of which two may pass through host memory at a time. Its tier has no room for them.
fn eight_in_the_file() -> (Fixture, Vec<(RegionId, usize)>) {
    let mut plan = Plan::default().via_host();
    plan.config.inflight_bytes_max = 2 * MIB as u64;
    let fixture = plan.build();
    let regions: Vec<_> = (0..8).map(|i| fixture.region(MIB, i)).collect();
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    fixture.engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&ids).unwrap();
    fixture.engine.set_tier_budget(Tier::Host, 0).unwrap();
    fixture.engine.reset_peaks();
    fixture.faults.hold(false, true);
    (fixture, regions)
}

/// Wakes all of [`eight_in_the_file`] but those that were freed, `left` of them, and frees them. No more than two had passed
/// through host memory at a time.
fn come_two_at_a_time(fixture: &Fixture, regions: &[(RegionId, usize)], left: usize) {
    let engine = &fixture.engine;
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    engine.wait_settled(&ids).unwrap();
    engine.wait_awake(&ids).unwrap();
    let exists = |&(_, r): &(usize, &(RegionId, usize))| engine.region_info(r.0).is_ok();
    let kept: Vec<_> = regions.iter().enumerate().filter(exists).collect();
    assert_eq!(kept.len(), left);
    for (at, &(_, address)) in kept {
        assert!(holds(address, MIB, at as u64));
        engine.free(address, 0).unwrap();
    }
    assert_eq!(engine.stats().tiers[1].peak_bytes, 2 * MIB as u64);
    fixture.assert_empty();
}

/// Those beyond the window wait in order. One that is dropped while it waits is over at once.
#[test]
fn loads_pass_through_no_more_host_memory_than_the_window() {
    let (fixture, regions) = eight_in_the_file();
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    fixture.engine.wake(&ids);
    assert_eq!(fixture.host_used(), 2 * MIB as u64);
    fixture.engine.free(regions[5].1, 0).unwrap();
    soon("it is gone, whatever is before it", || fixture.engine.region_info(ids[5]).is_err());
    assert_eq!(fixture.host_used(), 2 * MIB as u64);
    fixture.faults.hold(false, false);
    come_two_at_a_time(&fixture, &regions, 7);
}

#[test]
fn loads_that_cannot_be_read_hold_no_other_up() {
    let (fixture, regions) = eight_in_the_file();
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    // All of them, with all attempts.
    fixture.faults.fail_next_reads(u32::MAX, libc::EIO);
    fixture.engine.wake(&ids);
    assert_eq!(fixture.host_used(), 2 * MIB as u64);
    fixture.faults.hold(false, false);
    assert!(fixture.engine.wait_awake(&ids).is_err());
    fixture.faults.heal();
    come_two_at_a_time(&fixture, &regions, 8);
}
