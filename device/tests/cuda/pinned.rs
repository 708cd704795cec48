//! Pinned memory: whose it is, and what is done when the driver refuses.
#![allow(unsafe_code, reason = "memory is looked at, and freed")]

use dormouse_device::{AddressRange, Device, DeviceError, Operation};

use super::super::{device, driver};
use standin::Live;

const OUT_OF_MEMORY: i32 = 2;
const NOT_SUPPORTED: i32 = 801;
const SYSTEM_PAGE: usize = 4096;
/// Enough for several threads to touch, and no whole share for the last.
const BYTES: usize = (96 << 20) + 3 * SYSTEM_PAGE;

/// Pages of a range that the kernel has memory behind; `None` where it is not mapped.
fn resident(range: AddressRange) -> Option<usize> {
    let mut pages = vec![0_u8; range.bytes.div_ceil(SYSTEM_PAGE)];
    // SAFETY: it writes one byte for each page of the range.
    let status = unsafe { libc::mincore(range.start as *mut _, range.bytes, pages.as_mut_ptr()) };
    (status == 0).then(|| pages.iter().filter(|page| **page & 1 != 0).count())
}

#[test]
fn memory_is_there_before_it_is_registered() {
    let driver = driver();
    let device = device();
    let alone = driver.calls("cuMemHostAlloc");
    let range = device.allocate_pinned(BYTES - 5).unwrap();
    assert_eq!(range.bytes, BYTES);
    assert_eq!(resident(range), Some(BYTES / SYSTEM_PAGE));
    assert_eq!(driver.live(Live::PinnedBytes), BYTES as u64);
    assert_eq!(driver.calls("cuMemHostAlloc"), alone, "the driver's own call is not needed");
    // SAFETY: allocated above, and unused.
    unsafe { device.free_pinned(range) };
    assert_eq!(resident(range), None);
    drop(device);
    driver.assert_nothing_left();
}

#[test]
fn a_driver_that_registers_nothing_allocates() {
    let driver = driver();
    let device = device();
    driver.fail("cuMemHostRegister_v2", 1, 1, NOT_SUPPORTED);
    let (ours, frees) = (device.allocate_pinned(1), driver.calls("cuMemFreeHost"));
    let ours = ours.unwrap();
    assert_eq!((ours.bytes, driver.live(Live::PinnedBytes)), (SYSTEM_PAGE, SYSTEM_PAGE as u64));
    // SAFETY: allocated above, and unused.
    unsafe { device.free_pinned(ours) };
    assert_eq!(driver.calls("cuMemFreeHost"), frees + 1);
    drop(device);
    driver.assert_nothing_left();
}

#[test]
fn a_failed_creation_leaves_nothing() {
    let driver = driver();
    let device = device();
    let alone = driver.calls("cuMemHostAlloc");
    driver.fail("cuMemHostRegister_v2", 1, 1, OUT_OF_MEMORY);
    let refused = device.allocate_pinned(BYTES).unwrap_err();
    let DeviceError::Refused { operation, start, bytes, code, .. } = refused else {
        panic!("{refused:?}")
    };
    assert_eq!((operation, bytes, code), (Operation::Pin, BYTES, OUT_OF_MEMORY));
    assert_eq!(resident(AddressRange::new(start, bytes)), None);
    assert_eq!(driver.calls("cuMemHostAlloc"), alone, "there is no more to be had there either");
    drop(device);
    driver.assert_nothing_left();
}

/// What the GPU may still write to stays.
#[test]
fn memory_that_cannot_be_unregistered_stays() {
    let driver = driver();
    let device = device();
    let range = device.allocate_pinned(SYSTEM_PAGE).unwrap();
    driver.fail("cuMemHostUnregister", 1, 1, NOT_SUPPORTED);
    // SAFETY: allocated above, and unused.
    unsafe { device.free_pinned(range) };
    assert_eq!(resident(range), Some(1));
    // SAFETY: as above.
    unsafe { device.free_pinned(range) };
    assert_eq!(resident(range), None);
    drop(device);
    driver.assert_nothing_left();
}
