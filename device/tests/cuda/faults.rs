//! Refusals of the driver's, one call at a time.

use std::sync::mpsc::channel;

use dormouse_device::cuda::CudaDevice;
use dormouse_device::{Device, DeviceError, Fill, Operation, Sealed, SpanLabel};

use super::super::{PAGE_BYTES, device, driver, holds, mapped, range};
use standin::{Live, UnmapRuns};

const OUT_OF_MEMORY: i32 = 2;
const UNKNOWN: i32 = 999;
/// The codes after which the driver's header says that "the process must be terminated and relaunched", of hardware that
/// failed, and of a context that is gone.
const LOSSES: [i32; 16] =
    [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911];
const ILLEGAL_ADDRESS: i32 = 700;
/// Codes beside those that say nothing of the context.
const REFUSALS: [i32; 7] = [1, 219, 225, 720, 809, 910, 999];
/// Pages of the ranges below.
const PAGES: usize = 6;

fn mapped_bytes(device: &CudaDevice) -> u64 {
    device.memory_info().mapped_bytes
}

#[test]
fn a_map_that_fails_at_any_call_leaves_the_range_as_it_was() {
    let driver = driver();
    let device = device();
    let range = range(&device, 10, PAGES);
    let calls = [("cuMemCreate", PAGES), ("cuMemMap", PAGES), ("cuMemSetAccess", 1)];
    for (entry, count) in calls {
        for nth in 1..=count as u64 {
            device.release_parked();
            driver.fail(entry, nth, 1, OUT_OF_MEMORY);
            let refused = device.map(range, Fill::Any);
            match refused {
                Err(DeviceError::OutOfMemory {
                    operation: Operation::Map, asked_bytes, ..
                }) => {
                    assert_eq!(asked_bytes, range.bytes as u64);
                }
                other => panic!("{entry} {nth}: {other:?}"),
            }
            assert_eq!(mapped_bytes(&device), 0, "{entry} {nth}");
            assert_eq!(driver.live(Live::Mappings), 0, "{entry} {nth}");
            let parked = device.memory_info().parked_bytes;
            assert_eq!(driver.live(Live::HandleBytes), parked, "every handle is somewhere");
            // Zeroes, so that pages which were there for a moment show nothing.
            device.map(range, Fill::Zero).unwrap();
            assert!(holds(&device, range, 0));
            device.unmap(range).unwrap();
        }
    }
    drop(device);
    driver.assert_nothing_left();
}

#[test]
fn pages_made_before_a_refusal_are_not_kept_past_the_limit() {
    let driver = driver();
    let device = device();
    device.limit_parked((2 * PAGE_BYTES) as u64);
    driver.fail("cuMemCreate", PAGES as u64, 1, OUT_OF_MEMORY);
    assert!(device.map(range(&device, 0, PAGES), Fill::Any).is_err());
    assert_eq!(device.memory_info().parked_bytes, 2 * PAGE_BYTES as u64);
    assert_eq!(driver.live(Live::HandleBytes), 2 * PAGE_BYTES as u64);
}

#[test]
fn a_map_that_cannot_be_undone_is_never_used_again() {
    let driver = driver();
    let device = device();
    let lost = range(&device, 0, PAGES);
    driver.fail("cuMemSetAccess", 1, 1, UNKNOWN);
    driver.fail("cuMemUnmap", 3, 1, UNKNOWN);
    assert!(matches!(device.map(lost, Fill::Any), Err(DeviceError::Refused { code: 999, .. })));
    assert_eq!(mapped_bytes(&device), lost.bytes as u64, "its room stays taken");
    match device.map(lost, Fill::Any) {
        Err(DeviceError::WrongPages { state: "being changed", .. }) => {}
        other => panic!("{other:?}"),
    }
    let other = mapped(&device, PAGES, PAGES, 3);
    assert!(holds(&device, other, 3));
}

#[test]
fn zeroes_that_are_refused_are_an_error() {
    let driver = driver();
    let device = device();
    let range = range(&device, 0, PAGES);
    driver.fail("cuMemsetD8Async", 1, 1, UNKNOWN);
    assert!(matches!(device.map(range, Fill::Zero), Err(DeviceError::Refused { .. })));
    assert_eq!((mapped_bytes(&device), driver.live(Live::Mappings)), (0, 0));
    // A wait that is refused once is made again.
    driver.fail("cuStreamSynchronize", 1, 1, UNKNOWN);
    device.map(range, Fill::Zero).unwrap();
    assert!(holds(&device, range, 0));
}

#[test]
fn pages_stay_mapped_if_the_end_of_their_zeroing_is_unknown() {
    let driver = driver();
    let device = device();
    let lost = range(&device, 0, PAGES);
    driver.fail("cuStreamSynchronize", 1, u64::MAX, UNKNOWN);
    assert!(matches!(device.map(lost, Fill::Zero), Err(DeviceError::Refused { .. })));
    driver.heal();
    assert_eq!(mapped_bytes(&device), lost.bytes as u64, "its room stays taken");
    let again = device.map(lost, Fill::Any);
    assert!(matches!(again, Err(DeviceError::WrongPages { state: "being changed", .. })));
    // The GPU lives: nothing was unmapped under its work.
    let other = mapped(&device, PAGES, PAGES, 3);
    assert!(holds(&device, other, 3));
}

