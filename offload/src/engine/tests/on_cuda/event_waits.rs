//! Sleeps behind work of the trainer's that is late.

use std::sync::atomic::Ordering;

use dormouse_alloc::Request;

use super::ASLEEP_FIRST;
use super::both::{Fixture, Plan};
use super::side::Side;
use crate::engine::tests::{KIB, MIB, holds, soon};
use crate::ids::{RegionId, Tier};
use dormouse_residency::region::RegionState;

/// What the GPU does late, but before the event, sleeps and wakes with the rest.
#[test]
fn a_sleep_behind_late_work_takes_what_that_work_wrote() {
    for tier in [Tier::Host, Tier::Nvme] {
        let fixture = Plan::default().build();
        let side = Side::new(&fixture, 7);
        let (id, address) = fixture.region(MIB, 1);
        let (other, other_at) = fixture.region(MIB, 2);
        let held = fixture.hold(&side.stream);
        side.write(address, MIB, 3);
        fixture.engine.sleep(&[id], tier, &[side.mark()]).unwrap();
        // Who waits for nothing goes by: the engine has had its time.
        fixture.engine.sleep(&[other], tier, &[]).unwrap();
        fixture.engine.wait_settled(&[other]).unwrap();
        assert!(fixture.state(other).is_asleep());
        assert_eq!(fixture.state(id), RegionState::Awake);
        assert_eq!(fixture.engine.stats().device_to_host.copies, 1);
        assert!(holds(address, MIB, 1), "its pages are there, unwritten");
        held.let_go();
        fixture.engine.wait_settled(&[id]).unwrap();
        assert!(fixture.state(id).is_asleep());
        fixture.engine.wait_awake(&[id, other]).unwrap();
        assert!(holds(address, MIB, 3) && holds(other_at, MIB, 2));
        fixture.engine.free(address, 0).unwrap();
        fixture.engine.free(other_at, 0).unwrap();
        drop(side);
        fixture.assert_empty();
    }
}

#[test]
fn a_sleep_waits_for_every_stream_that_used_its_memory() {
    let fixture = Plan::default().build();
    let (early, late) = (Side::new(&fixture, 7), Side::new(&fixture, 8));
    let (id, address) = fixture.region(MIB, 1);
    let held = [fixture.hold(&early.stream), fixture.hold(&late.stream)];
    early.write(address, MIB / 2, 2);
    late.write(address + MIB / 2, MIB / 2, 3);
    fixture.engine.sleep(&[id], Tier::Host, &[early.mark(), late.mark()]).unwrap();
    let [first, second] = held;
    first.let_go();
    early.finish(&[]);
    let has_gone = second.let_go_later();
    fixture.engine.wait_settled(&[id]).unwrap();
    assert!(has_gone.load(Ordering::SeqCst) && fixture.state(id).is_asleep());
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB / 2, 2) && holds(address + MIB / 2, MIB / 2, 3));
    fixture.engine.free(address, 0).unwrap();
    drop((early, late));
    fixture.assert_empty();
}

/// What the allocator knows of a block's streams is waited for without being said again.
#[test]
fn a_sleep_waits_for_the_blocks_own_stream_and_for_those_recorded() {
    let fixture = Plan::default().build();
    let (own, other) = (Side::new(&fixture, 7), Side::new(&fixture, 8));
    let (id, address) = own.region(MIB);
    let held = [fixture.hold(&own.stream), fixture.hold(&other.stream)];
    own.write(address, MIB / 2, 2);
    fixture.allocator.record_stream(address, 8).unwrap();
    other.write(address + MIB / 2, MIB / 2, 3);
    let uses = fixture.engine.uses_end(&[id]).unwrap().events;
    assert_eq!(uses.len(), 2);
    fixture.engine.sleep(&[id], Tier::Host, &uses).unwrap();
    assert_eq!(fixture.state(id), RegionState::Awake);
    let [first, second] = held;
    first.let_go();
    own.finish(&[]);
    let has_gone = second.let_go_later();
    fixture.engine.wait_settled(&[id]).unwrap();
    assert!(has_gone.load(Ordering::SeqCst) && fixture.state(id).is_asleep());
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB / 2, 2) && holds(address + MIB / 2, MIB / 2, 3));
    own.free(address);
    drop((own, other));
    fixture.allocator.trim(u64::MAX);
    fixture.assert_empty();
}

#[test]
fn a_tag_sleeps_behind_its_blocks_own_streams() {
    let fixture = Plan::default().build();
    let side = Side::new(&fixture, 7);
    let address = side.allocate(MIB);
    let tag = fixture.engine.tag_create("weights", true).unwrap();
    let id = fixture.engine.tag_add(tag, address).unwrap();
    let held = fixture.hold(&side.stream);
    side.write(address, MIB, 4);
    fixture.engine.tag_sleep(tag, Tier::Host, &[]).unwrap();
    assert_eq!(fixture.state(id), RegionState::Awake);
    let has_gone = held.let_go_later();
    fixture.engine.wait_settled(&[id]).unwrap();
    assert!(has_gone.load(Ordering::SeqCst) && fixture.state(id).is_asleep());
    fixture.engine.tag_destroy(tag).unwrap();
    assert!(holds(address, MIB, 4));
    side.free(address);
    drop(side);
    fixture.assert_empty();
}

