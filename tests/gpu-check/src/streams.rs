//! What the driver says of a stream that was destroyed: its users must be able to tell it from a lost GPU.

use dormouse_device::Device;
use dormouse_device::cuda::{CudaConfig, CudaDevice};
use serde_json::{Value, json};

use crate::Options;
use crate::plain::Plain;

/// The driver's codes, and whether the device calls the handle unknown.
pub(crate) fn check(_: &Options) -> Value {
    type OfStream = unsafe extern "C" fn(usize) -> i32;
    let plain = Plain::open();
    let device = CudaDevice::new(&CudaConfig::default()).unwrap();
    let (handle, mut status, mut event) = (plain.stream(), 0_i32, 0_usize);
    // SAFETY: a live stream.
    let stream = unsafe { device.foreign_stream(handle as *mut _) }.unwrap();
    // SAFETY: the entry points' types. Those that are called with the destroyed stream are what is measured: this process
    // has nothing to lose.
    let codes = unsafe {
        let destroy: OfStream = plain.entry(c"cuStreamDestroy_v2");
        let is_capturing: unsafe extern "C" fn(usize, *mut i32) -> i32 =
            plain.entry(c"cuStreamIsCapturing");
        let query: OfStream = plain.entry(c"cuStreamQuery");
        let create: unsafe extern "C" fn(*mut usize, u32) -> i32 = plain.entry(c"cuEventCreate");
        let record: unsafe extern "C" fn(usize, usize) -> i32 = plain.entry(c"cuEventRecord");
        assert_eq!((create(&raw mut event, 0), destroy(handle)), (0, 0));
        json!({
            "is_capturing": is_capturing(handle, &raw mut status),
            "query": query(handle),
            "record": record(event, handle),
        })
    };
    let refused = device.record(&stream).err();
    let is_unknown = refused.as_ref().is_some_and(dormouse_device::DeviceError::is_unknown_handle);
    let said = refused.map(|error| error.to_string());
    json!({ "destroyed": codes, "is_unknown": is_unknown, "said": said })
}
