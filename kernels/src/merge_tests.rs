use proptest::prelude::*;

use super::*;
use crate::check::{InPlace, merge};
use crate::cpu::merge_at;
use crate::level::runnable;

trait Typed: Element {
    const DTYPE: DType;
}

impl Typed for F16 {
    const DTYPE: DType = DType::F16;
}

impl Typed for Bf16 {
    const DTYPE: DType = DType::Bf16;
}

impl Typed for f32 {
    const DTYPE: DType = DType::F32;
}

impl Typed for f64 {
    const DTYPE: DType = DType::F64;
}

/// Merges two parts of outputs and log-sum-exps, for rows of `head_dim` elements of type `dtype`.
fn merge_parts<T: Typed>(
    level: Level,
    [(o1, l1), (o2, l2)]: [(&[T], &[T::Sum]); 2],
    (out, lse): (&mut [T], &mut [T::Sum]),
    head_dim: usize,
    (base, empty): (LogBase, Empty),
) {
    let args = MergeArgs {
        out1: o1.as_ptr().cast(),
        lse1: l1.as_ptr().cast(),
        out2: o2.as_ptr().cast(),
        lse2: l2.as_ptr().cast(),
        out: out.as_mut_ptr().cast(),
        lse: lse.as_mut_ptr().cast(),
        rows: lse.len() as u64,
        head_dim: head_dim as u64,
        dtype: T::DTYPE,
        base,
        empty,
    };
    assert!([o1.len(), o2.len(), out.len()].iter().all(|&len| len == lse.len() * head_dim));
    let counts = merge(&args, InPlace::Refused).unwrap();
    // SAFETY: distinct live slices of these lengths and this type.
    unsafe { merge_at::<T>(level, &args, counts) };
}

const DEFAULTS: (LogBase, Empty) = (LogBase::E, Empty::MinusInfinity);

/// One row of attention over `keys` scores and one-dimensional values, in FP64, in one piece.
fn attention(scores: &[f64], values: &[f64]) -> (f64, f64) {
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if top == f64::NEG_INFINITY {
        return (0.0, top);
    }
    let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
    let out = scores.iter().zip(values).map(|(s, v)| (s - top).exp() * v).sum::<f64>() / sum;
    (out, top + sum.ln())
}

/// One row of `(output, log-sum-exp)` from two.
fn row<T: Typed<Sum = T> + Sum>(parts: [(T, T); 2], base: LogBase, empty: Empty) -> (T, T) {
    let [a, b] = parts;
    let mut first = None;
    for level in runnable() {
        let (mut out, mut lse) = ([a.0], [a.1]);
        let parts: [(&[T], &[T]); 2] = [(&[a.0], &[a.1]), (&[b.0], &[b.1])];
        merge_parts(level, parts, (&mut out, &mut lse), 1, (base, empty));
        let (wanted_out, wanted_lse): (T, T) = *first.get_or_insert((out[0], lse[0]));
        let bits = |x: T| x.widen().to_bits();
        assert!(bits(out[0]) == bits(wanted_out) || out[0].widen().is_nan(), "{level:?}");
        assert!(bits(lse[0]) == bits(wanted_lse) || lse[0].widen().is_nan(), "{level:?}");
    }
    first.unwrap()
}

fn merged(a: (f64, f64), b: (f64, f64)) -> (f64, f64) {
    row([a, b], LogBase::E, Empty::MinusInfinity)
}

