//! Refusals of the driver's, one call at a time: each costs a try and no byte.

use std::sync::atomic::Ordering;

use dormouse_device::{Device, DeviceError, Operation};

use super::arrivals::{put_to_sleep, wake_late};
use super::both::{Fixture, Plan};
use super::side::Foreign;
use crate::engine::tests::{Held, KIB, MIB, PATIENCE, cause, fill, holds, soon};
use crate::engine::transfers::CopyStream;
use crate::error::OffloadError;
use crate::ids::{RegionId, Tier};
use dormouse_residency::region::RegionState;

const OUT_OF_MEMORY: i32 = 2;
const UNKNOWN: i32 = 999;
const COUNT: usize = 4;

fn regions(fixture: &Fixture) -> (Vec<RegionId>, Vec<usize>) {
    (0..COUNT as u64).map(|seed| fixture.region(256 * KIB, seed)).unzip()
}

fn give_up(fixture: &Fixture, ids: &[RegionId], addresses: &[usize]) {
    fixture.engine.wait_awake(ids).unwrap();
    for (seed, &address) in (0..).zip(addresses) {
        assert!(holds(address, 256 * KIB, seed), "{seed}");
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

#[test]
fn a_copy_out_that_is_refused_leaves_its_region_awake() {
    for nth in 1..=COUNT {
        let fixture = Plan::default().build();
        let (ids, addresses) = regions(&fixture);
        fixture.turn.standin.fail("cuMemcpyAsync", nth as u64, 1, UNKNOWN);
        fixture.engine.sleep(&ids, Tier::Host, &[]).unwrap();
        fixture.engine.wait_settled(&ids).unwrap();
        // Any thread may start them, so any of them may be first.
        let (awake, asleep): (Vec<_>, Vec<_>) =
            (0..COUNT).partition(|&at| fixture.state(ids[at]) == RegionState::Awake);
        assert_eq!((awake.len(), asleep.len()), (1, COUNT - 1), "{nth}");
        assert!(asleep.iter().all(|&at| fixture.state(ids[at]) == RegionState::Host));
        assert!(holds(addresses[awake[0]], 256 * KIB, awake[0] as u64));
        assert_eq!(
            fixture.host_used(),
            ((COUNT - 1) * 256 * KIB) as u64,
            "its place is given back"
        );
        assert_eq!(fixture.engine.stats().sleep_failures, 1);
        give_up(&fixture, &ids, &addresses);
    }
}

#[test]
fn a_copy_in_that_is_refused_leaves_its_region_asleep() {
    for tier in [Tier::Host, Tier::Nvme] {
        for nth in 1..=COUNT {
            let fixture = Plan::default().build();
            let (ids, addresses) = regions(&fixture);
            put_to_sleep(&fixture, &ids, tier);
            fixture.turn.standin.fail("cuMemcpyAsync", nth as u64, 1, UNKNOWN);
            let error = cause(fixture.engine.wait_awake(&ids).unwrap_err());
            let OffloadError::Device(DeviceError::Refused { operation, code, .. }) = error else {
                panic!("{error}")
            };
            assert_eq!((operation, code), (Operation::Copy, UNKNOWN));
            fixture.engine.wait_settled(&ids).unwrap();
            let expected = if tier == Tier::Host { RegionState::Host } else { RegionState::Nvme };
            let asleep: Vec<_> = ids.iter().filter(|&&id| fixture.state(id) == expected).collect();
            let awake = ids.iter().filter(|&&id| fixture.state(id) == RegionState::Awake);
            assert_eq!((asleep.len(), awake.count()), (1, COUNT - 1), "{nth}");
            give_up(&fixture, &ids, &addresses);
        }
    }
}

#[test]
fn a_wake_that_finds_no_memory_at_any_page_can_be_tried_again() {
    const PAGES: u64 = 8;
    for tier in [Tier::Host, Tier::Nvme] {
        let fixture = Plan::default().build();
        let (id, address) = fixture.region(PAGES as usize * 4 * KIB, 1);
        put_to_sleep(&fixture, &[id], tier);
        let (state, mapped_bytes) =
            (fixture.state(id), fixture.device().memory_info().mapped_bytes);
        for nth in 1..=PAGES {
            fixture.device().release_parked();
            fixture.turn.standin.fail("cuMemCreate", nth, 1, OUT_OF_MEMORY);
            fixture.engine.wake(&[id]);
            fixture.engine.wait_settled(&[id]).unwrap();
            assert_eq!(fixture.state(id), state, "{nth}");
            assert_eq!(fixture.device().memory_info().mapped_bytes, mapped_bytes);
            assert_eq!(fixture.engine.stats().wake_failures, nth);
        }
        fixture.turn.standin.fail("cuMemCreate", 1, u64::MAX, OUT_OF_MEMORY);
        fixture.device().release_parked();
        let error = fixture.engine.wait_awake(&[id]).unwrap_err();
        assert!(
            matches!(error, OffloadError::WakeFailed { region, .. } if region == id),
            "{error}"
        );
        assert!(cause(error).is_out_of_memory());
        fixture.turn.standin.heal();
        fixture.engine.wait_awake(&[id]).unwrap();
        assert!(holds(address, PAGES as usize * 4 * KIB, 1));
        fixture.engine.free(address, 0).unwrap();
        fixture.assert_empty();
    }
}

/// A copy in is queued, and the driver will not say when it is over: once, and once more.
#[test]
fn pages_are_kept_during_a_copy_in_without_a_reported_end() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = fixture.hold_way(CopyStream::In);
    let calls = fixture.turn.standin.calls("cuEventRecord");
    fixture.turn.standin.fail("cuEventRecord", 1, 2, UNKNOWN);
    fixture.engine.wake(&[id]);
    soon("it is asked again", || fixture.turn.standin.calls("cuEventRecord") >= calls + 3);
    assert_eq!(fixture.state(id), RegionState::Waking);
    held.let_go();
    fixture.engine.wait_settled(&[id]).unwrap();
    assert_eq!(
        fixture.state(id),
        RegionState::Host,
        "the step has failed, and the bytes are where they were"
    );
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// A copy out is held while the driver refuses that many calls of `entry`.
fn copy_out_refused(entry: &str, refusals: u64) {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    let held = fixture.hold_way(CopyStream::Out);
    let calls = fixture.turn.standin.calls(entry);
    fixture.turn.standin.fail(entry, 1, refusals, UNKNOWN);
    fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    soon("it is asked again", || fixture.turn.standin.calls(entry) > calls + refusals);
    assert_eq!((fixture.state(id), fixture.host_used()), (RegionState::FallingAsleep, MIB as u64));
    held.let_go();
    fixture.engine.wait_settled(&[id]).unwrap();
    assert_eq!((fixture.state(id), fixture.host_used()), (RegionState::Awake, 0));
    assert!(holds(address, MIB, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn a_host_copy_is_kept_during_a_copy_out_without_a_callback() {
    copy_out_refused("cuEventRecord", 2);
}

/// That the stream's teller was refused an answer does not mean that the copy is over.
#[test]
fn a_host_copy_is_kept_during_a_copy_out_whose_wait_fails() {
    copy_out_refused("cuEventSynchronize", 1);
}

/// Where the device will not say at all, those who wait are told that nothing comes, and the copy
/// keeps both of its ends for good.
#[test]
fn waits_for_a_copy_without_a_reported_end_fail() {
    let fixture = Plan::default().build();
    let (id, _) = fixture.region(MIB, 1);
    let held = fixture.hold_way(CopyStream::Out);
    fixture.turn.standin.fail("cuEventSynchronize", 1, u64::MAX, UNKNOWN);
    fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    let waits = fixture.engine.wait_settled(&[id]);
    assert!(matches!(waits, Err(OffloadError::Broken)), "{waits:?}");
    assert_eq!((fixture.state(id), fixture.host_used()), (RegionState::FallingAsleep, MIB as u64));
    fixture.keep_for_good();
    fixture.turn.standin.heal();
    held.let_go();
}

/// The wake is given up, and its pages with it: once the copy that fills them is over.
#[test]
fn pages_that_cannot_be_published_go_after_the_copy_in() {
    for tier in [Tier::Host, Tier::Nvme] {
        let fixture = Plan::default().build();
        let (id, address) = fixture.region(MIB, 1);
        put_to_sleep(&fixture, &[id], tier);
        let has_gone = fixture.hold_copies_in().let_go_later();
        fixture.device().fail(Operation::Publish, 1, refused(Operation::Publish));
        fixture.engine.wake(&[id]);
        fixture.engine.wait_settled(&[id]).unwrap();
        assert!(has_gone.load(Ordering::SeqCst) && fixture.state(id).is_asleep());
        fixture.engine.wait_awake(&[id]).unwrap();
        assert!(holds(address, MIB, 1));
        fixture.engine.free(address, 0).unwrap();
        fixture.assert_empty();
    }
}

/// Nor do they where the device fails to say when that copy is over, and later says it.
#[test]
fn pages_stay_under_a_copy_in_whose_event_is_refused() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let has_gone = fixture.hold_copies_in().let_go_later();
    fixture.device().fail(Operation::Publish, 1, refused(Operation::Publish));
    // The thread that reports copies waits for events too, and must not meet the refusal.
    fixture.device().fail(Operation::Callback, 1, refused(Operation::Callback));
    fixture.turn.standin.fail("cuEventSynchronize", 1, 2, UNKNOWN);
    fixture.engine.wake(&[id]);
    fixture.engine.wait_settled(&[id]).unwrap();
    assert!(has_gone.load(Ordering::SeqCst) && fixture.state(id).is_asleep());
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

fn refused(operation: Operation) -> DeviceError {
    DeviceError::Refused { operation, start: 0, bytes: 0, code: UNKNOWN, reason: "injected".into() }
}

/// Nor does it of what is kept until then: first the copy's figures are told of, and then that.
#[test]
fn a_host_copy_is_kept_during_a_copy_in_whose_wait_fails() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let calls = fixture.turn.standin.calls("cuEventSynchronize");
    fixture.turn.standin.fail("cuEventSynchronize", 1, 2, UNKNOWN);
    let held = wake_late(&fixture, &[id]);
    soon("it is asked again", || fixture.turn.standin.calls("cuEventSynchronize") >= calls + 3);
    assert_eq!(fixture.host_used(), MIB as u64);
    held.let_go();
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 1));
    fixture.assert_nothing_stored();
    assert_eq!(fixture.engine.stats().device_faults, 1, "its figures are missing");
    fixture.engine.free(address, 0).unwrap();
}

/// A region that is loading, on a stream that reports nothing any more.
fn wake_untold(fixture: &Fixture) -> (RegionId, usize, Held) {
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(fixture, &[id], Tier::Host);
    fixture.device().fail_from(Operation::Callback, 1, refused(Operation::Callback));
    (id, address, wake_late(fixture, &[id]))
}

/// If the stream reports nothing, a helper thread waits. The wake does not.
#[test]
fn a_host_copy_is_kept_if_the_callback_is_refused() {
    let fixture = Plan::default().build();
    let (id, address, held) = wake_untold(&fixture);
    let has_gone = held.let_go_later();
    fixture.assert_nothing_stored();
    assert!(has_gone.load(Ordering::SeqCst));
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// Nor is it given back where the device fails to say when that is.
#[test]
fn a_host_copy_stays_though_its_event_is_refused() {
    let fixture = Plan::default().build();
    let (id, address, held) = wake_untold(&fixture);
    let has_gone = held.let_go_later();
    fixture.turn.standin.fail("cuEventSynchronize", 1, 2, UNKNOWN);
    fixture.assert_nothing_stored();
    assert!(has_gone.load(Ordering::SeqCst));
    fixture.turn.standin.heal();
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// Nor does the free.
#[test]
fn freed_memory_is_kept_if_the_callback_is_refused() {
    let fixture = Plan::default().build();
    let (_, address, held) = wake_untold(&fixture);
    fixture.engine.free(address, 0).unwrap();
    assert!(fixture.allocator.blocks()[0].free_deferred);
    let has_gone = held.let_go_later();
    fixture.drain();
    assert!(has_gone.load(Ordering::SeqCst));
    fixture.assert_empty();
}

/// Nor does anything where the I/O threads have gone: a thread of its own waits.
#[test]
fn all_of_it_stays_after_a_shutdown() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    fixture.device().fail_from(Operation::Callback, 1, refused(Operation::Callback));
    fixture.engine.shutdown();
    let held = wake_late(&fixture, &[id]);
    fixture.engine.free(address, 0).unwrap();
    let has_gone = held.let_go_later();
    fixture.drain();
    assert!(has_gone.load(Ordering::SeqCst));
    fixture.assert_empty();
}

/// An event wait that cannot be armed blocks no later sleep.
#[test]
fn a_sleep_whose_events_cannot_be_waited_for_does_not_begin() {
    for operation in [Operation::CreateStream, Operation::Callback] {
        let fixture = Plan::default().build();
        let (id, address) = fixture.region(MIB, 1);
        let side = super::side::Side::new(&fixture, 7);
        let held = fixture.hold(&side.stream);
        let event = side.mark();
        fixture.device().fail(operation, 1, refused(operation));
        let error = fixture.engine.sleep(&[id], Tier::Host, &[event]).unwrap_err();
        assert!(matches!(error, OffloadError::Device(DeviceError::Refused { .. })), "{error}");
        assert_eq!((fixture.state(id), fixture.host_used()), (RegionState::Awake, 0));
        fixture.engine.wait_settled(&[id]).unwrap();
        held.let_go();
        fixture.engine.free(address, 0).unwrap();
        drop(side);
        fixture.assert_empty();
    }
}

/// Another thread begins to capture the caller's stream while a stash orders its copy behind it: the copies' own
/// stream, which wakes share, stays out of that.
#[test]
fn a_capture_that_begins_at_the_record_takes_no_stream_of_ours() {
    let fixture = Plan::default().build();
    let caller = Foreign::new(&fixture, 7);
    let address = fixture.allocate(MIB, 1);
    let (id, asleep_at) = fixture.region(MIB, 2);
    put_to_sleep(&fixture, &[id], Tier::Host);
    // SAFETY: a live, awake block of the test's own, here and below.
    let put = |key| unsafe { fixture.engine.stash_put(address, MIB, key, &caller.stream) };
    // SAFETY: as above.
    let get = |stash| unsafe { fixture.engine.stash_get(stash, address, &caller.stream) };
    let stash = put(1).unwrap();
    for takes_out in [true, false] {
        fixture.turn.standin.capture_at_record(caller.handle);
        let refused = if takes_out { put(2).map(drop) } else { get(stash).map(drop) };
        const UNSUPPORTED: i32 = 900;
        let is_captured = |error: &OffloadError| {
            matches!(error, OffloadError::Device(DeviceError::Refused { code: UNSUPPORTED, .. }))
        };
        assert!(refused.as_ref().is_err_and(is_captured), "{refused:?}");
        caller.end_capture();
    }
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(asleep_at, MIB, 2));
    let again = put(2).unwrap();
    fill(address, MIB, 3);
    assert_eq!(get(again).unwrap(), MIB as u64);
    assert!(holds(address, MIB, 1));
    [stash, again].into_iter().for_each(|stash| fixture.engine.stash_drop(stash).unwrap());
    [address, asleep_at].into_iter().for_each(|it| fixture.engine.free(it, 0).unwrap());
    fixture.assert_empty();
    caller.destroy();
}

/// The end of what a destroyed stream did is unknown: what it used stays awake, and no more.
#[test]
fn a_destroyed_stream_holds_up_only_the_blocks_that_it_used() {
    let fixture = Plan::default().build();
    let user = Foreign::new(&fixture, 7);
    let engine = &fixture.engine;
    for has_backup in [true, false] {
        let [used, other] = [1, 2].map(|seed| fixture.allocate(MIB, seed));
        let tag = engine.tag_create("weights", has_backup).unwrap();
        let ids = [used, other].map(|address| engine.tag_add(tag, address).unwrap());
        fixture.allocator.record_stream(used, 7).unwrap();
        if has_backup {
            user.destroy();
        }
        let outcome = engine.tag_sleep(tag, Tier::Host, &[]).unwrap();
        assert_eq!((outcome.accepted_bytes, outcome.declined_bytes), (1 << 20, 1 << 20));
        let reason = outcome.declined.unwrap();
        assert!(reason.contains("a stream that was destroyed may use it"), "{reason}");
        engine.wait_settled(&ids).unwrap();
        assert_eq!(fixture.state(ids[0]), RegionState::Awake);
        assert!(fixture.state(ids[1]).is_asleep());
        engine.tag_destroy(tag).unwrap();
        assert!(holds(used, MIB, 1) && (!has_backup || holds(other, MIB, 2)));
        [used, other].into_iter().for_each(|it| engine.free(it, 0).unwrap());
    }
    fixture.assert_empty();
}

/// A stash's copy is queued, and its end is not told: neither end is given up before.
#[test]
fn a_stash_waits_for_a_copy_without_a_reported_end() {
    let fixture = Plan::default().build();
    let address = fixture.allocate(MIB, 1);
    let here = fixture.here();
    let has_gone = fixture.hold_way(CopyStream::Out).let_go_later();
    // After the one that orders the copy behind the caller's work.
    fixture.turn.standin.fail("cuEventRecord", 2, 2, UNKNOWN);
    // SAFETY: a live, awake block of the test's own.
    let error = unsafe { fixture.engine.stash_put(address, MIB, 1, &here) }.unwrap_err();
    assert!(matches!(error, OffloadError::Device(DeviceError::Refused { .. })), "{error}");
    assert!(has_gone.load(Ordering::SeqCst));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// Where it is never told they are never given up, and the caller is told so.
#[test]
fn a_stash_never_reuses_memory_of_a_copy_without_a_reported_end() {
    for tier in [Tier::Host, Tier::Nvme] {
        let mut plan = Plan::default();
        if tier == Tier::Nvme {
            plan.config.host_bytes_max = 0;
        }
        let fixture = plan.build();
        let address = fixture.allocate(MIB, 1);
        let here = fixture.here();
        let held = fixture.hold_way(CopyStream::Out);
        fixture.turn.standin.fail("cuEventRecord", 2, u64::MAX, UNKNOWN);
        // SAFETY: a live, awake block of the test's own.
        let put = unsafe { fixture.engine.stash_put(address, MIB, 1, &here) };
        assert!(matches!(put, Err(OffloadError::Broken)), "{put:?}");
        assert_eq!((fixture.host_used(), fixture.nvme_used()), (MIB as u64, 0), "{tier:?}");
        fixture.keep_for_good();
        fixture.turn.standin.heal();
        held.let_go();
    }
}

/// Nor is the stash that it reads, whichever owner drops it.
#[test]
fn a_stash_that_may_be_read_still_is_kept_for_good() {
    let fixture = Plan::default().build();
    let address = fixture.allocate(MIB, 1);
    let here = fixture.here();
    // SAFETY: a live, awake block of the test's own.
    let stash = unsafe { fixture.engine.stash_put(address, MIB, 1, &here) }.unwrap();
    let held = fixture.hold_way(CopyStream::In);
    fixture.turn.standin.fail("cuEventRecord", 2, u64::MAX, UNKNOWN);
    // SAFETY: as above.
    let got = unsafe { fixture.engine.stash_get(stash, address, &here) };
    assert!(matches!(got, Err(OffloadError::Broken)), "{got:?}");
    fixture.engine.stash_drop(stash).unwrap();
    assert_eq!(fixture.host_used(), MIB as u64);
    fixture.keep_for_good();
    fixture.turn.standin.heal();
    held.let_go();
}

/// Pages that a copy may be filling stay within the budget, and behind no address.
#[test]
fn room_under_a_copy_without_a_reported_end_is_never_reused() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    put_to_sleep(&fixture, &[id], Tier::Host);
    let held = fixture.hold_copies_in();
    fixture.device().fail(Operation::Publish, 1, refused(Operation::Publish));
    fixture.device().fail(Operation::Callback, 1, refused(Operation::Callback));
    fixture.turn.standin.fail("cuEventSynchronize", 1, u64::MAX, UNKNOWN);
    fixture.engine.wake(&[id]);
    let staged_bytes = || fixture.allocator.stats().staged_bytes.current;
    assert!(fixture.state(id).is_asleep());
    assert_eq!(staged_bytes(), MIB as u64);
    for _ in 0..2 {
        let waits = fixture.engine.wait_awake(&[id]);
        assert!(waits.is_err(), "{waits:?}");
        assert_eq!(staged_bytes(), MIB as u64);
    }
    assert!(fixture.engine.table.lock().is_broken, "waits for others are told");
    fixture.engine.free(address, 0).unwrap();
    fixture.turn.standin.heal();
    held.let_go();
    // Notified after the receiver of the copy's end.
    let (tell, told) = std::sync::mpsc::channel();
    let stream = fixture.engine.stream(CopyStream::In).unwrap();
    fixture.device().callback(&stream, Box::new(move |_| tell.send(()).unwrap())).unwrap();
    told.recv_timeout(PATIENCE).unwrap();
    assert!(fixture.allocator.blocks().iter().any(|block| block.range.start == address));
    fixture.keep_for_good();
}
