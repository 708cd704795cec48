//! Waking ahead of need, while every I/O thread is held.

use super::*;
use crate::desk::Priority;
use crate::ids::Tier;

/// A region asleep in the file, and the I/O threads, which do nothing until they are let go.
fn asleep_behind_held_threads(house: &House) -> (RegionId, usize, Vec<Held>) {
    let (id, address) = house.region(MIB, 6);
    house.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    house.engine.wait_settled(&[id]).unwrap();
    (id, address, held_threads(house))
}

fn held_threads(house: &House) -> Vec<Held> {
    let hold = || Held::by(|until| house.engine.wait_aside(until));
    (0..IO_THREADS_DEFAULT).map(|_| hold()).collect()
}

fn staged_bytes(house: &House) -> u64 {
    house.allocator.stats().staged_bytes.current
}

#[test]
fn room_is_taken_or_promised_at_once_and_the_rest_is_for_an_io_thread() {
    let house = Plan::default().build();
    let (id, address, held) = asleep_behind_held_threads(&house);
    let mapped_bytes = house.device().memory_info().mapped_bytes;

    house.engine.wake_ahead(&[id]);
    let asked = house.engine.stats().nvme_read;
    assert_eq!((house.state(id), asked.bytes), (RegionState::Loading, 0));
    // Where nothing freed is in a stream's hands, an I/O thread may take the room.
    let promised_bytes = if house.device().is_stream_ordered() { 0 } else { MIB as u64 };
    let of_room = || {
        let found = house.engine.residence(&[id]);
        (found.resident_bytes, found.promised_bytes, staged_bytes(&house))
    };
    let expected = (MIB as u64, promised_bytes, MIB as u64 - promised_bytes);
    assert_eq!(of_room(), expected);
    assert_eq!(house.device().memory_info().mapped_bytes, mapped_bytes, "nothing is mapped yet");
    // Whoever needs it now waits for the same wake.
    house.engine.wake(&[id]).unwrap();
    assert_eq!(of_room(), expected);

    held.into_iter().for_each(Held::let_go);
    house.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 6));
    assert_eq!((house.engine.stats().wakes, staged_bytes(&house)), (1, 0));
    house.engine.free(address, 0).unwrap();
    house.assert_empty();
}

#[test]
fn one_that_is_freed_before_its_turn_gives_its_room_back() {
    let house = Plan::default().build();
    let (id, address, held) = asleep_behind_held_threads(&house);
    house.engine.wake_ahead(&[id]);
    house.engine.free(address, 0).unwrap();
    held.into_iter().for_each(Held::let_go);
    house.assert_empty();
    assert_eq!(staged_bytes(&house), 0);
}

#[test]
fn without_room_nothing_is_taken_and_a_later_wake_finds_it() {
    let house = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.build();
    let (id, address) = house.region(2 * MIB, 6);
    house.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    house.engine.wait_settled(&[id]).unwrap();
    let taken = house.allocate(3 * MIB, 1);
    house.engine.wake_ahead(&[id]);
    house.engine.wait_settled(&[id]).unwrap();
    assert_eq!((house.state(id), staged_bytes(&house)), (RegionState::Nvme, 0));
    assert_eq!(house.engine.stats().wake_failures, 1);

    house.engine.free(taken, 0).unwrap();
    let held = held_threads(&house);
    house.engine.wake_ahead(&[id]);
    // Nobody is promised twice what was not to be had.
    assert_eq!(staged_bytes(&house), 2 * MIB as u64);
    held.into_iter().for_each(Held::let_go);
    house.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, 2 * MIB, 6));
    house.engine.free(address, 0).unwrap();
    house.assert_empty();
}

