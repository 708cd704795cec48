//! `accumulator += gradient`, whatever type the gradient has.

use crate::level::{Level, at_level, detect};
use crate::{DType, KernelError};

/// Where gradients are added up.
#[derive(Debug)]
pub enum Accumulator<'a> {
    /// For FP16, BF16 and FP32 gradients.
    F32(&'a mut [f32]),
    /// For FP64 gradients.
    F64(&'a mut [f64]),
}

/// A gradient to add. FP16 and BF16 are given as their bits.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// IEEE binary16 bits.
    F16(&'a [u16]),
    /// bfloat16 bits.
    Bf16(&'a [u16]),
    /// FP32.
    F32(&'a [f32]),
    /// FP64.
    F64(&'a [f64]),
}

impl Accumulator<'_> {
    const fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F64(_) => DType::F64,
        }
    }

    const fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
        }
    }
}

impl Source<'_> {
    const fn dtype(&self) -> DType {
        match self {
            Self::F16(_) => DType::F16,
            Self::Bf16(_) => DType::Bf16,
            Self::F32(_) => DType::F32,
            Self::F64(_) => DType::F64,
        }
    }

    const fn len(&self) -> usize {
        match self {
            Self::F16(values) | Self::Bf16(values) => values.len(),
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
        }
    }
}

/// Adds `source` into `accumulator`, element by element, in the accumulator's type.
///
/// Any-thread; the slices are the caller's.
///
/// # Errors
/// `Length` where the counts differ; `Types` where the accumulator is not
/// [`DType::accumulator`] of the source.
pub fn accumulate(accumulator: Accumulator<'_>, source: Source<'_>) -> Result<(), KernelError> {
    accumulate_at(detect(), accumulator, source)
}

fn accumulate_at(
    level: Level,
    accumulator: Accumulator<'_>,
    source: Source<'_>,
) -> Result<(), KernelError> {
    if source.len() != accumulator.len() {
        return Err(KernelError::Length {
            what: "gradient",
            seen: source.len(),
            needed: accumulator.len(),
        });
    }
    match (accumulator, source) {
        (Accumulator::F32(to), Source::F16(from)) => {
            at_level!(level, add_f16(to: &mut [f32], from: &[u16]));
        }
        (Accumulator::F32(to), Source::Bf16(from)) => {
            at_level!(level, add_bf16(to: &mut [f32], from: &[u16]));
        }
        (Accumulator::F32(to), Source::F32(from)) => {
            at_level!(level, add_f32(to: &mut [f32], from: &[f32]));
        }
        (Accumulator::F64(to), Source::F64(from)) => {
            at_level!(level, add_f64(to: &mut [f64], from: &[f64]));
        }
        (accumulator, source) => {
            return Err(KernelError::Types {
                source_type: source.dtype(),
                accumulator: accumulator.dtype(),
            });
        }
    }
    Ok(())
}

/// [`accumulate`] from addresses: adds `elems` elements of `dtype` at `source` into the
/// accumulator of type [`DType::accumulator`] at `accumulator`.
///
/// # Errors
/// `Address` for NULL or a misaligned address (unless `elems` is 0). Nothing was written.
///
/// # Safety
/// `source` is readable and `accumulator` writable for `elems` elements of their types, nobody
/// else touches either meanwhile, and they do not overlap.
pub unsafe fn accumulate_raw(
    accumulator: *mut u8,
    source: *const u8,
    elems: usize,
    dtype: DType,
) -> Result<(), KernelError> {
    if elems == 0 {
        return Ok(());
    }
    check_address("accumulator", accumulator.addr(), dtype.accumulator())?;
    check_address("gradient", source.addr(), dtype)?;
    // SAFETY: the caller promises validity for `elems` elements; alignment was checked above.
    let source = unsafe {
        match dtype {
            DType::F16 => Source::F16(std::slice::from_raw_parts(source.cast(), elems)),
            DType::Bf16 => Source::Bf16(std::slice::from_raw_parts(source.cast(), elems)),
            DType::F32 => Source::F32(std::slice::from_raw_parts(source.cast(), elems)),
            DType::F64 => Source::F64(std::slice::from_raw_parts(source.cast(), elems)),
        }
    };
    // SAFETY: as above; the caller promises that nobody else touches it and no overlap.
    let accumulator = unsafe {
        match dtype.accumulator() {
            DType::F64 => {
                Accumulator::F64(std::slice::from_raw_parts_mut(accumulator.cast(), elems))
            }
            _ => Accumulator::F32(std::slice::from_raw_parts_mut(accumulator.cast(), elems)),
        }
    };
    accumulate(accumulator, source)
}

fn check_address(what: &'static str, address: usize, dtype: DType) -> Result<(), KernelError> {
    let align = dtype.size_bytes();
    if address == 0 || !address.is_multiple_of(align) {
        return Err(KernelError::Address { what, address, align });
    }
    Ok(())
}

#[inline(always)]
fn add_f16(to: &mut [f32], from: &[u16]) {
    for (sum, bits) in to.iter_mut().zip(from) {
        *sum += f16_to_f32(*bits);
    }
}

#[inline(always)]
fn add_bf16(to: &mut [f32], from: &[u16]) {
    for (sum, bits) in to.iter_mut().zip(from) {
        *sum += f32::from_bits(u32::from(*bits) << 16);
    }
}

#[inline(always)]
fn add_f32(to: &mut [f32], from: &[f32]) {
    for (sum, value) in to.iter_mut().zip(from) {
        *sum += value;
    }
}

#[inline(always)]
fn add_f64(to: &mut [f64], from: &[f64]) {
    for (sum, value) in to.iter_mut().zip(from) {
        *sum += value;
    }
}

/// binary16 bits as FP32, exactly, without branches so that it vectorises: the exponent is
/// rebiased by one exact multiplication, which also normalises subnormals.
#[inline(always)]
fn f16_to_f32(bits: u16) -> f32 {
    const REBIAS: f32 = f32::from_bits((127 + 127 - 15) << 23); // 2^112
    let sign = u32::from(bits & 0x8000) << 16;
    let rest = u32::from(bits & 0x7fff);
    let finite = (f32::from_bits(rest << 13) * REBIAS).to_bits();
    let special = 0x7f80_0000 | (rest << 13);
    let magnitude = if rest >= 0x7c00 { special } else { finite };
    f32::from_bits(sign | magnitude)
}

#[cfg(test)]
#[path = "accumulate_tests.rs"]
mod tests;
