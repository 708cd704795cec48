//! Merging of two partial attention outputs by their log-sum-exps (docs/method.md §3):
//! `lse = log(exp(l1) + exp(l2))`, `out = o1·exp(l1 − lse) + o2·exp(l2 − lse)`.
//!
//! The two weights of a row are computed in FP64 for FP32 parts too (one exponential per row, against
//! `head_dim` elements), so only the last few operations of an FP32 result round: with `ε = 2^-24`, the
//! error of `out` is at most `3ε·(|o1|·w1 + |o2|·w2)`, that of `lse` at most `ε·|lse|` plus FP64's.

use std::ffi::c_void;

use crate::check::elements;
use crate::level::{Level, at_level, detect};
use crate::{DType, KernelError};

/// Two partial attention outputs to merge, by address. All of them are of type `dtype`.
///
/// Addresses are the device's own; on the host device they are ordinary memory.
#[derive(Clone, Copy, Debug)]
pub struct MergeArgs {
    /// Output of the first part, `rows * head_dim` elements.
    pub out1: *const c_void,
    /// Log-sum-exps of the first part, `rows` elements.
    pub lse1: *const c_void,
    /// Output of the second part, `rows * head_dim` elements.
    pub out2: *const c_void,
    /// Log-sum-exps of the second part, `rows` elements.
    pub lse2: *const c_void,
    /// Merged output, `rows * head_dim` elements that overlap no other argument; on CUDA it may be
    /// `out1` or `out2`.
    pub out: *mut c_void,
    /// Merged log-sum-exps, `rows` elements that overlap no other argument; on CUDA they may be `lse1`
    /// or `lse2`.
    pub lse: *mut c_void,
    /// Number of rows: batch, heads and queries flattened. `rows * head_dim` is below 2^48; at 0 no
    /// address is accessed.
    pub rows: u64,
    /// Elements of a row.
    pub head_dim: u64,
    /// [`DType::F32`] or [`DType::F64`].
    pub dtype: DType,
    /// Base of all log-sum-exps.
    pub base: LogBase,
    /// Representation of empty rows in the parts.
    pub empty: Empty,
}

/// Base of the log-sum-exps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(i32)]
pub enum LogBase {
    /// Natural.
    #[default]
    E = 0,
    /// Base two.
    Two = 1,
}

/// Representation of the log-sum-exp of a row without keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(i32)]
pub enum Empty {
    /// Minus infinity. Plus infinity is an overflow and gives NaN.
    #[default]
    MinusInfinity = 0,
    /// Plus infinity, as some kernels write; minus infinity is empty too.
    PlusInfinity = 1,
}

/// A partial output: `rows * head_dim` elements, and one log-sum-exp per row.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a, T> {
    /// Output rows.
    pub out: &'a [T],
    /// Log-sum-exps.
    pub lse: &'a [T],
}

/// Two parts to merge, and the output.
#[derive(Debug)]
pub struct Merge<'a, T> {
    /// The first part.
    pub first: Part<'a, T>,
    /// The second part.
    pub second: Part<'a, T>,
    /// Merged output rows.
    pub out: &'a mut [T],
    /// Merged log-sum-exps, in the parts' base; minus infinity for a row without keys.
    pub lse: &'a mut [T],
    /// Elements of a row.
    pub head_dim: usize,
    /// Base of all log-sum-exps.
    pub base: LogBase,
    /// Representation of empty rows in the parts.
    pub empty: Empty,
}

mod sealed {
    use crate::level::Level;

    pub trait Sealed {
        fn blend(level: Level, to: &mut [Self], parts: [(&[Self], f64); 2])
        where
            Self: Sized;
        fn widen(self) -> f64;
        fn narrow(value: f64) -> Self;
    }
}

/// Element types of partial outputs: FP32 and FP64.
pub trait Element: Copy + sealed::Sealed {}

