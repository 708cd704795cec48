//! Errors of the allocator, with the values seen.

use crate::report::OutOfMemory;
use dormouse_device::DeviceError;

/// Why an allocator call failed. A failed call changes nothing, except that pages may have been
/// trimmed or put to sleep.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AllocError {
    /// An invalid configuration value.
    #[error("{field} is {value}; accepted: {accepted}")]
    BadConfig {
        /// Name of the field.
        field: &'static str,
        /// The value seen.
        value: u64,
        /// The accepted values.
        accepted: &'static str,
    },
    /// An invalid request, independent of the available memory.
    #[error("invalid request: {field} is {value}; accepted: {accepted}")]
    BadRequest {
        /// Name of the field.
        field: &'static str,
        /// The value seen.
        value: u64,
        /// The accepted values.
        accepted: &'static str,
    },
    /// The out-of-memory ladder is exhausted. The text is the report, at most 12 lines.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// The address space was cut ([`Allocator::cut_addresses`](crate::Allocator::cut_addresses)), and its remainder
    /// has no free run of this length.
    #[error(
        "no free addresses for {asked_bytes} bytes: the address space was cut to {space_bytes} bytes"
    )]
    NoAddresses {
        /// Requested bytes.
        asked_bytes: u64,
        /// Bytes of addresses left, used ones included.
        space_bytes: u64,
    },
    /// No room to wake, even after trimming. Putting other memory to sleep may help.
    #[error(
        "no room to wake {asked_bytes} bytes: {mapped_bytes} bytes mapped ({staged_bytes} of them \
         staged), budget {budget_bytes} bytes"
    )]
    NoRoom {
        /// Requested bytes.
        asked_bytes: u64,
        /// Bytes mapped now, staged ones included.
        mapped_bytes: u64,
        /// Bytes staged now.
        staged_bytes: u64,
        /// The budget.
        budget_bytes: u64,
    },
    /// More room used or returned than `reserve_awake` has reserved.
    #[error("{asked_bytes} bytes exceed the {staged_bytes} bytes reserved to wake")]
    NotReserved {
        /// Bytes to use or return.
        asked_bytes: u64,
        /// Bytes reserved now.
        staged_bytes: u64,
    },
    /// The address is in no live block.
    #[error(
        "address {address:#x} is in no live block; accepted: an address in a block that this \
         allocator allocated and that is not freed"
    )]
    NotABlock {
        /// The address seen.
        address: usize,
    },
    /// The address is inside a block, not at its start.
    #[error("address {address:#x} is inside the block at {start:#x}; accepted: its start")]
    NotBlockStart {
        /// The address seen.
        address: usize,
        /// Start of the block.
        start: usize,
    },
    /// The block is freed already (or used after its free); a claim defers the free.
    #[error("the block at {start:#x} is freed; claimant {owner_key:#x} defers its reuse")]
    FreeDeferred {
        /// Start of the block.
        start: usize,
        /// Owner key of the claimant.
        owner_key: u64,
    },
    /// The block with this id no longer exists.
    #[error("block {index} of generation {generation} no longer exists; current: {current}")]
    StaleBlock {
        /// Slot.
        index: u32,
        /// Generation seen.
        generation: u32,
        /// Current generation of the slot.
        current: u32,
    },
    /// The block has another claimant.
    #[error("the block at {start:#x} is claimed by {owner_key:#x}; accepted: an unclaimed block")]
    AlreadyClaimed {
        /// Start of the block.
        start: usize,
        /// Owner key of the claimant.
        owner_key: u64,
    },
    /// The block is not in a state that the call accepts.
    #[error("{operation}: the block at {start:#x} is {state}; accepted: {needed}")]
    WrongState {
        /// Name of the call.
        operation: &'static str,
        /// Start of the block.
        start: usize,
        /// State of the block.
        state: &'static str,
        /// Accepted state.
        needed: &'static str,
    },
    /// The arena is closed or never existed.
    #[error("arena {index} of generation {generation} is not open")]
    UnknownArena {
        /// Slot.
        index: u32,
        /// Generation seen.
        generation: u32,
    },
    /// The stream is not registered.
    #[error("stream {key:#x} is unknown; accepted: a key passed to `register_stream`")]
    UnknownStream {
        /// The key seen.
        key: u64,
    },
    /// The limit of streams is reached.
    #[error("stream limit reached ({limit})")]
    TooManyStreams {
        /// The limit.
        limit: u32,
    },
    /// The limit of arenas is reached.
    #[error("arena limit reached ({limit})")]
    TooManyArenas {
        /// The limit.
        limit: u32,
    },
    /// The limit of ranges is reached.
    #[error("range limit reached ({limit})")]
    TooManyRanges {
        /// The limit.
        limit: u32,
    },
    /// There is no memory for the allocator's own tables.
    #[error(
        "no memory for the tables of {ranges} ranges; accepted: a larger memory limit of the process"
    )]
    NoBookkeeping {
        /// The ranges that exist.
        ranges: u32,
    },
    /// The device failed for a reason other than a lack of memory.
    #[error("device error: {0}")]
    Device(#[from] DeviceError),
}
