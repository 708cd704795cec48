//! Reads of memory that sleeps in the file.

use std::time::Instant;

use super::read::{holds_here, read};
use super::*;
use crate::engine::tests::PATIENCE;
use crate::ids::Tier;
use dormouse_storage::NvmeError;

/// Two chunks and a part of a third.
const BYTES: usize = 2 * CHUNK_BYTES + 12 * KIB;

/// A region that sleeps in the file.
fn asleep(fixture: &Fixture, bytes: usize, seed: u64) -> (RegionId, usize) {
    let (id, address) = fixture.region(bytes, seed);
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    assert_eq!(fixture.state(id), RegionState::Nvme);
    (id, address)
}

fn refused(fixture: &Fixture, address: usize, bytes: usize) -> NvmeError {
    match read(fixture, address, &mut vec![0; bytes]) {
        Err(OffloadError::Nvme(error)) => error,
        other => panic!("{other:?}"),
    }
}

#[test]
fn any_part_is_read_and_no_chunk_without_need() {
    for plan in [Plan::default(), Plan::default().via_host()] {
        let fixture = plan.build();
        let (id, address) = asleep(&fixture, BYTES, 1);
        let used = (fixture.nvme_used(), fixture.host_used());
        let mapped_bytes = fixture.device().memory_info().mapped_bytes;
        let mut seen = vec![0; BYTES];
        read(&fixture, address, &mut seen).unwrap();
        assert!(holds_here(&seen, 1));
        assert_eq!(fixture.engine.stats().nvme_read.bytes, BYTES as u64);
        let chunk = CHUNK_BYTES;
        for (at, bytes, chunks) in
            [(0, 8, 1), (chunk - 3, 7, 2), (chunk, chunk, 1), (3, BYTES - 6, 3), (BYTES - 5, 5, 1)]
        {
            let (reads, _) = fixture.faults.counts();
            let mut part = vec![0; bytes];
            read(&fixture, address + at, &mut part).unwrap();
            assert!(part == seen[at..at + bytes], "{bytes} bytes at {at}");
            assert_eq!(fixture.faults.counts().0 - reads, chunks, "{bytes} bytes at {at}");
        }
        assert_eq!((fixture.state(id), fixture.engine.stats().wakes), (RegionState::Nvme, 0));
        assert_eq!((fixture.nvme_used(), fixture.host_used()), used);
        assert_eq!(fixture.device().memory_info().mapped_bytes, mapped_bytes);
        fixture.engine.wait_awake(&[id]).unwrap();
        assert!(holds(address, BYTES, 1));
        fixture.engine.free(address, 0).unwrap();
        fixture.assert_empty();
    }
}

#[test]
fn what_the_file_lost_or_changed_is_a_typed_error_and_stays_asleep() {
    let fixture = Plan::default().build();
    let (id, address) = asleep(&fixture, BYTES, 1);
    let start = fixture.engine.extent_offset(id).unwrap();
    let second = start + CHUNK_BYTES as u64;
    fixture.faults.flip_bit(second + 12_345);
    let error = refused(&fixture, address, BYTES);
    let NvmeError::Corrupted { extent, offset, expected, seen } = error else { panic!("{error}") };
    assert_eq!((extent, offset), (start, second));
    assert_ne!(expected, seen);
    let mut whole = vec![0; CHUNK_BYTES];
    read(&fixture, address, &mut whole).unwrap();
    assert!(holds_here(&whole, 1), "the chunk before it is as it was");
    fixture.faults.flip_bit(second + 12_345);

    fixture.faults.fail_next_reads(1, libc::EIO);
    let error = refused(&fixture, address, 8);
    assert!(matches!(error, NvmeError::Failed { code: libc::EIO, .. }), "{error}");
    fixture.faults.end_at(second + 4096);
    let error = refused(&fixture, address, BYTES);
    assert!(matches!(error, NvmeError::Truncated { seen_bytes: 4096, .. }), "{error}");
    fixture.faults.heal();

    assert_eq!(fixture.state(id), RegionState::Nvme);
    assert_eq!(fixture.engine.stats().nvme_stopped, None);
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, BYTES, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn a_passing_bit_flip_is_read_again_and_short_reads_go_on() {
    let fixture = Plan::default().build();
    let (_, address) = asleep(&fixture, BYTES, 1);
    let mut seen = vec![0; BYTES];
    fixture.faults.flip_next_reads(1);
    read(&fixture, address, &mut seen).unwrap();
    assert!(holds_here(&seen, 1));
    assert_eq!(fixture.engine.stats().reread_chunks, 1);
    seen.fill(0);
    fixture.faults.cut_next(&[8192, 4096]);
    fixture.faults.interrupt_next(1);
    read(&fixture, address, &mut seen).unwrap();
    assert!(holds_here(&seen, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// A read in progress shares the extent: the region may wake, and its place is not written to.
#[test]
fn the_place_of_a_region_that_woke_stays_until_it_is_read() {
    for plan in [Plan::default(), Plan::default().via_host()] {
        let fixture = plan.build();
        let (id, address) = asleep(&fixture, MIB, 1);
        let extent = fixture.engine.body(id, |body| body.extent.clone()).unwrap();
        fixture.engine.wait_awake(&[id]).unwrap();
        assert_eq!(fixture.nvme_used(), MIB as u64);
        assert!(holds(address, MIB, 1));
        fixture.engine.release_shared_extent(extent);
        assert_eq!(fixture.nvme_used(), 0);
        fixture.engine.free(address, 0).unwrap();
        fixture.assert_empty();
    }
}

/// It may have moved on to the file, or be awake: what is read is right, or refused.
#[test]
fn reads_beside_sleeps_and_wakes_are_right_or_refused() {
    const READS: usize = 8;
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(BYTES, 1);
    let read_often = || {
        let (start, mut seen, mut reads) = (Instant::now(), vec![0; BYTES], 0);
        while reads < READS {
            assert!(start.elapsed() < PATIENCE, "{reads} reads, the others refused");
            match read(&fixture, address, &mut seen) {
                Ok(()) => assert!(holds_here(&seen, 1)),
                Err(OffloadError::Order { .. }) => continue,
                Err(error) => panic!("{error}"),
            }
            reads += 1;
        }
    };
    std::thread::scope(|scope| {
        let readers = [scope.spawn(read_often), scope.spawn(read_often)];
        while !readers.iter().all(|reader| reader.is_finished()) {
            for tier in [Tier::Host, Tier::Nvme] {
                fixture.engine.sleep(&[id], tier, &[]).unwrap();
                fixture.engine.wait_settled(&[id]).unwrap();
            }
            fixture.engine.wait_awake(&[id]).unwrap();
        }
    });
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}
