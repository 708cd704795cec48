//! Merging of two partial attention outputs by their log-sum-exps (docs/method.md §3):
//! `lse = log(exp(l1) + exp(l2))`, `out = o1·exp(l1 − lse) + o2·exp(l2 − lse)`.
//!
//! The two weights of a row are computed in FP64 for all parts (one exponential per row, against
//! `head_dim` elements), so only the last few operations of an FP32 result round: with `ε = 2^-24`, the
//! error of `out` is at most `3ε·(|o1|·w1 + |o2|·w2)`, that of `lse` at most `ε·|lse|` plus FP64's.
//! Outputs of FP16 and bfloat16 are summed in FP32 and rounded once, to the nearest.

use std::ffi::c_void;

use crate::DType;
use crate::level::{Level, at_level};
use crate::scalar::{Bf16, F16};

/// Two partial attention outputs to merge, by address. Outputs are of type `dtype`, log-sum-exps of type
/// [`DType::accumulator`].
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
    /// Type of the outputs.
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

/// Element types of partial outputs.
pub(crate) trait Element: Copy {
    /// Type of the log-sum-exps.
    type Sum: Sum;
    const ZERO: Self;
    /// Writes the weighted sum of both parts.
    fn blend(level: Level, to: &mut [Self], parts: [(&[Self], f64); 2]);
}

/// Types of log-sum-exps.
pub(crate) trait Sum: Copy {
    fn widen(self) -> f64;
    fn narrow(value: f64) -> Self;
}

macro_rules! element {
    ($kind:ident, $blend:ident) => {
        impl Element for $kind {
            type Sum = Self;
            const ZERO: Self = 0.0;

            fn blend(level: Level, to: &mut [Self], parts: [(&[Self], f64); 2]) {
                let [(a, weight_a), (b, weight_b)] = parts;
                at_level!(level, $blend(to, a, b, weight_a as $kind, weight_b as $kind));
            }
        }

        impl Sum for $kind {
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

/// 16-bit floats have the scalar form alone: on the CPU no step merges them.
macro_rules! narrow_element {
    ($kind:ident) => {
        impl Element for $kind {
            type Sum = f32;
            const ZERO: Self = Self(0);

            fn blend(_: Level, to: &mut [Self], parts: [(&[Self], f64); 2]) {
                let [(a, weight_a), (b, weight_b)] = parts;
                let (weight_a, weight_b) = (weight_a as f32, weight_b as f32);
                for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
                    *to = Self::nearest(a.widen() * weight_a + b.widen() * weight_b);
                }
            }
        }
    };
}

narrow_element!(F16);
narrow_element!(Bf16);

/// The parts of a row that have keys, and their weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Joined {
    Neither,
    First,
    Second,
    Both { lse: f64, weights: [f64; 2] },
}

pub(crate) fn join(first: f64, second: f64, base: LogBase, empty: Empty) -> Joined {
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
            let other = libm::exp(below - top);
            (other, libm::log1p(other))
        }
        LogBase::Two => {
            let other = libm::exp2(below - top);
            (other, libm::log1p(other) * std::f64::consts::LOG2_E)
        }
    };
    let (larger, smaller) = (1.0 / (1.0 + other), other / (1.0 + other));
    let weights = if second > first { [smaller, larger] } else { [larger, smaller] };
    Joined::Both { lse: top + log_sum, weights }
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;
