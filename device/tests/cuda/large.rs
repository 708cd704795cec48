//! Large pages of the `cuda` device: where they are, that they leave whole, and refusals of the driver's between
//! pages of two sizes.

use dormouse_device::cuda::{CudaConfig, CudaDevice, Unavailable};
use dormouse_device::{AddressRange, Device, DeviceError, Fill, Operation, Sealed, SpanLabel};
use standin::{Live, UnmapRuns};

use super::super::{CAPACITY_PAGES, Driver, PAGE_BYTES};
use super::super::{driver, holds, range, write};

const OUT_OF_MEMORY: i32 = 2;
const UNKNOWN: i32 = 999;
const LARGE_PAGES: usize = 4;
/// Two pages, two large pages and a page, from page `FIRST` on.
const FIRST: usize = 2;
const PAGES: usize = 11;
const HANDLES: u64 = 5;

fn device() -> CudaDevice {
    let config = CudaConfig {
        reserve_bytes: 4 * CAPACITY_PAGES * PAGE_BYTES,
        capacity_bytes: (CAPACITY_PAGES * PAGE_BYTES) as u64,
        large_page_bytes: LARGE_PAGES * PAGE_BYTES,
        ..CudaConfig::default()
    };
    CudaDevice::new(&config).unwrap()
}

fn mapped(device: &CudaDevice, byte: u8) -> AddressRange {
    let range = range(device, FIRST, PAGES);
    device.map_large(range, range, Fill::Any).unwrap();
    write(device, range, byte);
    range
}

fn bytes(pages: usize) -> u64 {
    (pages * PAGE_BYTES) as u64
}

/// Every handle is mapped or parked, and every byte of them is counted.
fn assert_counted(driver: &Driver, device: &CudaDevice, mapped_pages: usize) {
    let info = device.memory_info();
    assert_eq!(info.mapped_bytes, bytes(mapped_pages));
    assert_eq!(driver.live(Live::HandleBytes), info.mapped_bytes + info.parked_bytes);
}

#[test]
fn large_pages_are_aligned_and_lie_in_their_part_only() {
    let driver = driver();
    let device = device();
    assert_eq!(device.large_page_bytes(), LARGE_PAGES * PAGE_BYTES);
    assert!(device.address_space().start.is_multiple_of(device.large_page_bytes()));
    let all = mapped(&device, 1);
    assert_eq!(driver.live(Live::Handles), HANDLES);
    device.unmap(all).unwrap();
    device.release_parked();
    // The part ends within the second one.
    device.map_large(all, range(&device, FIRST, PAGES - 2), Fill::Any).unwrap();
    assert_eq!(driver.live(Live::Handles), HANDLES + 3);
    device.unmap(all).unwrap();
    device.release_parked();
    device.map(all, Fill::Any).unwrap();
    assert_eq!(driver.live(Live::Handles), PAGES as u64, "plain maps have none");
    assert!(device.unmap(range(&device, FIRST, 3)).is_ok(), "and go page by page");
    drop(device);
    driver.assert_nothing_left();
}

#[test]
fn their_size_is_checked_and_the_default_is_no_less_than_a_page() {
    let driver = driver();
    for large_page_bytes in [PAGE_BYTES / 2, 3 * PAGE_BYTES] {
        let config = CudaConfig { large_page_bytes, ..CudaConfig::default() };
        match CudaDevice::new(&config).map(|_| ()).unwrap_err() {
            Unavailable::Device(DeviceError::BadConfig {
                field: "large_page_bytes", seen, ..
            }) => assert_eq!(seen, large_page_bytes as u64),
            other => panic!("{other:?}"),
        }
    }
    let of = |page_bytes| {
        let config = CudaConfig { page_bytes, reserve_bytes: 64 << 20, ..CudaConfig::default() };
        CudaDevice::new(&config).unwrap().large_page_bytes()
    };
    assert_eq!(of(0), 16 << 20);
    assert_eq!(of(32 << 20), 32 << 20);
    driver.assert_nothing_left();
}

