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
//!
//! # Invariants
//! - **I1** Every form of a kernel gives the same bits: one scalar expression per element, compiled
//!   for several instruction sets; the fastest the CPU has is chosen once per call.
//! - **I2** No form reads or writes outside the slices it is given.
//! - **I3** A conversion to FP32 is exact; NaN stays NaN.
//!
//! ```text
//!   ffi, offload ──► accumulate / merge_lse ──► level::detect ─┬─► AVX-512 ┐
//!                     (argument checks)                        ├─► AVX2    ├ one source
//!                                                              └─► any CPU ┘
//! ```
//!
//! The device forms of a later CUDA room take the same arguments: pointers, counts and a
//! [`DType`] code, all `repr(C)`-friendly.

pub mod accumulate;
mod dtype;
mod error;
mod level;
pub mod merge;

pub use accumulate::{Accumulator, Source, accumulate, accumulate_raw};
pub use dtype::DType;
pub use error::KernelError;
pub use merge::{Empty, LogBase, Merge, Part, merge_lse};
