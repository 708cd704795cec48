//! What the allocator refuses, with the values seen.

use crate::report::OutOfMemory;
use dormouse_device::DeviceError;

/// Why the allocator did not do what it was asked. Nothing has changed where one is returned,
/// except that pages may have been trimmed or put to sleep on the way.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// A configuration value that cannot work.
    #[error("{field} is {value}; accepted: {accepted}")]
    BadConfig {
        /// Which field.
        field: &'static str,
        /// The value seen.
        value: u64,
        /// What would do.
        accepted: &'static str,
    },
    /// A request that makes no sense, however much memory there is.
    #[error("request with {field} {value}; accepted: {accepted}")]
    BadRequest {
        /// Which field.
        field: &'static str,
        /// The value seen.
        value: u64,
        /// What would do.
        accepted: &'static str,
    },
    /// Everything was tried. The text is the report, at most 12 lines.
    #[error("{0}")]
    OutOfMemory(Box<OutOfMemory>),
    /// No room to wake now, trimming included. Sleeping something else may help.
    #[error(
        "no room to wake {asked_bytes} bytes: {mapped_bytes} bytes mapped ({staged_bytes} of them \
         staged) of a budget of {budget_bytes}"
    )]
    NoRoom {
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes mapped now, staged ones included.
        mapped_bytes: u64,
        /// Bytes staged now.
        staged_bytes: u64,
        /// The budget.
        budget_bytes: u64,
    },
    /// More room taken or given back than was reserved with `reserve_awake`.
    #[error("{asked_bytes} bytes of room to wake, but only {staged_bytes} bytes are reserved")]
    NotReserved {
        /// Bytes to be taken or given back.
        asked_bytes: u64,
        /// Bytes reserved now.
        staged_bytes: u64,
    },
    /// No live block there.
    #[error(
        "address {address:#x} is in no live block; accepted: an address this allocator handed out and that is not freed"
    )]
    NotABlock {
        /// The address seen.
        address: usize,
    },
    /// Inside a block, where its start is needed.
    #[error("address {address:#x} is inside the block at {start:#x}; accepted: exactly its start")]
    NotBlockStart {
        /// The address seen.
        address: usize,
        /// Where the block starts.
        start: usize,
    },
    /// Freed twice, or used after its free; a claimant still holds it.
    #[error("the block at {start:#x} is freed already and waits for its claimant {owner_key:#x}")]
    Doomed {
        /// Where the block starts.
        start: usize,
        /// Who holds it.
        owner_key: u64,
    },
    /// An id whose block is gone.
    #[error(
        "block {index} of generation {generation} is gone; the slot is at generation {current}"
    )]
    StaleBlock {
        /// Slot.
        index: u32,
        /// Generation seen.
        generation: u32,
        /// Generation the slot is at.
        current: u32,
    },
    /// Claimed by somebody else.
    #[error(
        "the block at {start:#x} is claimed by {owner_key:#x}; accepted: a block nobody claims"
    )]
    AlreadyClaimed {
        /// Where the block starts.
        start: usize,
        /// Who holds it.
        owner_key: u64,
    },
    /// A block that is not in the state the call needs.
    #[error("{operation} of the block at {start:#x}: it is {state}, not {needed}")]
    WrongState {
        /// Which call.
        operation: &'static str,
        /// Where the block starts.
        start: usize,
        /// What it is.
        state: &'static str,
        /// What it should be.
        needed: &'static str,
    },
    /// An arena that is closed or never was.
    #[error("arena {index} of generation {generation} is not open")]
    UnknownArena {
        /// Slot.
        index: u32,
        /// Generation seen.
        generation: u32,
    },
    /// A stream nobody has told the allocator of.
    #[error("stream {key:#x} is not known; accepted: a key that was given to `know_stream`")]
    UnknownStream {
        /// The key seen.
        key: u64,
    },
    /// No more streams.
    #[error("{limit} streams are known already, the most that can be")]
    TooManyStreams {
        /// The named limit.
        limit: u32,
    },
    /// No more arenas.
    #[error("{limit} arenas exist already, the most that can")]
    TooManyArenas {
        /// The named limit.
        limit: u32,
    },
    /// No more ranges can be tracked.
    #[error("{limit} ranges exist already, the most that can")]
    TooManyRanges {
        /// The named limit.
        limit: u32,
    },
    /// The device refused for a reason that more room would not mend.
    #[error("the device refused: {0}")]
    Device(#[from] DeviceError),
}
