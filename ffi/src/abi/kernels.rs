//! Kernels that a trainer can call directly.

use std::ffi::c_void;

use dormouse_kernels::{DType, Empty, LogBase, MergeArgs, cpu};

use super::c::*;
use crate::boundary::{In, RawStream, check_flags, check_reserved, enter, usize_of};
use crate::fault::Fault;
use crate::heap::Heap;
use crate::status::dormouse_status_t;

/// Merges two partial attention outputs over the same rows by their log-sum-exps:
/// `lse = log(exp(lse1) + exp(lse2))`, `out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)`.
/// A row without keys has lse -infinity and takes the other partial output. If both are empty, the
/// output is 0.
///
/// The kernel runs on the device that holds `out`: on a GPU in the order of `stream` if `out` is
/// memory of that GPU's heap, otherwise on the calling thread, unless `DORMOUSE_MERGE_ON_GPU` is set.
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
    let known = DORMOUSE_MERGE_LOG2 | DORMOUSE_MERGE_PLUS_INFINITY_IS_EMPTY | DORMOUSE_MERGE_ON_GPU;
    check_flags(args.flags, known, "args.flags", "DORMOUSE_MERGE_*")?;
    check_reserved(args.reserved, "args.reserved")?;
    let is_set = |flag: u64| args.flags & flag != 0;
    let gpu = Heap::gpu_around(args.out.addr());
    if gpu.is_none() && is_set(DORMOUSE_MERGE_ON_GPU) {
        return Err(Fault::argument(format!(
            "args.out is {:p}, which is not memory of a GPU's heap, and args.flags has \
             DORMOUSE_MERGE_ON_GPU; accepted: memory of a GPU's heap",
            args.out
        )));
    }
    if gpu.is_none() && !stream.get().is_null() {
        return Err(Fault::argument(format!(
            "stream is {:p}, but args.out is not memory of a GPU's heap; accepted: NULL",
            stream.get()
        )));
    }
    let dtype = DType::try_from(args.dtype).map_err(|_| {
        let seen = args.dtype;
        Fault::argument(format!(
            "args.dtype is {seen}; accepted: 1 (f16), 2 (bf16), 3 (f32), 4 (f64)"
        ))
    })?;
    let mut merge = MergeArgs {
        out1: args.out1,
        lse1: args.lse1,
        out2: args.out2,
        lse2: args.lse2,
        out: args.out,
        lse: args.lse,
        rows: args.rows,
        head_dim: args.head_dim,
        dtype,
        base: if is_set(DORMOUSE_MERGE_LOG2) { LogBase::Two } else { LogBase::E },
        empty: if is_set(DORMOUSE_MERGE_PLUS_INFINITY_IS_EMPTY) {
            Empty::PlusInfinity
        } else {
            Empty::MinusInfinity
        },
    };
    match gpu {
        Some(heap) => {
            let stream = heap.stream(stream)?;
            // SAFETY: the caller's contract, until the stream has passed.
            unsafe { heap.allocator().device().merge_lse(&merge, &stream) }?;
        }
        None => {
            // SAFETY: the caller's contract; an input that is an output too is replaced by a copy, which
            // lives until the merge is over.
            let _copies = unsafe { copy_in_place(&mut merge) }?;
            // SAFETY: as above.
            unsafe { cpu::merge_lse(&merge) }?;
        }
    }
    Ok(())
}

