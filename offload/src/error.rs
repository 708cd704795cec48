//! What this room refuses or could not do, with the values seen and those accepted.

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

/// Why something was not done. Nothing is lost by any of them.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// The allocator said no.
    #[error(transparent)]
    Alloc(Arc<AllocError>),
    /// The device said no.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The pinned pool said no.
    #[error(transparent)]
    Pinned(PinnedError),
    /// The file tier said no.
    #[error(transparent)]
    Nvme(#[from] NvmeError),
    /// A kernel refused its arguments.
    #[error(transparent)]
    Kernel(Arc<KernelError>),
    /// A thread could not be started.
    #[error("thread {name} could not be started: {reason}")]
    Thread {
        /// Its name.
        name: String,
        /// The system's words.
        reason: String,
    },
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
    /// A call out of order on an exclusive object.
    #[error("{what}: seen {seen}, expected {expected}")]
    Order {
        /// Which call.
        what: &'static str,
        /// What was seen.
        seen: String,
        /// What would have been in order.
        expected: String,
    },
    /// An id whose object is gone.
    #[error("{what} {id} does not exist any more")]
    Stale {
        /// What kind of id.
        what: &'static str,
        /// The id.
        id: String,
    },
    /// An address no block of ours holds.
    #[error("address {address:#x} lies in no live block of this allocator")]
    NotOurs {
        /// The address.
        address: usize,
    },
    /// A block that another region owns already.
    #[error("the block at {address:#x} is region {owner} already")]
    Claimed {
        /// The block's address.
        address: usize,
        /// Its owner's key, as an id.
        owner: String,
    },
    /// A block that shares every page it lies in: none of them can sleep.
    #[error(
        "the block at {address:#x} has no page of {page_bytes} bytes to itself; accepted: one with \
         a whole page, as whatever is allocated inside a tag or a layer has"
    )]
    NoWholePage {
        /// The block's address.
        address: usize,
        /// Bytes of a page.
        page_bytes: usize,
    },
    /// A region that must be awake and is not.
    #[error("region {region} is {state:?}; {what} needs it awake")]
    NotAwake {
        /// The region.
        region: RegionId,
        /// Its state.
        state: RegionState,
        /// What was asked.
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
        /// Why.
        #[source]
        source: Arc<OffloadError>,
    },
    /// A tier with no room, or with none configured.
    #[error(
        "the {tier:?} tier has no room for {asked_bytes} bytes: {used_bytes} of {budget_bytes} are used"
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
    #[error("{what}: {limit} exist already, the most that can")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The engine has been shut down.
    #[error("the engine is shut down: nothing is copied any more")]
    ShutDown,
    /// A thread of the runtime panicked, which is a defect of ours; or the device refuses to say
    /// whether it is still copying.
    #[error(
        "a thread of the runtime panicked, or the device would not say when a copy is over: what was \
         in its care may never come, and nobody waits for it; what is asleep may stay so"
    )]
    Broken,
    /// A device this first version cannot do it on.
    #[error("{what} is not available on the {kind} device")]
    Unsupported {
        /// What was asked.
        what: &'static str,
        /// Which device.
        kind: &'static str,
    },
}

/// Coarse kind of an error, for the status blocks of the C interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// A bad argument.
    Argument,
    /// Memory or a tier has no room.
    Memory,
    /// The device.
    Device,
    /// I/O: the file, its directory, its content.
    Io,
    /// Order, stale ids, busy things.
    State,
    /// A defect of the runtime's own.
    Internal,
}

impl OffloadError {
    /// Its coarse kind.
    #[must_use]
    pub fn class(&self) -> ErrorClass {
        match self {
            Self::Alloc(e) => match **e {
                AllocError::NotABlock { .. }
                | AllocError::NotBlockStart { .. }
                | AllocError::BadRequest { .. }
                | AllocError::BadConfig { .. }
                | AllocError::UnknownStream { .. } => ErrorClass::Argument,
                AllocError::FreeDeferred { .. } | AllocError::StaleBlock { .. } => {
                    ErrorClass::State
                }
                AllocError::Device(_) => ErrorClass::Device,
                _ => ErrorClass::Memory,
            },
            Self::Pinned(PinnedError::TooManyRanges { .. })
            | Self::TierFull { .. }
            | Self::TooMany { .. } => ErrorClass::Memory,
            Self::Device(DeviceError::OutOfMemory { .. }) => ErrorClass::Memory,
            Self::Device(_) | Self::Unsupported { .. } => ErrorClass::Device,
            Self::Nvme(e) if e.is_full() => ErrorClass::Memory,
            Self::Nvme(_) => ErrorClass::Io,
            Self::Pinned(_) | Self::Kernel(_) | Self::Argument { .. } | Self::NotOurs { .. } => {
                ErrorClass::Argument
            }
            Self::WakeFailed { source, .. } => source.class(),
            Self::Thread { .. }
            | Self::Order { .. }
            | Self::Stale { .. }
            | Self::Claimed { .. }
            | Self::NoWholePage { .. }
            | Self::NotAwake { .. }
            | Self::ShutDown => ErrorClass::State,
            Self::Broken => ErrorClass::Internal,
        }
    }

    /// Whether this only means "not done, the data stays awake": a full, closed or stopped tier.
    #[must_use]
    pub fn is_declined(&self) -> bool {
        match self {
            Self::TierFull { .. } | Self::ShutDown => true,
            Self::Nvme(e) => e.is_full(),
            _ => false,
        }
    }

    /// Whether a tier has no room now that would have if it were empty.
    pub(crate) const fn is_full_for_now(&self) -> bool {
        match self {
            Self::TierFull { asked_bytes, budget_bytes, .. }
            | Self::Nvme(NvmeError::Full { asked_bytes, budget_bytes, .. }) => {
                *asked_bytes <= *budget_bytes
            }
            _ => false,
        }
    }

    /// Whether device memory ran short: room made elsewhere may help.
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

impl From<ThreadError> for OffloadError {
    fn from(ThreadError { name, reason }: ThreadError) -> Self {
        Self::Thread { name, reason }
    }
}

impl From<Broken> for OffloadError {
    fn from(_: Broken) -> Self {
        Self::Broken
    }
}

impl From<KernelError> for OffloadError {
    fn from(error: KernelError) -> Self {
        Self::Kernel(Arc::new(error))
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn what_no_place_would_be_large_enough_for_is_not_full_for_now() {
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
