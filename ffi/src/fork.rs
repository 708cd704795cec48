//! Forked children. A child has the parent's memory and none of its threads, so it cannot use the
//! library: its frees of our blocks are no-ops, its requests go to libc, and every function of the
//! header returns `DORMOUSE_ERR_FORKED`. Locks that the parent's threads held stay locked and are
//! never taken.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::torch::capture_flags;

static IN_CHILD: AtomicBool = AtomicBool::new(false);
static WATCH: Once = Once::new();

/// Returns whether this process is a child forked after [`watch`].
#[inline]
pub(crate) fn in_child() -> bool {
    // Relaxed: only the child's first thread writes it, before it runs other code.
    IN_CHILD.load(Ordering::Relaxed)
}

/// Registers the handler of forked children. Idempotent.
pub(crate) fn watch() {
    WATCH.call_once(|| {
        // SAFETY: the handler stores to statics and closes files, and this library is never unloaded
        // (`-z nodelete`). A failure (no memory for a list entry) has no remedy.
        let _ignored = unsafe { libc::pthread_atfork(None, None, Some(child)) };
    });
}

extern "C" fn child() {
    IN_CHILD.store(true, Ordering::Relaxed);
    // The fast allocation path checks these flags only; set, they send every request to the slow one.
    capture_flags::set_announced(false);
    // Open descriptors would keep the parent's disk space and pinned memory after its end.
    dormouse_storage::close_in_child();
}
