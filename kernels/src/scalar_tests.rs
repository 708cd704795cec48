//! Rounding to 16-bit floats, at every value of theirs.

use super::*;

/// Checks `nearest` at every finite value, at the middle between it and the next, and on both sides of that.
/// `infinity`: the bits of infinity. Bits of finite values are in the order of their magnitudes.
fn rounds_to_nearest(infinity: u16, widen: fn(u16) -> f32, nearest: fn(f32) -> u16) {
    for bits in 0..infinity {
        let (low, next) = (f64::from(widen(bits)), bits + 1);
        // What follows the largest value would be a power of two.
        let high = if next == infinity {
            2.0 * low - f64::from(widen(bits - 1))
        } else {
            f64::from(widen(next))
        };
        // FP32 holds it, but for the subnormals of bfloat16, whose middles it holds too.
        let middle = f64::midpoint(low, high) as f32;
        assert_eq!(f64::from(middle), f64::midpoint(low, high), "{bits:#x}");
        let even = if bits % 2 == 0 { bits } else { next };
        let beside = |bits: u32| f32::from_bits(bits);
        let wanted = [
            (low as f32, bits),
            (middle, even),
            (beside(middle.to_bits() - 1), bits),
            (beside(middle.to_bits() + 1), next),
        ];
        for (value, wanted) in wanted {
            assert_eq!(nearest(value), wanted, "{value:e}");
            assert_eq!(nearest(-value), wanted | 0x8000, "{:e}", -value);
        }
    }
    assert_eq!(nearest(f32::INFINITY), infinity);
    assert_eq!(nearest(f32::MAX), infinity);
    assert_eq!(nearest(f32::NEG_INFINITY), infinity | 0x8000);
    // A payload in the lower bits alone, which are dropped, must not become infinity.
    for nan in [0x7f80_0001, 0xff80_0001, 0x7fff_ffff, 0x7fc0_0000] {
        assert!(widen(nearest(f32::from_bits(nan))).is_nan(), "{nan:#x}");
    }
}

#[test]
fn fp16_is_rounded_to_nearest() {
    rounds_to_nearest(0x7c00, f16_to_f32, |value| F16::nearest(value).0);
}

#[test]
fn bfloat16_is_rounded_to_nearest() {
    rounds_to_nearest(0x7f80, bf16_to_f32, |value| Bf16::nearest(value).0);
}
