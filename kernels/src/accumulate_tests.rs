use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::level::runnable;
use crate::scalar::f16_to_f32;

/// Longer than two of the widest registers and a remainder, at every element offset of a cache line.
const LENGTH_MAX: usize = 70;
const OFFSET_MAX: usize = 17;

#[test]
fn halves_convert_exactly() {
    for bits in 0..=u16::MAX {
        let (ours, theirs) = (f16_to_f32(bits), f16::from_bits(bits).to_f32());
        if theirs.is_nan() {
            assert!(ours.is_nan(), "{bits:#06x}");
        } else {
            assert_eq!(ours.to_bits(), theirs.to_bits(), "{bits:#06x}");
        }
    }
}

/// Whether both have the same bits or are NaN.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

fn same_wide(a: f64, b: f64) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// The expected sum of one element, by the conversion of another library.
fn expected(dtype: DType, sum: f32, bits: u16) -> f32 {
    match dtype {
        DType::F16 => sum + f16::from_bits(bits).to_f32(),
        _ => sum + bf16::from_bits(bits).to_f32(),
    }
}

/// Adds `from`, of type `dtype`, to `to`.
fn add<T, S>(level: Level, to: &mut [T], from: &[S], dtype: DType) {
    assert_eq!(to.len(), from.len());
    assert_eq!(
        (size_of::<S>(), size_of::<T>()),
        (dtype.size_bytes(), dtype.accumulator().size_bytes())
    );
    // SAFETY: distinct slices of these lengths and types.
    unsafe {
        accumulate_at(level, to.as_mut_ptr().cast(), from.as_ptr().cast(), to.len(), dtype);
    }
}

#[test]
fn all_levels_convert_all_halves_and_bfloats() {
    let bits: Vec<u16> = (0..=u16::MAX).collect();
    for level in runnable() {
        for dtype in [DType::F16, DType::Bf16] {
            let mut sums = vec![0.0f32; bits.len()];
            add(level, &mut sums, &bits, dtype);
            for (bits, sum) in bits.iter().zip(&sums) {
                let wanted = expected(dtype, 0.0, *bits);
                assert!(same(*sum, wanted), "{level:?} {dtype:?} {bits:#06x}: {sum} {wanted}");
            }
        }
    }
}

/// Sum and gradient pairs with special values.
const EDGES: [(f64, f64); 10] = [
    (0.0, 0.0),
    (-0.0, -0.0),
    (1.0, -1.0),
    (f64::INFINITY, f64::NEG_INFINITY),
    (f64::INFINITY, 1.0),
    (1.0, f64::NAN),
    (f64::NAN, 1.0),
    (16_777_216.0, 1.0),
    (1e-45, -3e-45), // FP32 subnormals
    (5e-324, 5e-324),
];

#[test]
fn accumulation_writes_only_its_own_elements() {
    for level in runnable() {
        for offset in 0..OFFSET_MAX {
            for length in 0..LENGTH_MAX {
                let edge = |i: usize| EDGES[(i + length) % EDGES.len()];
                let total = offset + length + OFFSET_MAX;
                let before: Vec<f64> = (0..total).map(|i| edge(i).0).collect();
                let from: Vec<f64> = (0..total).map(|i| edge(i).1).collect();
                let (at, own) = (offset..offset + length, OFFSET_MAX - offset);
                let source = own..own + length;

                let mut wide = before.clone();
                add(level, &mut wide[at.clone()], &from[source.clone()], DType::F64);

                let narrow_from: Vec<f32> = from.iter().map(|x| *x as f32).collect();
                let mut narrow: Vec<f32> = before.iter().map(|x| *x as f32).collect();
                add(level, &mut narrow[at.clone()], &narrow_from[source.clone()], DType::F32);

                let bits: Vec<u16> = from.iter().map(|x| bf16::from_f64(*x).to_bits()).collect();
                let mut sums: Vec<f32> = before.iter().map(|x| *x as f32).collect();
                add(level, &mut sums[at.clone()], &bits[source.clone()], DType::Bf16);

                for i in 0..total {
                    let (mut w, mut n) = (before[i], before[i] as f32);
                    let mut b = n;
                    if at.contains(&i) {
                        let j = i - offset + own;
                        w += from[j];
                        n += narrow_from[j];
                        b = expected(DType::Bf16, b, bits[j]);
                    }
                    let place = format!("{level:?} offset {offset} length {length} element {i}");
                    assert!(same_wide(wide[i], w), "{place}: {} {w}", wide[i]);
                    assert!(same(narrow[i], n), "{place}: {} {n}", narrow[i]);
                    assert!(same(sums[i], b), "{place}: {} {b}", sums[i]);
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn all_levels_add_halves_with_equal_results(
        pairs in prop::collection::vec((any::<u32>(), any::<u16>()), 0..LENGTH_MAX),
        skip in 0usize..8,
    ) {
        let skip = skip.min(pairs.len());
        for level in runnable() {
            for dtype in [DType::F16, DType::Bf16] {
                let before: Vec<f32> = pairs.iter().map(|p| f32::from_bits(p.0)).collect();
                let bits: Vec<u16> = pairs.iter().map(|p| p.1).collect();
                let mut sums = before.clone();
                add(level, &mut sums[skip..], &bits[skip..], dtype);
                for i in 0..pairs.len() {
                    let wanted =
                        if i < skip { before[i] } else { expected(dtype, before[i], bits[i]) };
                    prop_assert!(same(sums[i], wanted), "{level:?} {dtype:?} element {i}");
                }
            }
        }
    }

    #[test]
    fn all_levels_add_wide_types_with_equal_results(
        pairs in prop::collection::vec((any::<u64>(), any::<u64>()), 0..LENGTH_MAX),
    ) {
        let wide = |bits: u64| f64::from_bits(bits);
        let narrow = |bits: u64| f32::from_bits(bits as u32);
        for level in runnable() {
            let mut wides: Vec<f64> = pairs.iter().map(|p| wide(p.0)).collect();
            let mut narrows: Vec<f32> = pairs.iter().map(|p| narrow(p.0)).collect();
            let from: Vec<f64> = pairs.iter().map(|p| wide(p.1)).collect();
            let from_narrow: Vec<f32> = pairs.iter().map(|p| narrow(p.1)).collect();
            add(level, &mut wides, &from, DType::F64);
            add(level, &mut narrows, &from_narrow, DType::F32);
            for (i, (a, b)) in pairs.iter().enumerate() {
                prop_assert!(same_wide(wides[i], wide(*a) + wide(*b)), "{level:?} element {i}");
                prop_assert!(same(narrows[i], narrow(*a) + narrow(*b)), "{level:?} element {i}");
            }
        }
    }
}

#[test]
fn fp32_accumulator_keeps_small_additions() {
    let mut sums = [256.0f32];
    let one_eighth = [bf16::from_f32(0.125).to_bits()];
    for _ in 0..8 {
        add(detect(), &mut sums, &one_eighth, DType::Bf16);
    }
    assert_eq!(sums, [257.0], "in BF16 the sum would still be 256");
}

#[test]
fn dtype_codes_are_those_of_the_header() {
    for (code, dtype) in (1..).zip(DType::ALL) {
        assert_eq!(DType::try_from(code), Ok(dtype));
    }
    for code in [0, 5, -1, i32::MAX] {
        assert_eq!(DType::try_from(code), Err(KernelError::UnknownDType { code }));
    }
}
