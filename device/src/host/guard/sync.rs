//! Synchronisation of the span table. The loom model replaces this module.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, fence};
pub(in crate::host) use std::sync::atomic::{AtomicUsize, Ordering};
pub(super) use std::thread::yield_now;
