//! On the host device: bytes are where they belong when a call returns, file I/O is done on frozen
//! pages, and what has a choice sleeps in the file, for in memory it would free none.

#[path = "both/mod.rs"]
#[expect(clippy::duplicate_mod, reason = "the same tests, of another `TestDevice`")]
pub(crate) mod both;
mod direct;
pub(crate) mod stray;

use dormouse_device::faulty::Faulty;
use dormouse_device::host::{HostConfig, HostDevice};

use dormouse_residency::region::RegionState;

pub(crate) type TestDevice = Faulty<HostDevice>;

/// Where memory sleeps that was not told where.
pub(crate) const ASLEEP_FIRST: RegionState = RegionState::Nvme;

/// Host devices share nothing: it is always everybody's turn.
pub(crate) struct Turn;

impl Turn {
    pub(crate) fn take() -> Self {
        Self
    }

    /// No effect: copies end with the call.
    pub(crate) fn refuse_answers(&self, _count: u64) {}

    pub(crate) fn heal(&self) {}

    pub(crate) fn refused_answers(&self) -> Option<u64> {
        None
    }

    /// Launches of the accumulating kernel; here what it adds can be seen instead.
    pub(crate) fn accumulations(&self) -> Option<u64> {
        None
    }
}

pub(crate) fn new_device(reserve_bytes: usize, capacity_bytes: u64) -> TestDevice {
    Faulty::new(HostDevice::new(HostConfig::new(reserve_bytes, capacity_bytes)).unwrap())
}
