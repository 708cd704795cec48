//! The kernels on CUDA, as data: the compiled code, and which launch of it does what. Nothing here
//! calls the driver.
//!
//! A device loads [`FATBIN`] once per context, finds each of [`Kernel::ALL`] by its name, and
//! carries a [`Launch`] out on a stream: `cuLaunchKernel` with the launch's grid, block and shared
//! bytes, and one pointer for each of [`Arguments::offsets`] into [`Arguments::bytes`].
//!
//! `scripts/build-kernels` compiles `kernels/cuda/` and says what it compiled in
//! `dormouse_kernels.json` beside it.
#![forbid(unsafe_code)]

mod arguments;
mod kernel;
mod launch;

pub use arguments::Arguments;
pub use kernel::{BLOCKS_MAX, Kernel};
pub use launch::Launch;

/// The driver reads the header where it lies, in eight-byte words.
#[repr(C, align(16))]
struct Aligned<T: ?Sized> {
    bytes: T,
}

static ALIGNED: &Aligned<[u8]> =
    &Aligned { bytes: *include_bytes!("../../cuda/dormouse_kernels.fatbin") };

/// Every kernel: machine code for compute capabilities 8.0, 9.0 and 10.x, and PTX for 8.0, which
/// the driver translates for all others from there on. For `cuModuleLoadData`.
pub static FATBIN: &[u8] = &ALIGNED.bytes;

#[cfg(test)]
mod tests;