/// Replaces each input that is an output too (in place) by a copy of it, and returns the copies. The CPU
/// kernel refuses other overlaps.
///
/// # Safety
/// As [`run`], for the buffers of `merge`.
unsafe fn copy_in_place(merge: &mut MergeArgs) -> Result<Vec<Vec<u64>>, Fault> {
    let (rows, head_dim) = (merge.rows, merge.head_dim);
    let bytes = |columns: u64, dtype: DType| {
        rows.checked_mul(columns).and_then(|count| count.checked_mul(dtype.size_bytes() as u64))
    };
    let sizes = (bytes(head_dim, merge.dtype), bytes(1, merge.dtype.accumulator()));
    let (Some(out_bytes), Some(lse_bytes)) = sizes else {
        return Err(Fault::argument(format!(
            "args.rows {rows} times args.head_dim {head_dim} overflows"
        )));
    };
    let out_bytes = usize_of(out_bytes, "bytes of args.out")?;
    let lse_bytes = usize_of(lse_bytes, "bytes of args.lse")?;
    let outputs = [(merge.out.addr(), out_bytes), (merge.lse.addr(), lse_bytes)];
    let mut copies = Vec::new();
    for (input, bytes, name) in [
        (&mut merge.out1, out_bytes, "args.out1"),
        (&mut merge.lse1, lse_bytes, "args.lse1"),
        (&mut merge.out2, out_bytes, "args.out2"),
        (&mut merge.lse2, lse_bytes, "args.lse2"),
    ] {
        // SAFETY: the caller's contract; this refuses NULL and too long.
        let buffer = unsafe { In::slice(input.cast::<u8>(), bytes, name) }?;
        if outputs.contains(&(input.addr(), bytes)) {
            // Words, so that the copy is aligned for either type.
            let mut copy = vec![0_u64; bytes.div_ceil(size_of::<u64>())];
            // SAFETY: distinct buffers of at least `bytes` bytes.
            unsafe {
                copy.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(buffer.as_ptr(), bytes)
            };
            *input = copy.as_ptr().cast();
            copies.push(copy);
        }
    }
    Ok(copies)
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
    fn outputs_of_16_bits_have_log_sum_exps_of_32() {
        // In bfloat16: 1 and 3, in equal parts.
        let (mut first, second) = ([0x3f80_u16], [0x4040_u16]);
        let (mut lse1, lse2) = ([0.0_f32], [0.0_f32]);
        let args = dormouse_merge_args_t {
            out1: first.as_ptr().cast(),
            lse1: lse1.as_ptr().cast(),
            out2: second.as_ptr().cast(),
            lse2: lse2.as_ptr().cast(),
            out: first.as_mut_ptr().cast(),
            lse: lse1.as_mut_ptr().cast(),
            head_dim: 1,
            dtype: DORMOUSE_DTYPE_BF16,
            ..args(&mut [[0.0; 2]; 2], &mut [0.0; 2])
        };
        // SAFETY: live locals of the stated lengths.
        unsafe { run(&raw const args, here()) }.unwrap();
        assert_eq!(first, [0x4000]);
        assert!((lse1[0] - 2.0_f32.ln()).abs() < 1e-6);
    }

    #[test]
    fn memory_of_the_host_is_refused_where_a_gpus_is_promised() {
        let (mut parts, mut lse) = ([[1.0, 2.0], [3.0, 6.0]], [0.0, 0.0]);
        let mut args = args(&mut parts, &mut lse);
        args.flags = DORMOUSE_MERGE_ON_GPU;
        // SAFETY: refused before a read.
        let fault = unsafe { run(&raw const args, here()) }.unwrap_err();
        assert_eq!(fault.status, status::DORMOUSE_ERR_ARGUMENT);
        assert!(fault.message.contains("not memory of a GPU's heap"), "{}", fault.message);
    }

    #[test]
    fn an_output_that_partly_overlaps_an_input_is_refused() {
        let (mut parts, mut lse) = ([[1.0, 2.0], [3.0, 6.0]], [0.0, 0.0]);
        let mut args = args(&mut parts, &mut lse);
        args.out = args.out.wrapping_byte_add(8);
        // SAFETY: refused before a write.
        let fault = unsafe { run(&raw const args, here()) }.unwrap_err();
        assert_eq!(fault.status, status::DORMOUSE_ERR_ARGUMENT);
        assert!(fault.message.contains("out overlaps first out"), "{}", fault.message);
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
