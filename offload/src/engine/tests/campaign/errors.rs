//! Which errors a sequence may meet: each has a name, and a cause that was put there.

use std::collections::HashSet;

use dormouse_alloc::AllocError;
use dormouse_device::{DeviceError, Operation};

use crate::engine::tests::cause;
use crate::error::OffloadError;
use dormouse_storage::{IoOperation, NvmeError};

/// Codes of what is refused by order.
pub(crate) const REFUSED: i32 = libc::EAGAIN;
pub(crate) const TORN: i32 = libc::EIO;

/// An error of the device's as a test would have it.
pub(crate) fn refused(operation: Operation, code: i32) -> DeviceError {
    let reason = "injected".to_owned();
    DeviceError::Refused { operation, start: 0, bytes: 0, code, reason }
}

/// What has been put in a sequence's way so far.
#[derive(Debug, Default)]
pub(crate) struct Armed {
    pub(crate) full_disk: bool,
    pub(crate) failed_writes: bool,
    pub(crate) failed_reads: bool,
    pub(crate) short: bool,
    pub(crate) flips: bool,
    pub(crate) refused: HashSet<Operation>,
    pub(crate) torn: bool,
    pub(crate) shut_down: bool,
}

/// Whom an error was given to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum To {
    /// An allocation.
    Allocate,
    /// A sleep.
    Sleep,
    /// A wait for an awake region.
    WaitAwake,
    /// A release of a region.
    Release,
    /// A stash or unstash.
    Stash,
}

impl Armed {
    /// Returns the error's name. The error is one that `to` documents, and has a cause.
    pub(crate) fn explain(&self, to: To, error: OffloadError) -> &'static str {
        let shown = error.to_string();
        let is_wrapped = matches!(error, OffloadError::WakeFailed { .. });
        let leaf = cause(error);
        let name = self.name(&leaf).unwrap_or_else(|| panic!("{to:?} met {shown} of no cause"));
        let is_documented = match to {
            To::Allocate => matches!(leaf, OffloadError::Alloc(_)),
            To::Sleep => matches!(leaf, OffloadError::Device(_) | OffloadError::Alloc(_)),
            // No other thread puts a region to sleep that is waited for.
            To::WaitAwake if matches!(leaf, OffloadError::NotAwake { .. }) => false,
            To::WaitAwake => is_wrapped || matches!(leaf, OffloadError::Device(_)),
            To::Release => {
                matches!(leaf, OffloadError::NotAwake { .. } | OffloadError::Device(_))
            }
            To::Stash => matches!(
                leaf,
                OffloadError::TierFull { .. } | OffloadError::Nvme(_) | OffloadError::Device(_)
            ),
        };
        assert!(is_documented, "{to:?} is not said to give this: {shown}");
        name
    }

    /// Its name; `None` where nothing was done that could bring it about.
    fn name(&self, error: &OffloadError) -> Option<&'static str> {
        let (name, has_cause) = match error {
            OffloadError::Alloc(e) => match &**e {
                AllocError::NoRoom { .. } => ("NoRoom", true),
                AllocError::OutOfMemory(_) => ("OutOfMemory", true),
                AllocError::Device(e) => return self.device(e),
                _ => return None,
            },
            OffloadError::Device(e) => return self.device(e),
            OffloadError::Nvme(e) => return self.file(e),
            OffloadError::TierFull { .. } => ("TierFull", true),
            OffloadError::NotAwake { .. } => ("NotAwake", true),
            OffloadError::ShutDown => ("ShutDown", self.shut_down),
            _ => return None,
        };
        has_cause.then_some(name)
    }

    fn device(&self, error: &DeviceError) -> Option<&'static str> {
        let DeviceError::Refused { operation, code, .. } = error else { return None };
        match *code {
            REFUSED => self.refused.contains(operation).then_some("Refused"),
            TORN => self.torn.then_some("Torn"),
            _ => None,
        }
    }

    fn file(&self, error: &NvmeError) -> Option<&'static str> {
        let is_stopped = self.full_disk || self.failed_writes || self.short;
        let (name, has_cause) = match error {
            NvmeError::Full { .. } => ("Full", true),
            NvmeError::Stopped { .. } => ("Stopped", is_stopped),
            NvmeError::Failed { operation: IoOperation::Write, code: libc::ENOSPC, .. } => {
                ("FullDisk", self.full_disk)
            }
            NvmeError::Failed { operation: IoOperation::Write, code: libc::EIO, .. } => {
                ("FailedWrite", self.failed_writes)
            }
            NvmeError::Failed { operation: IoOperation::Read, code: libc::EIO, .. } => {
                ("FailedRead", self.failed_reads)
            }
            NvmeError::Short { .. } => ("Short", self.short),
            NvmeError::Truncated { .. } => ("Truncated", self.short),
            NvmeError::Corrupted { .. } => ("Corrupted", self.flips),
            _ => return None,
        };
        has_cause.then_some(name)
    }
}
