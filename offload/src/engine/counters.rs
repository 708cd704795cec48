//! Counts and sums that belong to no region. All relaxed: each is a figure on its own.

use std::sync::atomic::{AtomicU64, Ordering};

/// One direction of travel.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    pub(crate) copies: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) busy_ns: AtomicU64,
}

impl Copies {
    pub(crate) fn add(&self, bytes: u64, ns: u64) {
        bump(&self.copies, 1);
        bump(&self.bytes, bytes);
        bump(&self.busy_ns, ns);
    }
}

/// All of them.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) device_to_host: Copies,
    pub(crate) host_to_device: Copies,
    pub(crate) nvme_write: Copies,
    pub(crate) nvme_read: Copies,
    pub(crate) sleeps: AtomicU64,
    pub(crate) wakes: AtomicU64,
    pub(crate) sleeps_backed_out: AtomicU64,
    pub(crate) written_meanwhile: AtomicU64,
    pub(crate) declined: AtomicU64,
    pub(crate) sleep_failures: AtomicU64,
    pub(crate) wake_failures: AtomicU64,
    pub(crate) reread_chunks: AtomicU64,
    pub(crate) device_faults: AtomicU64,
    pub(crate) reclaims: AtomicU64,
    pub(crate) stall_ns: AtomicU64,
    pub(crate) waits: AtomicU64,
}

pub(crate) fn bump(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

pub(crate) fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
