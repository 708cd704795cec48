//! What the caller has of its own: a context that is current, a stream that is being captured.

use std::ffi::c_void;

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

/// A stream that is captured in the strictest mode.
struct Capture {
    driver: Standin,
    stream: usize,
}

impl Capture {
    fn begin(driver: Standin, flags: u32) -> Self {
        const GLOBAL: i32 = 0; // every thread's calls count
        let (mut context, mut stream) = (0, 0);
        // SAFETY: these are the entry points' types; each writes one handle, or takes one.
        unsafe {
            type Retain = unsafe extern "C" fn(*mut usize, i32) -> i32;
            let retain: Retain = entry(driver, "cuDevicePrimaryCtxRetain");
            let set: unsafe extern "C" fn(usize) -> i32 = entry(driver, "cuCtxSetCurrent");
            type Create = unsafe extern "C" fn(*mut usize, u32) -> i32;
            let create: Create = entry(driver, "cuStreamCreate");
            type Begin = unsafe extern "C" fn(usize, i32) -> i32;
            let begin: Begin = entry(driver, "cuStreamBeginCapture_v2");
            assert_eq!(retain(&raw mut context, 0), 0);
            assert_eq!(set(context), 0);
            assert_eq!(create(&raw mut stream, flags), 0);
            assert_eq!(begin(stream, GLOBAL), 0);
        }
        Self { driver, stream }
    }

    /// What the driver says of the capture at its end.
    fn end(self) -> i32 {
        let mut graph = 0;
        // SAFETY: these are the entry points' types; the stream is that of `begin`.
        unsafe {
            type End = unsafe extern "C" fn(usize, *mut usize) -> i32;
            let end: End = entry(self.driver, "cuStreamEndCapture");
            type Destroy = unsafe extern "C" fn(usize) -> i32;
            let destroy: Destroy = entry(self.driver, "cuStreamDestroy_v2");
            let set: unsafe extern "C" fn(usize) -> i32 = entry(self.driver, "cuCtxSetCurrent");
            type Release = unsafe extern "C" fn(i32) -> i32;
            let release: Release = entry(self.driver, "cuDevicePrimaryCtxRelease_v2");
            let ended = end(self.stream, &raw mut graph);
            assert_eq!(destroy(self.stream), 0);
            assert_eq!(set(0), 0);
            assert_eq!(release(0), 0);
            ended
        }
    }
}

#[test]
fn a_capture_is_neither_joined_nor_broken() {
    let driver = driver();
    let device = device();
    let ours = device.create_stream("ours").unwrap();
    let before = device.record(&ours).unwrap();
    let capture = Capture::begin(driver.standin, NON_BLOCKING);
    // SAFETY: a live stream.
    let captured = unsafe { device.foreign_stream(capture.stream as *mut c_void) }.unwrap();
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
    assert_eq!(capture.end(), 0, "the capture was invalidated");
}

/// The driver refuses to say of the legacy stream, as a blocking one is being captured.
#[test]
fn the_legacy_stream_is_never_captured() {
    let driver = driver();
    let device = device();
    // SAFETY: NULL is the default stream.
    let null = unsafe { device.foreign_stream(std::ptr::null_mut()) }.unwrap();
    let capture = Capture::begin(driver.standin, 0);
    assert_eq!(device.is_captured(&null), Ok(false));
    let refused = device.record(&null).unwrap_err();
    assert!(matches!(refused, DeviceError::Refused { code: 906, .. }), "{refused}");
    assert_eq!(capture.end(), 0);
}
