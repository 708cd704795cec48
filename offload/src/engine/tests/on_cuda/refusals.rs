//! Refusals of the driver's, one call at a time: each costs a try and no byte.

use std::sync::atomic::Ordering;

use dormouse_device::{Device, DeviceError, Operation};

use super::arrivals::{put_to_sleep, wake_late};
use super::both::{House, Plan};
use crate::engine::tests::{Held, KIB, MIB, PATIENCE, cause, holds, soon};
use crate::engine::transfers::Way;
use crate::error::OffloadError;
use crate::ids::{RegionId, Tier};
use dormouse_residency::region::RegionState;

const OUT_OF_MEMORY: i32 = 2;
const UNKNOWN: i32 = 999;
const COUNT: usize = 4;

fn regions(house: &House) -> (Vec<RegionId>, Vec<usize>) {
    (0..COUNT as u64).map(|seed| house.region(256 * KIB, seed)).unzip()
}

fn give_up(house: &House, ids: &[RegionId], addresses: &[usize]) {
    house.engine.wait_awake(ids).unwrap();
    for (seed, &address) in (0..).zip(addresses) {
        assert!(holds(address, 256 * KIB, seed), "{seed}");
        house.engine.free(address, 0).unwrap();
    }
    house.assert_empty();
}

#[test]
fn a_copy_out_that_is_refused_leaves_its_region_awake() {
    for nth in 1..=COUNT {
        let house = Plan::default().build();
        let (ids, addresses) = regions(&house);
        house.turn.standin.fail("cuMemcpyAsync", nth as u64, 1, UNKNOWN);
        house.engine.sleep(&ids, Tier::Host, &[]).unwrap();
        house.engine.wait_settled(&ids).unwrap();
        // They are started by whoever comes by, so it may be any of them.
        let (awake, asleep): (Vec<_>, Vec<_>) =
            (0..COUNT).partition(|&at| house.state(ids[at]) == RegionState::Awake);
        assert_eq!((awake.len(), asleep.len()), (1, COUNT - 1), "{nth}");
        assert!(asleep.iter().all(|&at| house.state(ids[at]) == RegionState::Host));
        assert!(holds(addresses[awake[0]], 256 * KIB, awake[0] as u64));
        assert_eq!(house.host_used(), ((COUNT - 1) * 256 * KIB) as u64, "its place is given back");
        assert_eq!(house.engine.stats().sleep_failures, 1);
        give_up(&house, &ids, &addresses);
    }
}

#[test]
fn a_copy_in_that_is_refused_leaves_its_region_asleep() {
    for tier in [Tier::Host, Tier::Nvme] {
        for nth in 1..=COUNT {
            let house = Plan::default().build();
            let (ids, addresses) = regions(&house);
            put_to_sleep(&house, &ids, tier);
            house.turn.standin.fail("cuMemcpyAsync", nth as u64, 1, UNKNOWN);
            let error = cause(house.engine.wait_awake(&ids).unwrap_err());
            let OffloadError::Device(DeviceError::Refused { operation, code, .. }) = error else {
                panic!("{error}")
            };
            assert_eq!((operation, code), (Operation::Copy, UNKNOWN));
            house.engine.wait_settled(&ids).unwrap();
            let expected = if tier == Tier::Host { RegionState::Host } else { RegionState::Nvme };
            let asleep: Vec<_> = ids.iter().filter(|&&id| house.state(id) == expected).collect();
            let awake = ids.iter().filter(|&&id| house.state(id) == RegionState::Awake);
            assert_eq!((asleep.len(), awake.count()), (1, COUNT - 1), "{nth}");
            give_up(&house, &ids, &addresses);
        }
    }
}

#[test]
fn a_wake_that_finds_no_memory_at_any_page_can_be_tried_again() {
    const PAGES: u64 = 8;
    for tier in [Tier::Host, Tier::Nvme] {
        let house = Plan::default().build();
        let (id, address) = house.region(PAGES as usize * 4 * KIB, 1);
        put_to_sleep(&house, &[id], tier);
        let (state, mapped_bytes) = (house.state(id), house.device().memory_info().mapped_bytes);
        for nth in 1..=PAGES {
            house.device().release_parked();
            house.turn.standin.fail("cuMemCreate", nth, 1, OUT_OF_MEMORY);
            house.engine.wake(&[id]).unwrap();
            house.engine.wait_settled(&[id]).unwrap();
            assert_eq!(house.state(id), state, "{nth}");
            assert_eq!(house.device().memory_info().mapped_bytes, mapped_bytes);
            assert_eq!(house.engine.stats().wake_failures, nth);
        }
        house.turn.standin.fail("cuMemCreate", 1, u64::MAX, OUT_OF_MEMORY);
        house.device().release_parked();
        let error = house.engine.wait_awake(&[id]).unwrap_err();
        assert!(
            matches!(error, OffloadError::WakeFailed { region, .. } if region == id),
            "{error}"
        );
        assert!(cause(error).is_out_of_memory());
        house.turn.standin.heal();
        house.engine.wait_awake(&[id]).unwrap();
        assert!(holds(address, PAGES as usize * 4 * KIB, 1));
        house.engine.free(address, 0).unwrap();
        house.assert_empty();
    }
}