#[test]
fn a_part_of_a_large_page_stays() {
    let driver = driver();
    let device = device();
    let all = mapped(&device, 7);
    // Begins in one, ends in one, lies in one.
    for (first, count, split) in [(5, 8, 4), (FIRST, 4, 4), (5, 2, 4), (8, 1, 8), (9, 4, 8)] {
        let part = range(&device, first, count);
        let start = range(&device, split, 1).start;
        for (operation, outcome) in [
            (Operation::Unmap, device.unmap(part)),
            (Operation::Freeze, device.freeze(part, SpanLabel::default()).map(drop)),
        ] {
            match outcome {
                Err(DeviceError::WrongPages { operation: seen, start: at, .. }) => {
                    assert_eq!((seen, at), (operation, start), "pages {first}+{count}");
                }
                other => panic!("pages {first}+{count}: {other:?}"),
            }
        }
    }
    assert!(holds(&device, all, 7));
    // Whole ones go apart.
    device.unmap(range(&device, 8, LARGE_PAGES)).unwrap();
    assert_counted(&driver, &device, PAGES - LARGE_PAGES);
    assert!(
        holds(&device, range(&device, FIRST, 6), 7) && holds(&device, range(&device, 12, 1), 7)
    );
    // What is missing is found between them.
    let gap = range(&device, 7, 2);
    let stream = device.create_stream("gap").unwrap();
    // SAFETY: refused.
    let zeroed = unsafe { device.zero(gap.start, gap.bytes, &stream) };
    let missing = range(&device, 8, 1).start;
    assert!(matches!(zeroed, Err(DeviceError::WrongPages { start, .. }) if start == missing));
}

#[test]
fn parked_handles_of_one_size_make_way_for_the_other() {
    let driver = driver();
    let device = device();
    let half = CAPACITY_PAGES / 2;
    let (low, high) = (range(&device, 0, half), range(&device, half, half));
    device.map_large(low, low, Fill::Any).unwrap();
    device.map(high, Fill::Any).unwrap();
    for (leaving, coming) in [(low, low), (high, high), (low, low)] {
        device.unmap(leaving).unwrap();
        assert_counted(&driver, &device, half);
        device.map(coming, Fill::Any).unwrap();
        assert_counted(&driver, &device, CAPACITY_PAGES);
        device.unmap(coming).unwrap();
        device.map_large(coming, coming, Fill::Any).unwrap();
        assert_counted(&driver, &device, CAPACITY_PAGES);
        assert!(driver.live(Live::HandleBytes) <= bytes(CAPACITY_PAGES));
    }
    // The driver has less than the capacity: what is parked is given back for it, whichever its size.
    device.unmap(low).unwrap();
    assert_eq!(device.memory_info().parked_bytes, bytes(half));
    driver.fail("cuMemCreate", 1, 1, OUT_OF_MEMORY);
    device.map(range(&device, 0, 1), Fill::Any).unwrap();
    assert_eq!(device.memory_info().parked_bytes, 0);
    assert_counted(&driver, &device, half + 1);
}

#[test]
fn a_large_page_that_cannot_be_created_is_pages() {
    let driver = driver();
    let device = device();
    let all = range(&device, FIRST, PAGES);
    driver.fail("cuMemCreate", 2, 1, OUT_OF_MEMORY);
    device.map_large(all, all, Fill::Zero).unwrap();
    assert_eq!(driver.live(Live::Handles), HANDLES - 1 + LARGE_PAGES as u64);
    assert!(holds(&device, all, 0));
    device.unmap(all).unwrap();
    assert_counted(&driver, &device, 0);
}

