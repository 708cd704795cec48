//! Kernels that a trainer can call directly.

use std::borrow::Cow;
use std::ffi::c_void;

use dormouse_kernels::merge::Element;
use dormouse_kernels::{DType, Empty, LogBase, Merge, MergeArgs, Part, merge_lse};
use dormouse_offload::Compute;

use super::c::*;
use crate::boundary::{In, RawStream, check_flags, enter, usize_of};
use crate::convert;
use crate::fault::Fault;
use crate::heap::Heap;
use crate::status::dormouse_status_t;

/// Merges two partial attention outputs over the same rows by their log-sum-exps:
/// `lse = log(exp(lse1) + exp(lse2))`, `out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)`.
/// A row without keys has lse -infinity and takes the other partial output. If both are empty, the
/// output is 0.
///
/// The kernel runs on the device that holds `out`: on a GPU in the order of `stream` if `out` is
/// memory of that GPU's heap, otherwise on the calling thread.
///
/// Any-thread. The caller owns the buffers. They are not used after the call returns or, on a GPU,
/// after the stream has passed. Errors: `NULL`, `VERSION`, `ARGUMENT`, and `DEVICE` on a GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_kernel_merge_lse(
    args: *const dormouse_merge_args_t,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs), for every buffer `args` names.
        unsafe { run(args, RawStream::new(stream)) }
    })
}

/// Checks `args` and merges.
///
/// # Safety
/// `args` is NULL or a struct with its size set, whose buffers have the lengths that it states.
unsafe fn run(args: *const dormouse_merge_args_t, stream: RawStream) -> Result<(), Fault> {
    // SAFETY: the caller's contract.
    let args = unsafe { In::structure(args, "args") }?;
    let gpu = Heap::gpu_around(args.out.addr());
    if gpu.is_none() && !stream.get().is_null() {
        return Err(Fault::argument(format!(
            "stream is {:p}, but args.out is not memory of a GPU's heap; accepted: NULL",
            stream.get()
        )));
    }
    let known = DORMOUSE_MERGE_LOG2 | DORMOUSE_MERGE_PLUS_INFINITY_IS_EMPTY;
    check_flags(args.flags, known, "args.flags", "DORMOUSE_MERGE_*")?;
    if let Some(heap) = gpu {
        let merge = MergeArgs {
            out1: args.out1,
            lse1: args.lse1,
            out2: args.out2,
            lse2: args.lse2,
            out: args.out,
            lse: args.lse,
            rows: args.rows,
            head_dim: args.head_dim,
            dtype: convert::dtype(args.dtype)?,
            base: base(&args),
            empty: empty(&args),
        };
        let stream = heap.stream(stream)?;
        // SAFETY: the caller's contract, until the stream has passed.
        return Ok(unsafe { heap.allocator().device().merge_lse(&merge, &stream) }?);
    }
    match DType::try_from(args.dtype) {
        // SAFETY: the caller's contract, for this dtype.
        Ok(DType::F32) => unsafe { merge::<f32>(&args) },
        // SAFETY: as above.
        Ok(DType::F64) => unsafe { merge::<f64>(&args) },
        _ => {
            let seen = args.dtype;
            Err(Fault::argument(format!("args.dtype is {seen}; accepted: 3 (f32), 4 (f64)")))
        }
    }
}

const fn base(args: &dormouse_merge_args_t) -> LogBase {
    if args.flags & DORMOUSE_MERGE_LOG2 == 0 { LogBase::E } else { LogBase::Two }
}

const fn empty(args: &dormouse_merge_args_t) -> Empty {
    match args.flags & DORMOUSE_MERGE_PLUS_INFINITY_IS_EMPTY {
        0 => Empty::MinusInfinity,
        _ => Empty::PlusInfinity,
    }
}

/// Merges buffers of `T`.
///
/// # Safety
/// The buffers of `args` have `rows` and `rows * head_dim` elements of `T`; the call has
/// exclusive use of the outputs.
unsafe fn merge<T: Element + Default>(args: &dormouse_merge_args_t) -> Result<(), Fault> {
    let rows = usize_of(args.rows, "args.rows")?;
    let head_dim = usize_of(args.head_dim, "args.head_dim")?;
    let elements = rows.checked_mul(head_dim).ok_or_else(|| {
        Fault::argument(format!("args.rows {rows} times args.head_dim {head_dim} overflows"))
    })?;
    let outputs =
        [Span::of::<T>(args.out, elements, "args.out"), Span::of::<T>(args.lse, rows, "args.lse")];
    // SAFETY: the caller's contract; `input` copies a buffer that is an output too.
    let (out1, lse1, out2, lse2) = unsafe {
        (
            input::<T>(args.out1, elements, "args.out1", &outputs)?,
            input::<T>(args.lse1, rows, "args.lse1", &outputs)?,
            input::<T>(args.out2, elements, "args.out2", &outputs)?,
            input::<T>(args.lse2, rows, "args.lse2", &outputs)?,
        )
    };
    if outputs[0].overlaps(&outputs[1]) {
        return Err(Fault::argument("args.out and args.lse overlap; accepted: distinct buffers"));
    }
    // SAFETY: the caller's contract: writable and exclusive; by the above, no input slice overlaps.
    let (out, lse) = unsafe {
        (output::<T>(args.out, elements, "args.out")?, output::<T>(args.lse, rows, "args.lse")?)
    };
    Ok(merge_lse(Merge {
        first: Part { out: &out1, lse: &lse1 },
        second: Part { out: &out2, lse: &lse2 },
        out,
        lse,
        head_dim,
        base: base(args),
        empty: empty(args),
    })?)
}

