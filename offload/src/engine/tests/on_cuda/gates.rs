//! Sleeps behind work of the trainer's that is late.

use std::sync::atomic::Ordering;

use dormouse_alloc::Request;

use super::ASLEEP_FIRST;
use super::both::{House, Plan};
use super::side::Side;
use crate::engine::tests::{KIB, MIB, holds, soon};
use crate::ids::{RegionId, Tier};
use dormouse_residency::region::RegionState;

/// What the GPU does late, but before the event, sleeps and wakes with the rest.
#[test]
fn a_sleep_behind_late_work_takes_what_that_work_wrote() {
    for tier in [Tier::Host, Tier::Nvme] {
        let house = Plan::default().build();
        let side = Side::new(&house, 7);
        let (id, address) = house.region(MIB, 1);
        let (other, other_at) = house.region(MIB, 2);
        let held = house.hold(&side.stream);
        side.write(address, MIB, 3);
        house.engine.sleep(&[id], tier, &[side.mark()]).unwrap();
        // Who waits for nothing goes by: the engine has had its time.
        house.engine.sleep(&[other], tier, &[]).unwrap();
        house.engine.wait_settled(&[other]).unwrap();
        assert!(house.state(other).is_asleep());
        assert_eq!(house.state(id), RegionState::Awake);
        assert_eq!(house.engine.stats().device_to_host.copies, 1);
        assert!(holds(address, MIB, 1), "its pages are there, unwritten");
        held.let_go();
        house.engine.wait_settled(&[id]).unwrap();
        assert!(house.state(id).is_asleep());
        house.engine.wait_awake(&[id, other]).unwrap();
        assert!(holds(address, MIB, 3) && holds(other_at, MIB, 2));
        house.engine.free(address, 0).unwrap();
        house.engine.free(other_at, 0).unwrap();
        drop(side);
        house.assert_empty();
    }
}

#[test]
fn a_sleep_waits_for_every_stream_it_was_told_of() {
    let house = Plan::default().build();
    let (early, late) = (Side::new(&house, 7), Side::new(&house, 8));
    let (id, address) = house.region(MIB, 1);
    let held = [house.hold(&early.stream), house.hold(&late.stream)];
    early.write(address, MIB / 2, 2);
    late.write(address + MIB / 2, MIB / 2, 3);
    house.engine.sleep(&[id], Tier::Host, &[early.mark(), late.mark()]).unwrap();
    let [first, second] = held;
    first.let_go();
    early.finish(&[]);
    let has_gone = second.let_go_later();
    house.engine.wait_settled(&[id]).unwrap();
    assert!(has_gone.load(Ordering::SeqCst) && house.state(id).is_asleep());
    house.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB / 2, 2) && holds(address + MIB / 2, MIB / 2, 3));
    house.engine.free(address, 0).unwrap();
    drop((early, late));
    house.assert_empty();
}

/// What the allocator knows of a block's streams is waited for without being said again.
#[test]
fn a_sleep_waits_for_the_blocks_own_stream_and_for_those_recorded() {
    let house = Plan::default().build();
    let (own, other) = (Side::new(&house, 7), Side::new(&house, 8));
    let (id, address) = own.region(MIB);
    let held = [house.hold(&own.stream), house.hold(&other.stream)];
    own.write(address, MIB / 2, 2);
    house.allocator.record_stream(address, 8).unwrap();
    other.write(address + MIB / 2, MIB / 2, 3);
    let uses = house.engine.uses_end(&[id]).unwrap();
    assert_eq!(uses.len(), 2);
    house.engine.sleep(&[id], Tier::Host, &uses).unwrap();
    assert_eq!(house.state(id), RegionState::Awake);
    let [first, second] = held;
    first.let_go();
    own.finish(&[]);
    let has_gone = second.let_go_later();
    house.engine.wait_settled(&[id]).unwrap();
    assert!(has_gone.load(Ordering::SeqCst) && house.state(id).is_asleep());
    house.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB / 2, 2) && holds(address + MIB / 2, MIB / 2, 3));
    own.free(address);
    drop((own, other));
    house.allocator.trim(u64::MAX);
    house.assert_empty();
}

#[test]
fn a_tag_sleeps_behind_its_blocks_own_streams() {
    let house = Plan::default().build();
    let side = Side::new(&house, 7);
    let address = side.allocate(MIB);
    let tag = house.engine.tag_create("weights", true).unwrap();
    let id = house.engine.tag_add(tag, address).unwrap();
    let held = house.hold(&side.stream);
    side.write(address, MIB, 4);
    house.engine.tag_sleep(tag, Tier::Host, &[]).unwrap();
    assert_eq!(house.state(id), RegionState::Awake);
    let has_gone = held.let_go_later();
    house.engine.wait_settled(&[id]).unwrap();
    assert!(has_gone.load(Ordering::SeqCst) && house.state(id).is_asleep());
    house.engine.tag_destroy(tag).unwrap();
    assert!(holds(address, MIB, 4));
    side.free(address);
    drop(side);
    house.assert_empty();
}

