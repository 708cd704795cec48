//! 512-bit forms: AVX-512F, which converts FP16 itself.

use std::arch::x86_64::*;

use super::forms;

forms! {
    features: "avx512f",
    narrow: 16 = (load_f32, store_f32, _mm512_add_ps, _mm512_mul_ps, _mm512_set1_ps),
    wide: 8 = (load_f64, store_f64, _mm512_add_pd, _mm512_mul_pd, _mm512_set1_pd),
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load_f32(from: &[f32; 16]) -> __m512 {
    // SAFETY: I2: the array is the 64 bytes read; no alignment is asked for.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store_f32(to: &mut [f32; 16], value: __m512) {
    // SAFETY: I2: the array is the 64 bytes written; no alignment is asked for.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), value) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load_f64(from: &[f64; 8]) -> __m512d {
    // SAFETY: I2: the array is the 64 bytes read; no alignment is asked for.
    unsafe { _mm512_loadu_pd(from.as_ptr()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn store_f64(to: &mut [f64; 8], value: __m512d) {
    // SAFETY: I2: the array is the 64 bytes written; no alignment is asked for.
    unsafe { _mm512_storeu_pd(to.as_mut_ptr(), value) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn load_bits(from: &[u16; 16]) -> __m256i {
    // SAFETY: I2: the array is the 32 bytes read; no alignment is asked for.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
#[inline]
fn from_f16(from: &[u16; 16]) -> __m512 {
    _mm512_cvtph_ps(load_bits(from))
}

#[target_feature(enable = "avx512f")]
#[inline]
fn from_bf16(from: &[u16; 16]) -> __m512 {
    let upper = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(load_bits(from)));
    _mm512_castsi512_ps(upper)
}
