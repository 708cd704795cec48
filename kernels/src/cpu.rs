//! The kernels on the calling thread, from addresses: the rim where pointers become slices.

use std::ffi::c_void;

use crate::interface::{AccumulateArgs, ELEMENTS_MAX, MergeArgs};
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
    let elems = elements(args.elems, 1)?;
    let (dtype, wide) = (args.dtype, args.dtype.accumulator());
    let to = Buffer::new("accumulator", args.accumulator, elems, wide)?;
    let from = Buffer::new("gradient", args.source, elems, dtype)?;
    to.keep_off(&from)?;
    // SAFETY: the caller's contract; `new` and `keep_off` checked alignment, size and overlap.
    unsafe {
        let source = match dtype {
            DType::F16 => Source::F16(from.slice()),
            DType::Bf16 => Source::Bf16(from.slice()),
            DType::F32 => Source::F32(from.slice()),
            DType::F64 => Source::F64(from.slice()),
        };
        let accumulator = match wide {
            DType::F64 => Accumulator::F64(to.slice_mut()),
            _ => Accumulator::F32(to.slice_mut()),
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
    match args.dtype {
        // SAFETY: the caller's contract, for this type.
        DType::F32 => unsafe { merge::<f32>(args) },
        // SAFETY: the caller's contract, for this type.
        DType::F64 => unsafe { merge::<f64>(args) },
        dtype => Err(KernelError::MergeType { dtype }),
    }
}

/// # Safety
/// As [`merge_lse`], `args.dtype` being `T`'s.
unsafe fn merge<T: Element>(args: &MergeArgs) -> Result<(), KernelError> {
    let elems = elements(args.rows, args.head_dim)?;
    let rows = elements(args.rows, 1)?;
    let buffer = |what, address, count| Buffer::new(what, address, count, args.dtype);
    let inputs = [
        buffer("first out", args.out1, elems)?,
        buffer("first lse", args.lse1, rows)?,
        buffer("second out", args.out2, elems)?,
        buffer("second lse", args.lse2, rows)?,
    ];
    let out = buffer("out", args.out.cast_const(), elems)?;
    let lse = buffer("lse", args.lse.cast_const(), rows)?;
    out.keep_off(&lse)?;
    for input in &inputs {
        out.keep_off(input)?;
        lse.keep_off(input)?;
    }
    let [out1, lse1, out2, lse2] = inputs;
    // SAFETY: the caller's contract; `new` and `keep_off` checked alignment, size and overlap.
    unsafe {
        merge_slices(Merge::<T> {
            first: Part { out: out1.slice(), lse: lse1.slice() },
            second: Part { out: out2.slice(), lse: lse2.slice() },
            out: out.slice_mut(),
            lse: lse.slice_mut(),
            head_dim: args.head_dim as usize,
            base: args.base,
            empty: args.empty,
        })
    }
}

/// `rows * head_dim`, where that is a count of something real.
fn elements(rows: u64, head_dim: u64) -> Result<usize, KernelError> {
    rows.checked_mul(head_dim)
        .filter(|elems| *elems < ELEMENTS_MAX)
        .and_then(|elems| usize::try_from(elems).ok())
        .ok_or(KernelError::TooLarge { rows: rows as usize, head_dim: head_dim as usize })
}

/// An argument whose address and size have been checked.
#[derive(Debug)]
struct Buffer {
    what: &'static str,
    address: *const c_void,
    elems: usize,
    bytes: usize,
}

impl Buffer {
    /// An empty buffer's address is not looked at; a dangling one takes its place.
    fn new(
        what: &'static str,
        address: *const c_void,
        elems: usize,
        dtype: DType,
    ) -> Result<Self, KernelError> {
        let align = dtype.size_bytes();
        if elems == 0 {
            let address = std::ptr::without_provenance(align);
            return Ok(Self { what, address, elems, bytes: 0 });
        }
        // Below ELEMENTS_MAX, so the product fits; the end must not wrap either.
        let bytes = elems * align;
        let seen = address.addr();
        if seen == 0 || !seen.is_multiple_of(align) || seen.checked_add(bytes).is_none() {
            return Err(KernelError::Address { what, address: seen, align });
        }
        Ok(Self { what, address, elems, bytes })
    }

    /// Refuses an output that shares bytes with `other`.
    fn keep_off(&self, other: &Self) -> Result<(), KernelError> {
        let (a, b) = (self.address.addr(), other.address.addr());
        let apart = self.bytes == 0 || other.bytes == 0;
        if apart || a + self.bytes <= b || b + other.bytes <= a {
            return Ok(());
        }
        Err(KernelError::Overlap { what: self.what, other: other.what })
    }

    /// # Safety
    /// Readable for `elems` elements of `T`, the type its size was checked for, for `'a`.
    unsafe fn slice<'a, T>(&self) -> &'a [T] {
        // SAFETY: the caller's contract; not NULL, aligned, below `isize::MAX` bytes by `new`.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.elems) }
    }

    /// # Safety
    /// As [`Self::slice`], and writable and nobody else's for `'a`.
    unsafe fn slice_mut<'a, T>(&self) -> &'a mut [T] {
        // SAFETY: the caller's contract; not NULL, aligned, below `isize::MAX` bytes by `new`.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast_mut().cast(), self.elems) }
    }
}

#[cfg(test)]
#[path = "cpu_tests.rs"]
mod tests;