/// A copy in is queued, and the driver will not say when it is over: once, and once more.
#[test]
fn pages_stay_under_a_copy_in_that_nobody_tells_of() {
    let house = Plan::default().build();
    let (id, address) = house.region(MIB, 1);
    put_to_sleep(&house, &[id], Tier::Host);
    let held = house.hold_way(Way::In);
    let calls = house.turn.standin.calls("cuEventRecord");
    house.turn.standin.fail("cuEventRecord", 1, 2, UNKNOWN);
    house.engine.wake(&[id]).unwrap();
    soon("it is asked again", || house.turn.standin.calls("cuEventRecord") >= calls + 3);
    assert_eq!(house.state(id), RegionState::Waking);
    held.let_go();
    house.engine.wait_settled(&[id]).unwrap();
    assert_eq!(
        house.state(id),
        RegionState::Host,
        "the step has failed, and the bytes are where they were"
    );
    house.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 1));
    house.engine.free(address, 0).unwrap();
    house.assert_empty();
}

/// A copy out is held while the driver refuses that many calls of `entry`.
fn copy_out_refused(entry: &str, refusals: u64) {
    let house = Plan::default().build();
    let (id, address) = house.region(MIB, 1);
    let held = house.hold_way(Way::Out);
    let calls = house.turn.standin.calls(entry);
    house.turn.standin.fail(entry, 1, refusals, UNKNOWN);
    house.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    soon("it is asked again", || house.turn.standin.calls(entry) > calls + refusals);
    assert_eq!((house.state(id), house.host_used()), (RegionState::FallingAsleep, MIB as u64));
    held.let_go();
    house.engine.wait_settled(&[id]).unwrap();
    assert_eq!((house.state(id), house.host_used()), (RegionState::Awake, 0));
    assert!(holds(address, MIB, 1));
    house.engine.free(address, 0).unwrap();
    house.assert_empty();
}

#[test]
fn a_host_copy_stays_under_a_copy_out_that_nobody_tells_of() {
    copy_out_refused("cuEventRecord", 2);
}

/// That the stream's teller was refused an answer does not mean that the copy is over.
#[test]
fn a_host_copy_stays_under_a_copy_out_whose_teller_is_refused() {
    copy_out_refused("cuEventSynchronize", 1);
}

/// Where the device will not say at all, those who wait are told that nothing comes, and the copy
/// keeps both of its ends for good.
#[test]
fn nobody_waits_for_a_copy_that_the_device_will_not_speak_of() {
    let house = Plan::default().build();
    let (id, _) = house.region(MIB, 1);
    let held = house.hold_way(Way::Out);
    house.turn.standin.fail("cuEventSynchronize", 1, u64::MAX, UNKNOWN);
    house.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    let waits = house.engine.wait_settled(&[id]);
    assert!(matches!(waits, Err(OffloadError::Broken)), "{waits:?}");
    assert_eq!((house.state(id), house.host_used()), (RegionState::FallingAsleep, MIB as u64));
    house.keep_for_good();
    house.turn.standin.heal();
    held.let_go();
}

/// The wake is given up, and its pages with it: once the copy that fills them is over.
#[test]
fn pages_that_cannot_be_published_go_after_the_copy_in() {
    for tier in [Tier::Host, Tier::Nvme] {
        let house = Plan::default().build();
        let (id, address) = house.region(MIB, 1);
        put_to_sleep(&house, &[id], tier);
        let has_gone = house.hold_copies_in().let_go_later();
        house.device().fail(Operation::Publish, 1, refused(Operation::Publish));
        house.engine.wake(&[id]).unwrap();
        house.engine.wait_settled(&[id]).unwrap();
        assert!(has_gone.load(Ordering::SeqCst) && house.state(id).is_asleep());
        house.engine.wait_awake(&[id]).unwrap();
        assert!(holds(address, MIB, 1));
        house.engine.free(address, 0).unwrap();
        house.assert_empty();
    }
}

