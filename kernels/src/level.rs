//! The instruction set of a kernel call.

/// Instruction sets with a form. All but `Any` are created by [`detect`] and `runnable` only (I4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// Every CPU of the target: the scalar form, as the compiler vectorises it.
    Any,
    /// AVX2 and F16C: 256-bit vectors, FP16 conversion.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512F: 512-bit vectors, FP16 conversion.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// Returns the best level of this CPU. The standard library queries the CPU once.
pub(crate) fn detect() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            return Level::Avx512;
        }
        if has_avx2() {
            return Level::Avx2;
        }
    }
    Level::Any
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c")
}

/// Calls the form of a kernel for `$level`.
macro_rules! at_level {
    ($level:expr, $form:ident($($argument:expr),* $(,)?)) => {
        match $level {
            $crate::level::Level::Any => $crate::scalar::$form($($argument),*),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: I4: the CPU has these instructions.
            $crate::level::Level::Avx2 => unsafe { $crate::simd::avx2::$form($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: I4: the CPU has these instructions.
            $crate::level::Level::Avx512 => unsafe { $crate::simd::avx512::$form($($argument),*) },
        }
    };
}
pub(crate) use at_level;

#[cfg(test)]
#[path = "level_tests.rs"]
mod tests;
#[cfg(test)]
pub(crate) use tests::runnable;
