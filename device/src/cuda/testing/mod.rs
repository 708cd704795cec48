//! Host functions in a stream, for tests that hold a stream up.

use std::ffi::c_void;

use super::entries::check;
use super::{CudaDevice, Stream};
use crate::{AddressRange, DeviceError, Operation};

impl CudaDevice {
    /// Runs `work` inside the driver when `stream` reaches it; later work of the stream waits for
    /// it. `work` must not call the driver.
    pub(crate) fn host_function(
        &self,
        stream: &Stream,
        work: Box<dyn FnOnce() + Send>,
    ) -> Result<(), DeviceError> {
        /// Runs the work, whose box `data` is.
        unsafe extern "C" fn run(data: *mut c_void) {
            // SAFETY: boxed below, and the driver calls once.
            let work = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
            work();
        }
        let data = Box::into_raw(Box::new(work));
        let launched =
            self.space.queue(stream, Operation::Callback, AddressRange::default(), || {
                let entries = self.space.context.entries;
                // SAFETY: `run` takes what `data` is.
                check(unsafe { (entries.launch_host_function)(stream.handle(), run, data.cast()) })
            });
        if launched.is_err() {
            // SAFETY: boxed above, and the driver will not call.
            drop(unsafe { Box::from_raw(data) });
        }
        launched
    }
}