#[test]
fn a_map_of_both_sizes_that_fails_at_any_call_leaves_the_range_as_it_was() {
    let driver = driver();
    let device = device();
    let all = range(&device, FIRST, PAGES);
    // A page after a large one that could not be created fails too.
    for (entry, count, fails) in
        [("cuMemCreate", HANDLES, u64::MAX), ("cuMemMap", HANDLES, 1), ("cuMemSetAccess", 1, 1)]
    {
        for nth in 1..=count {
            device.release_parked();
            driver.fail(entry, nth, fails, OUT_OF_MEMORY);
            let refused = device.map_large(all, all, Fill::Any);
            driver.heal();
            match refused {
                Err(DeviceError::OutOfMemory {
                    operation: Operation::Map, asked_bytes, ..
                }) => {
                    assert_eq!(asked_bytes, all.bytes as u64);
                }
                other => panic!("{entry} {nth}: {other:?}"),
            }
            assert_eq!(driver.live(Live::Mappings), 0, "{entry} {nth}");
            assert_counted(&driver, &device, 0);
            device.map_large(all, all, Fill::Zero).unwrap();
            assert!(holds(&device, all, 0));
            device.unmap(all).unwrap();
        }
    }
    drop(device);
    driver.assert_nothing_left();
}

#[test]
fn an_unmap_of_both_sizes_that_fails_at_any_call_leaves_every_byte() {
    for (way, calls) in [(UnmapRuns::Refused, HANDLES), (UnmapRuns::Whole, 1)] {
        let driver = driver();
        driver.unmap_runs(way);
        let device = device();
        let all = mapped(&device, 77);
        for nth in 1..=calls {
            driver.fail("cuMemUnmap", nth, 1, UNKNOWN);
            assert!(matches!(device.unmap(all), Err(DeviceError::Refused { code: 999, .. })));
            assert_counted(&driver, &device, PAGES);
            assert!(holds(&device, all, 77), "at handle {nth}");
        }
        assert!(device.unmap(range(&device, 5, 2)).is_err(), "its large pages are known");
        device.unmap(all).unwrap();
        assert_counted(&driver, &device, 0);
    }
}

#[test]
fn a_sleep_and_a_wake_keep_the_address_and_change_the_size() {
    let driver = driver();
    driver.unmap_runs(UnmapRuns::Refused);
    let device = device();
    let all = range(&device, FIRST, PAGES);
    device.map(all, Fill::Any).unwrap();
    let span = device.freeze(all, SpanLabel::default()).unwrap();
    assert_eq!(device.seal(span), Ok(Sealed::Asleep));
    device.release_parked();
    for (entry, nth) in [("cuMemMap", 3), ("cuMemSetAccess", 1)] {
        driver.fail(entry, nth, 1, OUT_OF_MEMORY);
        assert!(device.stage_large(span, Fill::Any).is_err(), "{entry}");
        assert_counted(&driver, &device, 0);
    }
    device.release_parked();
    let staged = device.stage_large(span, Fill::Any).unwrap();
    assert_eq!(driver.live(Live::Handles), HANDLES);
    write(&device, all, 43);
    device.publish(staged).map_err(|(error, _)| error).unwrap();
    // Frozen and sealed again, in spite of a refusal at the second large page.
    let span = device.freeze(all, SpanLabel::default()).unwrap();
    driver.fail("cuMemUnmap", 4, 1, UNKNOWN);
    assert!(matches!(device.seal(span), Err(DeviceError::Refused { .. })));
    assert!(holds(&device, all, 43));
    assert_eq!(device.seal(span), Ok(Sealed::Asleep));
    drop(device.stage_large(span, Fill::Any).unwrap());
    assert_counted(&driver, &device, 0);
    device.forget(span).unwrap();
    device.map(all, Fill::Zero).unwrap();
    assert!(holds(&device, all, 0));
    drop(device);
    driver.assert_nothing_left();
}

#[test]
fn handles_of_both_sizes_never_exceed_the_most_that_was_mapped() {
    let driver = driver();
    let device = device();
    let all = range(&device, 0, CAPACITY_PAGES / 2);
    for large in [all, AddressRange::default(), all] {
        match large.bytes {
            0 => device.map(all, Fill::Any).unwrap(),
            _ => device.map_large(all, large, Fill::Any).unwrap(),
        }
        assert_eq!(driver.live(Live::HandleBytes), all.bytes as u64);
        device.unmap(all).unwrap();
        assert_eq!(driver.live(Live::HandleBytes), all.bytes as u64);
    }
}
