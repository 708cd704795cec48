use super::*;

/// Returns all levels of this CPU, which tests compare (I1).
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
