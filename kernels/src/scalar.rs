//! The scalar forms: the reference for all others, bit for bit (I1). Slices have equal lengths.
//!
//! The compiler vectorises these loops: they have no branches, and elements are independent.

/// `to += from`, FP16 bits into FP32.
pub(crate) fn add_f16(to: &mut [f32], from: &[u16]) {
    for (sum, bits) in to.iter_mut().zip(from) {
        *sum += f16_to_f32(*bits);
    }
}

/// `to += from`, bfloat16 bits into FP32.
pub(crate) fn add_bf16(to: &mut [f32], from: &[u16]) {
    for (sum, bits) in to.iter_mut().zip(from) {
        *sum += bf16_to_f32(*bits);
    }
}

/// `to += from` in FP32.
pub(crate) fn add_f32(to: &mut [f32], from: &[f32]) {
    for (sum, value) in to.iter_mut().zip(from) {
        *sum += value;
    }
}

/// `to += from` in FP64.
pub(crate) fn add_f64(to: &mut [f64], from: &[f64]) {
    for (sum, value) in to.iter_mut().zip(from) {
        *sum += value;
    }
}

/// `to = a * weight_a + b * weight_b` in FP32, each operation rounded.
pub(crate) fn blend_f32(to: &mut [f32], a: &[f32], b: &[f32], weight_a: f32, weight_b: f32) {
    for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
        *to = a * weight_a + b * weight_b;
    }
}

/// `to = a * weight_a + b * weight_b` in FP64, each operation rounded.
pub(crate) fn blend_f64(to: &mut [f64], a: &[f64], b: &[f64], weight_a: f64, weight_b: f64) {
    for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
        *to = a * weight_a + b * weight_b;
    }
}

/// binary16, by its bits.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(transparent)]
pub(crate) struct F16(pub(crate) u16);

/// bfloat16, by its bits.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(transparent)]
pub(crate) struct Bf16(pub(crate) u16);

impl F16 {
    #[inline(always)]
    pub(crate) fn widen(self) -> f32 {
        f16_to_f32(self.0)
    }

    /// The nearest value, of two as near the even one. Subnormals of FP32, which a trainer may have set the
    /// CPU to flush to zero, are nearest to zero.
    #[inline(always)]
    pub(crate) fn nearest(value: f32) -> Self {
        const INFINITY: u16 = 31 << 10;
        const SMALLEST_NORMAL: f32 = 1.0 / 16_384.0; // 2^-14
        /// Half-way between the largest value and the next power of two.
        const OVERFLOW: f32 = 65_520.0;
        let sign = (value.to_bits() >> 16) as u16 & 0x8000;
        let magnitude = value.abs();
        let bits = magnitude.to_bits();
        let rest = if value.is_nan() {
            INFINITY | 0x200
        } else if magnitude >= OVERFLOW {
            INFINITY
        } else if magnitude < SMALLEST_NORMAL {
            // The sum rounds to multiples of 2^-24, the unit of subnormals.
            ((magnitude + 0.5).to_bits() - 0.5_f32.to_bits()) as u16
        } else {
            let rounded = bits + 0xfff + (bits >> 13 & 1);
            ((rounded >> 13) - ((127 - 15) << 10)) as u16
        };
        Self(sign | rest)
    }
}

impl Bf16 {
    #[inline(always)]
    pub(crate) fn widen(self) -> f32 {
        bf16_to_f32(self.0)
    }

    /// The nearest value, of two as near the even one.
    #[inline(always)]
    pub(crate) fn nearest(value: f32) -> Self {
        let bits = value.to_bits();
        if value.is_nan() {
            return Self((bits >> 16) as u16 | 0x40);
        }
        Self((bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16)
    }
}

/// bfloat16 bits as FP32: its upper half.
#[inline(always)]
fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// binary16 bits as FP32, exactly.
///
/// Subnormals are converted through an integer: a trainer may have set the CPU to flush FP32 subnormals to
/// zero, which the CPU's own conversion ignores too.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    const EXPONENT_SHIFT: u32 = (127 - 15) << 23;
    const SUBNORMAL_UNIT: f32 = 1.0 / 16_777_216.0; // 2^-24
    let sign = u32::from(bits & 0x8000) << 16;
    let rest = u32::from(bits & 0x7fff);
    let normal = (rest << 13).wrapping_add(EXPONENT_SHIFT);
    let subnormal = (rest as i32 as f32 * SUBNORMAL_UNIT).to_bits();
    let special = 0x7f80_0000 | (rest << 13);
    let magnitude = match rest {
        0..0x0400 => subnormal,
        0x7c00.. => special,
        _ => normal,
    };
    f32::from_bits(sign | magnitude)
}

#[cfg(test)]
#[path = "scalar_tests.rs"]
mod tests;
