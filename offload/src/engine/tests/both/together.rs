//! Several blocks that are one region.

use dormouse_device::Operation;

use super::*;
use crate::engine::Adopted;
use crate::engine::tests::campaign::errors::{REFUSED, refused};
use crate::ids::Tier;

const SIZES: [usize; 3] = [64 * KIB, 256 * KIB, 20 * KIB];
const ALL_BYTES: u64 = (340 * KIB) as u64;

/// Blocks and the region of them all. Seeds are their places.
fn together(house: &House) -> (RegionId, Vec<usize>) {
    let addresses: Vec<_> =
        SIZES.iter().zip(0..).map(|(&bytes, seed)| house.allocate(bytes, seed)).collect();
    let adopted = house.engine.adopt_together(&addresses, Role::Dormant, label("all", None), None);
    let Adopted { id, refused } = adopted.unwrap();
    assert!(refused.is_empty(), "{refused:?}");
    (id.unwrap(), addresses)
}

fn intact(addresses: &[usize]) -> bool {
    let mut all = addresses.iter().zip(SIZES).zip(0..);
    all.all(|((&at, bytes), seed)| at == 0 || holds(at, bytes, seed))
}

fn free(house: &House, addresses: &[usize]) {
    addresses.iter().for_each(|&at| house.engine.free(at, 0).unwrap());
}

fn plans() -> [Plan; 2] {
    [Plan::default(), Plan::default().via_host()]
}

#[test]
fn they_sleep_in_one_place_by_one_transfer_and_wake_with_their_bytes() {
    for plan in plans() {
        let house = plan.build();
        let (id, addresses) = together(&house);
        let info = house.engine.region_info(id).unwrap();
        assert_eq!((info.bytes, info.requested_bytes), (ALL_BYTES, ALL_BYTES));
        assert!(addresses.iter().all(|&at| house.engine.region_at(at + 4096) == Some(id)));
        for tier in [Tier::Host, Tier::Nvme] {
            let outcome = house.engine.sleep(&[id], tier, &[]).unwrap();
            assert_eq!((outcome.accepted_bytes, outcome.declined_bytes), (ALL_BYTES, 0));
            house.engine.wait_settled(&[id]).unwrap();
            let asleep = house.engine.stats();
            assert_eq!(asleep.tiers[tier.index()].regions.current_bytes, ALL_BYTES);
            assert_eq!(house.allocator.stats().asleep_bytes.current, ALL_BYTES);
            house.engine.wait_awake(&[id]).unwrap();
            assert!(intact(&addresses));
        }
        let stats = house.engine.stats();
        assert_eq!((stats.nvme_write.copies, stats.nvme_read.copies), (1, 1));
        assert_eq!((stats.device_to_host.bytes, stats.sleeps, stats.wakes), (2 * ALL_BYTES, 2, 2));
        free(&house, &addresses);
        house.assert_empty();
    }
}

#[test]
fn what_its_owner_frees_is_held_until_all_are_freed_or_given_back() {
    for plan in plans() {
        let house = plan.build();
        // All of them, asleep, one after the other.
        let (id, addresses) = together(&house);
        house.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
        house.engine.wait_settled(&[id]).unwrap();
        free(&house, &addresses[1..]);
        assert_eq!(house.state(id), RegionState::Nvme);
        assert!(house.engine.free(addresses[1], 0).is_err(), "freed before");
        free(&house, &addresses[..1]);
        house.assert_empty();
        // One before it sleeps, one asleep; the third is there when it wakes.
        let (id, mut addresses) = together(&house);
        free(&house, &addresses[2..]);
        house.engine.sleep(&[id], Tier::Host, &[]).unwrap();
        house.engine.wait_settled(&[id]).unwrap();
        free(&house, &addresses[..1]);
        house.engine.wait_awake(&[id]).unwrap();
        (addresses[0], addresses[2]) = (0, 0);
        assert!(intact(&addresses));
        house.engine.release(id).unwrap();
        let left_bytes = house.allocator.stats().allocated_bytes.current;
        assert_eq!(left_bytes, SIZES[1] as u64, "the other two went with the release");
        free(&house, &addresses[1..2]);
        house.assert_empty();
    }
}

