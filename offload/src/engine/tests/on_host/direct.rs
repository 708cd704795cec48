//! What comes of file I/O on frozen pages, which the guard watches: no device that works in the
//! order of streams has either.

use dormouse_device::host::guard;

use super::both::Plan;
use crate::engine::tests::{A_WHILE, MIB, holds, peek, poke, soon};
use crate::engine::transfers::CopyStream;
use crate::ids::{Role, Tier, label};
use dormouse_residency::region::RegionState;

#[test]
fn a_write_cancels_the_sleep_and_is_not_lost() {
    guard::install().unwrap();
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 3);
    fixture.faults.hold(true, false);
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.faults.wait_held(1);
    poke(address + 8192, 77);
    fixture.faults.hold(false, false);
    fixture.engine.wait_settled(&[id]).unwrap();
    assert_eq!((fixture.state(id), peek(address + 8192)), (RegionState::Awake, 77));
    let stats = fixture.engine.stats();
    assert_eq!((stats.written_meanwhile, stats.sleeps_backed_out, stats.sleeps), (1, 1, 0));
    assert_eq!(fixture.nvme_used(), 0);
    // Later it may sleep all the same.
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    assert_eq!(fixture.state(id), RegionState::Nvme);
    fixture.engine.wait_awake(&[id]).unwrap();
    assert_eq!(peek(address + 8192), 77);
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// Of several that are one region the one written to stays awake, and the rest sleeps.
#[test]
fn a_part_that_is_written_to_leaves_its_region() {
    guard::install().unwrap();
    for written in [vec![1], vec![0, 2], vec![0, 1, 2]] {
        let fixture = Plan::default().build();
        let addresses = [1, 2, 3].map(|seed| fixture.allocate(MIB, seed));
        let name = label("all", None);
        let adopted = fixture.engine.adopt_together(&addresses, Role::Dormant, name, None);
        let id = adopted.unwrap().id.unwrap();
        let held = fixture.hold_way(CopyStream::Out);
        fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
        let at = |part: usize| addresses[part] + 4096;
        written.iter().for_each(|&part| poke(at(part), 70 + part as u64));
        // One of them is gone by the time that the rest falls asleep.
        fixture.engine.free(addresses[written[0]], 0).unwrap();
        held.let_go();
        fixture.engine.wait_settled(&[id]).unwrap();
        let all = written.len() == addresses.len();
        assert_eq!(fixture.state(id), if all { RegionState::Awake } else { RegionState::Nvme });
        let left =
            written[1..].iter().filter(|&&part| fixture.engine.region_at(at(part)).is_none());
        assert_eq!(left.count(), if all { 0 } else { written.len() - 1 });
        assert_eq!(fixture.engine.stats().written_meanwhile, written.len() as u64);
        fixture.engine.wait_awake(&[id]).unwrap();
        for part in (0..3).filter(|&part| part != written[0]) {
            let is_written = written.contains(&part);
            assert_eq!(is_written, peek(at(part)) == 70 + part as u64);
            assert!(is_written || holds(addresses[part], MIB, part as u64 + 1));
            fixture.engine.free(addresses[part], 0).unwrap();
        }
        fixture.assert_empty();
    }
}

/// Where all others are freed, that is the end of the region; what was written to is its owner's.
#[test]
fn a_part_that_is_left_of_freed_ones_is_its_owners() {
    guard::install().unwrap();
    let fixture = Plan::default().build();
    let addresses = [1, 2, 3].map(|seed| fixture.allocate(MIB, seed));
    let adopted =
        fixture.engine.adopt_together(&addresses, Role::Dormant, label("all", None), None);
    let id = adopted.unwrap().id.unwrap();
    let held = fixture.hold_way(CopyStream::Out);
    fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    poke(addresses[1], 71);
    fixture.engine.free(addresses[0], 0).unwrap();
    fixture.engine.free(addresses[2], 0).unwrap();
    held.let_go();
    soon("the region ends", || fixture.engine.region_info(id).is_err());
    assert_eq!(peek(addresses[1]), 71);
    assert_eq!(fixture.allocator.stats().allocated_bytes.current, MIB as u64);
    fixture.engine.free(addresses[1], 0).unwrap();
    fixture.assert_empty();
}

/// What goes through host memory on its way to the file is bounded by the window, not by how many
/// sleeps were agreed on.
#[test]
fn bytes_on_their_way_to_the_file_are_bounded_by_the_window() {
    const EACH: usize = 256 << 10;
    let mut plan = Plan::default();
    (plan.config.host_bytes_max, plan.config.inflight_bytes_max) = (0, 4 * EACH as u64);
    let fixture = plan.build();
    fixture.faults.hold(true, false);
    let name = label("all", None);
    let (mut ids, mut blocks) = (Vec::new(), Vec::new());
    for seed in 0..8 {
        let addresses = [2 * seed, 2 * seed + 1].map(|seed| fixture.allocate(EACH, seed));
        let adopted = fixture.engine.adopt_together(&addresses, Role::Dormant, name, None);
        ids.extend(adopted.unwrap().id);
        blocks.extend(addresses);
    }
    let outcome = fixture.engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
    assert_eq!(outcome.accepted_bytes, 16 * EACH as u64);
    std::thread::sleep(A_WHILE);
    assert!(fixture.host_used() <= 4 * EACH as u64, "{} bytes", fixture.host_used());
    fixture.faults.hold(false, false);
    fixture.engine.wait_settled(&ids).unwrap();
    assert!(ids.iter().all(|&id| fixture.state(id) == RegionState::Nvme));
    assert_eq!(fixture.host_used(), 0);
    fixture.engine.wait_awake(&ids).unwrap();
    for (&at, seed) in blocks.iter().zip(0..) {
        assert!(holds(at, EACH, seed));
        fixture.engine.free(at, 0).unwrap();
    }
    fixture.assert_empty();
}

#[test]
fn a_sleep_admitted_before_a_panic_does_not_begin_after_it() {
    let mut plan = Plan::default();
    plan.config.inflight_bytes_max = 1;
    let fixture = plan.build();
    let (first, _) = fixture.region(MIB, 1);
    let (second, address) = fixture.region(MIB, 2);
    fixture.faults.hold(true, false);
    fixture.engine.sleep(&[first, second], Tier::Nvme, &[]).unwrap();
    fixture.faults.wait_held(1);
    fixture.engine.table.break_down();
    fixture.faults.hold(false, false);
    soon("the first is in the file", || fixture.state(first) == RegionState::Nvme);
    std::thread::sleep(A_WHILE);
    assert_eq!(fixture.state(second), RegionState::Awake);
    assert!(holds(address, MIB, 2));
}
