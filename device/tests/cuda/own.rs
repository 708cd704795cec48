//! What is the `cuda` device's own.

use std::ptr::null_mut;
use std::sync::mpsc::channel;

use dormouse_device::cuda::{CudaConfig, CudaDevice, Unavailable};
use dormouse_device::{AddressRange, Device, DeviceError, DeviceKind, Fill, Operation, SpanLabel};

use super::super::{CAPACITY_PAGES, PAGE_BYTES};
use super::super::{device, driver, holds, mapped, range};
use standin::{Live, UnmapRuns};

/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: i32 = 2;

fn unavailable(config: &CudaConfig) -> Unavailable {
    CudaDevice::new(config).map(|_| ()).unwrap_err()
}

#[test]
fn missing_devices_are_reported() {
    let driver = driver();
    let none = CudaConfig { ordinal: 7, ..CudaConfig::default() };
    assert_eq!(unavailable(&none), Unavailable::NoDevice { ordinal: 7, count: 1 });
    for page_bytes in [PAGE_BYTES / 2, 3 * PAGE_BYTES] {
        let config = CudaConfig { page_bytes, ..CudaConfig::default() };
        match unavailable(&config) {
            Unavailable::Device(DeviceError::BadConfig { field: "page_bytes", seen, .. }) => {
                assert_eq!(seen, page_bytes as u64);
            }
            other => panic!("{other:?}"),
        }
    }
    driver.assert_nothing_left();
}

#[test]
fn the_default_capacity_is_the_memory_of_the_gpu() {
    let driver = driver();
    let device = CudaDevice::new(&CudaConfig::default()).unwrap();
    assert_eq!(device.kind(), DeviceKind::Cuda);
    assert_eq!(device.page_bytes(), PAGE_BYTES);
    assert_eq!(device.memory_info().capacity_bytes, 64 << 20);
    assert!(device.address_space().bytes >= 64 << 20);
    drop(device);
    driver.assert_nothing_left();
}

fn two_devices() -> [CudaDevice; 2] {
    [0, 1].map(|ordinal| {
        let config = CudaConfig { ordinal, ..CudaConfig::default() };
        CudaDevice::new(&config).unwrap()
    })
}

/// Pages that are mapped, that are mapped later and that were parked: torch's copies between GPUs touch any of them.
#[test]
fn a_peer_has_access_to_all_pages() {
    standin::run_on_two_devices("a_peer_has_access_to_all_pages", || {
        let driver = driver();
        let [first, second] = two_devices();
        let before = mapped(&first, 0, 3, 1);
        first.unmap(mapped(&first, 8, 4, 1)).unwrap();
        assert!(!driver.is_accessible(1, before.start));
        first.add_peer(&second).unwrap();
        first.add_peer(&second).unwrap();
        let after = mapped(&first, 8, 8, 2);
        let pages = |range: AddressRange| (range.start..range.end()).step_by(PAGE_BYTES);
        for start in pages(before).chain(pages(after)) {
            let users = [0, 1].map(|ordinal| driver.is_accessible(ordinal, start));
            assert_eq!(users, [true; 2], "{start:#x}");
        }
        let own = mapped(&second, 0, 1, 3);
        assert!(!driver.is_accessible(0, own.start), "one direction");
        // Copies of either GPU.
        assert!(holds(&first, before, 1) && holds(&first, after, 2) && holds(&second, own, 3));
        let stream = second.create_stream("peer").unwrap();
        // SAFETY: mapped pages of both; waited for.
        unsafe { second.copy(own.start, after.start, PAGE_BYTES, &stream) }.unwrap();
        second.synchronize(&second.record(&stream).unwrap()).unwrap();
        assert!(holds(&second, own, 2));
        drop((stream, first, second));
        driver.assert_nothing_left();
    });
}

#[test]
fn a_peer_that_is_refused_costs_later_pages_nothing() {
    standin::run_on_two_devices("a_peer_that_is_refused_costs_later_pages_nothing", || {
        let driver = driver();
        let [first, second] = two_devices();
        mapped(&first, 0, 3, 1);
        driver.fail("cuMemSetAccess", 2, 1, OUT_OF_MEMORY);
        assert!(matches!(
            first.add_peer(&second),
            Err(DeviceError::Refused { code: OUT_OF_MEMORY, .. })
        ));
        assert!(matches!(first.add_peer(&first), Err(DeviceError::Refused { code: 217, .. })));
        let after = mapped(&first, 8, 8, 2);
        assert!(!driver.is_accessible(1, after.start));
        first.add_peer(&second).unwrap();
        assert!(driver.is_accessible(1, after.start));
    });
}

