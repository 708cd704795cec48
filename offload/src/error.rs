//! Errors of this crate, with the values seen and those accepted.

use std::sync::Arc;

use dormouse_alloc::AllocError;
use dormouse_alloc::pinned::PinnedError;
use dormouse_device::DeviceError;
use dormouse_kernels::KernelError;

use crate::ids::{RegionId, Tier};
use crate::table::Broken;
use dormouse_residency::WorkError;
use dormouse_residency::region::RegionState;
use dormouse_storage::{NvmeError, ThreadError};

/// Why an operation was not done. No bytes are lost by any of them.
#[derive(Clone, Debug, thiserror::Error)]
pub enum OffloadError {
    /// The allocator refused.
    #[error(transparent)]
    Alloc(Arc<AllocError>),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The pinned pool refused.
    #[error(transparent)]
    Pinned(PinnedError),
    /// The NVMe tier refused.
    #[error(transparent)]
    Nvme(#[from] NvmeError),
    /// A kernel refused its arguments.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A thread could not be started.
    #[error(transparent)]
    Thread(#[from] ThreadError),
    /// An argument outside what is accepted.
    #[error("{what} is {seen}; accepted: {accepted}")]
    Argument {
        /// Which argument.
        what: &'static str,
        /// The value seen.
        seen: String,
        /// What is accepted.
        accepted: String,
    },
    /// A call out of order.
    #[error("{what}: seen {seen}, expected {expected}")]
    Order {
        /// Which call.
        what: &'static str,
        /// The call or state seen.
        seen: String,
        /// The call or state expected.
        expected: String,
    },
    /// The id of an object that no longer exists.
    #[error("{what} {id} does not exist; accepted: a live {what}")]
    Stale {
        /// The kind of object.
        what: &'static str,
        /// The id.
        id: String,
    },
    /// An address outside every live block of this allocator.
    #[error("address {address:#x} is not in a live block of this allocator")]
    NotOurs {
        /// The address.
        address: usize,
    },
    /// A block that belongs to another region.
    #[error("the block at {address:#x} belongs to region {owner}")]
    Claimed {
        /// The block's address.
        address: usize,
        /// The region that holds it.
        owner: String,
    },
    /// A block without a whole page of its own. Only whole pages sleep.
    #[error(
        "the block at {address:#x} has no whole page of {page_bytes} bytes; accepted: blocks with a \
         whole page, such as those allocated inside a tag or a layer"
    )]
    NoWholePage {
        /// The block's address.
        address: usize,
        /// Bytes of a page.
        page_bytes: usize,
    },
    /// A region that is not awake, where the call needs it awake.
    #[error("region {region} is {state:?}; {what} requires an awake region")]
    NotAwake {
        /// The region.
        region: RegionId,
        /// Its state.
        state: RegionState,
        /// The operation.
        what: &'static str,
    },
    /// A wake failed. The bytes are still where they were.
    #[error("region {region} ({bytes} bytes at {start:#x}) stays asleep: {source}")]
    WakeFailed {
        /// The region.
        region: RegionId,
        /// Its first address.
        start: usize,
        /// Its length.
        bytes: u64,
        /// The cause.
        #[source]
        source: Arc<OffloadError>,
    },
    /// A tier that is full or not configured.
    #[error(
        "the {tier:?} tier has no room for {asked_bytes} bytes: {used_bytes} of {budget_bytes} bytes are used"
    )]
    TierFull {
        /// Which tier.
        tier: Tier,
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes used.
        used_bytes: u64,
        /// Its budget.
        budget_bytes: u64,
    },
    /// A named limit was reached.
    #[error("{what}: limit reached ({limit})")]
    TooMany {
        /// The kind of object.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The engine has been shut down.
    #[error("the engine is shut down")]
    ShutDown,
    /// A thread of the runtime panicked, or the device does not report whether a copy is over.
    #[error(
        "a thread of the runtime panicked, or the device did not report the end of a copy; waits end \
         with this error and memory that is asleep may stay asleep"
    )]
    Broken,
}

impl OffloadError {
    /// Returns true if the operation was declined and the data stays awake: a full, closed or stopped tier.
    #[must_use]
    pub fn is_declined(&self) -> bool {
        match self {
            Self::TierFull { .. } | Self::ShutDown => true,
            Self::Nvme(e) => e.is_full(),
            _ => false,
        }
    }

    /// Returns true if an empty tier would have room.
    pub(crate) const fn is_full_for_now(&self) -> bool {
        match self {
            Self::TierFull { asked_bytes, budget_bytes, .. }
            | Self::Nvme(NvmeError::Full { asked_bytes, budget_bytes, .. }) => {
                *asked_bytes <= *budget_bytes
            }
            _ => false,
        }
    }

    /// Returns true if the operation was declined and an empty tier would decline it too.
    pub(crate) fn is_final(&self) -> bool {
        self.is_declined() && !self.is_full_for_now()
    }

    /// Returns true if host memory was refused.
    pub(crate) const fn is_host_full(&self) -> bool {
        matches!(self, Self::TierFull { tier: Tier::Host, .. })
    }

    /// Returns true if device memory ran out, so that reclaim may help.
    pub(crate) fn is_out_of_memory(&self) -> bool {
        match self {
            Self::WakeFailed { source, .. } => source.is_out_of_memory(),
            Self::Alloc(e) => {
                matches!(**e, AllocError::NoRoom { .. } | AllocError::OutOfMemory(_))
            }
            Self::Device(DeviceError::OutOfMemory { .. }) => true,
            _ => false,
        }
    }

    /// Whether the device is full, and not the budget.
    pub(crate) fn is_device_full(&self) -> bool {
        match self {
            Self::WakeFailed { source, .. } => source.is_device_full(),
            Self::Device(e) => matches!(e, DeviceError::OutOfMemory { .. }),
            _ => false,
        }
    }

    pub(crate) fn argument(
        what: &'static str,
        seen: impl ToString,
        accepted: impl ToString,
    ) -> Self {
        Self::Argument { what, seen: seen.to_string(), accepted: accepted.to_string() }
    }
}

impl From<AllocError> for OffloadError {
    fn from(error: AllocError) -> Self {
        Self::Alloc(Arc::new(error))
    }
}

impl From<WorkError> for OffloadError {
    fn from(WorkError { what, seen, accepted }: WorkError) -> Self {
        Self::Argument { what, seen, accepted }
    }
}

impl From<Broken> for OffloadError {
    fn from(_: Broken) -> Self {
        Self::Broken
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_request_above_the_budget_is_not_full_for_now() {
        let host = |asked_bytes, budget_bytes| OffloadError::TierFull {
            tier: Tier::Host,
            asked_bytes,
            used_bytes: 0,
            budget_bytes,
        };
        let file = |asked_bytes, budget_bytes| {
            OffloadError::Nvme(NvmeError::Full { asked_bytes, used_bytes: 0, budget_bytes })
        };
        for full in [&host as &dyn Fn(u64, u64) -> OffloadError, &file] {
            assert!(full(8, 8).is_full_for_now());
            assert!(!full(8, 7).is_full_for_now());
            assert!(!full(1, 0).is_full_for_now(), "there is none");
        }
        assert!(!OffloadError::ShutDown.is_full_for_now());
    }
}
