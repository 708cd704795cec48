//! The kernels on the calling thread, on memory given by address.

use std::ffi::c_void;

use crate::check::{self, InPlace, MergeCounts};
use crate::level::{Level, at_level, detect};
use crate::merge::{Element, Joined, Sum, join};
use crate::scalar::{Bf16, F16};
use crate::{DType, KernelError, MergeArgs};

/// Adds `elems` elements of `dtype` at `source` to those of type [`DType::accumulator`] at `accumulator`.
///
/// # Errors
/// `TooLarge`; `Address` for NULL or a misaligned address; `Overlap`. Nothing is written.
///
/// # Safety
/// The source is readable and the accumulator writable for `elems` elements of their types, and
/// neither is used by another thread during the call.
pub unsafe fn accumulate(
    accumulator: *mut u8,
    source: *const u8,
    elems: usize,
    dtype: DType,
) -> Result<(), KernelError> {
    check::accumulate(accumulator.addr(), source.addr(), elems, dtype)?;
    // SAFETY: the caller's contract; alignment, size and overlap are checked.
    unsafe { accumulate_at(detect(), accumulator.cast(), source.cast(), elems, dtype) };
    Ok(())
}

/// # Safety
/// As [`accumulate`], with checked arguments.
unsafe fn accumulate_at(
    level: Level,
    to: *mut c_void,
    from: *const c_void,
    elems: usize,
    dtype: DType,
) {
    match dtype {
        DType::F16 => {
            // SAFETY: the caller's contract, for these types.
            let (to, from) = unsafe { (slice_mut(to, elems), slice(from, elems)) };
            at_level!(level, add_f16(to, from));
        }
        DType::Bf16 => {
            // SAFETY: as above.
            let (to, from) = unsafe { (slice_mut(to, elems), slice(from, elems)) };
            at_level!(level, add_bf16(to, from));
        }
        DType::F32 => {
            // SAFETY: as above.
            let (to, from) = unsafe { (slice_mut(to, elems), slice(from, elems)) };
            at_level!(level, add_f32(to, from));
        }
        DType::F64 => {
            // SAFETY: as above.
            let (to, from) = unsafe { (slice_mut(to, elems), slice(from, elems)) };
            at_level!(level, add_f64(to, from));
        }
    }
}

/// Merges the two parts of `args`.
///
/// A row that is empty in one part is a copy of the other part's row; a row that is empty in both is 0
/// with minus infinity. A log-sum-exp that is NaN, or plus infinity without meaning empty, makes its row
/// NaN.
///
/// # Errors
/// `TooLarge`; `Address` for NULL or a misaligned address; `Overlap` of an output with
/// any other argument. Nothing is written.
///
/// # Safety
/// Inputs are readable and outputs writable for the numbers of elements in [`MergeArgs`], and none is
/// used by another thread during the call.
pub unsafe fn merge_lse(args: &MergeArgs) -> Result<(), KernelError> {
    let counts = check::merge(args, InPlace::Refused)?;
    let merge = match args.dtype {
        DType::F16 => merge_at::<F16>,
        DType::Bf16 => merge_at::<Bf16>,
        DType::F32 => merge_at::<f32>,
        DType::F64 => merge_at::<f64>,
    };
    // SAFETY: the caller's contract, for this type; the arguments are checked.
    unsafe { merge(detect(), args, counts) };
    Ok(())
}

/// # Safety
/// As [`merge_lse`], with checked arguments of type `T`.
pub(crate) unsafe fn merge_at<T: Element>(level: Level, args: &MergeArgs, counts: MergeCounts) {
    let MergeCounts { rows, elems } = counts;
    // SAFETY: the caller's contract; alignment, size and overlap are checked.
    let (out1, out2, all_out) = unsafe {
        (slice::<T>(args.out1, elems), slice::<T>(args.out2, elems), slice_mut(args.out, elems))
    };
    // SAFETY: as above.
    let (lse1, lse2, lse) = unsafe {
        (
            slice::<T::Sum>(args.lse1, rows),
            slice::<T::Sum>(args.lse2, rows),
            slice_mut(args.lse, rows),
        )
    };
    let head_dim = args.head_dim as usize;
    for row in 0..rows {
        let at = row * head_dim..(row + 1) * head_dim;
        let out = &mut all_out[at.clone()];
        let (o1, o2) = (&out1[at.clone()], &out2[at]);
        let (l1, l2) = (lse1[row], lse2[row]);
        lse[row] = match join(l1.widen(), l2.widen(), args.base, args.empty) {
            Joined::Neither => {
                out.fill(T::ZERO);
                T::Sum::narrow(f64::NEG_INFINITY)
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
                T::Sum::narrow(lse)
            }
        };
    }
}

/// # Safety
/// Readable for `elems` elements of `T`, aligned and not NULL unless that is 0, for `'a`.
unsafe fn slice<'a, T>(address: *const c_void, elems: usize) -> &'a [T] {
    if elems == 0 {
        return &[];
    }
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts(address.cast(), elems) }
}

/// # Safety
/// As `slice`, writable, and used by nothing else for `'a`.
unsafe fn slice_mut<'a, T>(address: *mut c_void, elems: usize) -> &'a mut [T] {
    if elems == 0 {
        return &mut [];
    }
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts_mut(address.cast(), elems) }
}

#[cfg(test)]
#[path = "accumulate_tests.rs"]
mod accumulate_tests;
#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
