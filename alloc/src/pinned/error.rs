//! Errors of the pinned pool, with the values seen.

use dormouse_device::DeviceError;

/// Why a call of the pinned pool failed. A failed call changes nothing, except that idle slabs may have
/// been released.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PinnedError {
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
    /// The size is out of range.
    #[error("buffer size is {asked_bytes} bytes; accepted: up to {accepted_bytes}")]
    BadSize {
        /// The size seen.
        asked_bytes: usize,
        /// The largest accepted.
        accepted_bytes: u64,
    },
    /// No free range has the size, and the cap has no room for it even without idle slabs.
    #[error(
        "pinned pool full: {asked_bytes} bytes requested, {pinned_bytes} of {cap_bytes} bytes pinned, \
         {used_bytes} in buffers"
    )]
    Full {
        /// Requested bytes.
        asked_bytes: u64,
        /// Bytes in buffers.
        used_bytes: u64,
        /// Bytes pinned.
        pinned_bytes: u64,
        /// The cap, or what a [`PinLimit`](super::PinLimit) allows now if that is less.
        cap_bytes: u64,
    },
    /// The limit of ranges is reached.
    #[error("range limit reached ({limit})")]
    TooManyRanges {
        /// The limit.
        limit: u32,
    },
    /// The buffer is freed already, or belongs to another pool.
    #[error(
        "buffer at {start:#x} of {bytes} bytes is not allocated; accepted: an allocated buffer of this pool"
    )]
    NotOut {
        /// Its first address.
        start: usize,
        /// Its length in bytes.
        bytes: usize,
    },
    /// The background thread could not be started.
    #[error("cannot start thread {name}: {reason}")]
    Thread {
        /// Its name.
        name: &'static str,
        /// The message of the system.
        reason: String,
    },
    /// An error of the device.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