proptest! {
    #[test]
    fn two_halves_merge_to_the_whole(
        keys in prop::collection::vec((-30.0f64..30.0, -2.0f64..2.0), 0..12),
        cut in 0usize..13,
    ) {
        let (scores, values): (Vec<f64>, Vec<f64>) = keys.into_iter().unzip();
        let cut = cut.min(scores.len());
        let whole = attention(&scores, &values);
        let parts = (
            attention(&scores[..cut], &values[..cut]),
            attention(&scores[cut..], &values[cut..]),
        );
        let (out, lse) = merged(parts.0, parts.1);
        prop_assert!((out - whole.0).abs() <= 1e-13 * (1.0 + whole.0.abs()), "{out} {whole:?}");
        prop_assert!(lse == whole.1 || (lse - whole.1).abs() <= 1e-13 * (1.0 + whole.1.abs()));
    }

    #[test]
    fn base_two_gives_the_same_result(a in -20.0f64..20.0, b in -20.0f64..20.0) {
        let two = std::f64::consts::LN_2;
        let natural = merged((1.0, a), (3.0, b));
        let parts = [(1.0, a / two), (3.0, b / two)];
        let binary = row(parts, LogBase::Two, Empty::MinusInfinity);
        prop_assert!((natural.0 - binary.0).abs() < 1e-12);
        prop_assert!((natural.1 - binary.1 * two).abs() < 1e-12);
    }

    #[test]
    fn fp32_levels_agree_bit_for_bit_and_keep_the_stated_bound(
        rows in prop::collection::vec((-90.0f32..90.0, -90.0f32..90.0), 0..5),
        head_dim in 0usize..70,
        seed in any::<u32>(),
    ) {
        let value = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) ^ seed) as f32 / 2e9 - 1.0;
        let elements = rows.len() * head_dim;
        let o1: Vec<f32> = (0..elements).map(value).collect();
        let o2: Vec<f32> = (0..elements).map(|i| value(i + elements)).collect();
        let (l1, l2): (Vec<f32>, Vec<f32>) = rows.iter().copied().unzip();
        let mut first: Option<(Vec<u32>, Vec<u32>)> = None;
        for level in runnable() {
            let (mut out, mut lse) = (vec![f32::NAN; elements], vec![f32::NAN; rows.len()]);
            let parts: [(&[f32], &[f32]); 2] = [(&o1, &l1), (&o2, &l2)];
            merge_parts(level, parts, (&mut out, &mut lse), head_dim, DEFAULTS);
            let unit = f64::from(f32::EPSILON) / 2.0;
            for (row, (a, b)) in rows.iter().enumerate() {
                let (a, b) = (f64::from(*a), f64::from(*b));
                let (w1, w2) = (1.0 / (1.0 + (b - a).exp()), 1.0 / (1.0 + (a - b).exp()));
                let wanted = a.max(b) + (-(a - b).abs()).exp().ln_1p();
                let slack = 1e-13 * (1.0 + wanted.abs());
                prop_assert!((f64::from(lse[row]) - wanted).abs() <= unit * wanted.abs() + slack);
                for i in row * head_dim..(row + 1) * head_dim {
                    let (x, y) = (f64::from(o1[i]) * w1, f64::from(o2[i]) * w2);
                    // The last term: a product too small for FP32 (weights go down to e^-180).
                    let bound = 3.01 * unit * (x.abs() + y.abs()) + f64::from(f32::MIN_POSITIVE);
                    let off = (f64::from(out[i]) - (x + y)).abs();
                    prop_assert!(off <= bound, "{level:?}: {off} above {bound}");
                }
            }
            let bits = (
                out.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                lse.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
            );
            let wanted = first.get_or_insert_with(|| bits.clone());
            prop_assert!(*wanted == bits, "{level:?} differs");
        }
    }
}

