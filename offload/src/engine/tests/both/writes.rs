//! The budget of bytes written in a day.

use super::*;
use crate::ids::Tier;
use dormouse_storage::NvmeError;

const DAY_BYTES: u64 = 3 * MIB as u64;

/// A fixture whose file may be written three MiB a day.
fn limited(plan: Plan) -> Fixture {
    let fixture = plan.build();
    fixture.nvme().limit_writes(DAY_BYTES);
    fixture
}

/// Bytes written, and those that may be now.
fn written_and_left(fixture: &Fixture) -> (u64, u64) {
    let stats = fixture.engine.stats();
    (stats.nvme_written_bytes, stats.nvme_write_left_bytes)
}

#[test]
fn a_spent_budget_declines_and_loses_nothing_and_time_refills_it() {
    for plan in [Plan::default(), Plan::default().via_host()] {
        let fixture = limited(plan);
        let regions: Vec<_> = (0..5).map(|i| fixture.region(MIB, i)).collect();
        let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
        let outcome = fixture.engine.sleep(&ids[..4], Tier::Nvme, &[]).unwrap();
        assert_eq!((outcome.accepted_bytes, outcome.declined_bytes), (DAY_BYTES, MIB as u64));
        let why = outcome.declined.unwrap();
        let said = "the NVMe tier may write 3145728 bytes a day: ";
        assert!(why.starts_with(said) && why.contains("1048576 are asked for"), "{why}");
        fixture.engine.wait_settled(&ids).unwrap();
        assert_eq!(
            (fixture.state(ids[2]), fixture.state(ids[3])),
            (RegionState::Nvme, RegionState::Awake)
        );
        let (written, left) = written_and_left(&fixture);
        assert!(written == DAY_BYTES && left < MIB as u64, "{written} {left}");
        assert_eq!(fixture.engine.stats().nvme_write_budget_bytes, DAY_BYTES);

        // It can sleep in host memory, and stays there though it is asked on to the file.
        fixture.engine.sleep(&ids[3..4], Tier::Host, &[]).unwrap();
        fixture.engine.wait_settled(&ids).unwrap();
        let outcome = fixture.engine.sleep(&ids[3..4], Tier::Nvme, &[]).unwrap();
        assert!(outcome.declined.unwrap().starts_with(said));
        assert_eq!(fixture.state(ids[3]), RegionState::Host);

        // Eight hours are a third of a day: room for one more, and no longer for two.
        fixture.nvme().pass_hours(8);
        let outcome = fixture.engine.sleep(&ids[3..], Tier::Nvme, &[]).unwrap();
        assert_eq!(outcome.accepted_bytes, 2 * MIB as u64 - outcome.declined_bytes);
        assert_eq!(outcome.declined_bytes, MIB as u64);
        fixture.engine.wait_settled(&ids).unwrap();
        assert_eq!(
            (fixture.state(ids[3]), fixture.state(ids[4])),
            (RegionState::Nvme, RegionState::Awake)
        );
        fixture.engine.wait_awake(&ids).unwrap();
        for (i, &(_, address)) in regions.iter().enumerate() {
            assert!(holds(address, MIB, i as u64));
            fixture.engine.free(address, 0).unwrap();
        }
        fixture.assert_empty();
    }
}

#[test]
fn write_budget_of_a_cancelled_write_is_returned() {
    let mut plan = Plan::default();
    plan.config.inflight_bytes_max = 2 * MIB as u64;
    let fixture = limited(plan);
    let regions: Vec<_> = (0..3).map(|i| fixture.region(MIB, i)).collect();
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    fixture.faults.hold(true, false);
    fixture.engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
    assert!(written_and_left(&fixture).1 < MIB as u64, "set aside before it is written");
    // It waits for its turn: nothing of it has been asked of the file.
    fixture.engine.wait_awake(&ids[2..]).unwrap();
    let left = written_and_left(&fixture).1;
    assert!((MIB as u64..2 * MIB as u64).contains(&left), "{left}");
    fixture.faults.hold(false, false);
    fixture.engine.wait_settled(&ids).unwrap();
    assert_eq!(written_and_left(&fixture).0, 2 * MIB as u64);
    for (_, address) in regions {
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.drain();
    let (written, left) = written_and_left(&fixture);
    assert_eq!(written, 2 * MIB as u64);
    assert!(left < 2 * MIB as u64, "what was written is spent, though it is gone: {left}");
    fixture.assert_empty();
}

#[test]
fn a_write_that_fails_costs_what_it_wrote() {
    for io_engine in [IoEngine::Auto, IoEngine::Threads] {
        let fixture = limited(Plan { io_engine, ..Plan::default() });
        let (id, address) = fixture.region(MIB, 1);
        fixture.faults.fail_writes_after(8192, libc::ENOSPC);
        fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
        fixture.engine.wait_settled(&[id]).unwrap();
        let (written, left) = written_and_left(&fixture);
        assert_eq!(written, 8192);
        assert!((DAY_BYTES - 8192..DAY_BYTES).contains(&left), "{left}");
        fixture.engine.wait_awake(&[id]).unwrap();
        assert!(holds(address, MIB, 1));
        fixture.engine.free(address, 0).unwrap();
        fixture.assert_empty();
    }
}

#[test]
fn a_stash_is_written_within_the_budget_too() {
    let mut plan = Plan::default();
    plan.config.host_bytes_max = 0;
    let fixture = limited(plan);
    let (address, here) = (fixture.allocate(2 * MIB, 1), fixture.here());
    // SAFETY: a live, awake block of the test's own.
    let put = |key| unsafe { fixture.engine.stash_put(address, 2 * MIB, key, &here) };
    let id = put(1).unwrap();
    let refused = put(2).unwrap_err();
    assert!(matches!(refused, OffloadError::Nvme(NvmeError::Spent { .. })), "{refused}");
    assert!(refused.is_declined());
    fixture.engine.stash_drop(id).unwrap();
    assert_eq!(written_and_left(&fixture).0, 2 * MIB as u64);
    assert!(put(3).is_err(), "what was written stays spent");
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}