/// Address range of a buffer.
struct Span {
    name: &'static str,
    begin: usize,
    bytes: usize,
}

impl Span {
    fn of<T>(pointer: *const c_void, count: usize, name: &'static str) -> Self {
        Self { name, begin: pointer.addr(), bytes: count.saturating_mul(size_of::<T>()) }
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.begin < other.begin.saturating_add(other.bytes)
            && other.begin < self.begin.saturating_add(self.bytes)
    }
}

/// Reads an input. Copies it if it is an output too (in place); refuses other overlaps.
///
/// # Safety
/// `pointer` is NULL or readable for `count` elements of `T` that only `outputs` may change.
unsafe fn input<'a, T: Clone>(
    pointer: *const c_void,
    count: usize,
    name: &'static str,
    outputs: &[Span],
) -> Result<Cow<'a, [T]>, Fault> {
    // SAFETY: the caller's contract.
    let slice = unsafe { In::slice(pointer.cast::<T>(), count, name) }?;
    let own = Span::of::<T>(pointer, count, name);
    match outputs.iter().find(|output| output.overlaps(&own)) {
        None => Ok(Cow::Borrowed(slice)),
        Some(output) if output.begin == own.begin && output.bytes == own.bytes => {
            Ok(Cow::Owned(slice.to_vec()))
        }
        Some(output) => Err(Fault::argument(format!(
            "{name} overlaps {}; accepted: the same buffer or a distinct one",
            output.name
        ))),
    }
}

/// Checks an output.
///
/// # Safety
/// `pointer` is NULL or writable for `count` elements of `T`, with exclusive use during `'a`.
unsafe fn output<'a, T>(
    pointer: *mut c_void,
    count: usize,
    name: &str,
) -> Result<&'a mut [T], Fault> {
    if count == 0 {
        return Ok(&mut []);
    }
    // SAFETY: the caller's contract; this refuses NULL, misaligned and too long.
    let checked = unsafe { In::slice(pointer.cast::<T>(), count, name) }?.len();
    // SAFETY: the caller's contract.
    Ok(unsafe { std::slice::from_raw_parts_mut(pointer.cast::<T>(), checked) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> RawStream {
        // SAFETY: NULL is the calling thread.
        unsafe { RawStream::new(std::ptr::null_mut()) }
    }
    use crate::status;

    fn args(parts: &mut [[f64; 2]; 2], lse: &mut [f64; 2]) -> dormouse_merge_args_t {
        let [first, second] = parts;
        let [lse1, lse2] = lse;
        dormouse_merge_args_t {
            size: size_of::<dormouse_merge_args_t>() as u32,
            version: 1,
            out1: first.as_ptr().cast(),
            lse1: (&raw const *lse1).cast(),
            out2: second.as_ptr().cast(),
            lse2: (&raw const *lse2).cast(),
            out: first.as_mut_ptr().cast(),
            lse: (&raw mut *lse1).cast(),
            rows: 1,
            head_dim: 2,
            dtype: DORMOUSE_DTYPE_F64,
            reserved: 0,
            flags: 0,
        }
    }

    #[test]
    fn a_merge_in_place_is_correct() {
        let (mut parts, mut lse) = ([[1.0, 2.0], [3.0, 6.0]], [0.0, 0.0]);
        let args = args(&mut parts, &mut lse);
        // SAFETY: live locals of the stated lengths.
        unsafe { run(&raw const args, here()) }.unwrap();
        assert_eq!(parts[0], [2.0, 4.0]);
        assert!((lse[0] - 2.0_f64.ln()).abs() < 1e-15);
    }

    #[test]
    fn an_output_that_partly_overlaps_an_input_is_refused() {
        let (mut parts, mut lse) = ([[1.0, 2.0], [3.0, 6.0]], [0.0, 0.0]);
        let mut args = args(&mut parts, &mut lse);
        args.out = args.out.wrapping_byte_add(8);
        // SAFETY: refused before a write.
        let fault = unsafe { run(&raw const args, here()) }.unwrap_err();
        assert_eq!(fault.status, status::DORMOUSE_ERR_ARGUMENT);
        assert!(fault.message.contains("args.out1 overlaps args.out"), "{}", fault.message);
    }

    #[test]
    fn overflowing_shapes_are_refused() {
        let (mut parts, mut lse) = ([[1.0, 2.0], [3.0, 6.0]], [0.0, 0.0]);
        let mut args = args(&mut parts, &mut lse);
        (args.rows, args.head_dim) = (1 << 40, 1 << 40);
        // SAFETY: refused before a read.
        let fault = unsafe { run(&raw const args, here()) }.unwrap_err();
        assert_eq!(fault.status, status::DORMOUSE_ERR_ARGUMENT);
    }
}
