//! The kernels on the calling thread, from addresses: the rim where pointers become slices.

use std::ffi::c_void;

use crate::check::{self, InPlace, MergeCounts};
use crate::interface::{AccumulateArgs, MergeArgs};
use crate::merge::Element;
use crate::{Accumulator, DType, KernelError, Merge, Part, Source, merge_lse as merge_slices};

/// Runs [`AccumulateArgs`]. Done when it returns.
///
/// # Errors
/// `TooLarge`; `Address` for NULL or a misaligned address; `Overlap`. Nothing was written.
///
/// # Safety
/// The source is readable and the accumulator writable for `elems` elements of their types, and
/// nobody else touches either meanwhile.
pub unsafe fn accumulate(args: &AccumulateArgs) -> Result<(), KernelError> {
    let elems = check::accumulate(args)?;
    let (to, from) = (args.accumulator, args.source);
    // SAFETY: the caller's contract; `check` saw to alignment, size and overlap.
    unsafe {
        let source = match args.dtype {
            DType::F16 => Source::F16(slice(from, elems)),
            DType::Bf16 => Source::Bf16(slice(from, elems)),
            DType::F32 => Source::F32(slice(from, elems)),
            DType::F64 => Source::F64(slice(from, elems)),
        };
        let accumulator = match args.dtype.accumulator() {
            DType::F64 => Accumulator::F64(slice_mut(to, elems)),
            _ => Accumulator::F32(slice_mut(to, elems)),
        };
        crate::accumulate(accumulator, source)
    }
}

/// [`accumulate`] with its arguments one by one.
///
/// # Errors
/// As [`accumulate`].
///
/// # Safety
/// As [`accumulate`].
pub unsafe fn accumulate_raw(
    accumulator: *mut u8,
    source: *const u8,
    elems: usize,
    dtype: DType,
) -> Result<(), KernelError> {
    let args = AccumulateArgs {
        accumulator: accumulator.cast(),
        source: source.cast(),
        elems: elems as u64,
        dtype,
        reserved: 0,
    };
    // SAFETY: the caller's contract.
    unsafe { self::accumulate(&args) }
}

/// Runs [`MergeArgs`]. Done when it returns.
///
/// # Errors
/// `MergeType`; `TooLarge`; `Address` for NULL or a misaligned address; `Overlap` of an output with
/// anything. Nothing was written.
///
/// # Safety
/// Inputs are readable and outputs writable for the elements [`MergeArgs`] says, and nobody else
/// touches any meanwhile.
pub unsafe fn merge_lse(args: &MergeArgs) -> Result<(), KernelError> {
    let counts = check::merge(args, InPlace::Refused)?;
    match args.dtype {
        // SAFETY: the caller's contract, for this type; the arguments were checked.
        DType::F64 => unsafe { merge::<f64>(args, counts) },
        // SAFETY: as above; of the narrow types only FP32 passes the check.
        _ => unsafe { merge::<f32>(args, counts) },
    }
}

/// # Safety
/// As [`merge_lse`], `args` having been checked and their type being `T`'s.
unsafe fn merge<T: Element>(args: &MergeArgs, counts: MergeCounts) -> Result<(), KernelError> {
    let MergeCounts { rows, elems } = counts;
    // SAFETY: the caller's contract; `check` saw to alignment, size and overlap.
    unsafe {
        merge_slices(Merge::<T> {
            first: Part { out: slice(args.out1, elems), lse: slice(args.lse1, rows) },
            second: Part { out: slice(args.out2, elems), lse: slice(args.lse2, rows) },
            out: slice_mut(args.out, elems),
            lse: slice_mut(args.lse, rows),
            head_dim: args.head_dim as usize,
            base: args.base,
            empty: args.empty,
        })
    }
}

/// An empty slice's address is not looked at.
///
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
/// As `slice`, and writable and nobody else's for `'a`.
unsafe fn slice_mut<'a, T>(address: *mut c_void, elems: usize) -> &'a mut [T] {
    if elems == 0 {
        return &mut [];
    }
    // SAFETY: the caller's contract.
    unsafe { std::slice::from_raw_parts_mut(address.cast(), elems) }
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
