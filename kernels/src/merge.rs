//! Joining two partial attention outputs by their log-sum-exps (docs/method.md §3):
//! `lse = log(exp(l1) + exp(l2))`, `out = o1·exp(l1 − lse) + o2·exp(l2 − lse)`.

use crate::KernelError;
use crate::level::{Level, at_level, detect};

/// Product of rows and row length that is still accepted: far above any tensor.
const ELEMENTS_MAX: usize = 1 << 48;

/// Base of the logarithms a kernel writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogBase {
    /// Natural.
    #[default]
    E,
    /// Base two.
    Two,
}

/// How a kernel writes the log-sum-exp of a row without keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Empty {
    /// As it is: minus infinity.
    #[default]
    MinusInfinity,
    /// Some kernels write plus infinity.
    PlusInfinity,
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
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// FP32 and FP64: what partial outputs come in.
pub trait Element: Copy + sealed::Sealed {
    #[doc(hidden)]
    fn merge_rows(level: Level_, merge: Merge<'_, Self>);
}

#[doc(hidden)]
#[derive(Clone, Copy, Debug)]
pub struct Level_(Level);

/// Merges two parts. Any-thread; the slices are the caller's.
///
/// A row that is empty in one part takes the other's bits; a row empty in both gives 0.
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
        .filter(|elements| *elements < ELEMENTS_MAX)
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
    T::merge_rows(Level_(level), merge);
    Ok(())
}

macro_rules! element {
    ($kind:ident, $rows:ident, $weights:ident) => {
        impl Element for $kind {
            fn merge_rows(level: Level_, merge: Merge<'_, Self>) {
                at_level!(level.0, $rows(merge: Merge<'_, $kind>));
            }
        }

        /// The merged log-sum-exp and both parts' weights.
        #[inline(always)]
        fn $weights(first: $kind, second: $kind, base: LogBase) -> ($kind, $kind, $kind) {
            let top = first.max(second);
            if top == $kind::NEG_INFINITY {
                return (top, 0.0, 0.0);
            }
            let power = |x: $kind| match base {
                LogBase::E => x.exp(),
                LogBase::Two => x.exp2(),
            };
            // Relative to the larger, so that nothing overflows and its own term is exactly 1.
            let (a, b) = (power(first - top), power(second - top));
            let sum = a + b;
            let log = match base {
                LogBase::E => sum.ln(),
                LogBase::Two => sum.log2(),
            };
            (top + log, a / sum, b / sum)
        }

        #[inline(always)]
        fn $rows(merge: Merge<'_, $kind>) {
            let seen = |lse: $kind| match merge.empty {
                Empty::PlusInfinity if lse == $kind::INFINITY => $kind::NEG_INFINITY,
                _ => lse,
            };
            for row in 0..merge.lse.len() {
                let at = row * merge.head_dim..(row + 1) * merge.head_dim;
                let (l1, l2) = (seen(merge.first.lse[row]), seen(merge.second.lse[row]));
                let (lse, w1, w2) = $weights(l1, l2, merge.base);
                merge.lse[row] = lse;
                let out = &mut merge.out[at.clone()];
                let (o1, o2) = (&merge.first.out[at.clone()], &merge.second.out[at]);
                if w1 == 0.0 && w2 == 0.0 {
                    out.fill(0.0);
                } else if l2 == $kind::NEG_INFINITY {
                    out.copy_from_slice(o1);
                } else if l1 == $kind::NEG_INFINITY {
                    out.copy_from_slice(o2);
                } else {
                    for ((sum, a), b) in out.iter_mut().zip(o1).zip(o2) {
                        *sum = a * w1 + b * w2;
                    }
                }
            }
        }
    };
}

element!(f32, rows_f32, weights_f32);
element!(f64, rows_f64, weights_f64);

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;
