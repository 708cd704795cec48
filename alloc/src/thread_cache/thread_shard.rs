//! Assigns a thread-cache shard to each thread.

use std::cell::Cell;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};

thread_local! {
    /// No destructor: threads may free late.
    static SHARD: Cell<Option<ThreadShard>> = const { Cell::new(None) };
}

/// Number of shards assigned.
static SHARDS_ASSIGNED: AtomicUsize = AtomicUsize::new(0);

/// A thread's shard in the thread caches of all allocators. It is a hint: a thread may use any
/// shard, and threads may share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadShard(NonZero<usize>);

impl ThreadShard {
    /// Returns the shard of the calling thread, and assigns one at the first call.
    #[inline]
    #[must_use]
    pub fn current() -> Self {
        SHARD.get().unwrap_or_else(Self::assign)
    }

    #[cold]
    fn assign() -> Self {
        // Relaxed: a count.
        let before = SHARDS_ASSIGNED.fetch_add(1, Ordering::Relaxed);
        let assigned = Self(NonZero::<usize>::MIN.saturating_add(before));
        SHARD.set(Some(assigned));
        assigned
    }

    /// Number of shards assigned.
    pub(super) fn count() -> usize {
        SHARDS_ASSIGNED.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) const fn index(self) -> usize {
        self.0.get() - 1
    }
}
