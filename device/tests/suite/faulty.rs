//! The device that fails on demand fails exactly then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dormouse_device::faulty::Faulty;
use dormouse_device::host::{HostConfig, HostDevice, os_page_bytes};
use dormouse_device::{AddressRange, Device, DeviceError, Fill, Operation, SpanLabel};

fn device() -> (Faulty<HostDevice>, AddressRange) {
    let page = os_page_bytes();
    let device = HostDevice::new(HostConfig::new(8 * page, 8 * page as u64)).unwrap();
    let range = AddressRange::new(device.address_space().start, page);
    (Faulty::new(device), range)
}

fn lost(operation: Operation) -> DeviceError {
    DeviceError::DeviceLost { operation, reason: "a test said so".into() }
}

#[test]
fn the_chosen_call_fails_and_does_nothing() {
    let (device, range) = device();
    device.fail(Operation::Map, 2, lost(Operation::Map));
    device.map(range, Fill::Zero).unwrap();
    device.unmap(range).unwrap();
    assert_eq!(device.map(range, Fill::Zero), Err(lost(Operation::Map)));
    assert_eq!(device.memory_info().mapped_bytes, 0);
    device.map(range, Fill::Zero).unwrap();
    assert_eq!(device.calls(Operation::Map), 3);
    assert_eq!(device.calls(Operation::Unmap), 1);
    assert_eq!(device.calls(Operation::Seal), 0);
    assert_eq!((device.failures(Operation::Map), device.failures(Operation::Unmap)), (1, 0));
}

#[test]
fn counting_starts_when_the_failure_is_chosen() {
    let (device, range) = device();
    device.map(range, Fill::Zero).unwrap();
    device.fail(Operation::Unmap, 1, lost(Operation::Unmap));
    assert_eq!(device.unmap(range), Err(lost(Operation::Unmap)));
    device.unmap(range).unwrap();
}

#[test]
fn a_lasting_failure_lasts_until_healed() {
    let (device, range) = device();
    device.fail_from(Operation::Map, 1, lost(Operation::Map));
    for _ in 0..3 {
        assert_eq!(device.map(range, Fill::Zero), Err(lost(Operation::Map)));
    }
    device.heal();
    device.map(range, Fill::Zero).unwrap();
}

#[test]
fn a_failed_publish_gives_the_pages_back() {
    let (device, range) = device();
    device.map(range, Fill::Zero).unwrap();
    let span = device.freeze(range, SpanLabel::default()).unwrap();
    device.seal(span).unwrap();
    let staged = device.stage(span, Fill::Any).unwrap();
    device.fail(Operation::Publish, 1, lost(Operation::Publish));
    let (error, staged) = device.publish(staged).unwrap_err();
    assert_eq!(error, lost(Operation::Publish));
    device.publish(staged).unwrap();
}

/// A copy that was taken and moved nothing says so, at once or through its callback, and once.
#[test]
fn a_failed_copy_reports_its_error() {
    let (device, range) = device();
    device.map(range, Fill::Zero).unwrap();
    let stream = device.create_stream("torn").unwrap();
    let source = [7_u8; 64];
    // SAFETY: 64 bytes each, that stay until the stream is synchronized.
    let copy = || unsafe { device.copy(range.start, source.as_ptr() as usize, 64, &stream) };
    // SAFETY: mapped, and no copy is in flight.
    let first = || unsafe { (range.start as *const u8).read_volatile() };
    device.tear(1, lost(Operation::Copy));
    device.tear(2, lost(Operation::Copy));
    copy().unwrap();
    assert_eq!(device.record(&stream).unwrap_err(), lost(Operation::Copy));
    copy().unwrap();
    let (told, ended) = std::sync::mpsc::channel();
    device.callback(&stream, Box::new(move |ended| told.send(ended).unwrap())).unwrap();
    assert_eq!(ended.recv().unwrap(), Err(lost(Operation::Copy)));
    assert_eq!((first(), device.torn_copies()), (0, 2));
    copy().unwrap();
    device.synchronize(&device.record(&stream).unwrap()).unwrap();
    assert_eq!(first(), 7);
}

#[test]
fn a_held_event_is_late_on_every_stream() {
    let (device, _) = device();
    let (stream, waiting) =
        (device.create_stream("one").unwrap(), device.create_stream("two").unwrap());
    device.hold_events();
    let event = device.record(&stream).unwrap();
    device.inner().synchronize(&device.inner().record(&stream).unwrap()).unwrap();
    assert_eq!(device.query(&event), Ok(false), "the device is done, the event is not");
    device.wait(&waiting, &event).unwrap();
    let reached = Arc::new(AtomicBool::new(false));
    let mark = Arc::clone(&reached);
    device.callback(&waiting, Box::new(move |_| mark.store(true, Ordering::Relaxed))).unwrap();
    let behind = device.inner().record(&waiting).unwrap();
    for _ in 0..1000 {
        assert_eq!(device.inner().query(&behind), Ok(false));
        assert!(!reached.load(Ordering::Relaxed));
        std::thread::yield_now();
    }
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| device.synchronize(&event));
        device.release_events();
        waiter.join().unwrap().unwrap();
    });
    device.inner().synchronize(&behind).unwrap();
    assert!(reached.load(Ordering::Relaxed));
    let next = device.record(&stream).unwrap();
    device.synchronize(&next).unwrap();
}

#[test]
fn dropping_the_device_lets_held_events_go() {
    let (device, _) = device();
    let stream = device.create_stream("held").unwrap();
    device.hold_events();
    let event = device.record(&stream).unwrap();
    device.wait(&stream, &event).unwrap();
    drop(device); // would wait for ever for the stream otherwise
}
