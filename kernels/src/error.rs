//! Errors of the kernels.

use crate::DType;
use crate::check::ELEMENTS_MAX;

/// Invalid arguments of a kernel. Nothing is written (I5).
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The types of source and accumulator do not match.
    #[error("accumulator of {source_type:?} is {accumulator:?}; accepted: {:?}", source_type.accumulator())]
    Types {
        /// Type of the source.
        source_type: DType,
        /// Type of the accumulator.
        accumulator: DType,
    },
    /// An address is NULL or misaligned.
    #[error("{what} at {address:#x}; accepted: a non-NULL multiple of {align}")]
    Address {
        /// Name of the argument.
        what: &'static str,
        /// The address.
        address: usize,
        /// Required alignment in bytes.
        align: usize,
    },
    /// An output overlaps another argument.
    #[error("{what} overlaps {other}; accepted: disjoint memory")]
    Overlap {
        /// The output.
        what: &'static str,
        /// Name of the other argument.
        other: &'static str,
    },
    /// The number of the element type is unknown.
    #[error("dtype is {code}; accepted: 1 (f16), 2 (bf16), 3 (f32), 4 (f64)")]
    UnknownDType {
        /// The number.
        code: i32,
    },
    /// The number of elements exceeds the limit.
    #[error("{rows} rows of {head_dim} elements; accepted: a product below {ELEMENTS_MAX}")]
    TooLarge {
        /// Number of rows, or of elements if there are no rows.
        rows: usize,
        /// Number of elements of a row.
        head_dim: usize,
    },
}