/// Threads that make room do not turn each other away: each of these wakes needs the pages of one
/// that was freed.
#[test]
fn wakes_ahead_by_all_threads_at_once_find_their_room() {
    const REGIONS: usize = 64;
    let house = Plan { budget_bytes: REGIONS * MIB, ..Plan::default() }.build();
    let regions: Vec<_> = (0..REGIONS).map(|at| house.region(MIB, at as u64 + 1)).collect();
    let ids: Vec<_> = regions.iter().map(|&(id, _)| id).collect();
    house.engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
    house.engine.wait_settled(&ids).unwrap();
    let taken: Vec<_> = (0..REGIONS).map(|_| house.allocate(MIB, 1)).collect();
    taken.into_iter().for_each(|address| house.engine.free(address, 0).unwrap());
    let held = held_threads(&house);
    ids.iter().for_each(|&id| house.engine.wake_ahead(&[id]));
    held.into_iter().for_each(Held::let_go);
    house.engine.wait_settled(&ids).unwrap();
    assert_eq!(house.engine.stats().wake_failures, 0);
    house.engine.wait_awake(&ids).unwrap();
    for (at, (_, address)) in regions.into_iter().enumerate() {
        assert!(holds(address, MIB, at as u64 + 1));
        house.engine.free(address, 0).unwrap();
    }
    house.assert_empty();
}

#[test]
fn after_the_end_of_the_threads_it_is_done_at_once() {
    let house = Plan::default().build();
    let (id, address) = house.region(MIB, 6);
    house.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    house.engine.wait_settled(&[id]).unwrap();
    house.engine.pool.stop();
    house.engine.wake_ahead(&[id]);
    house.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 6));
    house.engine.free(address, 0).unwrap();
    house.assert_empty();
}

/// The bytes are in host memory still: they wait for no write of others.
#[test]
fn a_wake_of_what_waits_to_be_written_does_not_wait_for_that() {
    let house = Plan::default().via_host().build();
    let regions: Vec<_> = (0..2).map(|seed| house.region(MIB, seed)).collect();
    let ids: Vec<_> = regions.iter().map(|region| region.0).collect();
    house.engine.sleep(&ids, Tier::Host, &[]).unwrap();
    house.engine.wait_settled(&ids).unwrap();
    let held = held_threads(&house);
    soon("all threads are held", || house.engine.pool.take(Priority::Write).is_none());
    house.engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
    house.engine.wake(&ids[1..]).unwrap();
    assert_eq!(house.state(ids[1]), RegionState::Spilling);
    // As the first of them that has an answer does.
    let mut first = house.engine.pool.take(Priority::Read).unwrap();
    assert!(first.next_request().is_none() && first.is_over());
    first.finish();
    house.engine.wait_awake(&ids[1..]).unwrap();
    assert!(holds(regions[1].1, MIB, 1));
    assert_eq!(house.state(ids[0]), RegionState::Spilling);
    held.into_iter().for_each(Held::let_go);
    for (_, address) in regions {
        house.engine.free(address, 0).unwrap();
    }
    house.assert_empty();
}

/// It was chosen before those that are chosen now, and takes its room when its read is over.
#[test]
fn a_wake_that_waits_for_a_read_counts_its_room() {
    let house = Plan::default().via_host().build();
    let (id, address) = house.region(MIB, 6);
    house.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    house.engine.wait_settled(&[id]).unwrap();
    let to_come = || {
        let found = house.engine.to_come(&[id]);
        (found.from_file_bytes, found.from_host_bytes)
    };
    assert_eq!(to_come(), (MIB as u64, MIB as u64));
    house.faults.hold(false, true);
    house.engine.promote_in_turn(&[id]);
    assert_eq!(house.state(id), RegionState::Promoting);
    assert_eq!(to_come(), (0, MIB as u64), "nobody knows what is read already");
    let of_room = || {
        let found = house.engine.residence(&[id]);
        (found.is_awake, found.resident_bytes, found.promised_bytes)
    };
    assert_eq!(of_room(), (false, 0, 0));
    house.engine.wake_ahead(&[id]);
    assert_eq!(
        (house.state(id), of_room()),
        (RegionState::Promoting, (true, MIB as u64, MIB as u64))
    );
    house.faults.hold(false, false);
    house.engine.wait_awake(&[id]).unwrap();
    assert_eq!(of_room(), (true, MIB as u64, 0));
    assert!(holds(address, MIB, 6));
    house.engine.free(address, 0).unwrap();
    house.assert_empty();
}
