//! 256-bit forms: AVX2, and F16C for FP16.

use std::arch::x86_64::*;
use std::convert::identity;
use std::mem::transmute;

use super::forms;

forms! {
    features: "avx2,f16c",
    narrow: [f32; 8] as __m256 = (_mm256_add_ps, _mm256_mul_ps, _mm256_set1_ps),
    wide: [f64; 4] as __m256d = (_mm256_add_pd, _mm256_mul_pd, _mm256_set1_pd),
    bits: [u16] as __m128i = (_mm256_cvtph_ps, from_bf16),
}

/// bfloat16 is the upper half of FP32.
#[target_feature(enable = "avx2")]
#[inline]
fn from_bf16(bits: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bits)))
}
