//! Reads of sleeping memory while copies are late.

use std::sync::atomic::Ordering;

use dormouse_alloc::Config;

use super::ANSWERS;
use super::both::Plan;
use super::both::read::{holds_here, read_behind};
use super::side::Side;
use crate::engine::tests::{A_WHILE, MIB, soon};
use crate::error::OffloadError;
use crate::ids::Tier;
use dormouse_residency::region::RegionState;

#[test]
fn a_read_of_an_end_waits_for_the_stream_that_writes_it() {
    let fixture = Plan { change: |config| config.granule_bytes = 512, ..Plan::default() }.build();
    let side = Side::new(&fixture, 7);
    let before = side.allocate(3 << 10);
    let (id, address) = side.region(MIB);
    let pages = fixture.allocator.lookup(address).unwrap().pages;
    let head_bytes = pages.start - address;
    assert!(head_bytes > 0);
    side.write(address, MIB, 1);
    fixture.engine.sleep(&[id], Tier::Host, &[side.mark()]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    let held = fixture.hold(&side.stream);
    side.write(address, head_bytes, 2);
    let has_gone = held.let_go_later();
    let mut head = vec![0; head_bytes];
    read_behind(&fixture, address, &mut head, &side.stream).unwrap();
    assert!(has_gone.load(Ordering::SeqCst) && holds_here(&head, 2));
    side.free(address);
    side.free(before);
    side.finish(&[]);
    drop(side);
    fixture.assert_empty();
}

/// The host copy is still there, but the trainer may have changed the memory.
#[test]
fn memory_that_is_awake_is_refused_while_its_copy_in_runs() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    let held = fixture.hold_copies_in();
    fixture.engine.wait_awake_on(&[id], &fixture.here()).unwrap();
    assert_eq!(fixture.state(id), RegionState::Awake);
    assert!(fixture.host_used() > 0);
    let error = read_behind(&fixture, address, &mut [0; 8], &fixture.here()).unwrap_err();
    assert!(matches!(&error, OffloadError::Order { seen, .. } if seen == "Awake"), "{error}");
    held.let_go();
    fixture.engine.wait_awake(&[id]).unwrap();
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// Host memory is there, but not yet its bytes.
#[test]
fn memory_that_the_file_is_being_read_for_is_read_from_the_file() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    fixture.faults.hold(false, true);
    fixture.engine.wake(&[id]);
    soon("host memory is taken", || fixture.host_used() > 0);
    assert_eq!(fixture.state(id), RegionState::Loading);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = vec![0; MIB];
            read_behind(&fixture, address, &mut seen, &fixture.here()).unwrap();
            seen
        });
        std::thread::sleep(A_WHILE);
        let has_read = reader.is_finished();
        fixture.faults.hold(false, false);
        assert!(!has_read, "there was nothing to read yet");
        assert!(holds_here(&reader.join().unwrap(), 1));
    });
    fixture.engine.wait_awake(&[id]).unwrap();
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// It may sleep again with other bytes: those read before and after do not belong together.
#[test]
fn a_block_that_wakes_during_a_read_is_refused() {
    for tier in [Tier::Host, Tier::Nvme] {
        let change = |config: &mut Config| config.granule_bytes = 512;
        let fixture = Plan { change, ..Plan::default() }.build();
        let side = Side::new(&fixture, 7);
        let before = side.allocate(3 << 10);
        let (id, address) = side.region(MIB);
        side.write(address, MIB, 1);
        fixture.engine.sleep(&[id], tier, &[side.mark()]).unwrap();
        fixture.engine.wait_settled(&[id]).unwrap();
        // Its end is read behind this stream.
        let held = fixture.hold(&side.stream);
        let (waits, stream) = (fixture.turn.standin.calls(ANSWERS), side.stream.clone());
        std::thread::scope(|scope| {
            let reader = scope
                .spawn(|| read_behind(&fixture, address, &mut vec![0; MIB], &stream).unwrap_err());
            soon("the read waits", || fixture.turn.standin.calls(ANSWERS) > waits);
            // A copy out would wait for the same stream: only the number says that it woke.
            fixture.engine.table.with(id, |entry| entry.data.wakes += 1).unwrap();
            held.let_go();
            let error = reader.join().unwrap();
            let woke = "memory that woke during the call";
            assert!(matches!(&error, OffloadError::Order { seen, .. } if seen == woke), "{error}");
        });
        side.free(address);
        side.free(before);
        side.finish(&[]);
        drop(side);
        fixture.assert_empty();
    }
}
