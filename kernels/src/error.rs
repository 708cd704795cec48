//! What a kernel refuses.

use crate::DType;
use crate::interface::ELEMENTS_MAX;

/// Arguments a kernel cannot work on. Nothing was written (I5).
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
    /// Partial outputs of a type that is not merged.
    #[error("parts are {dtype:?}; accepted: F32, F64")]
    MergeType {
        /// Their type.
        dtype: DType,
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
    /// An output that lies on another argument.
    #[error("{what} overlaps {other}; accepted: memory of its own")]
    Overlap {
        /// The output.
        what: &'static str,
        /// What it lies on.
        other: &'static str,
    },
    /// A number that names no element type.
    #[error("dtype is {code}; accepted: 1 (f16), 2 (bf16), 3 (f32), 4 (f64)")]
    UnknownDType {
        /// The number.
        code: i32,
    },
    /// More elements than any tensor has: a count gone wrong.
    #[error("{rows} rows of {head_dim} elements; accepted: a product below {ELEMENTS_MAX}")]
    TooLarge {
        /// Rows asked for; elements, where there are no rows.
        rows: usize,
        /// Elements of one row.
        head_dim: usize,
    },
}
