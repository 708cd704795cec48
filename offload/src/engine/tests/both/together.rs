//! Several blocks that are one region.

use dormouse_device::Operation;

use super::*;
use crate::engine::Adopted;
use crate::engine::tests::campaign::errors::{REFUSED, refused};
use crate::ids::Tier;

const SIZES: [usize; 3] = [64 * KIB, 256 * KIB, 20 * KIB];
const ALL_BYTES: u64 = (340 * KIB) as u64;

/// Blocks and the region of them all. Seeds are their places.
fn together(fixture: &Fixture) -> (RegionId, Vec<usize>) {
    let addresses: Vec<_> =
        SIZES.iter().zip(0..).map(|(&bytes, seed)| fixture.allocate(bytes, seed)).collect();
    let adopted =
        fixture.engine.adopt_together(&addresses, Role::Dormant, label("all", None), None);
    let Adopted { id, refused } = adopted.unwrap();
    assert!(refused.is_empty(), "{refused:?}");
    (id.unwrap(), addresses)
}

fn intact(addresses: &[usize]) -> bool {
    let mut all = addresses.iter().zip(SIZES).zip(0..);
    all.all(|((&at, bytes), seed)| at == 0 || holds(at, bytes, seed))
}

fn free(fixture: &Fixture, addresses: &[usize]) {
    addresses.iter().for_each(|&at| fixture.engine.free(at, 0).unwrap());
}

fn plans() -> [Plan; 2] {
    [Plan::default(), Plan::default().via_host()]
}

#[test]
fn they_sleep_in_one_place_by_one_transfer_and_wake_with_their_bytes() {
    for plan in plans() {
        let fixture = plan.build();
        let (id, addresses) = together(&fixture);
        let info = fixture.engine.region_info(id).unwrap();
        assert_eq!(info.bytes, ALL_BYTES);
        assert!(addresses.iter().all(|&at| fixture.engine.region_at(at + 4096) == Some(id)));
        for tier in [Tier::Host, Tier::Nvme] {
            let outcome = fixture.engine.sleep(&[id], tier, &[]).unwrap();
            assert_eq!((outcome.accepted_bytes, outcome.declined_bytes), (ALL_BYTES, 0));
            fixture.engine.wait_settled(&[id]).unwrap();
            let asleep = fixture.engine.stats();
            assert_eq!(asleep.tiers[tier.index()].regions.current_bytes, ALL_BYTES);
            assert_eq!(fixture.allocator.stats().asleep_bytes.current, ALL_BYTES);
            fixture.engine.wait_awake(&[id]).unwrap();
            assert!(intact(&addresses));
        }
        let stats = fixture.engine.stats();
        assert_eq!((stats.nvme_write.copies, stats.nvme_read.copies), (1, 1));
        assert_eq!((stats.device_to_host.bytes, stats.sleeps, stats.wakes), (2 * ALL_BYTES, 2, 2));
        free(&fixture, &addresses);
        fixture.assert_empty();
    }
}

#[test]
fn a_freed_block_is_held_until_all_are_freed_or_released() {
    for plan in plans() {
        let fixture = plan.build();
        // All of them, asleep, one after the other.
        let (id, addresses) = together(&fixture);
        fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
        fixture.engine.wait_settled(&[id]).unwrap();
        free(&fixture, &addresses[1..]);
        assert_eq!(fixture.state(id), RegionState::Nvme);
        assert!(fixture.engine.free(addresses[1], 0).is_err(), "freed before");
        free(&fixture, &addresses[..1]);
        fixture.assert_empty();
        // One before it sleeps, one asleep; the third is there when it wakes.
        let (id, mut addresses) = together(&fixture);
        free(&fixture, &addresses[2..]);
        fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
        fixture.engine.wait_settled(&[id]).unwrap();
        free(&fixture, &addresses[..1]);
        fixture.engine.wait_awake(&[id]).unwrap();
        (addresses[0], addresses[2]) = (0, 0);
        assert!(intact(&addresses));
        fixture.engine.release(id).unwrap();
        let left_bytes = fixture.allocator.stats().allocated_bytes.current;
        assert_eq!(left_bytes, SIZES[1] as u64, "the other two went with the release");
        free(&fixture, &addresses[1..2]);
        fixture.assert_empty();
    }
}