#[test]
fn an_unmap_that_fails_half_way_leaves_every_byte() {
    let driver = driver();
    driver.unmap_runs(UnmapRuns::Refused);
    let device = device();
    let range = mapped(&device, 0, PAGES, 77);
    for nth in 1..=PAGES as u64 {
        driver.fail("cuMemUnmap", nth, 1, UNKNOWN);
        assert!(matches!(device.unmap(range), Err(DeviceError::Refused { code: 999, .. })));
        assert_eq!(mapped_bytes(&device), range.bytes as u64);
        assert!(holds(&device, range, 77), "at page {nth}");
    }
    device.unmap(range).unwrap();
    assert_eq!(mapped_bytes(&device), 0);
}

#[test]
fn an_unmap_of_many_pages_that_is_refused_leaves_every_byte() {
    let driver = driver();
    let device = device();
    let range = mapped(&device, 0, PAGES, 78);
    driver.fail("cuMemUnmap", 1, 1, UNKNOWN);
    assert!(matches!(device.unmap(range), Err(DeviceError::Refused { code: 999, .. })));
    assert_eq!(mapped_bytes(&device), range.bytes as u64);
    assert!(holds(&device, range, 78));
    device.unmap(range).unwrap();
    assert_eq!(mapped_bytes(&device), 0);
}

#[test]
fn a_range_whose_unmap_cannot_be_undone_is_never_used_again() {
    let driver = driver();
    driver.unmap_runs(UnmapRuns::Refused);
    let device = device();
    let range = mapped(&device, 0, PAGES, 5);
    driver.fail("cuMemUnmap", 3, 1, UNKNOWN);
    driver.fail("cuMemMap", 1, 1, UNKNOWN);
    assert!(device.unmap(range).is_err());
    for again in [device.unmap(range), device.map(range, Fill::Any)] {
        let busy = matches!(again, Err(DeviceError::WrongPages { state: "being changed", .. }));
        assert!(busy, "{again:?}");
    }
    drop(device);
    driver.assert_nothing_left();
}

#[test]
fn a_seal_that_fails_leaves_the_span_frozen_and_whole() {
    let driver = driver();
    driver.unmap_runs(UnmapRuns::Refused);
    let device = device();
    let range = mapped(&device, 0, PAGES, 21);
    let span = device.freeze(range, SpanLabel::default()).unwrap();
    driver.fail("cuMemUnmap", 4, 1, UNKNOWN);
    assert!(matches!(device.seal(span), Err(DeviceError::Refused { .. })));
    assert!(holds(&device, range, 21));
    assert_eq!(device.seal(span), Ok(Sealed::Asleep));
    device.forget(span).unwrap();
}

/// The pages are lost: the caller keeps its copy, though no wake can use these pages.
#[test]
fn a_seal_that_cannot_be_undone_sleeps_for_ever() {
    let driver = driver();
    driver.unmap_runs(UnmapRuns::Refused);
    let device = device();
    let range = mapped(&device, 0, PAGES, 24);
    let span = device.freeze(range, SpanLabel::default()).unwrap();
    driver.fail("cuMemUnmap", 3, 1, UNKNOWN);
    driver.fail("cuMemMap", 1, 1, UNKNOWN);
    assert_eq!(device.seal(span), Ok(Sealed::Asleep));
    assert_eq!(mapped_bytes(&device), range.bytes as u64, "its room stays taken");
    for again in [device.stage(span, Fill::Any).map(|_| ()), device.thaw(span)] {
        let busy = matches!(again, Err(DeviceError::WrongState { state: "being changed", .. }));
        assert!(busy, "{again:?}");
    }
    drop(device);
    driver.assert_nothing_left();
}

#[test]
fn a_stage_that_fails_leaves_the_span_asleep() {
    let driver = driver();
    let device = device();
    let range = mapped(&device, 0, PAGES, 22);
    let span = device.freeze(range, SpanLabel::default()).unwrap();
    device.seal(span).unwrap();
    device.release_parked();
    for (entry, nth) in [("cuMemCreate", 2), ("cuMemMap", 5), ("cuMemSetAccess", 1)] {
        driver.fail(entry, nth, 1, OUT_OF_MEMORY);
        let refused = device.stage(span, Fill::Any).map(|_| ());
        assert!(matches!(refused, Err(DeviceError::OutOfMemory { .. })), "{entry}: {refused:?}");
        let info = device.memory_info();
        assert_eq!((info.mapped_bytes, info.staged_bytes), (0, 0), "{entry}");
    }
    let staged = device.stage(span, Fill::Zero).unwrap();
    device.publish(staged).map_err(|(error, _)| error).unwrap();
    assert!(holds(&device, range, 0));
}

