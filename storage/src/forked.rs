//! Descriptors that a forked child must not keep.
//!
//! A file without a name takes its space, and a ring what is registered with it, for as long as
//! anybody has their descriptors open: also after the end of the process they are of, where one of
//! its children runs on. (A child that runs another program has none of them: they close on exec.)
#![expect(unsafe_code, reason = "closes descriptors by number, in a child that owns nothing else")]

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, Ordering};

/// Descriptors that a child closes; one beyond stays open there.
const DESCRIPTORS_MAX: usize = 1024;
const NONE: i32 = -1;

/// By place: a descriptor, or `NONE`.
static DESCRIPTORS: [AtomicI32; DESCRIPTORS_MAX] =
    [const { AtomicI32::new(NONE) }; DESCRIPTORS_MAX];

/// A descriptor that children close. To be dropped before the descriptor is closed: the number may
/// be another file's after that.
#[derive(Debug)]
pub(crate) struct ClosedInChild {
    place: Option<usize>,
}

impl ClosedInChild {
    pub(crate) fn new(fd: RawFd) -> Self {
        // Relaxed, here as below: a child reads what its only thread, or one before it, has seen.
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

/// For a child that was forked from a process with file tiers, in its handler: lets go of what would
/// keep the parent's disk space and pinned memory for as long as the child lives. No tier can be
/// used in it.
///
/// Async-signal-safe.
pub fn close_in_child() {
    for place in &DESCRIPTORS {
        let fd = place.swap(NONE, Ordering::Relaxed);
        if fd != NONE {
            // SAFETY: the child's copy of a descriptor: its owner clears the place before it closes
            // it, and no thread of the parent's runs here.
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
    use crate::testing::disk_dir;
    use crate::uring;

    #[test]
    fn a_child_has_neither_file_nor_ring_open() {
        let file = DirectFile::create(&disk_dir(), 4096).unwrap();
        let mut open = vec![file.as_raw_fd()];
        let ring = match uring::set_up(&file, 2) {
            Ok(ring) => Some(ring),
            Err(refusal) => {
                uring::refused_here(&refusal.error);
                None
            }
        };
        open.extend(ring.as_ref().map(|ring| ring.as_raw_fd()));
        // SAFETY: the child does what a signal handler may, and ends.
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
        assert_eq!(libc::WEXITSTATUS(status), 0, "one of {open:?} was open in the child");
        for &fd in &open {
            // SAFETY: a plain system call.
            assert!(unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0, "it is the parent's still");
        }
        drop((ring, file));
        let is_left = |place: &AtomicI32| open.contains(&place.load(Ordering::Relaxed));
        assert!(!DESCRIPTORS.iter().any(is_left));
    }
}