#[test]
fn a_refusal_for_one_block_of_a_region_loses_nothing() {
    use Operation::*;
    for (operation, nth) in [(Freeze, 2), (Copy, 1), (Copy, 2), (Copy, 3), (Seal, 2)] {
        for plan in plans() {
            let fixture = plan.build();
            let (id, addresses) = together(&fixture);
            fixture.device().fail(operation, nth, refused(operation, REFUSED));
            fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
            fixture.engine.wait_settled(&[id]).unwrap();
            let kept = if operation == Seal { RegionState::Host } else { RegionState::Awake };
            assert_eq!(fixture.state(id), kept, "{operation:?} {nth}");
            fixture.device().heal();
            let fails = fixture.engine.stats().sleep_failures;
            assert_eq!(fails, 1, "{operation:?}");
            // The one that stayed awake is its owner's alone.
            let is_kept = fixture.engine.region_at(addresses[1]).is_none();
            assert_eq!(is_kept, operation == Seal);
            let left_bytes = if is_kept { ALL_BYTES - SIZES[1] as u64 } else { ALL_BYTES };
            let role = fixture.engine.stats().roles[Role::Dormant.index()];
            let asleep_bytes = if is_kept { left_bytes } else { 0 };
            assert_eq!(role.all.current_bytes, left_bytes);
            assert_eq!(role.asleep.current_bytes, asleep_bytes);
            assert_eq!(fixture.allocator.stats().asleep_bytes.current, asleep_bytes);
            fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
            fixture.engine.wait_settled(&[id]).unwrap();
            assert_eq!(fixture.state(id), RegionState::Nvme);
            fixture.engine.wait_awake(&[id]).unwrap();
            assert!(intact(&addresses), "{operation:?} {nth}");
            free(&fixture, &addresses);
            fixture.assert_empty();
        }
    }
    for (operation, nth) in [(Stage, 2), (Copy, 1), (Copy, 3), (Publish, 1), (Publish, 3)] {
        for (plan, frees) in plans().into_iter().zip([false, true]) {
            let fixture = plan.build();
            let (id, addresses) = together(&fixture);
            fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
            fixture.engine.wait_settled(&[id]).unwrap();
            fixture.device().fail(operation, nth, refused(operation, REFUSED));
            let failed = fixture.engine.wait_awake(&[id]).unwrap_err();
            assert!(matches!(cause(failed), OffloadError::Device(_)), "{operation:?}");
            assert_eq!(fixture.state(id), RegionState::Host);
            fixture.device().heal();
            if !frees {
                fixture.engine.wait_awake(&[id]).unwrap();
                assert!(intact(&addresses), "{operation:?} {nth}");
            }
            free(&fixture, &addresses);
            fixture.assert_empty();
        }
    }
}

#[test]
fn those_that_cannot_be_part_of_it_are_named() {
    let fixture = Plan::default().build();
    let (taken, elsewhere) = fixture.region(MIB, 9);
    let own = fixture.allocate(64 * KIB, 0);
    let foreign = &raw const fixture as usize;
    let addresses = [own, elsewhere, foreign];
    let adopted =
        fixture.engine.adopt_together(&addresses, Role::Dormant, label("all", None), None);
    let Adopted { id, refused } = adopted.unwrap();
    let why: Vec<_> = refused.iter().map(|(at, e)| (*at, e.to_string())).collect();
    assert_eq!(why[0].0, elsewhere);
    assert!(why[0].1.contains("region") && why[1].0 == foreign, "{why:?}");
    assert_eq!(fixture.engine.region_info(id.unwrap()).unwrap().bytes, (64 * KIB) as u64);
    fixture.engine.release(id.unwrap()).unwrap();
    fixture.engine.release(taken).unwrap();
    let none = fixture
        .engine
        .adopt_together(&[foreign, foreign + 8], Role::Dormant, label("none", None), None)
        .unwrap();
    assert_eq!((none.id, none.refused.len()), (None, 2));
    free(&fixture, &[own, elsewhere]);
    fixture.assert_empty();
}
