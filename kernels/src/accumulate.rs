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
            at_level!(level, add_f16(to, from));
        }
        (Accumulator::F32(to), Source::Bf16(from)) => {
            at_level!(level, add_bf16(to, from));
        }
        (Accumulator::F32(to), Source::F32(from)) => {
            at_level!(level, add_f32(to, from));
        }
        (Accumulator::F64(to), Source::F64(from)) => {
            at_level!(level, add_f64(to, from));
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

#[cfg(test)]
#[path = "accumulate_tests.rs"]
mod tests;
