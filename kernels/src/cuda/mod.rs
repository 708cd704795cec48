//! The kernels on CUDA, as data: the compiled code and the parameters of its launches. Nothing here
//! calls the driver.
//!
//! A device loads the first of [`IMAGES`] that its driver accepts once per context, finds each of [`Kernel::ALL`] by name, and queues a
//! [`Launch`] with `cuLaunchKernel`: `blocks` blocks of [`Kernel::block_threads`] threads, and a pointer
//! to each of its `parameters`. The driver reads as many of them as the kernel has.
//!
//! `scripts/build-kernels` compiles `kernels/cuda/` and records what it compiled in
//! `dormouse_kernels.json` there.
#![forbid(unsafe_code)]

mod kernel;
mod launch;

pub use kernel::{BLOCKS_MAX, Kernel};
pub use launch::Launch;

/// The driver reads the header in place, in eight-byte words.
#[repr(C, align(16))]
struct Aligned<T: ?Sized> {
    bytes: T,
}

static ALIGNED: &Aligned<[u8]> =
    &Aligned { bytes: *include_bytes!("../../cuda/dormouse_kernels.fatbin") };

/// All kernels as machine code for compute capabilities 8.0, 9.0 and 10.0. Needs a driver of the toolkit
/// in `dormouse_kernels.json`, or newer.
pub static FATBIN: &[u8] = &ALIGNED.bytes;

/// All kernels as PTX 7.0 for compute capability 8.0, terminated by NUL: for other GPUs and older drivers.
pub static PTX: &[u8] = concat!(include_str!("../../cuda/dormouse_kernels.ptx"), "\0").as_bytes();

/// What `cuModuleLoadData` is given, in this order.
pub static IMAGES: &[&[u8]] = &[FATBIN, PTX];

#[cfg(test)]
mod tests;
