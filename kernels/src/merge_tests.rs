use proptest::prelude::*;

use super::*;
use crate::level::runnable;

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

fn merged(level: Level, a: (f64, f64), b: (f64, f64), base: LogBase) -> (f64, f64) {
    let (mut out, mut lse) = ([f64::NAN], [f64::NAN]);
    let (o1, l1, o2, l2) = ([a.0], [a.1], [b.0], [b.1]);
    let merge = Merge {
        first: Part { out: &o1, lse: &l1 },
        second: Part { out: &o2, lse: &l2 },
        out: &mut out,
        lse: &mut lse,
        head_dim: 1,
        base,
        empty: Empty::MinusInfinity,
    };
    merge_at(level, merge).unwrap();
    (out[0], lse[0])
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
        for level in runnable() {
            let (out, lse) = merged(level, parts.0, parts.1, LogBase::E);
            prop_assert!((out - whole.0).abs() <= 1e-13 * (1.0 + whole.0.abs()), "{out} {whole:?}");
            prop_assert!(lse == whole.1 || (lse - whole.1).abs() <= 1e-13 * (1.0 + whole.1.abs()));
        }
    }

    #[test]
    fn base_two_means_the_same(a in -20.0f64..20.0, b in -20.0f64..20.0) {
        let two = std::f64::consts::LN_2;
        let natural = merged(Level::Any, (1.0, a), (3.0, b), LogBase::E);
        let binary = merged(Level::Any, (1.0, a / two), (3.0, b / two), LogBase::Two);
        prop_assert!((natural.0 - binary.0).abs() < 1e-12);
        prop_assert!((natural.1 - binary.1 * two).abs() < 1e-12);
    }

    #[test]
    fn fp32_levels_agree_bit_for_bit_and_with_fp64(
        rows in prop::collection::vec((-40.0f32..40.0, -40.0f32..40.0), 1..9),
        head_dim in 0usize..70,
        seed in any::<u32>(),
    ) {
        let value = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) ^ seed) as f32 / 4e9 - 0.5;
        let elements = rows.len() * head_dim;
        let o1: Vec<f32> = (0..elements).map(value).collect();
        let o2: Vec<f32> = (0..elements).map(|i| value(i + elements)).collect();
        let (l1, l2): (Vec<f32>, Vec<f32>) = rows.iter().copied().unzip();
        let mut first: Option<(Vec<u32>, Vec<u32>)> = None;
        for level in runnable() {
            let (mut out, mut lse) = (vec![f32::NAN; elements], vec![f32::NAN; rows.len()]);
            merge_at(level, Merge {
                first: Part { out: &o1, lse: &l1 },
                second: Part { out: &o2, lse: &l2 },
                out: &mut out,
                lse: &mut lse,
                head_dim,
                base: LogBase::E,
                empty: Empty::MinusInfinity,
            }).unwrap();
            for (i, merged) in out.iter().enumerate() {
                let row = i / head_dim;
                let (a, b) = (f64::from(l1[row]), f64::from(l2[row]));
                let w = 1.0 / (1.0 + (b - a).exp());
                let wanted = f64::from(o1[i]) * w + f64::from(o2[i]) * (1.0 - w);
                prop_assert!((f64::from(*merged) - wanted).abs() < 5e-7);
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

#[test]
fn an_empty_part_leaves_the_others_bits() {
    let none = f64::NEG_INFINITY;
    assert_eq!(merged(Level::Any, (0.1, 3.5), (f64::NAN, none), LogBase::E), (0.1, 3.5));
    assert_eq!(merged(Level::Any, (f64::NAN, none), (0.1, 3.5), LogBase::E), (0.1, 3.5));
    assert_eq!(merged(Level::Any, (f64::NAN, none), (f64::NAN, none), LogBase::E), (0.0, none));
}

#[test]
fn plus_infinity_can_mean_empty() {
    let (mut out, mut lse) = ([f32::NAN; 2], [f32::NAN; 1]);
    merge_lse(Merge {
        first: Part { out: &[7.0, 8.0], lse: &[f32::INFINITY] },
        second: Part { out: &[1.0, 2.0], lse: &[0.25] },
        out: &mut out,
        lse: &mut lse,
        head_dim: 2,
        base: LogBase::E,
        empty: Empty::PlusInfinity,
    })
    .unwrap();
    assert_eq!((out, lse), ([1.0, 2.0], [0.25]));
}

#[test]
fn lengths_are_checked() {
    let (mut out, mut lse) = ([0.0f32; 4], [0.0f32; 2]);
    let error = merge_lse(Merge {
        first: Part { out: &[0.0; 4], lse: &[0.0; 2] },
        second: Part { out: &[0.0; 3], lse: &[0.0; 2] },
        out: &mut out,
        lse: &mut lse,
        head_dim: 2,
        base: LogBase::E,
        empty: Empty::MinusInfinity,
    });
    assert_eq!(error, Err(KernelError::Length { what: "second out", seen: 3, needed: 4 }));
}
