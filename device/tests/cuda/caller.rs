//! What the caller has of its own: a context that is current, a stream that is being captured.

use std::ffi::c_void;

use dormouse_device::cuda::{CudaDevice, Stream};
use dormouse_device::{Device, DeviceError, SpanLabel};
use standin::Standin;

use super::super::{PAGE_BYTES, device, driver, holds, mapped};

/// An entry point of the driver.
///
/// # Safety
/// `F` is its type.
unsafe fn entry<F: Copy>(driver: Standin, name: &str) -> F {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    // SAFETY: a function pointer, of the type the caller says.
    unsafe { std::mem::transmute_copy(&driver.symbol(name)) }
}

/// The context that is current on this thread.
fn current(driver: Standin) -> usize {
    let mut context = 0;
    // SAFETY: it writes one handle.
    unsafe {
        let get: unsafe extern "C" fn(*mut usize) -> i32 = entry(driver, "cuCtxGetCurrent");
        assert_eq!(get(&raw mut context), 0);
    }
    context
}

/// The primary context, current on this thread while this lives.
pub(super) struct Current(Standin);

/// Makes the primary context current on this thread.
pub(super) fn make_current(driver: Standin) -> Current {
    let mut context = 0;
    // SAFETY: these are the entry points' types; one writes one handle, the other takes it.
    unsafe {
        type Retain = unsafe extern "C" fn(*mut usize, i32) -> i32;
        let retain: Retain = entry(driver, "cuDevicePrimaryCtxRetain");
        let set: unsafe extern "C" fn(usize) -> i32 = entry(driver, "cuCtxSetCurrent");
        assert_eq!((retain(&raw mut context, 0), set(context)), (0, 0));
    }
    Current(driver)
}

impl Drop for Current {
    fn drop(&mut self) {
        // SAFETY: these are the entry points' types; what `make_current` did is undone.
        unsafe {
            let set: unsafe extern "C" fn(usize) -> i32 = entry(self.0, "cuCtxSetCurrent");
            let release: unsafe extern "C" fn(i32) -> i32 =
                entry(self.0, "cuDevicePrimaryCtxRelease_v2");
            assert_eq!((set(0), release(0)), (0, 0));
        }
    }
}

#[test]
fn the_callers_context_is_left_as_it_was() {
    let driver = driver();
    let standin = driver.standin;
    let device = device();
    std::thread::scope(|scope| {
        let fresh = scope.spawn(|| {
            assert_eq!(current(standin), 0, "a new thread has none");
            let range = mapped(&device, 0, 2, 5);
            assert!(holds(&device, range, 5));
            // SAFETY: NULL is the default stream.
            let null = unsafe { device.foreign_stream(std::ptr::null_mut()) }.unwrap();
            assert_eq!(device.is_captured(&null), Ok(false));
            let done = device.record(&null).unwrap();
            device.synchronize(&done).unwrap();
            assert_eq!(device.query(&done), Ok(true));
            assert_eq!(current(standin), 0);
        });
        fresh.join().unwrap();
    });
}

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// A stream of the caller's.
struct Foreign {
    driver: Standin,
    handle: usize,
}

impl Foreign {
    fn create(driver: Standin, flags: u32) -> Self {
        let (mut context, mut handle) = (0, 0);
        // SAFETY: these are the entry points' types; each writes one handle, or takes one.
        unsafe {
            type Retain = unsafe extern "C" fn(*mut usize, i32) -> i32;
            let retain: Retain = entry(driver, "cuDevicePrimaryCtxRetain");
            let set: unsafe extern "C" fn(usize) -> i32 = entry(driver, "cuCtxSetCurrent");
            type Create = unsafe extern "C" fn(*mut usize, u32) -> i32;
            let create: Create = entry(driver, "cuStreamCreate");
            assert_eq!(retain(&raw mut context, 0), 0);
            assert_eq!(set(context), 0);
            assert_eq!(create(&raw mut handle, flags), 0);
        }
        Self { driver, handle }
    }

    /// A stream that is captured in the strictest mode.
    fn captured(driver: Standin, flags: u32) -> Self {
        const GLOBAL: i32 = 0; // every thread's calls count
        let foreign = Self::create(driver, flags);
        // SAFETY: the entry point's type; it takes one handle.
        unsafe {
            type Begin = unsafe extern "C" fn(usize, i32) -> i32;
            let begin: Begin = entry(driver, "cuStreamBeginCapture_v2");
            assert_eq!(begin(foreign.handle, GLOBAL), 0);
        }
        foreign
    }

    /// The device's handle of it. It is used after `destroy` only where the stand-in refuses that.
    fn stream(&self, device: &CudaDevice) -> Stream {
        // SAFETY: a live stream.
        unsafe { device.foreign_stream(self.handle as *mut c_void) }.unwrap()
    }

    /// What the driver says of the capture at its end.
    fn end_capture(&self) -> i32 {
        let mut graph = 0;
        // SAFETY: the entry point's type; it takes one handle and writes one.
        unsafe {
            type End = unsafe extern "C" fn(usize, *mut usize) -> i32;
            let end: End = entry(self.driver, "cuStreamEndCapture");
            end(self.handle, &raw mut graph)
        }
    }

