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

    /// Number of the pool that `request` is served from, where there is one yet.
    ///
    /// # Errors
    /// `BadRequest`.
    #[doc(hidden)]
    pub fn pool(&self, request: &Request) -> Result<Option<u32>, AllocError> {
        let need = self.need(request)?;
        Ok(self.state.lock().state.pool_if_any(request, need.fit))
    }
}
