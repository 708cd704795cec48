//! The device kernels of the runtime, and their CPU versions.
//!
//! There are two: [`cpu::accumulate`] adds a gradient of any floating-point type to an accumulator of
//! higher precision, and [`cpu::merge_lse`] merges two partial attention outputs. Attention and matrix
//! products are the trainer's.
//!
//! # Glossary
//! - *accumulator*: the sum of the gradients of a boundary tensor ([`DType::accumulator`]).
//! - *part*: an attention output over some of the keys, with its log-sum-exp per row.
//! - *row*: one query of one head: `head_dim` elements of output and one log-sum-exp.
//! - *form*: a kernel written for one instruction set; the *scalar* form is the reference.
//! - *launch*: the parameters of one call of a CUDA kernel; the device executes it.
//!
//! # Invariants
//! - **I1** Every form of a kernel returns the bits of the scalar form: the same operations on each
//!   element, not contracted or reordered. (NaN payloads are unspecified.)
//! - **I2** No form accesses memory outside its slices: vector loads and stores use references to
//!   arrays of one register, the remainder is scalar.
//! - **I3** A conversion to FP32 is exact, subnormals included; NaN stays NaN.
//! - **I4** A level above scalar is selected only by querying the CPU.
//! - **I5** A call that returns an error has written nothing; all devices share the checks (`check`).
//! - **I6** The CUDA form satisfies I1 except for the exponentials and logarithms of a merge, which are
//!   the device's: there the bound of [`merge`] holds.

mod check;
pub mod cpu;
pub mod cuda;
mod dtype;
mod error;
mod level;
pub mod merge;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod simd;

pub use dtype::DType;
pub use error::KernelError;
pub use merge::{Empty, LogBase, MergeArgs};
