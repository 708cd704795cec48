//! Reads of sleeping memory.

use super::*;
use crate::ids::Tier;
use dormouse_device::{AddressRange, DeviceKind};
use dormouse_storage::UNIT_BYTES;

pub(crate) fn read_behind(
    fixture: &Fixture,
    address: usize,
    into: &mut [u8],
    stream: &Stream,
) -> Result<(), OffloadError> {
    let range = AddressRange::new(address, into.len());
    let destination = into.as_mut_ptr().expose_provenance();
    // SAFETY: the slice; the test frees nothing meanwhile.
    unsafe { fixture.engine.read_asleep(range, destination, stream) }
}

pub(super) fn read(fixture: &Fixture, address: usize, into: &mut [u8]) -> Result<(), OffloadError> {
    read_behind(fixture, address, into, &fixture.here())
}

pub(crate) fn holds_here(bytes: &[u8], seed: u64) -> bool {
    holds(bytes.as_ptr().expose_provenance(), bytes.len(), seed)
}

const TIERS: [(Tier, RegionState); 2] =
    [(Tier::Host, RegionState::Host), (Tier::Nvme, RegionState::Nvme)];

#[test]
fn a_sleeping_block_is_read_and_stays_asleep() {
    TIERS.into_iter().for_each(|(tier, state)| read_and_wake(tier, state));
}

fn read_and_wake(tier: Tier, state: RegionState) {
    // Behind another block it does not begin with a page of its own.
    let fixture = Plan { change: |config| config.granule_bytes = 512, ..Plan::default() }.build();
    let small = fixture.allocate(3 * KIB, 1);
    let (bytes, seed) = (5 * MIB + 3 * KIB, 2);
    let (id, address) = fixture.region(bytes, seed);
    let block = fixture.allocator.lookup(address).unwrap();
    assert!(block.pages.start > address && block.pages.end() < address + bytes, "{block:?}");
    fixture.engine.sleep(&[id], tier, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    let copied_bytes = fixture.engine.stats().device_to_host.bytes;
    let mut seen = vec![0; bytes];
    read(&fixture, address, &mut seen).unwrap();
    assert!(holds_here(&seen, seed));
    let ends_bytes = (bytes - block.pages.bytes) as u64;
    assert_eq!(fixture.engine.stats().device_to_host.bytes, copied_bytes + ends_bytes);
    // Any part of it: across both ends, inside, and of one end only.
    let head_bytes = block.pages.start - address;
    for (at, part_bytes) in [(8, bytes - 16), (head_bytes + 3, 2 * MIB), (1, head_bytes - 1)] {
        let mut part = vec![0; part_bytes];
        read(&fixture, address + at, &mut part).unwrap();
        assert!(part == seen[at..at + part_bytes], "{part_bytes} bytes at {at}");
    }
    assert_eq!(fixture.state(id), state);
    let wakes = || fixture.engine.body(id, |body| Some(body.wakes)).unwrap();
    assert_eq!(wakes(), 0);
    fixture.engine.wait_awake(&[id]).unwrap();
    assert_eq!(wakes(), 1);
    fixture.finish(&fixture.here());
    assert!(holds(address, bytes, seed));
    fixture.engine.free(address, 0).unwrap();
    fixture.engine.free(small, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn blocks_that_share_a_region_are_read_each() {
    for (tier, _) in TIERS {
        let fixture = Plan::default().build();
        let addresses = [fixture.allocate(3 * MIB, 1), fixture.allocate(6 * MIB, 2)];
        let adopted =
            fixture.engine.adopt_together(&addresses, Role::Dormant, label("all", None), None);
        let id = adopted.unwrap().id.unwrap();
        fixture.engine.sleep(&[id], tier, &[]).unwrap();
        fixture.engine.wait_settled(&[id]).unwrap();
        for (address, (bytes, seed)) in addresses.into_iter().zip([(3 * MIB, 1), (6 * MIB, 2)]) {
            let mut seen = vec![0; bytes];
            read(&fixture, address, &mut seen).unwrap();
            assert!(holds_here(&seen, seed));
        }
        for address in addresses {
            fixture.engine.free(address, 0).unwrap();
        }
        fixture.assert_empty();
    }
}

#[test]
fn only_the_bytes_of_its_copy_are_read_of_a_block() {
    // On a GPU what a size class adds to a request is not copied.
    let change = |config: &mut Config| {
        (config.granule_bytes, config.thread_cache) = (512, true);
    };
    let fixture = Plan { change, ..Plan::default() }.build();
    let bytes = 513 * KIB;
    for (tier, _) in TIERS {
        read_the_copy(&fixture, bytes, tier);
    }
    fixture.assert_empty();
}

fn read_the_copy(fixture: &Fixture, bytes: usize, tier: Tier) {
    let (id, address) = fixture.region(bytes, 1);
    fixture.engine.sleep(&[id], tier, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    let block = fixture.allocator.lookup(address).unwrap();
    assert!(block.pages.bytes >= bytes + 2 * UNIT_BYTES, "{block:?}");
    let is_gpu = fixture.device().kind() == DeviceKind::Cuda;
    let accepted_bytes =
        if is_gpu { bytes.next_multiple_of(UNIT_BYTES) } else { block.range.bytes };
    let mut seen = vec![0; accepted_bytes];
    read(fixture, address, &mut seen).unwrap();
    assert!(holds_here(&seen[..bytes], 1));
    seen.push(0);
    let beyond = read(fixture, address, &mut seen).unwrap_err();
    assert!(matches!(beyond, OffloadError::Argument { what: "bytes to read", .. }), "{beyond}");
    fixture.engine.free(address, 0).unwrap();
}

#[test]
fn what_has_no_copy_is_refused() {
    let fixture = Plan::default().build();
    let engine = &fixture.engine;
    let refused =
        |address: usize, bytes: usize| read(&fixture, address, &mut vec![0; bytes]).unwrap_err();
    let of_state = |address: usize, state: &str| {
        let error = refused(address, 2 * MIB);
        assert!(matches!(&error, OffloadError::Order { seen, .. } if seen == state), "{error}");
    };
    let untracked = fixture.allocate(2 * MIB, 1);
    of_state(untracked, "awake memory");
    let (id, address) = fixture.region(2 * MIB, 2);
    of_state(address, "Awake");
    engine.sleep(&[id], Tier::Host, &[]).unwrap();
    engine.wait_settled(&[id]).unwrap();
    let block = fixture.allocator.lookup(address).unwrap();
    let too_long = refused(address, block.range.bytes + 1);
    assert!(matches!(too_long, OffloadError::Argument { what: "bytes to read", .. }), "{too_long}");
    let tag = engine.tag_create("cache", false).unwrap();
    engine.tag_add(tag, untracked).unwrap();
    engine.tag_sleep(tag, Tier::Host, &[]).unwrap();
    engine.wait_settled(&engine.tag_regions(tag).unwrap()).unwrap();
    of_state(untracked, "Empty");
    for address in [untracked, address] {
        engine.free(address, 0).unwrap();
        assert!(matches!(refused(address, 8), OffloadError::NotOurs { .. }));
    }
    engine.tag_destroy(tag).unwrap();
    fixture.assert_empty();
}
