//! Errors of a device, with the values seen.

use crate::AddressRange;

/// The operation that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operation {
    /// Reserving address space.
    Reserve,
    /// `map`.
    Map,
    /// `unmap`.
    Unmap,
    /// `freeze`.
    Freeze,
    /// `thaw`.
    Thaw,
    /// `seal`.
    Seal,
    /// `stage`.
    Stage,
    /// `publish`.
    Publish,
    /// `forget`.
    Forget,
    /// `allocate_pinned`.
    Pin,
    /// Creating a stream.
    CreateStream,
    /// Recording, waiting for or querying an event.
    Event,
    /// `copy`.
    Copy,
    /// `zero`.
    Zero,
    /// Loading and launching kernels.
    Launch,
    /// `callback`.
    Callback,
    /// Installing the guard's signal handler.
    Guard,
}

/// Why a device operation failed. Cheap to create and to clone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The operation would exceed the capacity.
    #[error(
        "{operation:?}: {asked_bytes} bytes exceed the capacity ({mapped_bytes} of {capacity_bytes} bytes \
         are mapped)"
    )]
    OutOfMemory {
        /// The operation.
        operation: Operation,
        /// Requested bytes.
        asked_bytes: u64,
        /// Mapped bytes.
        mapped_bytes: u64,
        /// Limit of the mapped bytes.
        capacity_bytes: u64,
    },
    /// A range that is not page-aligned, empty, or not the device's own.
    #[error(
        "{operation:?}: range {start:#x}+{bytes}; accepted: one or more whole {page_bytes}-byte pages in \
         {space_start:#x}..{space_end:#x}"
    )]
    BadRange {
        /// The operation.
        operation: Operation,
        /// First address seen.
        start: usize,
        /// Length seen.
        bytes: usize,
        /// The device's page size.
        page_bytes: usize,
        /// First address of the device's space.
        space_start: usize,
        /// One past its last address.
        space_end: usize,
    },
    /// A page is in a state that the operation does not accept. Nothing is changed.
    #[error("{operation:?}: the page at {start:#x} is {state}; accepted: {needed}")]
    WrongPages {
        /// The operation.
        operation: Operation,
        /// Address of the first such page.
        start: usize,
        /// Its state.
        state: &'static str,
        /// The accepted state.
        needed: &'static str,
    },
    /// An invalid configuration value.
    #[error("{field} is {seen}; accepted: {accepted}")]
    BadConfig {
        /// The field.
        field: &'static str,
        /// The value seen.
        seen: u64,
        /// The accepted values.
        accepted: &'static str,
    },
    /// A span is in a state that the operation does not accept.
    #[error("{operation:?}: span {span} is {state}; accepted: {needed}")]
    WrongState {
        /// The operation.
        operation: Operation,
        /// The span.
        span: u32,
        /// Its state.
        state: &'static str,
        /// The accepted state.
        needed: &'static str,
    },
    /// The limit of spans is reached.
    #[error("Freeze: span limit reached ({limit})")]
    TooManySpans {
        /// The limit.
        limit: u32,
    },
    /// The operating system or the driver refused.
    #[error("{operation:?} of {bytes} bytes at {start:#x} failed: {reason} (code {code})")]
    Refused {
        /// The operation.
        operation: Operation,
        /// First address.
        start: usize,
        /// Length in bytes.
        bytes: usize,
        /// `errno` or driver code.
        code: i32,
        /// The message of the system.
        reason: String,
    },
    /// A stream handle of another device.
    #[error("stream {raw:#x} is not a stream of the {kind} device; accepted: {accepted}")]
    ForeignStream {
        /// The handle.
        raw: usize,
        /// The kind of the device.
        kind: &'static str,
        /// The accepted handles.
        accepted: &'static str,
    },
    /// The device is lost: every further operation fails.
    #[error("{operation:?}: the device is lost: {reason}")]
    DeviceLost {
        /// The operation.
        operation: Operation,
        /// The reason.
        reason: String,
    },
}

/// `CUDA_ERROR_INVALID_HANDLE`.
pub(crate) const INVALID_HANDLE: i32 = 400;

impl DeviceError {
    /// Whether the driver does not know the stream or event: it was destroyed.
    #[must_use]
    pub fn is_unknown_handle(&self) -> bool {
        matches!(self, Self::Refused { operation: Operation::Event, code: INVALID_HANDLE, .. })
    }

    /// Creates the `Refused` error of a call on `range`.
    pub(crate) fn refused(
        operation: Operation,
        range: AddressRange,
        code: i32,
        reason: String,
    ) -> Self {
        let AddressRange { start, bytes } = range;
        Self::Refused { operation, start, bytes, code, reason }
    }

    /// Creates the `Refused` error of a call that returned `error`.
    pub(crate) fn of_system(
        operation: Operation,
        range: AddressRange,
        error: &std::io::Error,
    ) -> Self {
        Self::refused(operation, range, error.raw_os_error().unwrap_or(0), error.to_string())
    }

    /// Creates the `BadRange` error for `range`.
    #[must_use]
    pub fn bad_range(
        operation: Operation,
        range: AddressRange,
        page_bytes: usize,
        space: AddressRange,
    ) -> Self {
        Self::BadRange {
            operation,
            start: range.start,
            bytes: range.bytes,
            page_bytes,
            space_start: space.start,
            space_end: space.end(),
        }
    }
}
