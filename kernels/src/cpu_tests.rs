use super::*;
use crate::check::{ELEMENTS_MAX, elements};
use crate::{Empty, LogBase};

fn add(to: *mut f32, from: *const f32, elems: usize) -> Result<(), KernelError> {
    // SAFETY: the callers below pass live arrays of this length, or addresses that are refused unread.
    unsafe { accumulate(to.cast(), from.cast(), elems, DType::F32) }
}

#[test]
fn merge_codes_are_those_of_the_cuda_kernel() {
    assert_eq!((LogBase::E as i32, LogBase::Two as i32), (0, 1));
    assert_eq!((Empty::MinusInfinity as i32, Empty::PlusInfinity as i32), (0, 1));
}

#[test]
fn all_types_accumulate_by_address() {
    fn run<S, T: Copy>(dtype: DType, to: &mut [T; 3], from: &[S; 3]) {
        let (to, from) = (to.as_mut_ptr().cast(), from.as_ptr().cast());
        // SAFETY: two distinct arrays of three.
        unsafe { accumulate(to, from, 3, dtype) }.unwrap();
    }
    let (mut narrow, mut wide) = ([1.0f32, 2.0, 3.0], [1.0f64, 2.0, 3.0]);
    run(DType::F16, &mut narrow, &[0x3c00u16, 0, 0x4000]);
    assert_eq!(narrow, [2.0, 2.0, 5.0]);
    run(DType::Bf16, &mut narrow, &[0x3f80u16, 0, 0x4000]);
    assert_eq!(narrow, [3.0, 2.0, 7.0]);
    run(DType::F32, &mut narrow, &[1.0f32, 0.5, -7.0]);
    assert_eq!(narrow, [4.0, 2.5, 0.0]);
    run(DType::F64, &mut wide, &[1.0f64, 0.5, -3.0]);
    assert_eq!(wide, [2.0, 2.5, 0.0]);
}

#[test]
fn invalid_addresses_are_refused() {
    let (mut sums, source) = ([0.0f32; 3], [1.0f32, 2.0, 4.0]);
    let (to, from) = (sums.as_mut_ptr(), source.as_ptr());
    let refused = |result: Result<(), KernelError>, what: &str| match result {
        Err(KernelError::Address { what: seen, .. }) => assert_eq!(seen, what),
        other => panic!("{other:?}"),
    };
    refused(add(std::ptr::null_mut(), from, 2), "accumulator");
    refused(add(to, std::ptr::null(), 2), "gradient");
    refused(add(to.wrapping_byte_add(2), from, 1), "accumulator");
    refused(add(to, from.wrapping_byte_add(1), 1), "gradient");
    refused(add(to, std::ptr::without_provenance(usize::MAX - 3), 2), "gradient");
    add(std::ptr::null_mut(), std::ptr::null(), 0).unwrap();
    assert_eq!(sums, [0.0; 3]);
    add(to, from, 2).unwrap();
    assert_eq!(sums, [1.0, 2.0, 0.0]);
}

#[test]
fn oversized_counts_are_refused() {
    let (mut sums, source) = ([0.0f32; 1], [1.0f32]);
    let limit = ELEMENTS_MAX as usize;
    let error = add(sums.as_mut_ptr(), source.as_ptr(), limit).unwrap_err();
    assert_eq!(error, KernelError::TooLarge { rows: limit, head_dim: 1 });
    assert!(error.to_string().ends_with("accepted: a product below 281474976710656"), "{error}");
    assert_eq!(elements(ELEMENTS_MAX - 1, 1), Ok(limit - 1));
    assert!(elements(1 << 32, 1 << 32).is_err(), "overflow");
    assert_eq!(elements(u64::MAX, 0), Ok(0));
}

