//! Fork: the child has our memory and none of our threads, so it may not come in.
//!
//! The handler sets flags, and closes what would keep the parent's disk space and pinned memory
//! beyond its end. In the child frees of ours do nothing, new requests go to libc, and every call of
//! the boundary is `DORMOUSE_ERR_FORKED`; whatever the parent's other threads had locked stays
//! locked and is never waited for.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::torch::captures;

static IN_CHILD: AtomicBool = AtomicBool::new(false);
static WATCH: Once = Once::new();

/// Whether this process is a child forked after [`watch`].
#[inline]
pub(crate) fn in_child() -> bool {
    // Relaxed: the only writer is the child's only thread, before it runs anything else.
    IN_CHILD.load(Ordering::Relaxed)
}

/// Starts watching for forks; a process that forks before this leaves its child a free start.
pub(crate) fn watch() {
    WATCH.call_once(|| {
        // SAFETY: the handler stores to statics and closes files, and this library is never unloaded
        // (`-z nodelete`). Failure means no memory for a list entry; nothing better can be done.
        let _ignored = unsafe { libc::pthread_atfork(None, None, Some(child)) };
    });
}

extern "C" fn child() {
    IN_CHILD.store(true, Ordering::Relaxed);
    // No request may come by the quick way any more, which looks at this alone.
    captures::set_announced(false);
    dormouse_storage::close_in_child();
}