#[test]
fn what_refuses_in_the_middle_of_them_loses_nothing() {
    use Operation::*;
    for (operation, nth) in [(Freeze, 2), (Copy, 1), (Copy, 2), (Copy, 3), (Seal, 2)] {
        for plan in plans() {
            let house = plan.build();
            let (id, addresses) = together(&house);
            house.device().fail(operation, nth, refused(operation, REFUSED));
            house.engine.sleep(&[id], Tier::Host, &[]).unwrap();
            house.engine.wait_settled(&[id]).unwrap();
            let kept = if operation == Seal { RegionState::Host } else { RegionState::Awake };
            assert_eq!(house.state(id), kept, "{operation:?} {nth}");
            house.device().heal();
            let fails = house.engine.stats().sleep_failures;
            assert_eq!(fails, 1, "{operation:?}");
            // The one that stayed awake is its owner's alone.
            let is_kept = house.engine.region_at(addresses[1]).is_none();
            assert_eq!(is_kept, operation == Seal);
            let left_bytes = if is_kept { ALL_BYTES - SIZES[1] as u64 } else { ALL_BYTES };
            let role = house.engine.role_stats(Role::Dormant);
            let asleep_bytes = if is_kept { left_bytes } else { 0 };
            assert_eq!(role.all.current_bytes, left_bytes);
            assert_eq!(role.asleep.current_bytes, asleep_bytes);
            assert_eq!(house.allocator.stats().asleep_bytes.current, asleep_bytes);
            house.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
            house.engine.wait_settled(&[id]).unwrap();
            assert_eq!(house.state(id), RegionState::Nvme);
            house.engine.wait_awake(&[id]).unwrap();
            assert!(intact(&addresses), "{operation:?} {nth}");
            free(&house, &addresses);
            house.assert_empty();
        }
    }
    for (operation, nth) in [(Stage, 2), (Copy, 1), (Copy, 3), (Publish, 1), (Publish, 3)] {
        for (plan, frees) in plans().into_iter().zip([false, true]) {
            let house = plan.build();
            let (id, addresses) = together(&house);
            house.engine.sleep(&[id], Tier::Host, &[]).unwrap();
            house.engine.wait_settled(&[id]).unwrap();
            house.device().fail(operation, nth, refused(operation, REFUSED));
            let failed = house.engine.wait_awake(&[id]).unwrap_err();
            assert!(matches!(cause(failed), OffloadError::Device(_)), "{operation:?}");
            assert_eq!(house.state(id), RegionState::Host);
            house.device().heal();
            if !frees {
                house.engine.wait_awake(&[id]).unwrap();
                assert!(intact(&addresses), "{operation:?} {nth}");
            }
            free(&house, &addresses);
            house.assert_empty();
        }
    }
}

#[test]
fn those_that_cannot_be_part_of_it_are_named() {
    let house = Plan::default().build();
    let (taken, elsewhere) = house.region(MIB, 9);
    let own = house.allocate(64 * KIB, 0);
    let foreign = &raw const house as usize;
    let addresses = [own, elsewhere, foreign];
    let adopted = house.engine.adopt_together(&addresses, Role::Dormant, label("all", None), None);
    let Adopted { id, refused } = adopted.unwrap();
    let why: Vec<_> = refused.iter().map(|(at, e)| (*at, e.to_string())).collect();
    assert_eq!(why[0].0, elsewhere);
    assert!(why[0].1.contains("region") && why[1].0 == foreign, "{why:?}");
    assert_eq!(house.engine.region_info(id.unwrap()).unwrap().bytes, (64 * KIB) as u64);
    house.engine.release(id.unwrap()).unwrap();
    house.engine.release(taken).unwrap();
    let none = house
        .engine
        .adopt_together(&[foreign, foreign + 8], Role::Dormant, label("none", None), None)
        .unwrap();
    assert_eq!((none.id, none.refused.len()), (None, 2));
    free(&house, &[own, elsewhere]);
    house.assert_empty();
}
