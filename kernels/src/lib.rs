//! The few kernels the runtime runs itself, and their CPU twins.
//!
//! Two kernels: [`accumulate()`] adds a gradient of any floating type into an accumulator of more
//! bits, and [`merge_lse`] joins two partial attention outputs. Not a kernel library: attention
//! and matrices are the trainer's.
//!
//! # Glossary
//! - *accumulator*: where gradients of one boundary tensor are added up, FP32 ([`DType::accumulator`]).
//! - *part*: an attention output over some of the keys, with its log-sum-exp per row.
//! - *row*: one query of one head: `head_dim` elements of output and one log-sum-exp.
//! - *form*: a kernel written for one instruction set; the *scalar* form is the reference.
//! - *launch*: one call of a CUDA kernel as data; carrying it out is the device's.
//!
//! # Invariants
//! - **I1** Every form of a kernel gives the scalar form's bits: the same operations on each element,
//!   nothing contracted or reordered. (Which NaN a NaN is, the CPU and the compiler choose.)
//! - **I2** No form reads or writes outside the slices it is given: vector loads and stores go
//!   through references to arrays of one register, what is left over is scalar.
//! - **I3** A conversion to FP32 is exact, subnormals included; NaN stays NaN.
//! - **I4** A level above the scalar one comes from asking the CPU, nowhere else.
//! - **I5** A call that returns an error wrote nothing; every device checks the same (`check`).
//! - **I6** The CUDA form keeps I1 but for the exponentials and logarithms of a merge, which are the
//!   device's own: there it keeps the bound of [`merge`].
//!
//! ```text
//!   slices:  accumulate, merge_lse ◄──check── addresses: cpu::*, accumulate_raw
//!                  │                    │      (interface: the structs of every device)
//!                  │                    └───► cuda::Launch: which kernel of cuda::FATBIN, how
//!                  └─► level::detect ─┬─► AVX-512 ┐   many blocks, which parameters
//!                                     ├─► AVX2    ├─► same bits
//!                                     └─► scalar  ┘
//! ```

pub mod accumulate;
mod check;
pub mod cpu;
pub mod cuda;
mod dtype;
mod error;
pub mod interface;
mod level;
pub mod merge;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod simd;

pub use accumulate::{Accumulator, Source, accumulate};
pub use cpu::accumulate_raw;
pub use dtype::DType;
pub use error::KernelError;
pub use interface::{AccumulateArgs, MergeArgs};
pub use merge::{Empty, LogBase, Merge, Part, merge_lse};
