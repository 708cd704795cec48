//! Driver errors.

use super::entries::Entries;
use crate::error::INVALID_HANDLE;
use crate::{AddressRange, DeviceError, Operation};

/// Why no `cuda` device is available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// No driver library on this machine.
    #[error("no CUDA driver: neither libcuda.so nor libcuda.so.1 can be loaded")]
    NoDriver,
    /// The driver is too old.
    #[error("the CUDA driver (version {version}) lacks {name}; accepted: 11.4 and later")]
    MissingEntryPoint {
        /// The entry point.
        name: &'static str,
        /// The driver's version, as `1000 * major + 10 * minor`; 0 if unknown.
        version: i32,
    },
    /// The GPU does not exist.
    #[error("CUDA device {ordinal} does not exist; this machine has {count}")]
    NoDevice {
        /// The requested ordinal.
        ordinal: u32,
        /// Number of GPUs.
        count: u32,
    },
    /// The GPU, or its mode, does not support virtual memory management.
    #[error("CUDA device {ordinal} has no virtual memory management")]
    NoVirtualMemory {
        /// The requested ordinal.
        ordinal: u32,
    },
    /// An invalid configuration, or an error of the driver.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A result code of the driver other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Code(pub(super) i32);

/// Success.
pub(super) const SUCCESS: i32 = 0;

impl Code {
    pub(super) const OUT_OF_MEMORY: Self = Self(2);
    pub(super) const NOT_INITIALIZED: Self = Self(3);
    pub(super) const DEINITIALIZED: Self = Self(4);
    pub(super) const INVALID_CONTEXT: Self = Self(201);
    pub(super) const PEER_ACCESS_UNSUPPORTED: Self = Self(217);
    pub(super) const INVALID_HANDLE: Self = Self(INVALID_HANDLE);
    pub(super) const NOT_READY: Self = Self(600);
    pub(super) const CONTEXT_IS_DESTROYED: Self = Self(709);
    pub(super) const CAPTURE_UNSUPPORTED: Self = Self(900);
    pub(super) const CAPTURE_IMPLICIT: Self = Self(906);

    /// Whether the context is unusable: the codes after which CUDA documents that "the process must be terminated and
    /// relaunched", those of hardware that failed, and those of a destroyed context.
    fn is_lost(self) -> bool {
        const ECC_UNCORRECTABLE: i32 = 214;
        const NVLINK_UNCORRECTABLE: i32 = 220;
        const CONTAINED: i32 = 226;
        const ILLEGAL_ADDRESS: i32 = 700;
        const LAUNCH_TIMEOUT: i32 = 702;
        const ASSERT: i32 = 710;
        const HARDWARE_STACK_ERROR_TO_LAUNCH_FAILED: std::ops::RangeInclusive<i32> = 714..=719;
        const TENSOR_MEMORY_LEAK: i32 = 721;
        const MPS_CLIENT_TERMINATED: i32 = 810;
        const EXTERNAL_DEVICE: i32 = 911;
        matches!(
            self.0,
            ECC_UNCORRECTABLE
                | NVLINK_UNCORRECTABLE
                | CONTAINED
                | ILLEGAL_ADDRESS
                | LAUNCH_TIMEOUT
                | ASSERT
                | TENSOR_MEMORY_LEAK
                | MPS_CLIENT_TERMINATED
                | EXTERNAL_DEVICE
        ) || matches!(self, Self::DEINITIALIZED | Self::CONTEXT_IS_DESTROYED)
            || HARDWARE_STACK_ERROR_TO_LAUNCH_FAILED.contains(&self.0)
    }

    /// Converts the code to an error of `operation` on `range`.
    pub(super) fn error(
        self,
        entries: &Entries,
        operation: Operation,
        range: AddressRange,
    ) -> DeviceError {
        let reason = entries.describe(self);
        if self.is_lost() {
            return DeviceError::DeviceLost { operation, reason };
        }
        DeviceError::refused(operation, range, self.0, reason)
    }
}
