//! Regions that are awake, with their bytes still on their way: the stream of copies in is held.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dormouse_alloc::Request;
use dormouse_device::Device;

use super::both::{Fixture, Plan};
use super::side::Side;
use crate::engine::tests::{Held, MIB, fill, holds, soon};
use crate::engine::transfers::CopyStream;
use crate::error::OffloadError;
use crate::ids::{RegionId, Tier};
use dormouse_residency::region::RegionState;

/// Puts regions to sleep, leaving no page about that has their bytes.
pub(super) fn put_to_sleep(fixture: &Fixture, ids: &[RegionId], tier: Tier) {
    fixture.engine.sleep(ids, tier, &[]).unwrap();
    fixture.engine.wait_settled(ids).unwrap();
    assert!(ids.iter().all(|&id| fixture.state(id).is_asleep()));
    fixture.allocator.trim(u64::MAX);
}

/// Wakes regions as far as that goes while their copies in are held up.
pub(super) fn wake_late(fixture: &Fixture, ids: &[RegionId]) -> Held {
    let held = fixture.hold_way(CopyStream::In);
    fixture.engine.wake(ids);
    fixture.engine.wait_settled(ids).unwrap();
    assert!(ids.iter().all(|&id| fixture.state(id) == RegionState::Awake));
    held
}

#[test]
fn a_region_that_sleeps_before_its_bytes_arrived_keeps_them() {
    for tier in [Tier::Host, Tier::Nvme] {
        let fixture = Plan::default().build();
        let (id, address) = fixture.region(MIB, 5);
        put_to_sleep(&fixture, &[id], tier);
        let held = wake_late(&fixture, &[id]);
        fixture.engine.sleep(&[id], tier, &[]).unwrap();
        assert_eq!(fixture.state(id), RegionState::FallingAsleep);
        let has_gone = held.let_go_later();
        fixture.engine.wait_settled(&[id]).unwrap();
        assert!(has_gone.load(Ordering::SeqCst) && fixture.state(id).is_asleep());
        fixture.engine.wait_awake(&[id]).unwrap();
        assert!(holds(address, MIB, 5));
        fixture.engine.free(address, 0).unwrap();
        fixture.assert_empty();
    }
}

/// Without a copy out there is nothing that would come after the copy in by itself.
#[test]
fn bytes_that_are_dropped_arrive_before_their_pages_go() {
    let fixture = Plan::default().build();
    let tag = fixture.engine.tag_create("cache", false).unwrap();
    let address = fixture.allocate(MIB, 1);
    let id = fixture.engine.tag_add(tag, address).unwrap();
    put_to_sleep(&fixture, &[id], Tier::Host);
    let has_gone = wake_late(&fixture, &[id]).let_go_later();
    fixture.engine.tag_sleep(tag, Tier::Host, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    assert!(has_gone.load(Ordering::SeqCst));
    assert_eq!(fixture.state(id), RegionState::Empty);
    fixture.engine.free(address, 0).unwrap();
    fixture.engine.tag_destroy(tag).unwrap();
    fixture.assert_empty();
}

/// Its owner has freed it, and it is in the table until its last copy is over.
#[test]
fn a_region_freed_during_a_copy_in_fails_no_wait() {
    let fixture = Plan::default().build();
    let tag = fixture.engine.tag_create("weights", true).unwrap();
    let address = fixture.allocate(MIB, 1);
    let id = fixture.engine.tag_add(tag, address).unwrap();
    let (other, other_address) = fixture.region(MIB, 2);
    put_to_sleep(&fixture, &[id, other], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    fixture.engine.free(address, 0).unwrap();
    assert_eq!(fixture.state(id), RegionState::Gone);
    let error = fixture.engine.release(id).unwrap_err();
    assert!(matches!(error, OffloadError::Stale { what: "region", .. }), "{error}");
    assert!(fixture.engine.are_awake(&[id]) && fixture.engine.are_under_way(&[id]));
    assert_eq!(fixture.engine.bytes_not_awake(&[id]), 0);
    let has_gone = held.let_go_later();
    fixture.engine.wait_awake(&[id, other]).unwrap();
    fixture.engine.tag_destroy(tag).unwrap();
    assert!(has_gone.load(Ordering::SeqCst) && holds(other_address, MIB, 2));
    fixture.engine.free(other_address, 0).unwrap();
    fixture.assert_empty();
}

/// A thread that waits for a copy is counted as waiting, whichever thread woke the region.
#[test]
fn a_wait_for_bytes_on_their_way_is_counted() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 5);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    let waits = fixture.engine.stats().waits;
    let has_gone = held.let_go_later();
    let stall_ns = fixture.engine.wait_awake(&[id]).unwrap().stall_ns;
    assert!(has_gone.load(Ordering::SeqCst) && stall_ns > 0);
    assert_eq!(fixture.engine.stats().waits, waits + 1);
    assert_eq!(fixture.engine.wait_awake(&[id]).unwrap().stall_ns, 0, "it is there");
    assert!(holds(address, MIB, 5));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn a_host_copy_stays_until_it_is_read() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 5);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    assert_eq!(fixture.host_used(), MIB as u64);
    held.let_go();
    fixture.assert_nothing_stored();
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 5));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn memory_without_a_waiting_stream_is_reused_after_the_copy() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    fixture.engine.free(address, 0).unwrap();
    let blocks = fixture.allocator.blocks();
    assert!(blocks.len() == 1 && blocks[0].free_deferred, "{blocks:?}");
    let other = fixture.allocate(MIB, 2);
    held.let_go();
    fixture.drain();
    assert!(other != address && holds(other, MIB, 2));
    assert_eq!(fixture.allocate(MIB, 3), address, "what comes first is reused first");
    fixture.finish(&fixture.engine.stream(CopyStream::In).unwrap());
    assert!(holds(address, MIB, 3));
    fixture.engine.free(address, 0).unwrap();
    fixture.engine.free(other, 0).unwrap();
    fixture.assert_empty();
}

