//! Which instruction set a kernel is compiled for, chosen once per call.

/// Instruction sets a kernel has a form for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// What every CPU of the target has.
    Any,
    /// 256-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// 512-bit vectors.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

/// The best level this CPU has (the standard library caches the answer).
pub(crate) fn detect() -> Level {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
            return Level::Avx512;
        }
        if is_x86_feature_detected!("avx2") {
            return Level::Avx2;
        }
    }
    Level::Any
}

/// Every level this CPU can run, for tests that compare them (I1).
#[cfg(test)]
pub(crate) fn runnable() -> Vec<Level> {
    let mut levels = vec![Level::Any];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") {
            levels.push(Level::Avx2);
        }
        if detect() == Level::Avx512 {
            levels.push(Level::Avx512);
        }
    }
    levels
}

/// Compiles one inlined body for every level and calls the form `level` names.
///
/// FMA is left out on purpose: contracting a multiply and an add would change bits (I1).
macro_rules! at_level {
    ($level:expr, $body:ident($($name:ident: $kind:ty),*)) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        fn avx2($($name: $kind),*) {
            $body($($name),*);
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw")]
        fn avx512($($name: $kind),*) {
            $body($($name),*);
        }
        match $level {
            $crate::level::Level::Any => $body($($name),*),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `level` comes from detection, so the CPU has these instructions.
            $crate::level::Level::Avx2 => unsafe { avx2($($name),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `level` comes from detection, so the CPU has these instructions.
            $crate::level::Level::Avx512 => unsafe { avx512($($name),*) },
        }
    }};
}
pub(crate) use at_level;
