//! Which instruction set a kernel runs on, chosen once per call.

/// Instruction sets a kernel has a form for. All but `Any` are made by [`detect`] and
/// [`runnable`] only (I4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// What every CPU of the target has: the scalar form, as the compiler vectorises it.
    Any,
    /// AVX2 and F16C: 256-bit vectors, FP16 conversion.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512F, which converts FP16 itself: 512-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// The best level this CPU has. The standard library asks the CPU once and caches the answer.
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

/// Every level this CPU can run, for tests that compare them (I1).
#[cfg(test)]
pub(crate) fn runnable() -> Vec<Level> {
    let mut levels = vec![Level::Any];
    #[cfg(target_arch = "x86_64")]
    {
        if has_avx2() {
            levels.push(Level::Avx2);
        }
        if detect() == Level::Avx512 {
            levels.push(Level::Avx512);
        }
    }
    levels
}

/// Calls the form of a kernel that `$level` names.
macro_rules! at_level {
    ($level:expr, $form:ident($($argument:expr),* $(,)?)) => {
        match $level {
            $crate::level::Level::Any => $crate::scalar::$form($($argument),*),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: I4: the CPU has said that it has these instructions.
            $crate::level::Level::Avx2 => unsafe { $crate::simd::avx2::$form($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: I4: the CPU has said that it has these instructions.
            $crate::level::Level::Avx512 => unsafe { $crate::simd::avx512::$form($($argument),*) },
        }
    };
}
pub(crate) use at_level;
