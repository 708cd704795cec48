//! A ring that forked children close, and that is used only while its descriptor is ours.

use std::io;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::AsRawFd;

use io_uring::IoUring;

use crate::descriptors::{ClosedInChild, Identity, closed};

/// A ring that children close.
pub(crate) struct KernelRing {
    // Dropped first.
    _closed_in_child: ClosedInChild,
    ring: ManuallyDrop<IoUring>,
    identity: Option<Identity>,
}

impl KernelRing {
    pub(crate) fn new(ring: IoUring) -> Self {
        let fd = ring.as_raw_fd();
        let identity = Identity::of(fd);
        let ring = ManuallyDrop::new(ring);
        Self { _closed_in_child: ClosedInChild::new(fd), ring, identity }
    }

    /// Fails if the descriptor was closed: it may name another ring now.
    pub(crate) fn check(&self) -> io::Result<()> {
        let fd = self.ring.as_raw_fd();
        let is_ours = self.identity.is_some() && Identity::of(fd) == self.identity;
        if is_ours { Ok(()) } else { Err(closed(fd)) }
    }
}

impl Deref for KernelRing {
    type Target = IoUring;

    fn deref(&self) -> &IoUring {
        &self.ring
    }
}

impl Drop for KernelRing {
    /// The kernel frees a closed ring later, on another thread. Until then the registered file would hold its
    /// disk space, and the next tier might find the disk full.
    fn drop(&mut self) {
        // Otherwise the ring stays mapped, and with it its file, until the process ends.
        if self.check().is_ok() {
            // After an error the space is freed a moment later.
            let _ = self.ring.submitter().unregister_files();
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.ring) };
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::fs::File;
    use std::path::Path;
    use std::sync::Arc;

    use super::*;
    use crate::choice::{self, IoEngine};
    use crate::testing::{disk_dir, in_a_process_of_its_own, skip_without_io_uring};
    use crate::{DirectFile, UNIT_BYTES};

    /// Whether a descriptor for writing is open: otherwise the kernel grants a read lease.
    fn is_open_for_writing(file: &File) -> bool {
        // SAFETY: plain system calls on a live descriptor.
        let (leased, e) = unsafe {
            let leased = libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK);
            (leased, std::io::Error::last_os_error())
        };
        assert!(leased == 0 || e.raw_os_error() == Some(libc::EAGAIN), "{e}");
        leased != 0
    }

    /// In a process of its own: a child forked by another test has the file open for a moment.
    #[test]
    fn a_file_is_gone_when_its_queues_are() {
        if !in_a_process_of_its_own(module_path!(), "a_file_is_gone_when_its_queues_are") {
            return;
        }
        let dir: &Path = &disk_dir();
        for _ in 0..8 {
            let file = Arc::new(DirectFile::create(dir, UNIT_BYTES as u64).unwrap());
            let chosen = choice::choose(dir, &file, IoEngine::Auto, 2, 4).unwrap();
            if chosen.engine != IoEngine::Uring {
                return skip_without_io_uring(chosen.note.get().unwrap_or_default());
            }
            let seen = File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
            assert!(is_open_for_writing(&seen));
            drop((file, chosen));
            assert!(!is_open_for_writing(&seen));
        }
    }
}
