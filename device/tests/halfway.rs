//! A publish of several pieces that the system refuses half-way. A hole is made in this process'
//! mappings for it, so the file has one test and no other threads.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::ffi::c_void;

use dormouse_device::host::{HostConfig, HostDevice, Staged};
use dormouse_device::{AddressRange, Device, DeviceError, Fill, Operation, SpanId, SpanLabel};

/// Pages long enough to be parked separately.
const PAGE: usize = 256 << 10;

/// A span of three pages, asleep, and staged in three pieces: two that were parked, and a fresh one.
fn staged_in_pieces(device: &HostDevice) -> (AddressRange, SpanId, Staged) {
    let page = |index: usize, count: usize| {
        AddressRange::new(device.address_space().start + index * PAGE, count * PAGE)
    };
    for range in [page(0, 3), page(4, 1), page(6, 1)] {
        device.map(range, Fill::Any).unwrap();
    }
    let span = device.freeze(page(0, 3), SpanLabel::default()).unwrap();
    device.seal(span).unwrap();
    device.release_parked();
    device.unmap(page(4, 1)).unwrap();
    device.unmap(page(6, 1)).unwrap();
    let staged = device.stage(span, Fill::Any).unwrap();
    assert_eq!(device.memory_info().parked_bytes, 0);
    let start = device.staged_address(&staged);
    // SAFETY: staged pages are the test's to fill.
    unsafe { std::ptr::write_bytes(start as *mut u8, 9, 3 * PAGE) };
    (page(0, 3), span, staged)
}

fn device_of_pieces() -> HostDevice {
    let config =
        HostConfig { reserve_bytes: 16 * PAGE, capacity_bytes: 16 * PAGE as u64, page_bytes: PAGE };
    HostDevice::new(config).unwrap()
}

/// Takes the second staged piece away behind the device's back, so that publishing stops there.
fn publish_half_way(device: &HostDevice, staged: Staged) -> Staged {
    let second = AddressRange::new(device.staged_address(&staged) + PAGE, PAGE);
    // SAFETY: staged pages, which only the test uses.
    let status = unsafe { libc::munmap(second.start as *mut c_void, second.bytes) };
    assert_eq!(status, 0);
    let (error, staged) = device.publish(staged).unwrap_err();
    assert!(matches!(error, DeviceError::Refused { operation: Operation::Publish, .. }), "{error}");
    staged
}

/// Whether a thread could read `address`: the kernel is asked to.
fn is_readable(address: usize) -> bool {
    let mut ends = [0; 2];
    // SAFETY: descriptors of our own; the kernel checks the address.
    unsafe {
        assert_eq!(libc::pipe(ends.as_mut_ptr()), 0);
        let taken = libc::write(ends[1], address as *const _, 1);
        ends.iter().for_each(|end| assert_eq!(libc::close(*end), 0));
        taken == 1
    }
}

fn a_half_published_span_can_be_published_again() {
    let device = device_of_pieces();
    let (range, span, staged) = staged_in_pieces(&device);
    let second = device.staged_address(&staged) + PAGE;
    let staged = publish_half_way(&device, staged);
    let thaw = device.thaw(span);
    assert!(matches!(thaw, Err(DeviceError::WrongState { state: "waking", .. })), "{thaw:?}");
    // SAFETY: the hole made above, filled again with what was there.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let piece = libc::mmap(second as *mut c_void, PAGE, access, flags, -1, 0);
        std::ptr::write_bytes(piece.cast::<u8>(), 9, PAGE);
    }
    device.publish(staged).map_err(|(error, _)| error).unwrap();
    // SAFETY: awake.
    let bytes = unsafe { std::slice::from_raw_parts(range.start as *const u8, range.bytes) };
    assert!(bytes.iter().all(|byte| *byte == 9));
    assert_eq!(device.memory_info().mapped_bytes, 3 * PAGE as u64);
}

fn can_be_given_up() {
    let device = device_of_pieces();
    let (range, span, staged) = staged_in_pieces(&device);
    let staged = publish_half_way(&device, staged);
    assert!(is_readable(range.start), "the first piece came");
    drop(staged);
    assert!((0..3).all(|page| !is_readable(range.start + page * PAGE)), "asleep as before");
    assert_eq!(device.memory_info().mapped_bytes, 0);
    let again = device.stage(span, Fill::Zero).unwrap();
    device.publish(again).map_err(|(error, _)| error).unwrap();
    // SAFETY: awake.
    assert_eq!(unsafe { (range.start as *const u8).read_volatile() }, 0);
}

/// A publish over pages that are parked where the span sleeps: refused, given up, forgotten.
fn leaves_no_old_bytes_behind() {
    let device = device_of_pieces();
    let range = AddressRange::new(device.address_space().start, 3 * PAGE);
    device.map(range, Fill::Any).unwrap();
    // SAFETY: mapped, and the test's alone.
    unsafe { std::ptr::write_bytes(range.start as *mut u8, 5, range.bytes) };
    let span = device.freeze(range, SpanLabel::default()).unwrap();
    device.seal(span).unwrap();
    assert_eq!(device.memory_info().parked_bytes, range.bytes as u64);
    let staged = device.stage(span, Fill::Zero).unwrap();
    // SAFETY: staged pages, which only the test uses.
    let status =
        unsafe { libc::munmap(device.staged_address(&staged) as *mut c_void, range.bytes) };
    assert_eq!(status, 0);
    let (_, staged) = device.publish(staged).unwrap_err();
    drop(staged);
    device.forget(span).unwrap();
    device.map(range, Fill::Zero).unwrap();
    // SAFETY: mapped.
    let bytes = unsafe { std::slice::from_raw_parts(range.start as *const u8, range.bytes) };
    assert!(bytes.iter().all(|byte| *byte == 0));
}

#[test]
fn a_publish_refused_half_way_loses_nothing() {
    a_half_published_span_can_be_published_again();
    can_be_given_up();
    leaves_no_old_bytes_behind();
}
