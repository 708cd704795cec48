//! What the span table needs of the machine; its loom model puts loom's in place of these.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
pub(super) use std::thread::yield_now;
