//! Address ranges.

use crate::{DeviceError, Operation};

/// Device virtual addresses `[start, start + bytes)`. Never dereferenced here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AddressRange {
    /// First address.
    pub start: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl AddressRange {
    /// Creates a range from its first address and length.
    #[must_use]
    pub const fn new(start: usize, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// Returns one past the last address, saturating.
    #[must_use]
    pub const fn end(self) -> usize {
        self.start.saturating_add(self.bytes)
    }

    /// Whether `address` lies inside.
    #[must_use]
    pub const fn contains(self, address: usize) -> bool {
        address.wrapping_sub(self.start) < self.bytes
    }

    /// Returns the first `bytes` of the range (at most all of it) and the rest.
    #[must_use]
    pub const fn split_at(self, bytes: usize) -> (Self, Self) {
        let bytes = if bytes < self.bytes { bytes } else { self.bytes };
        (Self::new(self.start, bytes), Self::new(self.start + bytes, self.bytes - bytes))
    }

    /// Refuses anything but a non-empty run of whole pages of `space`.
    pub(crate) fn check_pages(
        self,
        space: Self,
        page_bytes: usize,
        operation: Operation,
    ) -> Result<(), DeviceError> {
        // `covers` saturates: a length that wraps past the top of memory is refused here.
        let wraps = self.start.checked_add(self.bytes).is_none();
        let is_aligned =
            self.start.is_multiple_of(page_bytes) && self.bytes.is_multiple_of(page_bytes);
        if is_aligned && self.bytes > 0 && !wraps && space.covers(self) {
            return Ok(());
        }
        Err(DeviceError::bad_range(operation, self, page_bytes, space))
    }

    /// Whether `other` lies wholly inside.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        other.start >= self.start && other.end() <= self.end()
    }
}
