//! The device is lost during transfers: every waiter gets the error, no wait hangs, and bytes in host
//! memory or in the file are not reported lost.

use dormouse_device::DeviceError;

use super::arrivals::{put_to_sleep, wake_late};
use super::both::{Fixture, Plan};
use super::side::Side;
use crate::engine::tests::{MIB, cause};
use crate::engine::transfers::CopyStream;
use crate::error::OffloadError;
use crate::ids::Tier;
use dormouse_residency::region::RegionState;

fn assert_lost<T: std::fmt::Debug>(result: Result<T, OffloadError>) {
    match result.map_err(cause) {
        Err(OffloadError::Device(DeviceError::DeviceLost { reason, .. })) => {
            assert!(reason.contains("ILLEGAL_ADDRESS"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

/// Everything is freed, and no region is left: none of them was waited for in vain.
fn free_all(fixture: &Fixture, addresses: &[usize]) {
    for &address in addresses {
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.drain();
}

#[test]
fn under_a_copy_out() {
    for tier in [Tier::Host, Tier::Nvme] {
        let fixture = Plan::default().build();
        let (id, address) = fixture.region(MIB, 1);
        let held = fixture.hold_way(CopyStream::Out);
        fixture.engine.sleep(&[id], tier, &[]).unwrap();
        assert_eq!(fixture.state(id), RegionState::FallingAsleep);
        fixture.lose();
        held.let_go();
        fixture.engine.wait_settled(&[id]).unwrap();
        assert_eq!(
            (fixture.state(id), fixture.engine.stats().sleep_failures),
            (RegionState::Awake, 1)
        );
        // Its places are given back, though the driver takes no memory back any more.
        assert_eq!((fixture.host_used(), fixture.nvme_used()), (0, 0));
        free_all(&fixture, &[address]);
    }
}

#[test]
fn under_a_copy_in() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    std::thread::scope(|scope| {
        // Threads that wait already, and threads that come later.
        let waiter = scope.spawn(|| fixture.engine.wait_awake(&[id]));
        fixture.lose();
        held.let_go();
        assert_lost(waiter.join().unwrap());
    });
    assert_lost(fixture.engine.wait_awake(&[id]));
    assert_lost(fixture.engine.wait_awake_on(&[id], &fixture.here()));
    free_all(&fixture, &[address]);
    fixture.assert_nothing_stored();
}

#[test]
fn freed_under_a_copy_in() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    fixture.engine.free(address, 0).unwrap();
    fixture.lose();
    held.let_go();
    fixture.drain();
}

#[test]
fn released_under_a_copy_in_it_is_its_owners_to_free() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = wake_late(&fixture, &[id]);
    fixture.lose();
    held.let_go();
    assert_lost(fixture.engine.release(id));
    assert_eq!(fixture.allocator.lookup(address).unwrap().claimed, None);
    free_all(&fixture, &[address]);
    assert!(fixture.allocator.blocks().is_empty());
}

/// The users of the memory are unknown, so it stays where it is.
#[test]
fn behind_an_event_wait() {
    let fixture = Plan::default().build();
    let side = Side::new(&fixture, 7);
    let (id, address) = fixture.region(MIB, 1);
    let held = fixture.hold(&side.stream);
    let event = side.mark();
    fixture.engine.sleep(&[id], Tier::Host, std::slice::from_ref(&event)).unwrap();
    fixture.lose();
    held.let_go();
    fixture.engine.wait_settled(&[id]).unwrap();
    assert_eq!((fixture.state(id), fixture.host_used()), (RegionState::Awake, 0));
    // So it does when it is asked again, this time for the copy's sake.
    fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    assert_eq!((fixture.state(id), fixture.engine.stats().sleep_failures), (RegionState::Awake, 1));
    assert_lost(fixture.engine.sleep(&[id], Tier::Host, &[event]));
    free_all(&fixture, &[address]);
}

#[test]
fn while_others_sleep() {
    let fixture = Plan::default().build();
    let (in_host, a) = fixture.region(MIB, 1);
    let (in_file, b) = fixture.region(MIB, 2);
    put_to_sleep(&fixture, &[in_host], Tier::Host);
    put_to_sleep(&fixture, &[in_file], Tier::Nvme);
    fixture.lose();
    assert_lost(fixture.engine.wait_awake(&[in_host]));
    assert_lost(fixture.engine.wait_awake(&[in_file]));
    assert_eq!(
        (fixture.state(in_host), fixture.state(in_file)),
        (RegionState::Host, RegionState::Nvme)
    );
    free_all(&fixture, &[a, b]);
    assert_eq!((fixture.host_used(), fixture.nvme_used()), (0, 0));
}
