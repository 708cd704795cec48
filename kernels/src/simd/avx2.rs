//! 256-bit forms: AVX2, and F16C for FP16.

use std::arch::x86_64::*;

use super::forms;

forms! {
    features: "avx2,f16c",
    narrow: 8 = (load_f32, store_f32, _mm256_add_ps, _mm256_mul_ps, _mm256_set1_ps),
    wide: 4 = (load_f64, store_f64, _mm256_add_pd, _mm256_mul_pd, _mm256_set1_pd),
}

#[target_feature(enable = "avx2")]
#[inline]
fn load_f32(from: &[f32; 8]) -> __m256 {
    // SAFETY: I2: the array is the 32 bytes read; no alignment is asked for.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn store_f32(to: &mut [f32; 8], value: __m256) {
    // SAFETY: I2: the array is the 32 bytes written; no alignment is asked for.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), value) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn load_f64(from: &[f64; 4]) -> __m256d {
    // SAFETY: I2: the array is the 32 bytes read; no alignment is asked for.
    unsafe { _mm256_loadu_pd(from.as_ptr()) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn store_f64(to: &mut [f64; 4], value: __m256d) {
    // SAFETY: I2: the array is the 32 bytes written; no alignment is asked for.
    unsafe { _mm256_storeu_pd(to.as_mut_ptr(), value) }
}

#[target_feature(enable = "avx2")]
#[inline]
fn load_bits(from: &[u16; 8]) -> __m128i {
    // SAFETY: I2: the array is the 16 bytes read; no alignment is asked for.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

#[target_feature(enable = "avx2,f16c")]
#[inline]
fn from_f16(from: &[u16; 8]) -> __m256 {
    _mm256_cvtph_ps(load_bits(from))
}

#[target_feature(enable = "avx2")]
#[inline]
fn from_bf16(from: &[u16; 8]) -> __m256 {
    let upper = _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(load_bits(from)));
    _mm256_castsi256_ps(upper)
}
