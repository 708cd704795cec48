//! What the system refuses leaves everything as it was. The process runs out of mappings here, so
//! it is a process of its own.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::io::Write as _;
use std::ptr::null_mut;

use dormouse_device::host::{HostConfig, HostDevice, guard, os_page_bytes};
use dormouse_device::{AddressRange, Device, DeviceError, Fill, Operation, Sealed, SpanLabel};

/// Limits above this cost more time and kernel memory than the test is worth.
const MAPPINGS_MAX: usize = 1 << 18;

/// Mappings that use up what the system allows a process.
struct Hoard {
    pages: AddressRange,
}

impl Hoard {
    fn new(limit: usize) -> Self {
        let bytes = (limit + 64) * os_page_bytes();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh mapping.
        let start = unsafe { libc::mmap(null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        Self { pages: AddressRange::new(start as usize, bytes) }
    }

    /// Splits the mapping at every other page until the system refuses.
    fn fill(&self) {
        for start in (self.pages.start..self.pages.end()).step_by(2 * os_page_bytes()) {
            let page = start as *mut libc::c_void;
            // SAFETY: our own pages.
            if unsafe { libc::mprotect(page, os_page_bytes(), libc::PROT_READ) } != 0 {
                return;
            }
        }
        unreachable!("the system has no limit on mappings");
    }
}

impl Drop for Hoard {
    fn drop(&mut self) {
        // SAFETY: our own mapping.
        unsafe { libc::munmap(self.pages.start as *mut libc::c_void, self.pages.bytes) };
    }
}

fn assert_refused<T: std::fmt::Debug>(result: Result<T, DeviceError>, asked: Operation) {
    match result {
        Err(DeviceError::Refused { operation, code, .. }) => {
            assert_eq!((operation, code), (asked, libc::ENOMEM));
        }
        other => unreachable!("{asked:?} gave {other:?}"),
    }
}

fn bytes(range: AddressRange) -> &'static [u8] {
    // SAFETY: mapped, and written only between two calls of this.
    unsafe { std::slice::from_raw_parts(range.start as *const u8, range.bytes) }
}

fn fill(range: AddressRange, byte: u8) {
    // SAFETY: mapped or staged pages of the test's own.
    unsafe { std::ptr::write_bytes(range.start as *mut u8, byte, range.bytes) };
}

#[test]
fn out_of_mappings_every_call_is_refused_and_nothing_is_lost() {
    // Pages too short for parking, and such that go through it.
    for page_bytes in [os_page_bytes(), 256 << 10] {
        refuse_everything(page_bytes);
    }
}

fn refuse_everything(page: usize) {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
    let limit: usize = limit.trim().parse().unwrap();
    if limit > MAPPINGS_MAX {
        // Straight to the descriptor: libtest captures what `println!` writes in a test that passes.
        let _ = writeln!(
            std::io::stderr(),
            "skipped: {limit} mappings are allowed; the test uses up to {MAPPINGS_MAX}"
        );
        return;
    }
    guard::install().unwrap();
    let config =
        HostConfig { reserve_bytes: 64 * page, capacity_bytes: 64 * page as u64, page_bytes: page };
    let device = HostDevice::new(config).unwrap();
    let pages =
        |first, count| AddressRange::new(device.address_space().start + first * page, count * page);
    let (whole, middle) = (pages(0, 9), pages(3, 3));
    device.map(whole, Fill::Zero).unwrap();
    fill(whole, 7);
    let asleep = pages(20, 3);
    device.map(asleep, Fill::Zero).unwrap();
    let span = device.freeze(asleep, SpanLabel::default()).unwrap();
    assert_eq!(device.seal(span), Ok(Sealed::Asleep));
    let staged = device.stage(span, Fill::Any).unwrap();
    fill(AddressRange::new(device.staged_address(&staged), asleep.bytes), 9);

    // Parked where zeroes are wanted.
    device.map(pages(40, 3), Fill::Any).unwrap();
    fill(pages(40, 3), 5);
    device.unmap(pages(40, 3)).unwrap();
    let hoard = Hoard::new(limit);
    hoard.fill();
    let info = device.memory_info();
    let freeze = device.freeze(middle, SpanLabel::default());
    let unmap = device.unmap(middle);
    let map = device.map(pages(40, 3), Fill::Zero);
    let publish = device.publish(staged);
    let unchanged = device.memory_info() == info;
    drop(hoard);

    assert!(unchanged, "a refused call counts nothing");
    assert_refused(freeze, Operation::Freeze);
    assert_refused(unmap, Operation::Unmap);
    assert_refused(map, Operation::Map);
    assert!(bytes(whole).iter().all(|byte| *byte == 7));
    fill(whole, 8);
    let Err((error, staged)) = publish else { unreachable!("published without mappings") };
    assert_refused::<()>(Err(error), Operation::Publish);
    // With mappings available, every operation continues.
    device.publish(staged).map_err(|(error, _)| error).unwrap();
    assert!(bytes(asleep).iter().all(|byte| *byte == 9));
    let span = device.freeze(middle, SpanLabel::default()).unwrap();
    device.thaw(span).unwrap();
    device.unmap(middle).unwrap();
    device.map(pages(40, 3), Fill::Zero).unwrap();
    assert!(bytes(pages(40, 3)).iter().all(|byte| *byte == 0));
}
