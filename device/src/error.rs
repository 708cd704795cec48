//! What a device refuses, with the values seen.

use crate::AddressRange;

/// What was asked of the device when it failed.
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

/// Why a device did not do what it was asked. Cheap to make and to copy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The capacity would be passed.
    #[error(
        "{operation:?} of {asked_bytes} bytes: {mapped_bytes} of {capacity_bytes} bytes are mapped"
    )]
    OutOfMemory {
        /// What was asked.
        operation: Operation,
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes mapped now.
        mapped_bytes: u64,
        /// Bytes that may be mapped at most.
        capacity_bytes: u64,
    },
    /// A range that is not page-aligned, empty, or not the device's own.
    #[error(
        "{operation:?}: range {start:#x}+{bytes} is not a non-empty run of {page_bytes}-byte pages inside {space_start:#x}..{space_end:#x}"
    )]
    BadRange {
        /// What was asked.
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
    /// Pages that are not in the state the operation needs. Nothing was changed.
    #[error("{operation:?}: the page at {start:#x} is {state}, not {needed}")]
    WrongPages {
        /// What was asked.
        operation: Operation,
        /// First page seen in the wrong state.
        start: usize,
        /// The state it is in.
        state: &'static str,
        /// The state it should be in.
        needed: &'static str,
    },
    /// A device cannot be made from this configuration.
    #[error("{field} is {seen}; accepted: {accepted}")]
    BadConfig {
        /// The field.
        field: &'static str,
        /// Its value.
        seen: u64,
        /// What it may be.
        accepted: &'static str,
    },
    /// A span that is not in the state the operation needs.
    #[error("{operation:?}: span {span} is {state}, not {needed}")]
    WrongState {
        /// What was asked.
        operation: Operation,
        /// The span.
        span: u32,
        /// The state it is in.
        state: &'static str,
        /// The state it should be in.
        needed: &'static str,
    },
    /// No more spans can be tracked.
    #[error("freeze: {limit} spans exist already, the most that can")]
    TooManySpans {
        /// The named limit.
        limit: u32,
    },
    /// The operating system or driver said no.
    #[error("{operation:?} of {bytes} bytes at {start:#x} refused: {reason} (code {code})")]
    Refused {
        /// What was asked.
        operation: Operation,
        /// Where.
        start: usize,
        /// How much.
        bytes: usize,
        /// errno or driver code.
        code: i32,
        /// The system's own words.
        reason: String,
    },
    /// A stream handle that is not this device's.
    #[error("stream {raw:#x} is not a stream of the {kind} device; accepted: {accepted}")]
    ForeignStream {
        /// The handle seen.
        raw: usize,
        /// Which device.
        kind: &'static str,
        /// What it accepts.
        accepted: &'static str,
    },
    /// The device is gone: nothing more can be asked of it.
    #[error("{operation:?}: the device is lost: {reason}")]
    DeviceLost {
        /// What was asked.
        operation: Operation,
        /// Why.
        reason: String,
    },
}

impl DeviceError {
    /// The `BadRange` error for `range`.
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