/// Allocates more than there is while `id`, which may go only after late work, is in the way.
fn ask_for_room(house: &House, side: &Side<'_>, agree: impl FnOnce(RegionId)) {
    let (id, address) = house.region(3 * MIB, 1);
    let held = house.hold(&side.stream);
    side.write(address, 3 * MIB, 2);
    agree(id);
    held.let_go_later();
    // Not enough memory would be a lie: it comes when the stream has.
    let other = house.allocator.allocate(&Request::new(3 * MIB)).unwrap().range.start;
    assert_eq!(house.state(id), ASLEEP_FIRST);
    assert!(house.engine.stats().reclaims >= 1);
    house.engine.free(other, 0).unwrap();
    house.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, 3 * MIB, 2));
    house.engine.free(address, 0).unwrap();
}

#[test]
fn room_is_made_of_what_late_work_still_uses() {
    let house = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.build();
    let side = Side::new(&house, 7);
    ask_for_room(&house, &side, |id| house.engine.let_reclaim(&[id], &[side.mark()]));
    drop(side);
    house.assert_empty();
}

#[test]
fn room_is_waited_for_that_comes_behind_late_work() {
    let house = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.build();
    let side = Side::new(&house, 7);
    ask_for_room(&house, &side, |id| {
        house.engine.sleep(&[id], Tier::Host, &[side.mark()]).unwrap();
    });
    drop(side);
    house.assert_empty();
}

/// Where host memory is full and the file is not, what rests in the one makes way for more.
#[test]
fn room_is_made_by_way_of_a_full_host_tier() {
    let mut plan = Plan { budget_bytes: 4 * MIB, ..Plan::default() };
    plan.config.host_bytes_max = 2 << 20;
    let house = plan.build();
    let regions: Vec<_> = (0..4).map(|i| house.region(MIB, i)).collect();
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    house.engine.let_reclaim(&ids, &[]);
    let other = house.allocate(4 * MIB, 9);
    assert!(ids.iter().all(|&id| house.state(id).is_asleep()));
    house.engine.free(other, 0).unwrap();
    house.engine.wait_awake(&ids).unwrap();
    for (seed, (_, address)) in (0..).zip(regions) {
        assert!(holds(address, MIB, seed));
        house.engine.free(address, 0).unwrap();
    }
    house.assert_empty();
}

/// What has found a place in host memory is not sent on to the file: so many that the first of them
/// rest there while room is still looked for.
#[test]
fn room_is_made_in_one_tier_where_that_is_enough() {
    let house = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.build();
    let regions: Vec<_> = (0..60).map(|i| house.region(64 * KIB, i)).collect();
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    house.engine.let_reclaim(&ids, &[]);
    let other = house.allocate(4 * MIB, 9);
    house.engine.wait_settled(&ids).unwrap();
    assert!(ids.iter().all(|&id| house.state(id) == RegionState::Host));
    assert_eq!(house.faults.counts(), (0, 0));
    for address in regions.iter().map(|r| r.1).chain([other]) {
        house.engine.free(address, 0).unwrap();
    }
    house.assert_empty();
}

/// The thread that ends a write waits for no stream, and so finds no room for the wake that follows.
/// Whoever needs the region does before others sleep for it.
#[test]
fn nobody_sleeps_for_room_that_only_has_to_be_waited_for() {
    let house = Plan { budget_bytes: 5 * MIB, ..Plan::default() }.build();
    let side = Side::new(&house, 7);
    let (id, address) = house.region(3 * MIB, 1);
    let (other, other_at) = house.region(MIB, 2);
    house.engine.let_reclaim(&[other], &[]);
    house.faults.hold(true, false);
    house.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    house.faults.wait_held(1);
    soon("its pages are gone", || house.allocator.stats().mapped_bytes.current == MIB as u64);
    let freed = side.allocate(4 * MIB);
    let held = house.hold(&side.stream);
    side.free(freed);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| house.engine.wait_awake(&[id]));
        soon("it is called off", || house.engine.residence(&[id]).resident_bytes > 0);
        house.faults.hold(false, false);
        soon("no room was found", || house.engine.stats().wake_failures == 1);
        held.let_go();
        waiter.join().unwrap().unwrap();
    });
    assert_eq!(house.state(other), RegionState::Awake);
    assert!(holds(address, 3 * MIB, 1) && holds(other_at, MIB, 2));
    house.engine.free(address, 0).unwrap();
    house.engine.free(other_at, 0).unwrap();
    house.finish(&side.stream);
    drop(side);
    house.assert_empty();
}
