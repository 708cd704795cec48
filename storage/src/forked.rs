//! Descriptors that a forked child must not keep.
//!
//! An unlinked file holds its disk space, and a ring its registered memory, until the last process closes
//! the descriptor: a child that outlives its parent would hold them. (They close on exec.)
#![expect(unsafe_code, reason = "closes descriptors by number")]

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, Ordering};

/// Limit of the descriptors that a child closes; further ones stay open.
const DESCRIPTORS_MAX: usize = 1024;
const NONE: i32 = -1;

/// The descriptors; `NONE` if a place is free.
static DESCRIPTORS: [AtomicI32; DESCRIPTORS_MAX] =
    [const { AtomicI32::new(NONE) }; DESCRIPTORS_MAX];

/// A descriptor that children close. It must be dropped before the descriptor is closed: its number may be
/// reused after that.
#[derive(Debug)]
pub(crate) struct ClosedInChild {
    place: Option<usize>,
}

impl ClosedInChild {
    pub(crate) fn new(fd: RawFd) -> Self {
        // Relaxed throughout: a forked child has the memory that the forking thread saw.
        let take = |place: &AtomicI32| {
            place.compare_exchange(NONE, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        Self { place: DESCRIPTORS.iter().position(take) }
    }
}

impl Drop for ClosedInChild {
    fn drop(&mut self) {
        if let Some(place) = self.place.and_then(|at| DESCRIPTORS.get(at)) {
            place.store(NONE, Ordering::Relaxed);
        }
    }
}

/// Closes the descriptors of all tiers in a forked child, which would otherwise hold the parent's disk space
/// and pinned memory. The child cannot use a tier. Called from its fork handler; async-signal-safe.
pub fn close_in_child() {
    for place in &DESCRIPTORS {
        let fd = place.swap(NONE, Ordering::Relaxed);
        if fd != NONE {
            // SAFETY: the child's copy of an open descriptor: its owner clears the place before it closes
            // it, and the child has no thread of the parent.
            unsafe { libc::close(fd) };
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::storage::DirectFile;
    use crate::testing::{disk_dir, refused_here};
    use crate::uring;

    #[test]
    fn child_closes_file_and_ring() {
        let file = DirectFile::create(&disk_dir(), 4096).unwrap();
        let mut open = vec![file.as_raw_fd()];
        let ring = match uring::set_up(&file, 2) {
            Ok(ring) => Some(ring),
            Err(refusal) => {
                refused_here(&refusal.error);
                None
            }
        };
        open.extend(ring.as_ref().map(|ring| ring.as_raw_fd()));
        // SAFETY: the child makes async-signal-safe calls only, and exits.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "{}", std::io::Error::last_os_error());
        if child == 0 {
            close_in_child();
            // SAFETY: plain system calls.
            unsafe {
                let are_closed = open.iter().all(|&fd| libc::fcntl(fd, libc::F_GETFD) == -1);
                libc::_exit(if are_closed { 0 } else { 1 });
            }
        }
        let mut status = 0;
        // SAFETY: a live local, and a child of ours.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 0, "a descriptor of {open:?} is open in the child");
        for &fd in &open {
            // SAFETY: a plain system call.
            assert!(unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0, "open in the parent");
        }
        drop((ring, file));
        let is_left = |place: &AtomicI32| open.contains(&place.load(Ordering::Relaxed));
        assert!(!DESCRIPTORS.iter().any(is_left));
    }
}
