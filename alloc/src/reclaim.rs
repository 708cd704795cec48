//! The interface through which the allocator requests memory to be put to sleep.

use std::fmt::Debug;

/// Result of a [`Reclaim`] call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Bytes unmapped during the call.
    pub freed_bytes: u64,
    /// Bytes in the course of being unmapped at the end of the call.
    pub in_flight_bytes: u64,
}

impl Reclaimed {
    /// Whether a further call would free nothing.
    #[must_use]
    pub const fn is_nothing(self) -> bool {
        self.freed_bytes == 0 && self.in_flight_bytes == 0
    }
}

/// Puts awake memory to sleep when the allocator is out of memory.
///
/// Any-thread. Called with no lock of the allocator held: an implementation may call the allocator. It
/// may wait for its own I/O threads only: the calling thread may hold any lock of the program.
pub trait Reclaim: Send + Sync + Debug {
    /// Unmaps about `bytes_needed` bytes, as far as possible.
    fn reclaim(&self, bytes_needed: u64) -> Reclaimed;
}
