//! The device is lost in the middle of things: everybody hears of it, nobody waits for ever, and
//! what rests in host memory or in the file is not said to be gone.

use dormouse_device::DeviceError;

use super::arrivals::{put_to_sleep, wake_late};
use super::both::{House, Plan};
use super::side::Side;
use crate::engine::tests::{MIB, cause};
use crate::engine::transfers::Way;
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
fn free_all(house: &House, addresses: &[usize]) {
    for &address in addresses {
        house.engine.free(address, 0).unwrap();
    }
    house.drain();
}

#[test]
fn under_a_copy_out() {
    for tier in [Tier::Host, Tier::Nvme] {
        let house = Plan::default().build();
        let (id, address) = house.region(MIB, 1);
        let held = house.hold_way(Way::Out);
        house.engine.sleep(&[id], tier, &[]).unwrap();
        assert_eq!(house.state(id), RegionState::FallingAsleep);
        house.lose();
        held.let_go();
        house.engine.wait_settled(&[id]).unwrap();
        assert_eq!((house.state(id), house.engine.stats().sleep_failures), (RegionState::Awake, 1));
        // Its places are given back, though the driver takes no memory back any more.
        assert_eq!((house.host_used(), house.nvme_used()), (0, 0));
        free_all(&house, &[address]);
    }
}

#[test]
fn under_a_copy_in() {
    let house = Plan::default().build();
    let (id, address) = house.region(MIB, 1);
    put_to_sleep(&house, &[id], Tier::Host);
    let held = wake_late(&house, &[id]);
    std::thread::scope(|scope| {
        // Whoever waits already, and whoever comes later.
        let waiter = scope.spawn(|| house.engine.wait_awake(&[id]));
        house.lose();
        held.let_go();
        assert_lost(waiter.join().unwrap());
    });
    assert_lost(house.engine.wait_awake(&[id]));
    assert_lost(house.engine.wait_awake_on(&[id], &house.here()));
    free_all(&house, &[address]);
    house.assert_nothing_stored();
}

#[test]
fn freed_under_a_copy_in() {
    let house = Plan::default().build();
    let (id, address) = house.region(MIB, 1);
    put_to_sleep(&house, &[id], Tier::Host);
    let held = wake_late(&house, &[id]);
    house.engine.free(address, 0).unwrap();
    house.lose();
    held.let_go();
    house.drain();
}

#[test]
fn released_under_a_copy_in_it_is_its_owners_to_free() {
    let house = Plan::default().build();
    let (id, address) = house.region(MIB, 1);
    put_to_sleep(&house, &[id], Tier::Host);
    let held = wake_late(&house, &[id]);
    house.lose();
    held.let_go();
    assert_lost(house.engine.release(id));
    assert_eq!(house.allocator.lookup(address).unwrap().claimed, None);
    free_all(&house, &[address]);
    assert!(house.allocator.blocks().is_empty());
}

/// Nobody knows who still uses the memory: it stays where it is.
#[test]
fn behind_a_gate() {
    let house = Plan::default().build();
    let side = Side::new(&house, 7);
    let (id, address) = house.region(MIB, 1);
    let held = house.hold(&side.stream);
    let event = side.mark();
    house.engine.sleep(&[id], Tier::Host, std::slice::from_ref(&event)).unwrap();
    house.lose();
    held.let_go();
    house.engine.wait_settled(&[id]).unwrap();
    assert_eq!((house.state(id), house.host_used()), (RegionState::Awake, 0));
    // So it does when it is asked again, this time for the copy's sake.
    house.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    house.engine.wait_settled(&[id]).unwrap();
    assert_eq!((house.state(id), house.engine.stats().sleep_failures), (RegionState::Awake, 1));
    assert_lost(house.engine.sleep(&[id], Tier::Host, &[event]));
    free_all(&house, &[address]);
}

#[test]
fn while_others_sleep() {
    let house = Plan::default().build();
    let (in_host, a) = house.region(MIB, 1);
    let (in_file, b) = house.region(MIB, 2);
    put_to_sleep(&house, &[in_host], Tier::Host);
    put_to_sleep(&house, &[in_file], Tier::Nvme);
    house.lose();
    assert_lost(house.engine.wait_awake(&[in_host]));
    assert_lost(house.engine.wait_awake(&[in_file]));
    assert_eq!(
        (house.state(in_host), house.state(in_file)),
        (RegionState::Host, RegionState::Nvme)
    );
    free_all(&house, &[a, b]);
    assert_eq!((house.host_used(), house.nvme_used()), (0, 0));
}