/// A stream that waits for the bytes may have the memory again at once: its work comes after them.
#[test]
fn memory_that_its_stream_waits_for_is_that_streams_at_once() {
    let fixture = Plan::default().build();
    let side = Side::new(&fixture, 7);
    let (id, address) = side.region(MIB);
    side.write(address, MIB, 1);
    side.finish(&[]);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    fixture.engine.wait_awake_on(&[id], &side.stream).unwrap();
    let before = side.read(address, MIB);
    side.free(address);
    assert!(fixture.allocator.blocks().is_empty());
    assert_eq!(side.allocate(MIB), address);
    side.write(address, MIB, 2);
    let after = side.read(address, MIB);
    assert!(!side.is_done());
    held.let_go();
    side.finish(&[(before, 1), (after, 2)]);
    assert!(holds(address, MIB, 2));
    side.free(address);
    drop(side);
    fixture.assert_empty();
}

/// What one stream waits for is another's memory: that one knows nothing of the copy.
#[test]
fn memory_of_another_stream_is_reused_after_the_copy() {
    let fixture = Plan::default().build();
    let side = Side::new(&fixture, 7);
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    fixture.engine.wait_awake_on(&[id], &side.stream).unwrap();
    fixture.engine.free(address, 0).unwrap();
    let other = fixture.allocate(MIB, 2);
    assert_ne!(other, address);
    held.let_go();
    side.finish(&[]);
    assert_eq!(fixture.allocate(MIB, 3), address);
    assert!(holds(other, MIB, 2) && holds(address, MIB, 3));
    fixture.engine.free(other, 0).unwrap();
    fixture.engine.free(address, 0).unwrap();
    drop(side);
    fixture.assert_empty();
}

/// Nor is it known what a stream does that the allocator was never told of.
#[test]
fn memory_is_not_reused_during_a_copy_after_a_wait_on_an_unknown_stream() {
    let fixture = Plan::default().build();
    let unknown = fixture.device().create_stream("unknown").unwrap();
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    fixture.engine.wait_awake_on(&[id], &unknown).unwrap();
    fixture.engine.free(address, 0).unwrap();
    assert!(fixture.engine.region_info(id).is_ok(), "its pages stay under the copy");
    held.let_go();
    fixture.finish(&unknown);
    fixture.assert_empty();
}

