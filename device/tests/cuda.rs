//! The `cuda` device on the stand-in driver: it does what every device must, keeps its own
//! promises, and comes through every refusal of the driver's with nothing lost.
//!
//! A binary of its own: the stand-in driver is process-wide.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod cuda {
    mod caller;
    mod faults;
    mod large;
    mod own;
    mod pinned;
}

use dormouse_device::cuda::{CudaConfig, CudaDevice};
use dormouse_device::faulty::Faulty;
use dormouse_device::{AddressRange, Device, Fill, conformance};
use standin::{Exclusive, Live, Standin};

/// Bytes of a page: the stand-in's granularity.
const PAGE_BYTES: usize = 64 << 10;
/// Pages that may be mapped.
const CAPACITY_PAGES: usize = 64;

/// The stand-in driver, to one test alone, and what others have left in it: a device that was
/// lost gives nothing back.
struct Driver {
    standin: Standin,
    before: [u64; Live::ALL.len()],
    _turn: Exclusive,
}

/// Waits for the driver to be this test's.
fn driver() -> Driver {
    let standin = standin::load_with(PAGE_BYTES, 64 << 20);
    let turn = standin.exclusive();
    Driver { standin, before: Live::ALL.map(|what| standin.live(what)), _turn: turn }
}

impl std::ops::Deref for Driver {
    type Target = Standin;

    fn deref(&self) -> &Standin {
        &self.standin
    }
}

impl Driver {
    /// How much there is of something that this test has made.
    fn live(&self, what: Live) -> u64 {
        let at = Live::ALL.iter().position(|it| *it == what).unwrap();
        self.standin.live(what) - self.before[at]
    }

    /// Nothing of a device is left.
    fn assert_nothing_left(&self) {
        for what in Live::ALL {
            assert_eq!(self.live(what), 0, "{what:?}");
        }
    }
}

/// A device of 64 pages, in a space of four times that.
fn device() -> CudaDevice {
    let capacity_bytes = (CAPACITY_PAGES * PAGE_BYTES) as u64;
    let reserve_bytes = 4 * CAPACITY_PAGES * PAGE_BYTES;
    let large_page_bytes = 8 * PAGE_BYTES;
    let config =
        CudaConfig { reserve_bytes, capacity_bytes, large_page_bytes, ..CudaConfig::default() };
    CudaDevice::new(&config).unwrap()
}

/// `count` pages of the space from page `first` on.
fn range(device: &CudaDevice, first: usize, count: usize) -> AddressRange {
    AddressRange::new(device.address_space().start + first * PAGE_BYTES, count * PAGE_BYTES)
}

/// Maps pages and fills them with a byte.
fn mapped(device: &CudaDevice, first: usize, count: usize, byte: u8) -> AddressRange {
    let range = range(device, first, count);
    device.map(range, Fill::Any).unwrap();
    write(device, range, byte);
    range
}

/// A round trip through pinned memory.
fn write(device: &CudaDevice, to: AddressRange, byte: u8) {
    let pinned = device.allocate_pinned(to.bytes).unwrap();
    // SAFETY: pinned memory of ours, that long.
    unsafe { std::ptr::write_bytes(pinned.start as *mut u8, byte, to.bytes) };
    copy(device, to.start, pinned.start, to.bytes);
    // SAFETY: allocated above; the copy was waited for.
    unsafe { device.free_pinned(pinned) };
}

/// Whether every byte of `from` is `byte`.
fn holds(device: &CudaDevice, from: AddressRange, byte: u8) -> bool {
    let pinned = device.allocate_pinned(from.bytes).unwrap();
    copy(device, pinned.start, from.start, from.bytes);
    // SAFETY: pinned memory of ours, that long; the copy was waited for.
    let bytes = unsafe { std::slice::from_raw_parts(pinned.start as *const u8, from.bytes) };
    let all = bytes.iter().all(|found| *found == byte);
    // SAFETY: allocated above, read to the end.
    unsafe { device.free_pinned(pinned) };
    all
}

fn copy(device: &CudaDevice, to: usize, from: usize, bytes: usize) {
    let stream = device.create_stream("test").unwrap();
    // SAFETY: one end is pinned memory of the caller's, the other mapped pages; waited for.
    unsafe { device.copy(to, from, bytes, &stream).unwrap() };
    device.synchronize(&device.record(&stream).unwrap()).unwrap();
}

#[test]
fn it_conforms() {
    let driver = driver();
    conformance::run(&device);
    driver.assert_nothing_left();
}

#[test]
fn a_faulty_device_without_faults_conforms() {
    let driver = driver();
    conformance::run(&|| Faulty::new(device()));
    driver.assert_nothing_left();
}

/// Events are late.
#[test]
fn all_of_it_holds_while_the_host_is_ahead() {
    [1, 4].into_iter().for_each(|works| standin::run_again_ahead(works, "", &[]));
}
