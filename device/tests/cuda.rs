//! The `cuda` device does what every device must, on the stand-in driver.
#![cfg(not(loom))]

use dormouse_device::conformance;
use dormouse_device::cuda::{CudaConfig, CudaDevice};
use dormouse_device::faulty::Faulty;

/// Bytes of a page: the stand-in's granularity.
const PAGE_BYTES: usize = 64 << 10;

/// A device of 64 pages, in a space of four times that.
#[expect(clippy::unwrap_used, reason = "a test without its device has failed")]
fn device() -> CudaDevice {
    let capacity_bytes = 64 * PAGE_BYTES as u64;
    let reserve_bytes = 4 * capacity_bytes as usize;
    CudaDevice::new(&CudaConfig { reserve_bytes, capacity_bytes, ..CudaConfig::default() }).unwrap()
}

#[test]
fn the_cuda_device_conforms() {
    conformance::run(&device);
}

#[test]
fn so_does_a_faulty_one_without_faults() {
    conformance::run(&|| Faulty::new(device()));
}
