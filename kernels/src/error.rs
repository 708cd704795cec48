//! What a kernel refuses.

use crate::DType;

/// Arguments a kernel cannot work on. Nothing was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// Two lengths that must agree do not.
    #[error("{what} has {seen} elements; accepted: {needed}")]
    Length {
        /// Which argument.
        what: &'static str,
        /// Its elements.
        seen: usize,
        /// What it needs.
        needed: usize,
    },
    /// A source of one type for an accumulator of another.
    #[error("{source_type:?} adds into {:?}, not into {accumulator:?}", source_type.accumulator())]
    Types {
        /// Type of the source.
        source_type: DType,
        /// Type of the accumulator given.
        accumulator: DType,
    },
    /// An address that is not a multiple of its element's size, or NULL.
    #[error("{what} at {address:#x}; accepted: a non-NULL multiple of {align}")]
    Address {
        /// Which argument.
        what: &'static str,
        /// The address.
        address: usize,
        /// What it must be a multiple of.
        align: usize,
    },
    /// A number that names no element type.
    #[error("dtype is {code}; accepted: 1 (f16), 2 (bf16), 3 (f32), 4 (f64)")]
    UnknownDType {
        /// The number.
        code: i32,
    },
    /// Rows times row length does not fit the address space.
    #[error("{rows} rows of {head_dim} elements; accepted: a product below 2^48")]
    TooLarge {
        /// Rows asked for.
        rows: usize,
        /// Elements of one row.
        head_dim: usize,
    },
}
