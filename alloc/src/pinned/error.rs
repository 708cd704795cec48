//! What the pinned pool refuses, with the values seen.

use dormouse_device::DeviceError;

/// Why no buffer was handed out, or taken back. Nothing has changed where one is returned, except
/// that idle slabs may have been given up on the way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PinnedError {
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
    /// A size no pool could have.
    #[error("a buffer of {asked_bytes} bytes; accepted: 1 to {accepted_bytes}")]
    BadSize {
        /// The size seen.
        asked_bytes: usize,
        /// The largest accepted.
        accepted_bytes: u64,
    },
    /// The cap has no room, with every idle slab given up.
    #[error(
        "no room for {asked_bytes} bytes: {pinned_bytes} of {cap_bytes} bytes are pinned, \
         {used_bytes} of them in buffers ({pending_bytes} of these wait for events)"
    )]
    Full {
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes in buffers, pending ones included.
        used_bytes: u64,
        /// Bytes in buffers whose readers' events have not completed.
        pending_bytes: u64,
        /// Bytes pinned.
        pinned_bytes: u64,
        /// The cap.
        cap_bytes: u64,
    },
    /// No more pieces can be tracked.
    #[error("{limit} ranges exist already, the most that can")]
    TooManyRanges {
        /// The named limit.
        limit: u32,
    },
    /// A release with more events than are kept for one buffer.
    #[error("{seen} events guard one buffer; accepted: up to {accepted}")]
    TooManyEvents {
        /// How many there are.
        seen: usize,
        /// The named limit.
        accepted: usize,
    },
    /// A buffer that is not out: given back before, or another pool's.
    #[error("the buffer at {start:#x} of {bytes} bytes is not out of this pool")]
    NotOut {
        /// Where it starts.
        start: usize,
        /// Its length.
        bytes: usize,
    },
    /// The thread that pins ahead of need could not be started.
    #[error("thread {name} could not be started: {reason}")]
    Thread {
        /// Its name.
        name: &'static str,
        /// The system's words.
        reason: String,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
