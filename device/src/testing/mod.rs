//! What tests of this and other rooms are made with. Features, never part of the library.

use crate::{Device, DeviceError};

#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(feature = "faults")]
pub mod faulty;

/// A device whose streams a test can hold up.
pub trait Hold: Device {
    /// Keeps `stream` from going on past this point until `until` returns. It runs on a thread of
    /// the device, and must not call the device.
    ///
    /// # Errors
    /// As [`Device::callback`].
    fn hold(
        &self,
        stream: &Self::Stream,
        until: Box<dyn FnOnce() + Send>,
    ) -> Result<(), DeviceError>;
}

impl Hold for crate::host::HostDevice {
    fn hold(
        &self,
        stream: &Self::Stream,
        until: Box<dyn FnOnce() + Send>,
    ) -> Result<(), DeviceError> {
        self.callback(stream, Box::new(move |_| until()))
    }
}

impl Hold for crate::cuda::CudaDevice {
    fn hold(
        &self,
        stream: &Self::Stream,
        until: Box<dyn FnOnce() + Send>,
    ) -> Result<(), DeviceError> {
        self.host_function(stream, until)
    }
}

#[cfg(feature = "faults")]
impl<D: Hold> Hold for faulty::Faulty<D> {
    fn hold(
        &self,
        stream: &Self::Stream,
        until: Box<dyn FnOnce() + Send>,
    ) -> Result<(), DeviceError> {
        self.inner().hold(stream, until)
    }
}
