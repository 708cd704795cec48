//! Segments as they are, for tests that hold the allocator against what could be done.

use crate::allocator::Allocator;
use crate::{AllocError, Request};
use dormouse_device::{AddressRange, Device};

/// A run of addresses that one pool divides.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// Its addresses.
    pub range: AddressRange,
    /// Number of the pool it is in.
    pub pool: u32,
}

impl<D: Device> Allocator<D> {
    /// Every segment, in no particular order.
    #[doc(hidden)]
    #[must_use]
    pub fn segments(&self) -> Vec<SegmentInfo> {
        let segments = self.state.lock().state.segments();
        segments.into_iter().map(|(range, pool)| SegmentInfo { range, pool }).collect()
    }

    /// Numbers of the pools that are looked through before `request` is refused, as far as there are
    /// any yet.
    ///
    /// # Errors
    /// `BadRequest`.
    #[doc(hidden)]
    pub fn pools(&self, request: &Request) -> Result<Vec<u32>, AllocError> {
        let need = self.need(request)?;
        Ok(self.state.lock().state.pools_of_last_resort(request, need.fit))
    }
}
