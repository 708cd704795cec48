//! Configuration of a pinned pool.

use super::{PinnedError, UNIT_BYTES};

/// Largest cap of a pool, limited by its 32-bit unit counts.
pub const CAP_BYTES_MAX: u64 = (u32::MAX / 4) as u64 * UNIT_BYTES as u64;

/// Settings of one [`super::PinnedPool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedConfig {
    /// Limit of the pinned bytes, used or not. Only bounce buffers may exceed it. 0: only bounce buffers
    /// are allocated. Clamped to [`CAP_BYTES_MAX`].
    pub cap_bytes: u64,
    /// Whether freed memory stays pinned for the next request.
    pub keeps: bool,
    /// Whether a background thread pins memory in advance. Requires `keeps`.
    pub prepares: bool,
}

impl PinnedConfig {
    /// Creates the default configuration: if pinning `costs` time on the device, memory is kept and pinned
    /// in advance.
    #[must_use]
    pub const fn new(cap_bytes: u64, costs: bool) -> Self {
        Self { cap_bytes, keeps: costs, prepares: costs }
    }

    pub(super) fn validate(&self) -> Result<(), PinnedError> {
        if self.prepares && !self.keeps {
            return Err(PinnedError::BadConfig {
                field: "prepares",
                value: 1,
                accepted: "0 without keeps",
            });
        }
        Ok(())
    }
}
