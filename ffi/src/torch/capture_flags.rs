//! One word per GPU that tells requests whether a CUDA graph may be being captured.
//!
//! Loaded by every request, stored by captures and by a forked child. No locks.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::device::GPUS_MAX;

/// Number of open captures of each GPU, refused ones included, and [`UNANNOUNCED`].
static OPEN: [AtomicU32; GPUS_MAX] = [const { AtomicU32::new(UNANNOUNCED) }; GPUS_MAX];
/// Captures may exist that `dormouse_torch_begin_pool` does not announce.
const UNANNOUNCED: u32 = 1 << 31;

/// Returns whether a request on GPU `device` must query the driver if its stream is being captured.
#[inline]
pub(crate) fn must_query_driver(device: i32) -> bool {
    // Acquire: pairs with `set_open`. A thread that works for a capture got its work after the begin.
    let open = usize::try_from(device).ok().and_then(|device| OPEN.get(device));
    open.is_none_or(|open| open.load(Ordering::Acquire) > 0)
}

/// `dormouse_torch_set_graph_hooks`.
pub(crate) fn set_announced(are_announced: bool) {
    for open in &OPEN {
        // Relaxed: called before the first request.
        if are_announced {
            open.fetch_and(!UNANNOUNCED, Ordering::Relaxed);
        } else {
            open.fetch_or(UNANNOUNCED, Ordering::Relaxed);
        }
    }
}

/// Sets the number of open captures of GPU `device`.
pub(super) fn set_open(device: usize, captures: u32) {
    let set = |seen: u32| Some(seen & UNANNOUNCED | captures.min(!UNANNOUNCED));
    // Release: pairs with `must_query_driver`.
    let _always = OPEN[device].fetch_update(Ordering::Release, Ordering::Relaxed, set);
}