#[test]
fn larger_pages_are_single_handles() {
    let driver = driver();
    let config = CudaConfig { page_bytes: 4 * PAGE_BYTES, ..CudaConfig::default() };
    let device = CudaDevice::new(&config).unwrap();
    let range = AddressRange::new(device.address_space().start, 8 * PAGE_BYTES);
    device.map(range, Fill::Zero).unwrap();
    assert_eq!(driver.live(Live::Handles), 2);
    assert!(holds(&device, range, 0));
}

/// The driver is asked when the device is opened, and not taken at its word.
#[test]
fn many_pages_are_unmapped_by_one_call_where_the_driver_does_that() {
    for (way, calls) in [(UnmapRuns::Whole, 1), (UnmapRuns::Refused, 8), (UnmapRuns::First, 8)] {
        let driver = driver();
        driver.unmap_runs(way);
        let device = device();
        let current = super::caller::make_current(driver.standin);
        assert_eq!((driver.live(Live::Handles), driver.live(Live::Mappings)), (0, 0), "{way:?}");
        for _ in 0..2 {
            let range = mapped(&device, 3, 8, 9);
            let before = driver.calls("cuMemUnmap");
            device.unmap(range).unwrap();
            assert_eq!(driver.calls("cuMemUnmap") - before, calls, "{way:?}");
            assert_eq!(driver.live(Live::Mappings), 0, "{way:?}");
        }
        // Where it cannot be found out, pages go one by one.
        driver.unmap_runs(UnmapRuns::Whole);
        driver.fail("cuMemCreate", 2, 1, OUT_OF_MEMORY);
        let other = super::super::device();
        let range = mapped(&other, 0, 8, 9);
        let before = driver.calls("cuMemUnmap");
        other.unmap(range).unwrap();
        assert_eq!(driver.calls("cuMemUnmap") - before, 8);
        drop((device, other, current));
        driver.assert_nothing_left();
    }
}

/// A call that needs no context does not query it; many calls query it once.
#[test]
fn calls_for_pages_share_what_they_need() {
    const LOOKED: &str = "cuCtxGetCurrent";
    const SET_ASIDE: &str = "cuThreadExchangeStreamCaptureMode";
    let driver = driver();
    let device = device();
    let stream = device.create_stream("own").unwrap();
    let calls = |work: &dyn Fn()| {
        let before = [LOOKED, SET_ASIDE, "cuMemMap"].map(|entry| driver.calls(entry));
        work();
        [LOOKED, SET_ASIDE, "cuMemMap"].map(|entry| driver.calls(entry)).into_iter().zip(before)
    };
    let count = |work: &dyn Fn()| calls(work).map(|(now, before)| now - before).collect::<Vec<_>>();
    let there_and_back = || {
        let range = range(&device, 0, 4);
        device.map(range, Fill::Any).unwrap();
        device.unmap(range).unwrap();
    };
    // This thread has no context: the first call of each is refused (handles are made first), and
    // made again with ours.
    assert_eq!(count(&there_and_back), [2, 4, 4]);
    let ours = super::caller::make_current(driver.standin);
    assert_eq!(count(&there_and_back), [0, 4, 4]);
    let together = || {
        device.during(|| {
            there_and_back();
            assert_eq!(device.is_idle(&stream), Ok(true));
            there_and_back();
        });
    };
    // Only the stream is asked with the context looked after.
    assert_eq!(count(&together), [1, 2, 8]);
    drop(ours);
    assert_eq!(count(&together), [5, 2, 10]);
}

#[test]
fn parked_pages_are_reused_and_released_on_request() {
    let driver = driver();
    let device = device();
    let first = mapped(&device, 0, 8, 1);
    assert_eq!(driver.live(Live::Handles), 8, "each page is one handle");
    let made = driver.calls("cuMemCreate");
    device.unmap(first).unwrap();
    let parked = |pages: usize| (pages * PAGE_BYTES) as u64;
    assert_eq!(device.memory_info().parked_bytes, parked(8));
    assert_eq!(device.memory_info().mapped_bytes, 0);
    let second = range(&device, 20, 6);
    device.map(second, Fill::Any).unwrap();
    assert_eq!(driver.calls("cuMemCreate"), made, "parked pages come first");
    assert_eq!(device.memory_info().parked_bytes, parked(2));
    // Old bytes never show where zeroes were asked for.
    device.unmap(second).unwrap();
    device.map(second, Fill::Zero).unwrap();
    assert!(holds(&device, second, 0));
    // Six are mapped: seven together leave one.
    device.limit_parked(parked(7));
    assert_eq!(device.memory_info().parked_bytes, parked(1));
    assert_eq!(driver.live(Live::HandleBytes), parked(7));
    assert_eq!(device.release_parked(), parked(1));
    assert_eq!(driver.live(Live::HandleBytes), parked(6));
    device.unmap(second).unwrap();
    assert_eq!(device.memory_info().parked_bytes, parked(6), "the limit is on both together");
}

