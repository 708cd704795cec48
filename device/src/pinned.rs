//! Pinned memory with an owner.

use std::sync::Arc;

use crate::{AddressRange, Device, DeviceError};

/// Pinned host memory, freed when dropped. The caller keeps it until every copy that uses it has
/// completed ([`Device::copy`]).
#[derive(Debug)]
pub struct PinnedMemory<D: Device> {
    /// `None` after a leak.
    device: Option<Arc<D>>,
    range: AddressRange,
}

impl<D: Device> PinnedMemory<D> {
    /// Allocates at least `bytes` of page-aligned memory.
    ///
    /// # Errors
    /// As [`Device::allocate_pinned`].
    pub fn allocate(device: &Arc<D>, bytes: usize) -> Result<Self, DeviceError> {
        let range = device.allocate_pinned(bytes)?;
        Ok(Self { device: Some(Arc::clone(device)), range })
    }

    /// Returns its addresses.
    #[must_use]
    pub const fn range(&self) -> AddressRange {
        self.range
    }

    /// Leaks the memory: it may still be in use.
    pub fn leak(&mut self) {
        self.device = None;
    }
}

impl<D: Device> Drop for PinnedMemory<D> {
    fn drop(&mut self) {
        if let Some(device) = &self.device {
            // SAFETY: it is from this device's `allocate_pinned` and freed only here. No copy uses it: the
            // owner has kept it until the last one.
            unsafe { device.free_pinned(self.range) };
        }
    }
}
