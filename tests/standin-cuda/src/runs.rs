//! What one call of `cuMemUnmap` makes of several mappings side by side: the driver's documentation
//! leaves it open.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};

/// The ways there are.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Runs {
    /// All of them are unmapped.
    Whole,
    /// Refused: the range is not one mapping.
    Refused,
    /// Only the first is, without a word.
    First,
}

/// Relaxed: tests set it while no other thread calls.
static WAY: AtomicI32 = AtomicI32::new(0);

/// Sets the way by its number; `false` for a number that names none.
pub(crate) fn set(way: c_int) -> bool {
    let is_known = (0..=2).contains(&way);
    if is_known {
        WAY.store(way, Ordering::Relaxed);
    }
    is_known
}

/// The way it is now.
pub(crate) fn way() -> Runs {
    match WAY.load(Ordering::Relaxed) {
        1 => Runs::Refused,
        2 => Runs::First,
        _ => Runs::Whole,
    }
}
