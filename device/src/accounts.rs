//! Counts of mapped and staged bytes, never above the capacity (I5).

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{DeviceError, MemoryInfo, Operation};

/// Byte counts, updated before a system call and corrected if it fails.
#[derive(Debug)]
pub(crate) struct Accounts {
    capacity_bytes: u64,
    /// Relaxed throughout: counts.
    mapped_bytes: AtomicU64,
    staged_bytes: AtomicU64,
    /// Limit of the sum of mapped and parked bytes.
    parking_limit_bytes: AtomicU64,
}

impl Accounts {
    pub(crate) fn new(capacity_bytes: u64) -> Self {
        Self {
            capacity_bytes,
            mapped_bytes: AtomicU64::new(0),
            staged_bytes: AtomicU64::new(0),
            parking_limit_bytes: AtomicU64::new(capacity_bytes),
        }
    }

    /// Counts `bytes` as mapped, if the capacity allows it.
    pub(crate) fn take(&self, bytes: usize, operation: Operation) -> Result<(), DeviceError> {
        let asked_bytes = bytes as u64;
        let capacity_bytes = self.capacity_bytes;
        let fits =
            |mapped: u64| mapped.checked_add(asked_bytes).filter(|total| *total <= capacity_bytes);
        let taken = self.mapped_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        taken.map(drop).map_err(|mapped_bytes| DeviceError::OutOfMemory {
            operation,
            asked_bytes,
            mapped_bytes,
            capacity_bytes,
        })
    }

    /// Removes `bytes` from the mapped count.
    pub(crate) fn give(&self, bytes: usize) {
        let before = self.mapped_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
        debug_assert!(before >= bytes as u64, "gave {bytes} bytes back of {before} mapped");
    }

    /// Returns the bytes that may be parked.
    pub(crate) fn parking_bytes(&self) -> u64 {
        let limit_bytes = self.parking_limit_bytes.load(Ordering::Relaxed);
        limit_bytes.saturating_sub(self.mapped_bytes.load(Ordering::Relaxed))
    }

    /// Limits the sum of mapped and parked bytes.
    pub(crate) fn limit_parking(&self, total_bytes: u64) {
        let limit_bytes = total_bytes.min(self.capacity_bytes);
        self.parking_limit_bytes.store(limit_bytes, Ordering::Relaxed);
    }

    /// Counts mapped `bytes` as staged.
    pub(crate) fn stage(&self, bytes: usize) {
        self.staged_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Ends the staging of `bytes`; they stay mapped.
    pub(crate) fn unstage(&self, bytes: usize) {
        let before = self.staged_bytes.fetch_sub(bytes as u64, Ordering::Relaxed);
        debug_assert!(before >= bytes as u64, "unstaged {bytes} bytes of {before}");
    }

    pub(crate) fn info(&self, parked_bytes: u64) -> MemoryInfo {
        MemoryInfo {
            capacity_bytes: self.capacity_bytes,
            mapped_bytes: self.mapped_bytes.load(Ordering::Relaxed),
            staged_bytes: self.staged_bytes.load(Ordering::Relaxed),
            parked_bytes,
        }
    }
}
