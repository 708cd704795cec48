//! Figures of transfers that overlap.

use super::*;
use crate::engine::tests::A_WHILE;
use crate::ids::Tier;

#[test]
fn transfers_side_by_side_take_their_time_once() {
    let fixture = Plan { io_engine: IoEngine::Threads, ..Plan::default() }.build();
    let regions: Vec<_> = (1..=IO_THREADS_DEFAULT as u64).map(|i| fixture.region(MIB, i)).collect();
    let ids: Vec<_> = regions.iter().map(|&(id, _)| id).collect();
    let now_ns = || fixture.engine.timeline.now_ns();
    let began_ns = now_ns();
    for is_write in [true, false] {
        fixture.faults.hold(is_write, !is_write);
        if is_write {
            fixture.engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
        } else {
            fixture.engine.wake(&ids);
        }
        fixture.faults.wait_held(IO_THREADS_DEFAULT);
        std::thread::sleep(A_WHILE);
        fixture.faults.hold(false, false);
        fixture.engine.wait_settled(&ids).unwrap();
    }
    let wall_ns = now_ns() - began_ns;
    let stats = fixture.engine.stats();
    for link in [stats.nvme_write, stats.nvme_read] {
        assert_eq!((link.copies, link.bytes), (ids.len() as u64, (ids.len() * MIB) as u64));
        assert!(u128::from(link.busy_ns) >= A_WHILE.as_nanos(), "{link:?}");
    }
    let busy_ns = stats.nvme_write.busy_ns + stats.nvme_read.busy_ns;
    assert!(busy_ns <= wall_ns, "{busy_ns} ns of {wall_ns}");
    for (_, address) in regions {
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

#[test]
fn failed_and_cancelled_transfers_count_as_busy_time_only() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 3);
    fixture.faults.fail_writes_after(0, libc::EIO);
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    let failed = fixture.engine.stats().nvme_write;
    assert_eq!((failed.copies, failed.bytes), (0, 0));
    assert!(failed.busy_ns > 0, "{failed:?}");
    fixture.engine.wait_awake(&[id]).unwrap();
    assert_eq!(fixture.engine.stats().nvme_write, failed, "nothing is under way any more");
    assert!(holds(address, MIB, 3));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn a_link_has_its_measured_rate_until_enough_bytes_have_moved() {
    const SECOND_NS: u64 = 1_000_000_000;
    let (fast, slow) = (64 * MIB as u64, 32 * MIB as u64);
    let measured = Rates { write_bytes_per_s: fast, read_bytes_per_s: fast, read_latency_ns: 0 };
    let (turn, plan) = (Turn::take(), Plan::default());
    let (allocator, faults) = (new_allocator(plan.budget_bytes), Faults::in_memory(MIB as u64));
    let nvme = Nvme::with_storage(Arc::new(faults.clone()), MIB as u64, true).measured_as(measured);
    let fixture = Fixture::over(turn, allocator, plan.config, faults, nvme);
    let counters = &fixture.engine.counters;
    let read = || fixture.engine.link_rates().nvme_to_device_bytes_per_s;
    let host = || fixture.engine.link_rates().host_to_device_bytes_per_s;
    assert_eq!((read(), host()), (fast, 0));
    for link in [&counters.nvme_read, &counters.host_to_device] {
        link.add(slow, SECOND_NS);
    }
    assert_eq!((read(), host()), (fast, slow), "too little to go by, and all there is");
    for link in [&counters.nvme_read, &counters.host_to_device] {
        link.add(slow, SECOND_NS);
    }
    assert_eq!((read(), host()), (slow, slow));
    assert_eq!(fixture.engine.link_rates().device_to_nvme_bytes_per_s, fast, "the other direction");
    // What no schedule can beat goes by the best that was ever seen.
    assert_eq!(fixture.engine.best_rates().nvme_to_device_bytes_per_s, fast);
    counters.host_to_device.add(fast, SECOND_NS);
    assert_eq!(fixture.engine.best_rates().host_to_device_bytes_per_s, fast);
    assert!(host() < fast);
}

#[test]
fn copies_that_wait_behind_each_other_count_once() {
    let fixture = Plan::default().via_host().build();
    let regions: Vec<_> = (1..=4).map(|i| fixture.region(MIB, i)).collect();
    let ids: Vec<_> = regions.iter().map(|&(id, _)| id).collect();
    let began_ns = fixture.engine.timeline.now_ns();
    let held = fixture.hold_way(CopyStream::Out);
    fixture.engine.sleep(&ids, Tier::Host, &[]).unwrap();
    held.let_go_later();
    fixture.engine.wait_settled(&ids).unwrap();
    let wall_ns = fixture.engine.timeline.now_ns() - began_ns;
    let out = fixture.engine.stats().device_to_host;
    assert_eq!((out.copies, out.bytes), (4, 4 * MIB as u64));
    assert!(out.busy_ns > 0 && out.busy_ns <= wall_ns, "{out:?} of {wall_ns}");
    fixture.engine.wait_awake(&ids).unwrap();
    for (_, address) in regions {
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}