    fn destroy(self) {
        // SAFETY: these are the entry points' types; what `create` did is undone.
        unsafe {
            type Destroy = unsafe extern "C" fn(usize) -> i32;
            let destroy: Destroy = entry(self.driver, "cuStreamDestroy_v2");
            let set: unsafe extern "C" fn(usize) -> i32 = entry(self.driver, "cuCtxSetCurrent");
            type Release = unsafe extern "C" fn(i32) -> i32;
            let release: Release = entry(self.driver, "cuDevicePrimaryCtxRelease_v2");
            assert_eq!((destroy(self.handle), set(0), release(0)), (0, 0, 0));
        }
    }
}

#[test]
fn a_capture_is_neither_joined_nor_broken() {
    let driver = driver();
    let device = device();
    let ours = device.create_stream("ours").unwrap();
    let before = device.record(&ours).unwrap();
    let foreign = Foreign::captured(driver.standin, NON_BLOCKING);
    let captured = foreign.stream(&device);
    let refused = |result: Result<(), DeviceError>| {
        assert!(matches!(result, Err(DeviceError::Refused { code: 900, .. })), "{result:?}");
    };
    assert_eq!(device.is_captured(&captured), Ok(true));
    assert_eq!(device.is_captured(&ours), Ok(false));
    refused(device.record(&captured).map(|_| ()));
    refused(device.wait(&captured, &before));
    refused(device.callback(&captured, Box::new(|_| panic!("it was refused"))));
    let range = mapped(&device, 0, 3, 7);
    // SAFETY: refused before anything is queued.
    refused(unsafe { device.copy(range.start, range.start + PAGE_BYTES, 64, &captured) });
    // Other calls succeed during the capture and leave it valid.
    assert!(holds(&device, range, 7));
    let span = device.freeze(range, SpanLabel::default()).unwrap();
    device.seal(span).unwrap();
    device.forget(span).unwrap();
    device.synchronize(&before).unwrap();
    assert_eq!(device.query(&before), Ok(true));
    assert_eq!(foreign.end_capture(), 0, "the capture was invalidated");
    foreign.destroy();
}

/// Another thread begins to capture a stream between the question and the record. A query of that event breaks its capture.
#[test]
fn an_event_that_a_capture_took_is_not_returned() {
    let driver = driver();
    let device = device();
    let foreign = Foreign::create(driver.standin, NON_BLOCKING);
    let stream = foreign.stream(&device);
    for is_timed in [false, true] {
        driver.capture_at_record(foreign.handle);
        let recorded = if is_timed { device.record_timed(&stream) } else { device.record(&stream) };
        // As its users do.
        let seen = recorded.and_then(|event| device.query(&event));
        assert!(matches!(seen, Err(DeviceError::Refused { code: 900, .. })), "{seen:?}");
        assert_eq!(foreign.end_capture(), 0, "the capture was invalidated");
        let event = device.record(&stream).unwrap();
        device.synchronize(&event).unwrap();
    }
    foreign.destroy();
}

/// The driver may name the context where only the stream is gone. A GPU that is lost answers no question at all.
#[test]
fn a_destroyed_stream_is_no_lost_device() {
    let driver = driver();
    let device = device();
    let foreign = Foreign::create(driver.standin, NON_BLOCKING);
    let (stream, ours) = (foreign.stream(&device), device.create_stream("ours").unwrap());
    foreign.destroy();
    let refusals = || {
        [
            device.record(&stream).map(drop),
            device.is_idle(&stream).map(drop),
            device.is_captured(&stream).map(drop),
        ]
    };
    for code in [400, 709] {
        driver.fail("cuStreamIsCapturing", 1, 3, code);
        for refused in refusals() {
            assert!(refused.as_ref().is_err_and(DeviceError::is_unknown_handle), "{refused:?}");
        }
    }
    driver.fail("cuEventRecord", 1, 1, 709);
    let refused = device.record(&ours);
    assert!(matches!(refused, Err(DeviceError::DeviceLost { .. })), "{refused:?}");
    driver.lose(709);
    for refused in refusals() {
        assert!(matches!(refused, Err(DeviceError::DeviceLost { .. })), "{refused:?}");
    }
}

/// The driver refuses to say of the legacy stream, as a blocking one is being captured.
#[test]
fn the_legacy_stream_is_never_captured() {
    let driver = driver();
    let device = device();
    // SAFETY: NULL is the default stream.
    let null = unsafe { device.foreign_stream(std::ptr::null_mut()) }.unwrap();
    let foreign = Foreign::captured(driver.standin, 0);
    assert_eq!(device.is_captured(&null), Ok(false));
    let refused = device.record(&null).unwrap_err();
    assert!(matches!(refused, DeviceError::Refused { code: 906, .. }), "{refused}");
    assert_eq!(foreign.end_capture(), 0);
    foreign.destroy();
}
