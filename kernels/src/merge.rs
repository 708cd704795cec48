//! Joining two partial attention outputs by their log-sum-exps (docs/method.md §3):
//! `lse = log(exp(l1) + exp(l2))`, `out = o1·exp(l1 − lse) + o2·exp(l2 − lse)`.
//!
//! A row's two weights are worked out in FP64 for FP32 parts too (one exponential a row, against
//! `head_dim` elements), so the only roundings of an FP32 result are those of its last few
//! operations: with `ε = 2^-24`, `out` is within `3ε·(|o1|·w1 + |o2|·w2)` of the exact one and
//! `lse` within `ε·|lse|` and FP64's own error.

use crate::KernelError;
use crate::interface::ELEMENTS_MAX;
use crate::level::{Level, at_level, detect};

/// Base of the logarithms a kernel writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(i32)]
pub enum LogBase {
    /// Natural.
    #[default]
    E = 0,
    /// Base two.
    Two = 1,
}

/// How a kernel writes the log-sum-exp of a row without keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(i32)]
pub enum Empty {
    /// As it is: minus infinity. Plus infinity is then an overflow and gives NaN.
    #[default]
    MinusInfinity = 0,
    /// Some kernels write plus infinity. Minus infinity still means empty too.
    PlusInfinity = 1,
}

/// One partial output: `rows * head_dim` elements, and one log-sum-exp per row.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a, T> {
    /// Output rows, one after another.
    pub out: &'a [T],
    /// Log-sum-exps.
    pub lse: &'a [T],
}

/// What to merge, into what.
#[derive(Debug)]
pub struct Merge<'a, T> {
    /// One part.
    pub first: Part<'a, T>,
    /// The other.
    pub second: Part<'a, T>,
    /// Merged output rows.
    pub out: &'a mut [T],
    /// Merged log-sum-exps, in the parts' base; a row without any key gets minus infinity.
    pub lse: &'a mut [T],
    /// Elements of one row.
    pub head_dim: usize,
    /// Base of all log-sum-exps.
    pub base: LogBase,
    /// How the parts write empty rows.
    pub empty: Empty,
}

mod sealed {
    pub trait Sealed {
        fn blend(level: super::AtLevel, to: &mut [Self], parts: [(&[Self], f64); 2])
        where
            Self: Sized;
        fn widen(self) -> f64;
        fn narrow(value: f64) -> Self;
    }
}

/// FP32 and FP64: what partial outputs come in.
pub trait Element: Copy + sealed::Sealed {}

/// A level, opaque outside the crate.
#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct AtLevel(Level);

macro_rules! element {
    ($kind:ident, $blend:ident) => {
        impl Element for $kind {}
        impl sealed::Sealed for $kind {
            fn blend(level: AtLevel, to: &mut [Self], parts: [(&[Self], f64); 2]) {
                let [(a, weight_a), (b, weight_b)] = parts;
                at_level!(level.0, $blend(to, a, b, weight_a as $kind, weight_b as $kind));
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
/// A row that is empty in one part takes the other's bits, whatever the empty part's output holds;
/// a row empty in both gives 0 and minus infinity. A log-sum-exp that is NaN, or plus infinity where
/// that does not mean empty, makes its row NaN.
///
/// # Errors
/// `Length` where a slice does not fit `rows = lse.len()` and `head_dim`; `TooLarge`.
pub fn merge_lse<T: Element>(merge: Merge<'_, T>) -> Result<(), KernelError> {
    merge_at(detect(), merge)
}

fn merge_at<T: Element>(level: Level, merge: Merge<'_, T>) -> Result<(), KernelError> {
    let (rows, head_dim) = (merge.lse.len(), merge.head_dim);
    let elements = rows
        .checked_mul(head_dim)
        .filter(|elements| (*elements as u64) < ELEMENTS_MAX)
        .ok_or(KernelError::TooLarge { rows, head_dim })?;
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
                T::blend(AtLevel(level), out, [(o1, w1), (o2, w2)]);
                T::narrow(lse)
            }
        };
    }
    Ok(())
}

/// Which parts of a row have keys, and what they weigh.
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
    // First of all: a row that went wrong must not come out as an empty or a one-sided one.
    if broken(first) || broken(second) {
        return Joined::Both { lse: f64::NAN, weights: [f64::NAN; 2] };
    }
    // What is left of plus infinity means empty.
    let has_none = f64::is_infinite;
    match (has_none(first), has_none(second)) {
        (true, true) => return Joined::Neither,
        (false, true) => return Joined::First,
        (true, false) => return Joined::Second,
        (false, false) => {}
    }
    // Relative to the larger, so that nothing overflows and its own term is exactly 1.
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