/// Allocates more than there is while `id`, which may go only after late work, is in the way.
fn ask_for_room(fixture: &Fixture, side: &Side<'_>, agree: impl FnOnce(RegionId)) {
    let (id, address) = fixture.region(3 * MIB, 1);
    let held = fixture.hold(&side.stream);
    side.write(address, 3 * MIB, 2);
    agree(id);
    held.let_go_later();
    // Not enough memory would be a lie: it comes when the stream has.
    let other = fixture.allocator.allocate(&Request::new(3 * MIB)).unwrap().range.start;
    assert_eq!(fixture.state(id), ASLEEP_FIRST);
    assert!(fixture.engine.stats().reclaims >= 1);
    fixture.engine.free(other, 0).unwrap();
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, 3 * MIB, 2));
    fixture.engine.free(address, 0).unwrap();
}

#[test]
fn reclaim_waits_for_late_work_that_uses_a_region() {
    let fixture = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.build();
    let side = Side::new(&fixture, 7);
    ask_for_room(&fixture, &side, |id| fixture.engine.let_reclaim(&[id], &[side.mark()]));
    drop(side);
    fixture.assert_empty();
}

#[test]
fn room_is_waited_for_that_comes_behind_late_work() {
    let fixture = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.build();
    let side = Side::new(&fixture, 7);
    ask_for_room(&fixture, &side, |id| {
        fixture.engine.sleep(&[id], Tier::Host, &[side.mark()]).unwrap();
    });
    drop(side);
    fixture.assert_empty();
}

/// Where host memory is full and the file is not, what rests in the one makes way for more.
#[test]
fn room_is_made_by_way_of_a_full_host_tier() {
    let mut plan = Plan { budget_bytes: 4 * MIB, ..Plan::default() };
    plan.config.host_bytes_max = 2 << 20;
    let fixture = plan.build();
    let regions: Vec<_> = (0..4).map(|i| fixture.region(MIB, i)).collect();
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    fixture.engine.let_reclaim(&ids, &[]);
    let other = fixture.allocate(4 * MIB, 9);
    assert!(ids.iter().all(|&id| fixture.state(id).is_asleep()));
    fixture.engine.free(other, 0).unwrap();
    fixture.engine.wait_awake(&ids).unwrap();
    for (seed, (_, address)) in (0..).zip(regions) {
        assert!(holds(address, MIB, seed));
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

/// Regions that found room in host memory are not spilled. There are enough of them that the first ones
/// rest there while others still look for room.
#[test]
fn room_is_made_in_one_tier_where_that_is_enough() {
    let fixture = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.build();
    let regions: Vec<_> = (0..60).map(|i| fixture.region(64 * KIB, i)).collect();
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    fixture.engine.let_reclaim(&ids, &[]);
    let other = fixture.allocate(4 * MIB, 9);
    fixture.engine.wait_settled(&ids).unwrap();
    assert!(ids.iter().all(|&id| fixture.state(id) == RegionState::Host));
    assert_eq!(fixture.faults.counts(), (0, 0));
    for address in regions.iter().map(|r| r.1).chain([other]) {
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

/// The thread that ends a write waits for no stream, and so finds no room for the wake that follows.
/// A wait for the region comes before other sleeps that would make room for it.
#[test]
fn no_region_sleeps_for_room_that_a_wait_provides() {
    let fixture = Plan { budget_bytes: 5 * MIB, ..Plan::default() }.build();
    let side = Side::new(&fixture, 7);
    let (id, address) = fixture.region(3 * MIB, 1);
    let (other, other_at) = fixture.region(MIB, 2);
    fixture.engine.let_reclaim(&[other], &[]);
    fixture.faults.hold(true, false);
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.faults.wait_held(1);
    soon("its pages are gone", || fixture.allocator.stats().mapped_bytes.current == MIB as u64);
    let freed = side.allocate(4 * MIB);
    let held = fixture.hold(&side.stream);
    side.free(freed);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| fixture.engine.wait_awake(&[id]));
        soon("it is called off", || fixture.engine.residence(&[id]).resident_bytes > 0);
        fixture.faults.hold(false, false);
        soon("no room was found", || fixture.engine.stats().wake_failures == 1);
        held.let_go();
        waiter.join().unwrap().unwrap();
    });
    assert_eq!(fixture.state(other), RegionState::Awake);
    assert!(holds(address, 3 * MIB, 1) && holds(other_at, MIB, 2));
    fixture.engine.free(address, 0).unwrap();
    fixture.engine.free(other_at, 0).unwrap();
    fixture.finish(&side.stream);
    drop(side);
    fixture.assert_empty();
}
