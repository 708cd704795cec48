//! The by-copy door.

use std::cell::RefCell;

use dormouse_device::{DeviceError, Operation};

use super::*;
use crate::engine::StashId;
use dormouse_storage::NvmeError;

fn put(fixture: &Fixture, address: usize, bytes: usize, key: u64) -> Result<StashId, OffloadError> {
    // SAFETY: a live, awake block of the test's own.
    unsafe { fixture.engine.stash_put(address, bytes, key, &fixture.here()) }
}

fn get(fixture: &Fixture, id: StashId, to: usize) -> Result<u64, OffloadError> {
    // SAFETY: a live, awake block of the test's own, as long as the stash.
    unsafe { fixture.engine.stash_get(id, to, &fixture.here()) }
}

#[test]
fn copies_come_back_from_host_memory_and_from_the_file() {
    let bytes = 5 * MIB + 1000; // no whole unit, more than one chunk
    for host_bytes_max in [64 << 20, 0] {
        let mut plan = Plan::default();
        plan.config.host_bytes_max = host_bytes_max;
        let fixture = plan.build();
        let (from, to) = (fixture.allocate(bytes, 3), fixture.allocate(bytes, 4));
        let id = put(&fixture, from, bytes, 17).unwrap();
        assert_eq!(put(&fixture, from, bytes, 17).unwrap(), id, "same key, same id");
        // Memory is no better place than the memory it came from.
        let in_file = host_bytes_max == 0 || fixture.engine.is_direct;
        assert_eq!((fixture.host_used() > 0, fixture.nvme_used() > 0), (!in_file, in_file));
        fill(from, bytes, 5);
        for _ in 0..2 {
            fill(to, bytes, 9);
            assert_eq!(get(&fixture, id, to).unwrap(), bytes as u64);
            assert!(holds(to, bytes, 3), "the id stays valid");
        }
        let stats = fixture.engine.stats();
        assert_eq!(stats.device_to_host.bytes, bytes as u64, "once out");
        assert_eq!(stats.host_to_device.bytes, 2 * bytes as u64, "twice in");
        let filed = u64::from(in_file) * bytes as u64;
        assert_eq!((stats.nvme_write.bytes, stats.nvme_read.bytes), (filed, 2 * filed));
        let other_length = put(&fixture, from, 8, 17).unwrap_err();
        assert!(matches!(other_length, OffloadError::Argument { .. }), "{other_length}");
        fixture.engine.stash_drop(id).unwrap();
        assert_eq!(get(&fixture, id, to).unwrap(), bytes as u64, "put twice, dropped once");
        fixture.engine.stash_drop(id).unwrap();
        assert!(matches!(get(&fixture, id, to), Err(OffloadError::Stale { what: "stash", .. })));
        assert!(fixture.engine.stash_drop(id).is_err());
        assert_eq!(fixture.engine.stash_count(), 0);
        fixture.engine.free(from, 0).unwrap();
        fixture.engine.free(to, 0).unwrap();
        fixture.assert_empty();
    }
}

