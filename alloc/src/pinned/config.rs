//! How a pinned pool is set up.

use super::{PinnedError, UNIT_BYTES};

/// The most a pool can hold: what its bookkeeping counts in 32 bits.
pub const CAP_BYTES_MAX: u64 = (u32::MAX / 4) as u64 * UNIT_BYTES as u64;

/// Settings of one [`super::PinnedPool`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedConfig {
    /// The most pinned at any time, used or not; bounce buffers alone may go beyond. 0: nothing
    /// else is handed out. Larger than [`CAP_BYTES_MAX`] counts as that.
    pub cap_bytes: u64,
    /// Whether what comes back stays pinned for the next request: where pinning costs something.
    pub keeps: bool,
    /// Whether a thread of the pool pins ahead of need. Only where it `keeps`.
    pub prepares: bool,
}

impl PinnedConfig {
    /// The usual settings: on a device where pinning costs something, memory is kept and prepared.
    #[must_use]
    pub const fn new(cap_bytes: u64, costs: bool) -> Self {
        Self { cap_bytes, keeps: costs, prepares: costs }
    }

    pub(super) fn validate(&self) -> Result<(), PinnedError> {
        if self.prepares && !self.keeps {
            return Err(PinnedError::BadConfig {
                field: "prepares",
                value: 1,
                accepted: "0 where nothing is kept",
            });
        }
        Ok(())
    }
}
