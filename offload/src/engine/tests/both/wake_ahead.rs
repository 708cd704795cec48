//! Waking ahead of need, while every I/O thread is held.

use super::*;
use crate::ids::Tier;
use dormouse_storage::Priority;

/// A region asleep in the file, and the I/O threads, which do nothing until they are let go.
fn asleep_behind_held_threads(fixture: &Fixture) -> (RegionId, usize, Vec<Held>) {
    let (id, address) = fixture.region(MIB, 6);
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    (id, address, held_threads(fixture))
}

fn held_threads(fixture: &Fixture) -> Vec<Held> {
    let hold = || Held::by(|until| fixture.engine.run_blocking(until));
    (0..IO_THREADS_DEFAULT).map(|_| hold()).collect()
}

fn staged_bytes(fixture: &Fixture) -> u64 {
    fixture.allocator.stats().staged_bytes.current
}

#[test]
fn room_is_taken_or_promised_at_once_and_the_rest_is_for_an_io_thread() {
    let fixture = Plan::default().build();
    let (id, address, held) = asleep_behind_held_threads(&fixture);
    let mapped_bytes = fixture.device().memory_info().mapped_bytes;

    fixture.engine.wake_ahead(&[id]);
    let asked = fixture.engine.stats().nvme_read;
    assert_eq!((fixture.state(id), asked.bytes), (RegionState::Loading, 0));
    // Where nothing freed is in a stream's hands, an I/O thread may take the room.
    let promised_bytes = if fixture.device().is_stream_ordered() { 0 } else { MIB as u64 };
    let of_room = || {
        let found = fixture.engine.residence(&[id]);
        (found.resident_bytes, found.promised_bytes, staged_bytes(&fixture))
    };
    let expected = (MIB as u64, promised_bytes, MIB as u64 - promised_bytes);
    assert_eq!(of_room(), expected);
    assert_eq!(fixture.device().memory_info().mapped_bytes, mapped_bytes, "nothing is mapped yet");
    // A wake at once waits for the same transfer.
    fixture.engine.wake(&[id]);
    assert_eq!(of_room(), expected);

    held.into_iter().for_each(Held::let_go);
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 6));
    assert_eq!((fixture.engine.stats().wakes, staged_bytes(&fixture)), (1, 0));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn a_region_freed_before_its_turn_releases_its_room() {
    let fixture = Plan::default().build();
    let (id, address, held) = asleep_behind_held_threads(&fixture);
    fixture.engine.wake_ahead(&[id]);
    fixture.engine.free(address, 0).unwrap();
    held.into_iter().for_each(Held::let_go);
    fixture.assert_empty();
    assert_eq!(staged_bytes(&fixture), 0);
}