/// Two threads put one key with different lengths, and neither has a stash when it begins.
#[test]
fn the_first_of_two_lengths_of_a_key_is_kept() {
    let fixture = Plan::default().build();
    let (first, second) = (fixture.allocate(2 * MIB, 1), fixture.allocate(MIB, 2));
    let stored_bytes = || fixture.host_used() + fixture.nvme_used();
    let held = fixture.hold_way(CopyStream::Out);
    let results = std::thread::scope(|scope| {
        let puts = [(first, 2 * MIB), (second, MIB)].map(|(address, bytes)| {
            let before_bytes = stored_bytes();
            let fixture = &fixture;
            let thread = scope.spawn(move || put(fixture, address, bytes, 5));
            soon("it has a place", || stored_bytes() >= before_bytes + bytes as u64);
            thread
        });
        held.let_go();
        puts.map(|put| put.join().unwrap())
    });
    let (kept, refused): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    assert!(
        matches!(&refused[..], [Err(OffloadError::Argument { what: "stash length", .. })]),
        "{kept:?} {refused:?}"
    );
    assert_eq!(fixture.engine.stash_count(), 1);
    fixture.engine.stash_drop(*kept[0].as_ref().unwrap()).unwrap();
    // Either length is accepted again.
    for (address, bytes) in [(first, 2 * MIB), (second, MIB)] {
        fixture.engine.stash_drop(put(&fixture, address, bytes, 5).unwrap()).unwrap();
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

#[test]
fn no_place_and_bad_disks_are_typed() {
    let mut plan = Plan { file_bytes: MIB, ..Plan::default() };
    plan.config.host_bytes_max = 0;
    let fixture = plan.build();
    let address = fixture.allocate(2 * MIB, 1);
    assert!(put(&fixture, address, 2 * MIB, 1).unwrap_err().is_declined());
    assert!(put(&fixture, address, 0, 1).is_err());
    let id = put(&fixture, address, 4096, 2).unwrap();
    fixture.faults.flip_bit(100);
    let error = get(&fixture, id, address).unwrap_err();
    assert!(matches!(error, OffloadError::Nvme(NvmeError::Corrupted { .. })), "{error}");
    fixture.faults.fail_writes_after(0, libc::ENOSPC);
    for tries in 1..3 {
        let error = put(&fixture, address, 4096, 3).unwrap_err();
        assert!(error.is_declined(), "the bytes are where they were: {error}");
        assert!(error.to_string().contains("No space left"), "{error}");
        assert_eq!(fixture.engine.stats().declined, 1 + tries);
    }
    assert!(fixture.engine.stats().nvme_stopped.unwrap().contains("No space left"));
    fixture.engine.stash_drop(id).unwrap();
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn where_the_better_place_is_full_the_next_one_takes_it() {
    // On a GPU the file comes after host memory, on the host device before it.
    let mut plan = Plan { file_bytes: MIB, ..Plan::default() };
    plan.config.host_bytes_max = 1 << 20;
    let fixture = plan.build();
    let address = fixture.allocate(MIB, 6);
    let ids: Vec<_> = (1..=2).map(|key| put(&fixture, address, MIB, key).unwrap()).collect();
    assert!(fixture.host_used() >= MIB as u64 && fixture.nvme_used() >= MIB as u64);
    assert_eq!(fixture.engine.stats().declined, 0);
    assert!(put(&fixture, address, MIB, 3).unwrap_err().is_declined());
    assert_eq!(fixture.engine.stats().declined, 1);
    for id in ids {
        fill(address, MIB, 7);
        get(&fixture, id, address).unwrap();
        assert!(holds(address, MIB, 6));
        fixture.engine.stash_drop(id).unwrap();
    }
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

thread_local! {
    /// Dropped at this thread's next call of the device.
    static DROPPED_NEXT: RefCell<Option<(Arc<Engine<TestDevice>>, StashId)>> = RefCell::default();
}

/// The last user drops the stash while another call is about to read it, and the device refuses that call.
#[test]
fn a_refused_read_of_a_stash_that_is_dropped_meanwhile_leaves_no_place_taken() {
    let mut plan = Plan::default();
    plan.config.host_bytes_max = 0;
    let fixture = plan.build();
    let (address, here) = (fixture.allocate(MIB, 1), fixture.here());
    let id = put(&fixture, address, MIB, 1).unwrap();
    assert_eq!(fixture.nvme_used(), MIB as u64);
    DROPPED_NEXT.replace(Some((Arc::clone(&fixture.engine), id)));
    fixture.device().watch(|| {
        let dropped = DROPPED_NEXT.take();
        dropped.is_some_and(|(engine, id)| engine.stash_drop(id).is_err())
    });
    let refused = DeviceError::TooManySpans { limit: 1 };
    fixture.device().fail(Operation::Event, 1, refused);
    // SAFETY: a live, awake block of the test's own, as long as the stash.
    let error = unsafe { fixture.engine.stash_get(id, address, &here) }.unwrap_err();
    assert!(matches!(error, OffloadError::Device(_)), "{error}");
    assert_eq!((fixture.engine.stash_count(), fixture.nvme_used()), (0, 0));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}