#[test]
fn overlapping_buffers_are_refused_and_adjacent_ones_accepted() {
    let mut values = [1.0f32, 2.0, 4.0, 8.0];
    let at = values.as_mut_ptr();
    let error = KernelError::Overlap { what: "accumulator", other: "gradient" };
    for (to, from) in [(0, 0), (0, 1), (1, 0)] {
        let result = add(at.wrapping_add(to), at.wrapping_add(from).cast_const(), 2);
        assert_eq!(result, Err(error.clone()), "{to} {from}");
    }
    assert_eq!(values, [1.0, 2.0, 4.0, 8.0]);
    let at = values.as_mut_ptr();
    add(at, at.wrapping_add(2), 2).unwrap();
    assert_eq!(values, [5.0, 10.0, 4.0, 8.0]);
    let at = values.as_mut_ptr();
    add(at.wrapping_add(2), at, 2).unwrap();
    assert_eq!(values, [5.0, 10.0, 9.0, 18.0]);
}

/// One row of two elements: `[out1 ×2, out2 ×2, out ×2, lse1, lse2, lse]`.
fn merge_args(values: &mut [f64; 9]) -> MergeArgs {
    let at = values.as_mut_ptr();
    let input = |index: usize| at.wrapping_add(index).cast_const().cast::<c_void>();
    MergeArgs {
        out1: input(0),
        lse1: input(6),
        out2: input(2),
        lse2: input(7),
        out: at.wrapping_add(4).cast(),
        lse: at.wrapping_add(8).cast(),
        rows: 1,
        head_dim: 2,
        dtype: DType::F64,
        base: LogBase::E,
        empty: Empty::MinusInfinity,
    }
}

const ROW: [f64; 9] = [1.0, 2.0, 3.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0];

#[test]
fn merges_by_address() {
    let mut values = ROW;
    let args = merge_args(&mut values);
    // SAFETY: everything lies in `values`.
    unsafe { merge_lse(&args) }.unwrap();
    assert_eq!(values[4..6], [2.0, 4.0]);
    assert!((values[8] - std::f64::consts::LN_2).abs() < 1e-15);
}

#[test]
fn invalid_merges_are_refused_and_write_nothing() {
    let refused = |change: fn(&mut MergeArgs), wanted: KernelError| {
        let mut values = ROW;
        let mut args = merge_args(&mut values);
        change(&mut args);
        // SAFETY: refused before anything is read or written.
        assert_eq!(unsafe { merge_lse(&args) }, Err(wanted));
        assert_eq!(values, ROW);
    };
    let null = |what| KernelError::Address { what, address: 0, align: 8 };
    refused(|a| a.out1 = std::ptr::null(), null("first out"));
    refused(|a| a.lse1 = std::ptr::null(), null("first lse"));
    refused(|a| a.out2 = std::ptr::null(), null("second out"));
    refused(|a| a.lse2 = std::ptr::null(), null("second lse"));
    refused(|a| a.out = std::ptr::null_mut(), null("out"));
    refused(|a| a.lse = std::ptr::null_mut(), null("lse"));
    refused(|a| a.rows = 1 << 50, KernelError::TooLarge { rows: 1 << 50, head_dim: 2 });
    let overlap = |what, other| KernelError::Overlap { what, other };
    refused(|a| a.out = a.out1.cast_mut(), overlap("out", "first out"));
    refused(|a| a.out = a.out2.cast_mut().wrapping_byte_add(8), overlap("out", "second out"));
    refused(|a| a.lse = a.lse2.cast_mut(), overlap("lse", "second lse"));
    refused(|a| a.lse = a.out, overlap("out", "lse"));
}

#[test]
fn log_sum_exps_of_16_bit_outputs_are_fp32() {
    for dtype in [DType::F16, DType::Bf16] {
        let mut values = ROW;
        let mut args = merge_args(&mut values);
        args.dtype = dtype;
        args.lse1 = args.lse1.wrapping_byte_add(2);
        // SAFETY: refused before anything is read or written.
        let refused = unsafe { merge_lse(&args) };
        let address = args.lse1.addr();
        assert_eq!(refused, Err(KernelError::Address { what: "first lse", address, align: 4 }));
        assert_eq!(values, ROW);
    }
}

#[test]
fn merging_no_rows_accesses_no_address() {
    let mut values = ROW;
    let mut args = merge_args(&mut values);
    args.rows = 0;
    (args.out1, args.out, args.lse) = (std::ptr::null(), std::ptr::null_mut(), args.out);
    // SAFETY: no rows, nothing to read or write.
    unsafe { merge_lse(&args) }.unwrap();
    assert_eq!(values, ROW);
}
