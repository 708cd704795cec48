//! The rings there are, so that a forked child can let go of its copies.
//!
//! A ring lives as long as anybody has its descriptor or its memory, and with it what is registered
//! with it: pinned memory of a trainer that is gone, for as long as one of its children runs.

use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicI32, Ordering};

use io_uring::IoUring;

/// Rings whose descriptors a child closes; one beyond stays open there.
const RINGS_MAX: usize = 1024;
const NONE: i32 = -1;

/// By place: the descriptor of a ring, or `NONE`.
static RINGS: [AtomicI32; RINGS_MAX] = [const { AtomicI32::new(NONE) }; RINGS_MAX];

/// A ring that is known here.
pub(in crate::nvme) struct KernelRing {
    // Dropped after `place` is cleared.
    ring: IoUring,
    place: Option<usize>,
}

impl KernelRing {
    pub(in crate::nvme) fn new(ring: IoUring) -> Self {
        let fd = ring.as_raw_fd();
        // Relaxed, here as below: a child reads what its only thread, or one before it, has seen.
        let take = |place: &AtomicI32| {
            place.compare_exchange(NONE, fd, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        Self { ring, place: RINGS.iter().position(take) }
    }
}

impl Deref for KernelRing {
    type Target = IoUring;

    fn deref(&self) -> &IoUring {
        &self.ring
    }
}

impl Drop for KernelRing {
    fn drop(&mut self) {
        // Before it is closed: the number may be another file's after that.
        if let Some(place) = self.place.and_then(|at| RINGS.get(at)) {
            place.store(NONE, Ordering::Relaxed);
        }
    }
}

/// For a child that was forked from a process with file tiers, in its handler: lets go of what would
/// keep the parent's pinned memory for as long as the child lives. No tier can be used in it.
///
/// Async-signal-safe.
pub fn close_in_child() {
    for place in &RINGS {
        let fd = place.swap(NONE, Ordering::Relaxed);
        if fd != NONE {
            // SAFETY: the child's copy of a ring's descriptor: its owner clears the place before it
            // closes it, and no thread of the parent's runs here.
            unsafe { libc::close(fd) };
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn a_child_has_no_ring_open() {
        let ring = match IoUring::new(2) {
            Ok(ring) => ring,
            Err(e) => return super::super::refused_here(&e),
        };
        let ring = KernelRing::new(ring);
        let fd = ring.as_raw_fd();
        // SAFETY: the child does what a signal handler may, and ends.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "{}", std::io::Error::last_os_error());
        if child == 0 {
            close_in_child();
            // SAFETY: plain system calls.
            unsafe {
                let is_closed = libc::fcntl(fd, libc::F_GETFD) == -1;
                libc::_exit(if is_closed { 0 } else { 1 });
            }
        }
        let mut status = 0;
        // SAFETY: a live local, and a child of ours.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 0, "it was open in the child");
        // SAFETY: a plain system call.
        assert!(unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0, "it is the parent's still");
        drop(ring);
        assert!(RINGS.iter().all(|place| place.load(Ordering::Relaxed) != fd));
    }
}
