use half::{bf16, f16};
use proptest::prelude::*;

use super::*;
use crate::level::runnable;

#[test]
fn every_half_converts_exactly() {
    for bits in 0..=u16::MAX {
        let (ours, theirs) = (f16_to_f32(bits), f16::from_bits(bits).to_f32());
        if theirs.is_nan() {
            assert!(ours.is_nan(), "{bits:#06x}");
        } else {
            assert_eq!(ours.to_bits(), theirs.to_bits(), "{bits:#06x}");
        }
    }
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// What adding one element must give, by another library's conversion.
fn expected(dtype: DType, sum: f32, bits: u16) -> f32 {
    match dtype {
        DType::F16 => sum + f16::from_bits(bits).to_f32(),
        _ => sum + bf16::from_bits(bits).to_f32(),
    }
}

proptest! {
    #[test]
    fn every_level_adds_halves_alike(
        pairs in prop::collection::vec((any::<u32>(), any::<u16>()), 0..70),
        skip in 0usize..8,
    ) {
        let skip = skip.min(pairs.len());
        for level in runnable() {
            for dtype in [DType::F16, DType::Bf16] {
                let before: Vec<f32> = pairs.iter().map(|p| f32::from_bits(p.0)).collect();
                let bits: Vec<u16> = pairs.iter().map(|p| p.1).collect();
                let mut sums = before.clone();
                let source = match dtype {
                    DType::F16 => Source::F16(&bits[skip..]),
                    _ => Source::Bf16(&bits[skip..]),
                };
                accumulate_at(level, Accumulator::F32(&mut sums[skip..]), source).unwrap();
                for i in 0..pairs.len() {
                    let wanted =
                        if i < skip { before[i] } else { expected(dtype, before[i], bits[i]) };
                    prop_assert!(same(sums[i], wanted), "{level:?} {dtype:?} element {i}");
                }
            }
        }
    }

    #[test]
    fn every_level_adds_wide_types_alike(
        pairs in prop::collection::vec((any::<f64>(), any::<f64>()), 0..70),
    ) {
        for level in runnable() {
            let mut wide: Vec<f64> = pairs.iter().map(|p| p.0).collect();
            let mut narrow: Vec<f32> = pairs.iter().map(|p| p.0 as f32).collect();
            let from: Vec<f64> = pairs.iter().map(|p| p.1).collect();
            let from_narrow: Vec<f32> = pairs.iter().map(|p| p.1 as f32).collect();
            accumulate_at(level, Accumulator::F64(&mut wide), Source::F64(&from)).unwrap();
            accumulate_at(level, Accumulator::F32(&mut narrow), Source::F32(&from_narrow)).unwrap();
            for (i, (a, b)) in pairs.iter().enumerate() {
                let sum = a + b;
                prop_assert!(wide[i].to_bits() == sum.to_bits() || (wide[i].is_nan() && sum.is_nan()));
                prop_assert!(same(narrow[i], *a as f32 + *b as f32));
            }
        }
    }
}

#[test]
fn lengths_and_types_are_checked_before_anything_is_written() {
    let mut sums = [1.0f32; 3];
    let error = accumulate(Accumulator::F32(&mut sums), Source::F32(&[1.0; 4])).unwrap_err();
    assert_eq!(error, KernelError::Length { what: "gradient", seen: 4, needed: 3 });
    let error = accumulate(Accumulator::F32(&mut sums), Source::F64(&[1.0; 3])).unwrap_err();
    assert_eq!(error.to_string(), "F64 adds into F64, not into F32");
    assert_eq!(sums, [1.0; 3]);
}

#[test]
fn addresses_are_checked() {
    let mut sums = [0.0f32; 2];
    let source = [1.0f32, 2.0];
    let (to, from) = (sums.as_mut_ptr().cast::<u8>(), source.as_ptr().cast::<u8>());
    // SAFETY: both hold two elements; misaligned and NULL addresses are refused unread.
    unsafe {
        assert!(accumulate_raw(std::ptr::null_mut(), from, 2, DType::F32).is_err());
        assert!(accumulate_raw(to, std::ptr::null(), 2, DType::F32).is_err());
        assert!(accumulate_raw(to.add(2), from, 1, DType::F32).is_err());
        assert!(accumulate_raw(to, from.add(1), 1, DType::Bf16).is_err());
        accumulate_raw(std::ptr::null_mut(), std::ptr::null(), 0, DType::F64).unwrap();
        accumulate_raw(to, from, 2, DType::F32).unwrap();
    }
    assert_eq!(sums, [1.0, 2.0]);
}

#[test]
fn small_additions_to_a_large_sum_are_kept() {
    let mut sums = [256.0f32];
    let one_eighth = [bf16::from_f32(0.125).to_bits()];
    for _ in 0..8 {
        accumulate(Accumulator::F32(&mut sums), Source::Bf16(&one_eighth)).unwrap();
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
