//! Pinned memory with an owner.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::{AddressRange, Device, DeviceError};

/// Pinned host memory, freed when dropped. The caller keeps it until every copy that uses it has
/// completed ([`Device::copy`]).
#[derive(Debug)]
pub struct PinnedMemory<D: Device> {
    device: Arc<D>,
    range: AddressRange,
}

impl<D: Device> PinnedMemory<D> {
    /// Allocates at least `bytes` of page-aligned memory.
    ///
    /// # Errors
    /// As [`Device::allocate_pinned`].
    pub fn allocate(device: &Arc<D>, bytes: usize) -> Result<Self, DeviceError> {
        let range = device.allocate_pinned(bytes)?;
        Ok(Self { device: Arc::clone(device), range })
    }

    /// Returns its addresses.
    #[must_use]
    pub const fn range(&self) -> AddressRange {
        self.range
    }

    /// Leaks the memory: it may still be in use.
    pub fn leak(self) {
        let mut kept = ManuallyDrop::new(self);
        // SAFETY: the field is dropped once: `kept` itself never is, nor used again.
        unsafe { std::ptr::drop_in_place(&raw mut kept.device) };
    }
}

impl<D: Device> Drop for PinnedMemory<D> {
    fn drop(&mut self) {
        // SAFETY: it came from this device's `allocate_pinned` and is freed here alone. No copy
        // uses it: whoever queued one keeps its ends until it is over.
        unsafe { self.device.free_pinned(self.range) };
    }
}
