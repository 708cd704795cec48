//! 512-bit forms: AVX-512F, which converts FP16 itself.

use std::arch::x86_64::*;
use std::convert::identity;
use std::mem::transmute;

use super::forms;

forms! {
    features: "avx512f",
    narrow: [f32; 16] as __m512 = (_mm512_add_ps, _mm512_mul_ps, _mm512_set1_ps),
    wide: [f64; 8] as __m512d = (_mm512_add_pd, _mm512_mul_pd, _mm512_set1_pd),
    bits: [u16] as __m256i = (_mm512_cvtph_ps, from_bf16),
}

/// bfloat16 is the upper half of FP32.
#[target_feature(enable = "avx512f")]
#[inline]
fn from_bf16(bits: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
}
