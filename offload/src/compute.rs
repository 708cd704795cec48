//! Kernels on the device that holds the memory: at once on the CPU, in stream order on a GPU.
#![expect(unsafe_code, reason = "memory by address, lent by the caller")]

use std::ffi::c_void;

use dormouse_device::cuda::CudaDevice;
use dormouse_device::host::HostDevice;
use dormouse_device::{Device, DeviceError};
use dormouse_kernels::cuda::{IMAGES, Launch};
use dormouse_kernels::{DType, MergeArgs, cpu};

use crate::error::OffloadError;

/// A device that runs the project's kernels.
pub trait Compute: Device {
    /// Adds `elems` elements of `dtype` at `source` into those at `accumulator`
    /// ([`DType::accumulator`]) in stream order.
    ///
    /// # Errors
    /// `Kernel` for arguments that the kernel refuses; `Device` if it cannot be queued.
    ///
    /// # Safety
    /// Both are aligned, large enough, of this device, and valid until the stream has passed; nothing
    /// else writes to the accumulator meanwhile.
    unsafe fn accumulate(
        &self,
        accumulator: usize,
        source: usize,
        elems: usize,
        dtype: DType,
        stream: &Self::Stream,
    ) -> Result<(), OffloadError>;
}

impl Compute for HostDevice {
    /// Runs on the calling thread once the stream's earlier work is done.
    unsafe fn accumulate(
        &self,
        accumulator: usize,
        source: usize,
        elems: usize,
        dtype: DType,
        stream: &Self::Stream,
    ) -> Result<(), OffloadError> {
        self.synchronize(&self.record(stream)?)?;
        // SAFETY: the caller's.
        unsafe { cpu::accumulate(accumulator as *mut u8, source as *const u8, elems, dtype) }?;
        Ok(())
    }
}

impl Compute for CudaDevice {
    unsafe fn accumulate(
        &self,
        accumulator: usize,
        source: usize,
        elems: usize,
        dtype: DType,
        stream: &Self::Stream,
    ) -> Result<(), OffloadError> {
        let Some(launch) = Launch::accumulate(accumulator, source, elems, dtype)? else {
            return Ok(());
        };
        // SAFETY: the caller's.
        unsafe { run(self, &launch, stream) }?;
        Ok(())
    }
}

/// Merges two partial attention outputs by their log-sum-exps on a GPU, in stream order.
///
/// # Errors
/// As [`Compute::accumulate`].
///
/// # Safety
/// Every buffer of `args` is aligned, as long as its counts say, of this device, and valid until the
/// stream has passed; nothing else uses the outputs meanwhile.
pub unsafe fn merge_lse(
    device: &CudaDevice,
    args: &MergeArgs,
    stream: &<CudaDevice as Device>::Stream,
) -> Result<(), OffloadError> {
    let Some(launch) = Launch::merge_lse(args)? else { return Ok(()) };
    // SAFETY: the caller's.
    unsafe { run(device, &launch, stream) }?;
    Ok(())
}

/// Queues a launch.
///
/// # Safety
/// The memory it names is valid until the stream has passed it.
unsafe fn run(
    device: &CudaDevice,
    launch: &Launch,
    stream: &<CudaDevice as Device>::Stream,
) -> Result<(), DeviceError> {
    let kernel = device.kernel(IMAGES, launch.kernel.name())?;
    let parameters = launch.parameters.each_ref().map(|it| std::ptr::from_ref(it).cast::<c_void>());
    let threads = launch.kernel.block_threads();
    // SAFETY: the caller's; each pointer is at a parameter's value, in the kernel's order.
    unsafe { device.launch(&kernel, launch.blocks, threads, &parameters, stream) }
}

#[cfg(all(test, not(loom)))]
impl<D: Compute + dormouse_device::Hold> Compute for dormouse_device::faulty::Faulty<D> {
    unsafe fn accumulate(
        &self,
        accumulator: usize,
        source: usize,
        elems: usize,
        dtype: DType,
        stream: &Self::Stream,
    ) -> Result<(), OffloadError> {
        // SAFETY: the caller's, of the same device.
        unsafe { self.inner().accumulate(accumulator, source, elems, dtype, stream) }
    }
}