/// Parts of 16-bit floats, by the bits of their outputs, merge to the nearest of what the same parts merge to in FP32.
fn narrow_parts_round_once<T: Typed<Sum = f32> + std::fmt::Debug + PartialEq>(
    of_bits: fn(u16) -> T,
    widen: fn(T) -> f32,
    nearest: fn(f32) -> T,
    outs: &[(u16, u16)],
    (l1, l2): (f32, f32),
) -> Result<(), TestCaseError> {
    let first: Vec<T> = outs.iter().map(|&(bits, _)| of_bits(bits)).collect();
    let second: Vec<T> = outs.iter().map(|&(_, bits)| of_bits(bits)).collect();
    let (wide1, wide2): (Vec<f32>, Vec<f32>) =
        (first.iter().map(|&x| widen(x)).collect(), second.iter().map(|&x| widen(x)).collect());
    let (mut wide, mut wide_lse) = (vec![0.0_f32; outs.len()], [0.0_f32]);
    let parts: [(&[f32], &[f32]); 2] = [(&wide1, &[l1]), (&wide2, &[l2])];
    merge_parts(Level::Any, parts, (&mut wide, &mut wide_lse), outs.len(), DEFAULTS);
    for level in runnable() {
        let (mut out, mut lse) = (vec![T::ZERO; outs.len()], [0.0_f32]);
        let parts: [(&[T], &[f32]); 2] = [(&first, &[l1]), (&second, &[l2])];
        merge_parts(level, parts, (&mut out, &mut lse), outs.len(), DEFAULTS);
        prop_assert_eq!(lse[0].to_bits(), wide_lse[0].to_bits());
        for (got, wide) in out.iter().zip(&wide) {
            prop_assert!(*got == nearest(*wide) || (widen(*got).is_nan() && wide.is_nan()));
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn parts_of_16_bit_floats_round_once(
        outs in prop::collection::vec(any::<(u16, u16)>(), 1..70),
        l1 in -90.0f32..90.0,
        l2 in prop_oneof![-90.0f32..90.0, Just(f32::NEG_INFINITY)],
    ) {
        narrow_parts_round_once(F16, F16::widen, F16::nearest, &outs, (l1, l2))?;
        narrow_parts_round_once(Bf16, Bf16::widen, Bf16::nearest, &outs, (l1, l2))?;
        narrow_parts_round_once(Bf16, Bf16::widen, Bf16::nearest, &outs, (l2, l1))?;
    }
}

#[test]
fn rows_of_16_bit_floats_without_keys_are_zero() {
    let none = [f32::NEG_INFINITY];
    let (mut out, mut lse) = ([Bf16(0x7fc0)], [0.0]);
    let part: (&[Bf16], &[f32]) = (&[Bf16(0x3f80)], &none);
    merge_parts(Level::Any, [part, part], (&mut out, &mut lse), 1, DEFAULTS);
    assert_eq!((out, lse), ([Bf16(0)], none));
}

#[test]
fn all_levels_blend_all_lengths_with_equal_results() {
    for head_dim in 0..70usize {
        let o1: Vec<f64> = (0..2 * head_dim).map(|i| 1.0 / (i as f64 + 3.0)).collect();
        let o2: Vec<f64> = (0..2 * head_dim).map(|i| (i as f64).sqrt() - 3.0).collect();
        let lse = [[0.25, 1.5], [0.75, -2.0]];
        for level in runnable() {
            let (mut out, mut merged) = (vec![f64::NAN; 2 * head_dim], [f64::NAN; 2]);
            let parts: [(&[f64], &[f64]); 2] = [(&o1, &lse[0]), (&o2, &lse[1])];
            merge_parts(level, parts, (&mut out, &mut merged), head_dim, DEFAULTS);
            for (i, out) in out.iter().enumerate() {
                let (a, b) = (lse[0][i / head_dim], lse[1][i / head_dim]);
                let alone = self::merged((o1[i], a), (o2[i], b)).0;
                assert_eq!(out.to_bits(), alone.to_bits(), "{level:?} {head_dim} {i}");
            }
        }
    }
}

#[test]
fn fused_multiplication_changes_bits() {
    // Three times a rounded third is exactly 1 once rounded, and off by half a unit when it is not.
    for level in runnable() {
        let mut out = [f64::NAN; 9];
        f64::blend(level, &mut out, [(&[3.0; 9], 1.0 / 3.0), (&[-1.0; 9], 1.0)]);
        assert_eq!(out, [0.0; 9], "{level:?}");
        let (third, mut out) = (f64::from(1.0f32 / 3.0), [f32::NAN; 17]);
        f32::blend(level, &mut out, [(&[3.0; 17], third), (&[-1.0; 17], 1.0)]);
        assert_eq!(out, [0.0; 17], "{level:?}");
    }
}

#[test]
fn row_empty_in_one_part_copies_the_other() {
    let none = f64::NEG_INFINITY;
    // -0.0 as log-sum-exp: adding a zero to it would change its sign.
    let (out, lse) = merged((0.1, -0.0), (f64::NAN, none));
    assert_eq!((out.to_bits(), lse.to_bits()), (0.1f64.to_bits(), (-0.0f64).to_bits()));
    let (out, lse) = merged((f64::NAN, none), (0.1, -0.0));
    assert_eq!((out.to_bits(), lse.to_bits()), (0.1f64.to_bits(), (-0.0f64).to_bits()));
    assert_eq!(merged((f64::NAN, none), (f64::NAN, none)), (0.0, none));
    let (out, _) = merged((f64::INFINITY, 3.5), (0.0, none));
    assert_eq!(out, f64::INFINITY);
}

#[test]
fn plus_infinity_can_mean_empty() {
    let (inf, none) = (f32::INFINITY, f32::NEG_INFINITY);
    let plus = |a, b| row([a, b], LogBase::E, Empty::PlusInfinity);
    assert_eq!(plus((7.0, inf), (1.0, 0.25)), (1.0, 0.25));
    assert_eq!(plus((1.0, 0.25), (7.0, inf)), (1.0, 0.25));
    assert_eq!(plus((7.0, inf), (8.0, inf)), (0.0, none), "written out as minus infinity");
    assert_eq!(plus((7.0, none), (8.0, inf)), (0.0, none));
    for other in [0.25, inf, none] {
        for parts in [[(7.0, inf), (1.0, other)], [(1.0, other), (7.0, inf)]] {
            let (out, lse) = row(parts, LogBase::E, Empty::MinusInfinity);
            assert!(out.is_nan() && lse.is_nan(), "an overflow is not hidden: {parts:?}");
        }
    }
}

#[test]
fn nan_propagates() {
    let nan = f64::NAN;
    for other in [0.5, f64::INFINITY, f64::NEG_INFINITY, nan] {
        for base in [LogBase::E, LogBase::Two] {
            for empty in [Empty::MinusInfinity, Empty::PlusInfinity] {
                for parts in [[(1.0, nan), (2.0, other)], [(2.0, other), (1.0, nan)]] {
                    let (out, lse) = row(parts, base, empty);
                    assert!(out.is_nan() && lse.is_nan(), "{parts:?} {base:?} {empty:?}");
                }
            }
        }
    }
    assert!(merged((nan, 0.0), (1.0, 0.0)).0.is_nan(), "a NaN output of a part with keys");
}

#[test]
fn distant_log_sum_exps_do_not_overflow() {
    assert_eq!(merged((1.0, 1e300), (2.0, -1e300)), (1.0, 1e300));
    assert_eq!(merged((1.0, -1e300), (2.0, 1e300)), (2.0, 1e300));
    let (out, lse) = row([(1.0f32, 3e38), (2.0, 3e38)], LogBase::E, Empty::MinusInfinity);
    assert_eq!((out, lse), (1.5, 3e38));
    let (out, lse) = row([(1.0f32, 4.0), (2.0, 4.0)], LogBase::Two, Empty::MinusInfinity);
    assert_eq!((out, lse), (1.5, 5.0));
}
