//! What a kernel is given, on any device: plain structs of addresses, counts and codes.
//!
//! [`crate::cpu`] runs them on the calling thread; [`crate::cuda`] packs them for a kernel, field by
//! field. Addresses are the device's own; on the host device they are ordinary memory.

use std::ffi::c_void;

use crate::{DType, Empty, LogBase};

/// Elements of one argument that are still accepted: far above any tensor, and low enough that
/// bytes fit the address space.
pub const ELEMENTS_MAX: u64 = 1 << 48;

/// `accumulator[i] += source[i]`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct AccumulateArgs {
    /// `elems` elements of type [`DType::accumulator`], aligned to one.
    pub accumulator: *mut c_void,
    /// `elems` elements of type `dtype`, aligned to one.
    pub source: *const c_void,
    /// How many elements, below [`ELEMENTS_MAX`]. At 0 the addresses are not looked at.
    pub elems: u64,
    /// Type of the source.
    pub dtype: DType,
    /// Fills the struct up; 0.
    pub reserved: u32,
}

/// Two partial attention outputs into one; see [`crate::merge`]. All of it is of type `dtype`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MergeArgs {
    /// First part's output, `rows * head_dim` elements.
    pub out1: *const c_void,
    /// First part's log-sum-exps, `rows` elements.
    pub lse1: *const c_void,
    /// Second part's output, `rows * head_dim` elements.
    pub out2: *const c_void,
    /// Second part's log-sum-exps, `rows` elements.
    pub lse2: *const c_void,
    /// Merged output, `rows * head_dim` elements that overlap no other argument; on CUDA they may be
    /// those of `out1` or `out2`.
    pub out: *mut c_void,
    /// Merged log-sum-exps, `rows` elements that overlap no other argument; on CUDA they may be those
    /// of `lse1` or `lse2`.
    pub lse: *mut c_void,
    /// Rows: batch, heads and queries flattened.
    pub rows: u64,
    /// Elements of one row.
    pub head_dim: u64,
    /// [`DType::F32`] or [`DType::F64`].
    pub dtype: DType,
    /// Base of every log-sum-exp.
    pub base: LogBase,
    /// How the parts write empty rows.
    pub empty: Empty,
    /// Fills the struct up; 0.
    pub reserved: u32,
}
