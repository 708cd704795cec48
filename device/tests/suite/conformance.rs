//! The host device does what every device must, also behind a wrapper that injects nothing.

use dormouse_device::faulty::Faulty;
use dormouse_device::host::{HostConfig, HostDevice, guard, os_page_bytes};
use dormouse_device::{conformance, host};

/// A device of 64 pages of `page_bytes`, in a space of four times that.
#[expect(clippy::unwrap_used, reason = "a test without its device has failed")]
fn device(page_bytes: usize) -> HostDevice {
    let capacity_bytes = 64 * page_bytes as u64;
    let reserve_bytes = 4 * capacity_bytes as usize;
    HostDevice::new(HostConfig { reserve_bytes, capacity_bytes, page_bytes }).unwrap()
}

#[test]
fn the_host_device_conforms() {
    guard::install().unwrap();
    assert!(guard::is_installed());
    conformance::run(&|| device(os_page_bytes()));
}

#[test]
fn a_device_with_larger_pages_conforms() {
    guard::install().unwrap();
    conformance::run(&|| device(16 * os_page_bytes()));
}

#[test]
fn a_device_with_parked_pages_conforms() {
    guard::install().unwrap();
    // Each page is long enough to go from one owner to the next.
    conformance::run(&|| device(512 << 10));
}

#[test]
fn a_faulty_device_without_faults_conforms() {
    guard::install().unwrap();
    conformance::run(&|| Faulty::<host::HostDevice>::new(device(os_page_bytes())));
}