#[test]
fn without_room_nothing_is_taken_and_a_later_wake_finds_it() {
    let fixture = Plan { budget_bytes: 4 * MIB, ..Plan::default() }.build();
    let (id, address) = fixture.region(2 * MIB, 6);
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    let taken = fixture.allocate(3 * MIB, 1);
    fixture.engine.wake_ahead(&[id]);
    fixture.engine.wait_settled(&[id]).unwrap();
    assert_eq!((fixture.state(id), staged_bytes(&fixture)), (RegionState::Nvme, 0));
    assert_eq!(fixture.engine.stats().wake_failures, 1);

    fixture.engine.free(taken, 0).unwrap();
    let held = held_threads(&fixture);
    fixture.engine.wake_ahead(&[id]);
    // A refused reservation is not made twice.
    assert_eq!(staged_bytes(&fixture), 2 * MIB as u64);
    held.into_iter().for_each(Held::let_go);
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, 2 * MIB, 6));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// Threads that make room do not turn each other away: each of these wakes needs the pages of one
/// that was freed.
#[test]
fn wakes_ahead_by_all_threads_at_once_find_their_room() {
    const REGIONS: usize = 64;
    let fixture = Plan { budget_bytes: REGIONS * MIB, ..Plan::default() }.build();
    let regions: Vec<_> = (0..REGIONS).map(|at| fixture.region(MIB, at as u64 + 1)).collect();
    let ids: Vec<_> = regions.iter().map(|&(id, _)| id).collect();
    fixture.engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&ids).unwrap();
    let taken: Vec<_> = (0..REGIONS).map(|_| fixture.allocate(MIB, 1)).collect();
    taken.into_iter().for_each(|address| fixture.engine.free(address, 0).unwrap());
    let held = held_threads(&fixture);
    ids.iter().for_each(|&id| fixture.engine.wake_ahead(&[id]));
    held.into_iter().for_each(Held::let_go);
    fixture.engine.wait_settled(&ids).unwrap();
    assert_eq!(fixture.engine.stats().wake_failures, 0);
    fixture.engine.wait_awake(&ids).unwrap();
    for (at, (_, address)) in regions.into_iter().enumerate() {
        assert!(holds(address, MIB, at as u64 + 1));
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

#[test]
fn after_the_end_of_the_threads_it_is_done_at_once() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 6);
    fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    fixture.engine.pool.stop();
    fixture.engine.wake_ahead(&[id]);
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 6));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// The bytes are in host memory still: they wait for no write of others.
#[test]
fn a_wake_does_not_wait_for_a_queued_write() {
    let fixture = Plan::default().via_host().build();
    let regions: Vec<_> = (0..2).map(|seed| fixture.region(MIB, seed)).collect();
    let ids: Vec<_> = regions.iter().map(|region| region.0).collect();
    fixture.engine.sleep(&ids, Tier::Host, &[]).unwrap();
    fixture.engine.wait_settled(&ids).unwrap();
    let held = held_threads(&fixture);
    soon("all threads are held", || fixture.engine.pool.take(Priority::Write).is_none());
    fixture.engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
    fixture.engine.wake(&ids[1..]);
    assert_eq!(fixture.state(ids[1]), RegionState::Spilling);
    // As the first of them that has an answer does.
    let mut first = fixture.engine.pool.take(Priority::Read).unwrap();
    assert!(first.next_request().is_none() && first.is_over());
    first.finish();
    fixture.engine.wait_awake(&ids[1..]).unwrap();
    assert!(holds(regions[1].1, MIB, 1));
    assert_eq!(fixture.state(ids[0]), RegionState::Spilling);
    held.into_iter().for_each(Held::let_go);
    for (_, address) in regions {
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

/// It was chosen before those that are chosen now, and takes its room when its read is over.
#[test]
fn a_wake_that_waits_for_a_read_counts_its_room() {
    let fixture = Plan::default().via_host().build();
    let (id, address) = fixture.region(MIB, 6);
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    let bytes_to_load = || {
        let found = fixture.engine.bytes_to_load(&[id]);
        (found.from_file_bytes, found.from_host_bytes)
    };
    assert_eq!(bytes_to_load(), (MIB as u64, MIB as u64));
    fixture.faults.hold(false, true);
    fixture.engine.promote_when_admitted(&[id]);
    assert_eq!(fixture.state(id), RegionState::Promoting);
    assert_eq!(bytes_to_load(), (0, MIB as u64), "nobody knows what is read already");
    let of_room = || {
        let found = fixture.engine.residence(&[id]);
        (found.is_awake, found.resident_bytes, found.promised_bytes)
    };
    assert_eq!(of_room(), (false, 0, 0));
    fixture.engine.wake_ahead(&[id]);
    assert_eq!(
        (fixture.state(id), of_room()),
        (RegionState::Promoting, (true, MIB as u64, MIB as u64))
    );
    fixture.faults.hold(false, false);
    fixture.engine.wait_awake(&[id]).unwrap();
    assert_eq!(of_room(), (true, MIB as u64, 0));
    assert!(holds(address, MIB, 6));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}