#[test]
fn parked_pages_make_way_within_the_capacity() {
    let driver = driver();
    let device = device();
    let half = CAPACITY_PAGES / 2;
    let first = mapped(&device, 0, half, 1);
    let _second = mapped(&device, half, half, 2);
    device.unmap(first).unwrap();
    assert_eq!(driver.live(Live::Handles), CAPACITY_PAGES as u64);
    // Mapped and parked never pass the capacity, whatever is taken from where.
    for pages in 1..half {
        let range = range(&device, CAPACITY_PAGES, pages);
        device.map(range, Fill::Any).unwrap();
        assert!(driver.live(Live::Handles) <= CAPACITY_PAGES as u64);
        device.unmap(range).unwrap();
        assert!(driver.live(Live::Handles) <= CAPACITY_PAGES as u64);
    }
}

#[test]
fn a_sleep_gives_the_drivers_memory_back_and_a_wake_keeps_the_address() {
    let driver = driver();
    let device = device();
    device.limit_parked(0);
    let range = mapped(&device, 3, 5, 42);
    let span = device.freeze(range, SpanLabel::default()).unwrap();
    device.seal(span).unwrap();
    assert_eq!(driver.live(Live::HandleBytes), 0);
    let staged = device.stage(span, Fill::Any).unwrap();
    assert_eq!(device.staged_address(&staged), range.start);
    super::super::write(&device, range, 43);
    device.publish(staged).map_err(|(error, _)| error).unwrap();
    assert!(holds(&device, range, 43));
}

#[test]
fn a_copy_that_would_touch_no_page_is_refused_and_the_gpu_lives() {
    let _driver = driver();
    let device = device();
    let asleep = mapped(&device, 0, 4, 1);
    let span = device.freeze(asleep, SpanLabel::default()).unwrap();
    device.seal(span).unwrap();
    let awake = mapped(&device, 4, 4, 2);
    let stream = device.create_stream("touch").unwrap();
    let page = |at: usize| range(&device, at, 1).start;
    for (to, from, at, found) in [
        (awake.start, asleep.start, page(0), "asleep"),
        (page(3), awake.start, page(3), "asleep"),
        (awake.start, page(100), page(100), "unmapped"),
        // From the middle of a page that is there into one that is not.
        (page(7) + 100, awake.start, page(8), "unmapped"),
    ] {
        // SAFETY: refused before anything is touched.
        match unsafe { device.copy(to, from, PAGE_BYTES, &stream) } {
            Err(DeviceError::WrongPages { operation: Operation::Copy, start, state, .. }) => {
                assert_eq!((start, state), (at, found));
            }
            other => panic!("{other:?}"),
        }
    }
    // SAFETY: refused before anything is touched.
    let zeroed = unsafe { device.zero(page(1) + 8, 16, &stream) };
    assert!(matches!(zeroed, Err(DeviceError::WrongPages { state: "asleep", .. })), "{zeroed:?}");
    assert!(holds(&device, awake, 2));
}

#[test]
fn the_per_thread_stream_handle_is_refused() {
    let _driver = driver();
    let device = device();
    // SAFETY: refused unlooked at.
    let refused = unsafe { device.foreign_stream(2 as *mut std::ffi::c_void) };
    assert!(matches!(refused, Err(DeviceError::ForeignStream { raw: 2, kind: "cuda", .. })));
}

#[test]
fn zeroes_come_in_the_order_of_the_stream() {
    let _driver = driver();
    let device = device();
    let range = mapped(&device, 0, 2, 9);
    let stream = device.create_stream("zero").unwrap();
    // SAFETY: mapped, ours, and waited for.
    unsafe { device.zero(range.start + 100, 1000, &stream).unwrap() };
    device.synchronize(&device.record(&stream).unwrap()).unwrap();
    let (before, rest) = range.split_at(100);
    let (zeroed, after) = rest.split_at(1000);
    assert!(holds(&device, before, 9) && holds(&device, zeroed, 0) && holds(&device, after, 9));
}