/// Nor do they where the device fails to say when that copy is over, and later says it.
#[test]
fn pages_stay_under_a_copy_in_whose_event_is_refused() {
    let house = Plan::default().build();
    let (id, address) = house.region(MIB, 1);
    put_to_sleep(&house, &[id], Tier::Host);
    let has_gone = house.hold_copies_in().let_go_later();
    house.device().fail(Operation::Publish, 1, refused(Operation::Publish));
    // Whoever tells of copies waits for events too, and is not to meet the refusal.
    house.device().fail(Operation::Callback, 1, refused(Operation::Callback));
    house.turn.standin.fail("cuEventSynchronize", 1, 2, UNKNOWN);
    house.engine.wake(&[id]).unwrap();
    house.engine.wait_settled(&[id]).unwrap();
    assert!(has_gone.load(Ordering::SeqCst) && house.state(id).is_asleep());
    house.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 1));
    house.engine.free(address, 0).unwrap();
    house.assert_empty();
}

fn refused(operation: Operation) -> DeviceError {
    DeviceError::Refused { operation, start: 0, bytes: 0, code: UNKNOWN, reason: "injected".into() }
}

/// Nor does it of what is kept until then: first the copy's figures are told of, and then that.
#[test]
fn a_host_copy_stays_under_a_copy_in_whose_teller_is_refused() {
    let house = Plan::default().build();
    let (id, address) = house.region(MIB, 1);
    put_to_sleep(&house, &[id], Tier::Host);
    let calls = house.turn.standin.calls("cuEventSynchronize");
    house.turn.standin.fail("cuEventSynchronize", 1, 2, UNKNOWN);
    let held = wake_late(&house, &[id]);
    soon("it is asked again", || house.turn.standin.calls("cuEventSynchronize") >= calls + 3);
    assert_eq!(house.host_used(), MIB as u64);
    held.let_go();
    house.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 1));
    house.assert_nothing_stored();
    assert_eq!(house.engine.stats().device_faults, 1, "its figures are missing");
    house.engine.free(address, 0).unwrap();
}

/// A region on its way in whose stream will tell nobody of anything any more.
fn wake_untold(house: &House) -> (RegionId, usize, Held) {
    let (id, address) = house.region(MIB, 1);
    put_to_sleep(house, &[id], Tier::Host);
    house.device().fail_from(Operation::Callback, 1, refused(Operation::Callback));
    (id, address, wake_late(house, &[id]))
}

/// Where the stream tells nobody, somebody waits; the wake does not.
#[test]
fn a_host_copy_stays_though_its_stream_tells_nobody() {
    let house = Plan::default().build();
    let (id, address, held) = wake_untold(&house);
    let has_gone = held.let_go_later();
    house.assert_nothing_stored();
    assert!(has_gone.load(Ordering::SeqCst));
    house.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 1));
    house.engine.free(address, 0).unwrap();
    house.assert_empty();
}

/// Nor is it given back where the device fails to say when that is.
#[test]
fn a_host_copy_stays_though_its_event_is_refused() {
    let house = Plan::default().build();
    let (id, address, held) = wake_untold(&house);
    let has_gone = held.let_go_later();
    house.turn.standin.fail("cuEventSynchronize", 1, 2, UNKNOWN);
    house.assert_nothing_stored();
    assert!(has_gone.load(Ordering::SeqCst));
    house.turn.standin.heal();
    house.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 1));
    house.engine.free(address, 0).unwrap();
    house.assert_empty();
}

/// Nor does the free.
#[test]
fn freed_memory_stays_though_its_stream_tells_nobody() {
    let house = Plan::default().build();
    let (_, address, held) = wake_untold(&house);
    house.engine.free(address, 0).unwrap();
    assert!(house.allocator.blocks()[0].free_deferred);
    let has_gone = held.let_go_later();
    house.drain();
    assert!(has_gone.load(Ordering::SeqCst));
    house.assert_empty();
}

/// Nor does anything where the I/O threads have gone: a thread of its own waits.
#[test]
fn all_of_it_stays_after_a_shutdown() {
    let house = Plan::default().build();
    let (id, address) = house.region(MIB, 1);
    put_to_sleep(&house, &[id], Tier::Host);
    house.device().fail_from(Operation::Callback, 1, refused(Operation::Callback));
    house.engine.shutdown();
    let held = wake_late(&house, &[id]);
    house.engine.free(address, 0).unwrap();
    let has_gone = held.let_go_later();
    house.drain();
    assert!(has_gone.load(Ordering::SeqCst));
    house.assert_empty();
}

/// A gate that cannot be armed lets nobody through, and nobody waits behind it.
#[test]
fn a_sleep_whose_events_cannot_be_waited_for_does_not_begin() {
    for operation in [Operation::CreateStream, Operation::Callback] {
        let house = Plan::default().build();
        let (id, address) = house.region(MIB, 1);
        let side = super::side::Side::new(&house, 7);
        let held = house.hold(&side.stream);
        let event = side.mark();
        house.device().fail(operation, 1, refused(operation));
        let error = house.engine.sleep(&[id], Tier::Host, &[event]).unwrap_err();
        assert!(matches!(error, OffloadError::Device(DeviceError::Refused { .. })), "{error}");
        assert_eq!((house.state(id), house.host_used()), (RegionState::Awake, 0));
        house.engine.wait_settled(&[id]).unwrap();
        held.let_go();
        house.engine.free(address, 0).unwrap();
        drop(side);
        house.assert_empty();
    }
}

