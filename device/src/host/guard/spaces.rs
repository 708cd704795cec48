//! The address spaces of all host devices, read by the fault handler.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::AddressRange;

/// Limit of the host devices of a process.
pub(super) const SPACES_MAX: usize = 256;

/// Start and end of a space; both 0 if unused, start 1 while it is being filled in.
#[derive(Debug)]
struct Entry {
    start: AtomicUsize,
    end: AtomicUsize,
}

/// Not the start of a page.
const FILLING: usize = 1;

/// The spaces of the process. Lock-free.
#[derive(Debug)]
pub(super) struct Spaces {
    entries: [Entry; SPACES_MAX],
}

impl Spaces {
    pub(super) const fn new() -> Self {
        let entries =
            [const { Entry { start: AtomicUsize::new(0), end: AtomicUsize::new(0) } }; SPACES_MAX];
        Self { entries }
    }

    /// Adds `range`; `false` at the limit.
    pub(super) fn add(&self, range: AddressRange) -> bool {
        let free = self.entries.iter().find(|entry| {
            entry.start.compare_exchange(0, FILLING, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        });
        let Some(entry) = free else { return false };
        entry.end.store(range.end(), Ordering::Relaxed);
        // Release: pairs with the Acquire in `contains`. There are no faults of ours earlier.
        entry.start.store(range.start, Ordering::Release);
        true
    }

    pub(super) fn remove(&self, range: AddressRange) {
        for entry in &self.entries {
            if entry.start.load(Ordering::Acquire) == range.start {
                entry.end.store(0, Ordering::Relaxed);
                entry.start.store(0, Ordering::Release);
            }
        }
    }

    /// Lowers the end of the space that begins at `start` to `end`. Before the addresses are unmapped: see
    /// `crate::host::end`.
    pub(super) fn shrink(&self, start: usize, end: usize) {
        for entry in &self.entries {
            if entry.start.load(Ordering::Acquire) == start {
                entry.end.fetch_min(end, Ordering::Relaxed);
            }
        }
    }

    pub(super) fn contains(&self, address: usize) -> bool {
        self.entries.iter().any(|entry| {
            let start = entry.start.load(Ordering::Acquire);
            start > FILLING && start <= address && address < entry.end.load(Ordering::Relaxed)
        })
    }
}