#[test]
fn callbacks_may_call_the_device_and_do_not_hold_the_stream() {
    let _driver = driver();
    let device = std::sync::Arc::new(device());
    let stream = device.create_stream("tell").unwrap();
    let range = mapped(&device, 0, 2, 3);
    let (go, gate) = channel::<()>();
    let (told, hear) = channel();
    let inside = std::sync::Arc::clone(&device);
    let work = move |ended: Result<(), DeviceError>| {
        let _ = gate.recv();
        told.send((ended, inside.unmap(range))).unwrap();
    };
    device.callback(&stream, Box::new(work)).unwrap();
    // The stream continues while a callback runs.
    device.synchronize(&device.record(&stream).unwrap()).unwrap();
    go.send(()).unwrap();
    assert_eq!(hear.recv().unwrap(), (Ok(()), Ok(())));
}

#[test]
fn kernels_are_loaded_once_and_launched_in_order() {
    let driver = driver();
    let device = device();
    static IMAGE: &[&[u8]] = &[b"an image that the stand-in takes"];
    let loads = driver.calls("cuModuleLoadData");
    let one = device.kernel(IMAGE, c"one").unwrap();
    let again = device.kernel(IMAGE, c"one").unwrap();
    let two = device.kernel(IMAGE, c"two").unwrap();
    assert_eq!(driver.calls("cuModuleLoadData"), loads + 1);
    // SAFETY: NULL is the default stream.
    let stream = unsafe { device.foreign_stream(null_mut()) }.unwrap();
    let before = driver.launches("one");
    for kernel in [&one, &again, &two] {
        // SAFETY: the stand-in's kernels read nothing.
        unsafe { device.launch(kernel, 2, 32, &[], &stream) }.unwrap();
    }
    device.synchronize(&device.record(&stream).unwrap()).unwrap();
    assert_eq!(driver.launches("one"), before + 2);
    // SAFETY: refused.
    let refused = unsafe { device.launch(&one, 0, 32, &[], &stream) };
    assert!(matches!(refused, Err(DeviceError::Refused { .. })), "{refused:?}");
}

#[test]
fn an_image_that_the_driver_refuses_is_followed_by_the_next() {
    const NO_BINARY_FOR_GPU: i32 = 209;
    let driver = driver();
    let device = device();
    static IMAGES: &[&[u8]] = &[b"machine code of a newer toolkit", b"code that is translated"];
    let loads = driver.calls("cuModuleLoadData");
    driver.fail("cuModuleLoadData", 1, 1, NO_BINARY_FOR_GPU);
    device.kernel(IMAGES, c"one").unwrap();
    device.kernel(IMAGES, c"two").unwrap();
    assert_eq!(driver.calls("cuModuleLoadData"), loads + 2);
    let device = self::device();
    driver.fail("cuModuleLoadData", 1, 2, NO_BINARY_FOR_GPU);
    let refused = device.kernel(IMAGES, c"one");
    assert!(matches!(refused, Err(DeviceError::Refused { .. })), "{refused:?}");
    assert_eq!(driver.calls("cuModuleLoadData"), loads + 4);
}

#[test]
fn the_device_says_how_long_ago_a_point_was_reached() {
    let _driver = driver();
    let device = device();
    let stream = device.create_stream("time").unwrap();
    let plain = device.record(&stream).unwrap();
    let first = device.record_timed(&stream).unwrap();
    device.synchronize(&first).unwrap();
    let start = std::time::Instant::now();
    std::thread::sleep(std::time::Duration::from_millis(20));
    let second = device.record_timed(&stream).unwrap();
    device.synchronize(&second).unwrap();
    // Asked about in this order, what passes between makes the older one older.
    let newer = device.age(&second).unwrap();
    let older = device.age(&first).unwrap();
    assert!(older >= newer + std::time::Duration::from_millis(15), "{older:?} {newer:?}");
    assert!(older <= start.elapsed() + std::time::Duration::from_secs(1));
    let between = device.between(&first, &second).unwrap();
    assert!(between >= std::time::Duration::from_millis(20) && between <= older, "{between:?}");
    assert_eq!(device.between(&second, &first), None, "it was before");
    assert_eq!(device.between(&plain, &second), None, "it has no time");
    assert_eq!(device.age(&plain), None, "it has no time");
    let (go, gate) = channel::<()>();
    let until = Box::new(move || {
        let _ = gate.recv();
    });
    dormouse_device::Hold::hold(&device, &stream, until).unwrap();
    let later = device.record_timed(&stream).unwrap();
    assert_eq!(device.age(&later), None, "it has not been reached");
    assert_eq!(device.between(&first, &later), None, "it has not been reached");
    drop(go);
}