/// A stash's copy is queued, and its end is not told: neither end is given up before.
#[test]
fn a_stash_waits_for_a_copy_that_nobody_tells_of() {
    let house = Plan::default().build();
    let address = house.allocate(MIB, 1);
    let here = house.here();
    let has_gone = house.hold_way(Way::Out).let_go_later();
    // After the one that orders the copy behind the caller's work.
    house.turn.standin.fail("cuEventRecord", 2, 2, UNKNOWN);
    // SAFETY: a live, awake block of the test's own.
    let error = unsafe { house.engine.stash_put(address, MIB, 1, &here) }.unwrap_err();
    assert!(matches!(error, OffloadError::Device(DeviceError::Refused { .. })), "{error}");
    assert!(has_gone.load(Ordering::SeqCst));
    house.engine.free(address, 0).unwrap();
    house.assert_empty();
}

/// Where it is never told they are never given up, and the caller is told so.
#[test]
fn a_stash_keeps_what_a_copy_may_be_at_for_good() {
    for tier in [Tier::Host, Tier::Nvme] {
        let mut plan = Plan::default();
        if tier == Tier::Nvme {
            plan.config.host_bytes_max = 0;
        }
        let house = plan.build();
        let address = house.allocate(MIB, 1);
        let here = house.here();
        let held = house.hold_way(Way::Out);
        house.turn.standin.fail("cuEventRecord", 2, u64::MAX, UNKNOWN);
        // SAFETY: a live, awake block of the test's own.
        let put = unsafe { house.engine.stash_put(address, MIB, 1, &here) };
        assert!(matches!(put, Err(OffloadError::Broken)), "{put:?}");
        assert_eq!((house.host_used(), house.nvme_used()), (MIB as u64, 0), "{tier:?}");
        house.keep_for_good();
        house.turn.standin.heal();
        held.let_go();
    }
}

/// Nor is what it reads, whoever drops it.
#[test]
fn a_stash_that_may_be_read_still_is_kept_for_good() {
    let house = Plan::default().build();
    let address = house.allocate(MIB, 1);
    let here = house.here();
    // SAFETY: a live, awake block of the test's own.
    let stash = unsafe { house.engine.stash_put(address, MIB, 1, &here) }.unwrap();
    let held = house.hold_way(Way::In);
    house.turn.standin.fail("cuEventRecord", 2, u64::MAX, UNKNOWN);
    // SAFETY: as above.
    let got = unsafe { house.engine.stash_get(stash, address, &here) };
    assert!(matches!(got, Err(OffloadError::Broken)), "{got:?}");
    house.engine.stash_drop(stash).unwrap();
    assert_eq!(house.host_used(), MIB as u64);
    house.keep_for_good();
    house.turn.standin.heal();
    held.let_go();
}

/// Pages that a copy may be filling stay within the budget, and behind no address.
#[test]
fn room_under_a_copy_that_the_device_will_not_speak_of_is_nobodys() {
    let house = Plan::default().build();
    let (id, address) = house.region(MIB, 1);
    put_to_sleep(&house, &[id], Tier::Host);
    let held = house.hold_copies_in();
    house.device().fail(Operation::Publish, 1, refused(Operation::Publish));
    house.device().fail(Operation::Callback, 1, refused(Operation::Callback));
    house.turn.standin.fail("cuEventSynchronize", 1, u64::MAX, UNKNOWN);
    house.engine.wake(&[id]).unwrap();
    let staged_bytes = || house.allocator.stats().staged_bytes.current;
    assert!(house.state(id).is_asleep());
    assert_eq!(staged_bytes(), MIB as u64);
    for _ in 0..2 {
        let waits = house.engine.wait_awake(&[id]);
        assert!(waits.is_err(), "{waits:?}");
        assert_eq!(staged_bytes(), MIB as u64);
    }
    assert!(house.engine.table.lock().is_broken, "waits for others are told");
    house.engine.free(address, 0).unwrap();
    house.turn.standin.heal();
    held.let_go();
    // Told after whoever is told of the copy's end.
    let (tell, told) = std::sync::mpsc::channel();
    let stream = house.engine.stream(Way::In).unwrap();
    house.device().callback(&stream, Box::new(move |_| tell.send(()).unwrap())).unwrap();
    told.recv_timeout(PATIENCE).unwrap();
    assert!(house.allocator.blocks().iter().any(|block| block.range.start == address));
    house.keep_for_good();
}