/// Not enough memory would be a lie: a copy is in the way, and it comes to its end.
#[test]
fn room_is_waited_for_that_was_freed_under_a_copy() {
    let fixture = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.build();
    let (id, address) = fixture.region(3 * MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    fixture.engine.free(address, 0).unwrap();
    held.let_go_later();
    let other = fixture.allocator.allocate(&Request::new(3 * MIB)).unwrap().range.start;
    fill(other, 3 * MIB, 2);
    fixture.finish(&fixture.engine.stream(CopyStream::In).unwrap());
    assert!(holds(other, 3 * MIB, 2));
    fixture.engine.free(other, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn a_region_is_given_back_when_its_bytes_are_there() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let has_gone = wake_late(&fixture, &[id]).let_go_later();
    fixture.engine.release(id).unwrap();
    assert!(has_gone.load(Ordering::SeqCst));
    assert!(holds(address, MIB, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn a_region_that_its_owners_stream_waits_for_is_given_back_at_once() {
    let fixture = Plan::default().build();
    let side = Side::new(&fixture, 7);
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    fixture.engine.wait_awake_on(&[id], &side.stream).unwrap();
    fixture.engine.release(id).unwrap();
    assert_eq!(fixture.allocator.lookup(address).unwrap().claimed, None);
    let read = side.read(address, MIB);
    held.let_go();
    side.finish(&[(read, 1)]);
    fixture.engine.free(address, 0).unwrap();
    drop(side);
    fixture.assert_empty();
}

#[test]
fn a_tag_is_destroyed_when_its_bytes_are_there() {
    let fixture = Plan::default().build();
    let tag = fixture.engine.tag_create("weights", true).unwrap();
    let added = [1, 2].map(|seed| (fixture.allocate(MIB, seed), seed));
    let ids = added.map(|(address, _)| fixture.engine.tag_add(tag, address).unwrap());
    put_to_sleep(&fixture, &ids, Tier::Host);
    let has_gone = wake_late(&fixture, &ids).let_go_later();
    fixture.engine.tag_destroy(tag).unwrap();
    assert!(has_gone.load(Ordering::SeqCst));
    for (address, seed) in added {
        assert!(holds(address, MIB, seed));
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

/// Two streams ask for what is late: each waits for itself.
#[test]
fn every_stream_that_asks_waits() {
    let fixture = Plan::default().build();
    let sides = [Side::new(&fixture, 7), Side::new(&fixture, 8)];
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    for side in &sides {
        fixture.engine.wait_awake_on(&[id], &side.stream).unwrap();
    }
    let reads = [0, 1].map(|i| (sides[i].read(address, MIB), 1));
    held.let_go();
    for (side, read) in sides.iter().zip(reads) {
        side.finish(&[read]);
    }
    drop(sides);
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// The last owner of the engine may be the copy itself.
#[test]
fn an_engine_goes_when_its_copies_are_over() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    let Fixture { engine, allocator, turn, .. } = fixture;
    let engine_left = Arc::downgrade(&engine);
    drop(engine);
    assert!(engine_left.upgrade().is_some(), "a copy uses its host memory");
    held.let_go();
    soon("the engine goes", || engine_left.upgrade().is_none());
    assert!(holds(address, MIB, 1));
    drop(allocator);
    drop(turn);
}

/// Somebody looks at an arrival, and by the time they have their answer there is another.
#[test]
fn an_answer_that_comes_late_forgets_no_later_arrival() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    let first = fixture.engine.arrival(id).unwrap();
    held.let_go();
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    fixture.engine.forget_arrival(id, &first);
    assert!(fixture.engine.arrival(id).is_some());
    held.let_go();
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(fixture.engine.arrival(id).is_none() && holds(address, MIB, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// A copy counts from when the device begins it, not from when it was given to the device.
#[test]
fn the_time_a_copy_waited_in_its_stream_is_not_its_own() {
    const HELD: std::time::Duration = std::time::Duration::from_millis(200);
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 5);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    std::thread::sleep(HELD);
    held.let_go();
    fixture.engine.wait_awake(&[id]).unwrap();
    soon("the copy is counted", || fixture.engine.stats().host_to_device.copies == 1);
    let busy_ns = fixture.engine.stats().host_to_device.busy_ns;
    assert!(u128::from(busy_ns) < HELD.as_nanos(), "{busy_ns} ns, held up for {HELD:?}");
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// Freed on its stream before another one waits for the copy in: nothing on its own comes after that.
#[test]
fn a_block_freed_before_a_stream_waited_is_reused_after_the_copy() {
    for frees_all in [false, true] {
        let fixture = Plan::default().build();
        let (first, second) = (Side::new(&fixture, 7), Side::new(&fixture, 8));
        let addresses = [first.allocate(MIB), second.allocate(MIB)];
        addresses.iter().for_each(|&at| fill(at, MIB, 1));
        let name = crate::ids::label("both", None);
        let adopted =
            fixture.engine.adopt_together(&addresses, crate::ids::Role::Dormant, name, None);
        let id = adopted.unwrap().id.unwrap();
        put_to_sleep(&fixture, &[id], Tier::Host);
        first.free(addresses[0]);
        let held = wake_late(&fixture, &[id]);
        fixture.engine.wait_awake_on(&[id], &second.stream).unwrap();
        if frees_all {
            second.free(addresses[1]);
        } else {
            fixture.engine.release(id).unwrap();
        }
        let other = first.allocate(MIB);
        first.write(other, MIB, 2);
        first.finish(&[]);
        held.let_go();
        fixture.finish(&fixture.engine.stream(CopyStream::In).unwrap());
        assert!(holds(other, MIB, 2), "its pages were given away under a copy");
        first.free(other);
        if !frees_all {
            second.finish(&[]);
            assert!(holds(addresses[1], MIB, 1));
            second.free(addresses[1]);
        }
        drop((first, second));
        fixture.assert_empty();
    }
}