macro_rules! element {
    ($kind:ident, $blend:ident) => {
        impl Element for $kind {}
        impl sealed::Sealed for $kind {
            fn blend(level: Level, to: &mut [Self], parts: [(&[Self], f64); 2]) {
                let [(a, weight_a), (b, weight_b)] = parts;
                at_level!(level, $blend(to, a, b, weight_a as $kind, weight_b as $kind));
            }

            fn widen(self) -> f64 {
                self.into()
            }

            fn narrow(value: f64) -> Self {
                value as $kind
            }
        }
    };
}

element!(f32, blend_f32);
element!(f64, blend_f64);

/// Merges two parts. Any-thread; the slices are the caller's.
///
/// A row that is empty in one part is a copy of the other part's row; a row that is empty in both is 0
/// with minus infinity. A log-sum-exp that is NaN, or plus infinity without meaning empty, makes its row
/// NaN.
///
/// # Errors
/// `Length` if a slice does not match `rows = lse.len()` and `head_dim`; `TooLarge`.
pub fn merge_lse<T: Element>(merge: Merge<'_, T>) -> Result<(), KernelError> {
    merge_at(detect(), merge)
}

fn merge_at<T: Element>(level: Level, merge: Merge<'_, T>) -> Result<(), KernelError> {
    let (rows, head_dim) = (merge.lse.len(), merge.head_dim);
    let elements = elements(rows as u64, head_dim as u64)?;
    for (what, seen, needed) in [
        ("out", merge.out.len(), elements),
        ("first out", merge.first.out.len(), elements),
        ("second out", merge.second.out.len(), elements),
        ("first lse", merge.first.lse.len(), rows),
        ("second lse", merge.second.lse.len(), rows),
    ] {
        if seen != needed {
            return Err(KernelError::Length { what, seen, needed });
        }
    }
    for row in 0..rows {
        let at = row * head_dim..(row + 1) * head_dim;
        let out = &mut merge.out[at.clone()];
        let (o1, o2) = (&merge.first.out[at.clone()], &merge.second.out[at]);
        let (l1, l2) = (merge.first.lse[row], merge.second.lse[row]);
        merge.lse[row] = match join(l1.widen(), l2.widen(), merge.base, merge.empty) {
            Joined::Neither => {
                out.fill(T::narrow(0.0));
                T::narrow(f64::NEG_INFINITY)
            }
            Joined::First => {
                out.copy_from_slice(o1);
                l1
            }
            Joined::Second => {
                out.copy_from_slice(o2);
                l2
            }
            Joined::Both { lse, weights: [w1, w2] } => {
                T::blend(level, out, [(o1, w1), (o2, w2)]);
                T::narrow(lse)
            }
        };
    }
    Ok(())
}

/// The parts of a row that have keys, and their weights.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Joined {
    Neither,
    First,
    Second,
    Both { lse: f64, weights: [f64; 2] },
}

fn join(first: f64, second: f64, base: LogBase, empty: Empty) -> Joined {
    let overflowed = |lse: f64| lse == f64::INFINITY && empty == Empty::MinusInfinity;
    let broken = |lse: f64| lse.is_nan() || overflowed(lse);
    // First: an invalid row must not be taken for an empty one.
    if broken(first) || broken(second) {
        return Joined::Both { lse: f64::NAN, weights: [f64::NAN; 2] };
    }
    // Any remaining infinity means empty.
    let has_none = f64::is_infinite;
    match (has_none(first), has_none(second)) {
        (true, true) => return Joined::Neither,
        (false, true) => return Joined::First,
        (true, false) => return Joined::Second,
        (false, false) => {}
    }
    // Relative to the larger: nothing overflows, and its own term is exactly 1.
    let (top, below) = if second > first { (second, first) } else { (first, second) };
    let (other, log_sum) = match base {
        LogBase::E => {
            let other = (below - top).exp();
            (other, other.ln_1p())
        }
        LogBase::Two => {
            let other = (below - top).exp2();
            (other, other.ln_1p() * std::f64::consts::LOG2_E)
        }
    };
    let (larger, smaller) = (1.0 / (1.0 + other), other / (1.0 + other));
    let weights = if second > first { [smaller, larger] } else { [larger, smaller] };
    Joined::Both { lse: top + log_sum, weights }
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;
