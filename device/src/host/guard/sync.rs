//! Synchronisation of the span table. The loom model replaces this module.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
pub(super) use std::thread::yield_now;