#[test]
fn staged_pages_that_cannot_go_stay_counted() {
    let driver = driver();
    let device = device();
    let range = mapped(&device, 0, PAGES, 23);
    let span = device.freeze(range, SpanLabel::default()).unwrap();
    device.seal(span).unwrap();
    let staged = device.stage(span, Fill::Any).unwrap();
    driver.fail("cuMemUnmap", 1, u64::MAX, UNKNOWN);
    drop(staged);
    driver.heal();
    let info = device.memory_info();
    assert_eq!((info.mapped_bytes, info.staged_bytes), (range.bytes as u64, 0));
    let again = device.stage(span, Fill::Any).map(|_| ());
    assert!(matches!(again, Err(DeviceError::WrongState { state: "being changed", .. })));
}

#[test]
fn a_copy_that_is_refused_moves_nothing() {
    let driver = driver();
    let device = device();
    let (to, from) = (mapped(&device, 0, 1, 1), mapped(&device, 1, 1, 2));
    let stream = device.create_stream("copy").unwrap();
    driver.fail("cuMemcpyAsync", 1, 1, UNKNOWN);
    // SAFETY: both are mapped and not used otherwise.
    let refused = unsafe { device.copy(to.start, from.start, PAGE_BYTES, &stream) };
    assert!(matches!(refused, Err(DeviceError::Refused { operation: Operation::Copy, .. })));
    device.synchronize(&device.record(&stream).unwrap()).unwrap();
    assert!(holds(&device, to, 1));
}

#[test]
fn events_that_are_late_hold_callbacks_up() {
    let driver = driver();
    let device = device();
    let stream = device.create_stream("late").unwrap();
    driver.hold_events(true);
    let event = device.record(&stream).unwrap();
    let (told, hear) = channel();
    device.callback(&stream, Box::new(move |ended| told.send(ended).unwrap())).unwrap();
    for _ in 0..1000 {
        assert_eq!(device.query(&event), Ok(false));
        assert!(hear.try_recv().is_err());
    }
    driver.hold_events(false);
    device.synchronize(&event).unwrap();
    assert_eq!(hear.recv().unwrap(), Ok(()));
}

#[test]
fn a_lost_device_ends_all_waits_with_an_error() {
    LOSSES.into_iter().for_each(lose_under_way);
}

#[test]
fn a_refusal_is_no_loss() {
    let driver = driver();
    let device = device();
    let stream = device.create_stream("refused").unwrap();
    for code in REFUSALS {
        driver.fail("cuEventRecord", 1, 1, code);
        let refused = device.record(&stream);
        assert!(matches!(refused, Err(DeviceError::Refused { code: seen, .. }) if seen == code));
    }
}

fn lose_under_way(code: i32) {
    let driver = driver();
    let device = device();
    let stream = device.create_stream("lost").unwrap();
    let range = mapped(&device, 0, PAGES, 1);
    let span = device.freeze(range, SpanLabel::default()).unwrap();
    driver.hold_events(true);
    let event = device.record(&stream).unwrap();
    let (told, hear) = channel();
    device.callback(&stream, Box::new(move |ended| told.send(ended).unwrap())).unwrap();
    driver.lose(code);
    driver.hold_events(false);
    let lost = |result: Result<(), DeviceError>, asked: Operation| match result {
        Err(DeviceError::DeviceLost { operation, reason }) => {
            assert_eq!(operation, asked);
            assert!(code != ILLEGAL_ADDRESS || reason.contains("ILLEGAL_ADDRESS"), "{reason}");
        }
        other => panic!("{asked:?} after {code}: {other:?}"),
    };
    lost(hear.recv().unwrap(), Operation::Event);
    lost(device.synchronize(&event), Operation::Event);
    lost(device.query(&event).map(|_| ()), Operation::Event);
    lost(device.record(&stream).map(|_| ()), Operation::Event);
    lost(device.seal(span).map(|_| ()), Operation::Seal);
    lost(device.map(super::super::range(&device, 20, 1), Fill::Any), Operation::Map);
    lost(device.create_stream("none").map(|_| ()), Operation::CreateStream);
    lost(device.allocate_pinned(1).map(|_| ()), Operation::Pin);
    drop((event, stream, device)); // as at the end of a process: nothing to be done, no panic
}

#[test]
fn calls_during_a_driver_shutdown_succeed() {
    let driver = driver();
    let device = device();
    let stream = device.create_stream("last").unwrap();
    let event = device.record(&stream).unwrap();
    let staged = {
        let range = mapped(&device, 0, PAGES, 1);
        let span = device.freeze(range, SpanLabel::default()).unwrap();
        device.seal(span).unwrap();
        device.stage(span, Fill::Any).unwrap()
    };
    const DEINITIALIZED: i32 = 4;
    driver.lose(DEINITIALIZED);
    assert!(matches!(device.query(&event), Err(DeviceError::DeviceLost { .. })));
    assert_eq!(device.release_parked(), 0);
    drop((staged, event, stream, device));
}
