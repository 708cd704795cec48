//! How the allocator asks others for room.

use std::fmt::Debug;

/// What a [`Reclaim`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Bytes that stopped being mapped during the call.
    pub freed_bytes: u64,
    /// Bytes on their way out when the call returned: asking again may find them gone.
    pub in_flight_bytes: u64,
}

impl Reclaimed {
    /// Whether there is no point in asking again.
    #[must_use]
    pub const fn is_nothing(self) -> bool {
        self.freed_bytes == 0 && self.in_flight_bytes == 0
    }
}

/// Somebody who can put awake memory to sleep when the allocator has run out of room.
///
/// Any-thread, and called with no lock of the allocator held: an implementation may call the
/// allocator back. It may wait for its own I/O threads, and for nothing else: the thread that
/// needs the memory may hold any lock of the program's.
pub trait Reclaim: Send + Sync + Debug {
    /// Makes room for about `bytes_needed` more mapped bytes, as far as it can.
    fn reclaim(&self, bytes_needed: u64) -> Reclaimed;
}
