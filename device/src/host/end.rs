//! The end of a reserved range, which falls when its last addresses return to the system.
//!
//! Any thread may ask whether an address is below the end while another lowers it. Relaxed accesses suffice:
//! - An address that leaves the range has no owner, so no thread asks about it before it is mapped anew.
//! - It leaves the range before it is unmapped. The kernel orders an unmapping before the next mapping of the same
//!   addresses. Who owns memory there has therefore seen the end fall.
//! - The end never rises, and each address leaves once. Of two threads that lower it, each unmaps what left by
//!   its own call, never memory that others have mapped since.

use super::guard::sync::{AtomicUsize, Ordering};
use crate::AddressRange;

#[derive(Debug)]
pub(super) struct End(AtomicUsize);

impl End {
    pub(super) fn new(end: usize) -> Self {
        Self(AtomicUsize::new(end))
    }

    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Lowers it to `end`; a higher one is ignored. Returns the addresses that left, which no other call returns.
    pub(super) fn lower(&self, end: usize) -> AddressRange {
        let before = self.0.fetch_min(end, Ordering::Relaxed);
        AddressRange::new(end, before.saturating_sub(end))
    }
}
