//! A ring that forked children let go of.

use std::ops::Deref;
use std::os::fd::AsRawFd;

use io_uring::IoUring;

use crate::nvme::forked::NotInChildren;

/// A ring that children close.
pub(in crate::nvme) struct KernelRing {
    // Dropped first.
    _not_in_children: NotInChildren,
    ring: IoUring,
}

impl KernelRing {
    pub(in crate::nvme) fn new(ring: IoUring) -> Self {
        Self { _not_in_children: NotInChildren::new(ring.as_raw_fd()), ring }
    }
}

impl Deref for KernelRing {
    type Target = IoUring;

    fn deref(&self) -> &IoUring {
        &self.ring
    }
}
