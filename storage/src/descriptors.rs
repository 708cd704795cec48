//! Descriptors of ours in a process whose program may close them.
//!
//! A program that closes all descriptors (`closefrom`), or one twice, closes ours too. Its next file then gets our
//! number, and a write of ours would go to that file. So a descriptor is used and closed only while it names the
//! file that it was opened for.
//!
//! A forked child must not keep them: an unlinked file holds its disk space, and a ring its registered memory, until
//! the last process closes the descriptor. (They close on exec.)
#![expect(unsafe_code, reason = "descriptors by number, and a mapping that is never accessed")]

use std::fs::File;
use std::io;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use crate::UNIT_BYTES;

/// Limit of the descriptors that a child closes; further ones stay open.
const DESCRIPTORS_MAX: usize = 1024;
const NONE: i32 = -1;

/// What a descriptor names: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity([u64; 2]);

impl Identity {
    /// Async-signal-safe.
    pub(crate) fn of(fd: RawFd) -> Option<Self> {
        let mut found = MaybeUninit::<libc::stat64>::uninit();
        // SAFETY: a live local, which a successful call writes.
        let is_open = unsafe { libc::fstat64(fd, found.as_mut_ptr()) } == 0;
        // SAFETY: as above.
        is_open
            .then(|| unsafe { found.assume_init_ref() })
            .map(|found| Self([found.st_dev, found.st_ino]))
    }
}

/// Returns whether the identity of `fd` is that of every descriptor without a file, such as an eventfd: some kernels
/// have one inode for all of them, rings included. Also if that cannot be told.
pub(crate) fn has_common_identity(fd: RawFd) -> bool {
    // SAFETY: plain system calls; the descriptor is this call's own.
    let other = unsafe {
        let event = libc::eventfd(0, libc::EFD_CLOEXEC);
        let other = Identity::of(event);
        libc::close(event);
        other
    };
    other.is_none() || Identity::of(fd) == other
}

/// The error of an operation on a descriptor that is not ours any more.
pub(crate) fn closed(fd: RawFd) -> io::Error {
    io::Error::other(format!(
        "the program has closed descriptor {fd}, which is this library's; accepted: a program that closes its own"
    ))
}

/// A file that is used and closed only while its descriptor is ours.
#[derive(Debug)]
pub struct OwnFile {
    file: ManuallyDrop<File>,
    identity: Option<Identity>,
    _kept: Option<Kept>,
}

impl OwnFile {
    /// Takes over an open file.
    #[must_use]
    pub fn new(file: File) -> Self {
        let identity = Identity::of(file.as_raw_fd());
        Self { identity, _kept: Kept::new(&file), file: ManuallyDrop::new(file) }
    }

    /// Returns the file. One system call.
    ///
    /// # Errors
    /// The descriptor was closed. It may name another file now.
    pub fn get(&self) -> io::Result<&File> {
        if self.is_ours() { Ok(&self.file) } else { Err(closed(self.file.as_raw_fd())) }
    }

    fn is_ours(&self) -> bool {
        self.identity.is_some() && Identity::of(self.file.as_raw_fd()) == self.identity
    }

    /// Has forked children close the file until the result is dropped, before this.
    #[must_use]
    pub fn closed_in_child(&self) -> ClosedInChild {
        ClosedInChild::new(self.file.as_raw_fd())
    }
}

impl AsRawFd for OwnFile {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Drop for OwnFile {
    fn drop(&mut self) {
        if self.is_ours() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

/// A mapping without access, which forked children do not get. It keeps the inode: its number would otherwise be free
/// once the descriptor is closed, and the next file of the program could have both numbers.
#[derive(Debug)]
struct Kept(*mut libc::c_void);

// SAFETY: an address that nobody accesses.
unsafe impl Send for Kept {}
// SAFETY: as above.
unsafe impl Sync for Kept {}

impl Kept {
    /// `None` if the file cannot be mapped, such as a pipe.
    fn new(file: &File) -> Option<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice affects no memory.
        let start = unsafe {
            let (access, fd) = (libc::PROT_NONE, file.as_raw_fd());
            libc::mmap(null_mut(), UNIT_BYTES, access, libc::MAP_SHARED, fd, 0)
        };
        if start == libc::MAP_FAILED {
            return None;
        }
        let kept = Self(start);
        // SAFETY: our own mapping.
        let is_parents = unsafe { libc::madvise(start, UNIT_BYTES, libc::MADV_DONTFORK) } == 0;
        is_parents.then_some(kept)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // SAFETY: our own mapping, unmapped once.
        unsafe { libc::munmap(self.0, UNIT_BYTES) };
    }
}

/// A descriptor that a child closes.
struct Place {
    /// `NONE` if the place is free, `FILLING` while it is written.
    fd: AtomicI32,
    identity: [AtomicU64; 2],
}

const FILLING: i32 = -2;

static DESCRIPTORS: [Place; DESCRIPTORS_MAX] = [const {
    Place { fd: AtomicI32::new(NONE), identity: [AtomicU64::new(0), AtomicU64::new(0)] }
}; DESCRIPTORS_MAX];

/// A descriptor that children close. It must be dropped before the descriptor is closed: its number may be
/// reused after that.
#[derive(Debug)]
pub struct ClosedInChild {
    place: Option<usize>,
}

impl ClosedInChild {
    pub(crate) fn new(fd: RawFd) -> Self {
        let Some(Identity(identity)) = Identity::of(fd) else { return Self { place: None } };
        // Relaxed throughout: a forked child has the memory that the forking thread saw.
        let take = |place: &Place| {
            place.fd.compare_exchange(NONE, FILLING, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let place = DESCRIPTORS.iter().position(take);
        if let Some(place) = place.and_then(|at| DESCRIPTORS.get(at)) {
            for (word, value) in place.identity.iter().zip(identity) {
                word.store(value, Ordering::Relaxed);
            }
            place.fd.store(fd, Ordering::Release);
        }
        Self { place }
    }
}

impl Drop for ClosedInChild {
    fn drop(&mut self) {
        if let Some(place) = self.place.and_then(|at| DESCRIPTORS.get(at)) {
            place.fd.store(NONE, Ordering::Relaxed);
        }
    }
}

/// Closes the descriptors of all tiers in a forked child, which would otherwise hold the parent's disk space
/// and pinned memory. The child cannot use a tier. Called from its fork handler; async-signal-safe.
pub fn close_in_child() {
    for place in &DESCRIPTORS {
        let fd = place.fd.swap(NONE, Ordering::Acquire);
        let identity = place.identity.each_ref().map(|word| word.load(Ordering::Relaxed));
        if fd >= 0 && Identity::of(fd) == Some(Identity(identity)) {
            // SAFETY: the child's copy of an open descriptor: its owner clears the place before it closes
            // it, and the child has no thread of the parent.
            unsafe { libc::close(fd) };
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::storage::DirectFile;
    use crate::testing::{disk_dir, in_a_process_of_its_own, refused_here};
    use crate::{Aligned, IoEngine, Nvme, NvmeError, Storage, choice, uring};

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
        let is_left = |place: &Place| open.contains(&place.fd.load(Ordering::Relaxed));
        assert!(!DESCRIPTORS.iter().any(is_left));
    }

    /// Closes `fd` and opens a file of the program as it, in the same folder.
    fn replace(fd: RawFd, name: &str) -> std::path::PathBuf {
        let path = disk_dir().join(format!(".{name}-{}", std::process::id()));
        // SAFETY: the program closes a descriptor that it does not own, which is the point.
        assert_eq!(unsafe { libc::close(fd) }, 0);
        let mut opened = File::create_new(&path).unwrap();
        std::io::Write::write_all(&mut opened, b"the program's").unwrap();
        if opened.as_raw_fd() != fd {
            // SAFETY: `fd` is closed, or another test's descriptor has taken it, which the caller excludes.
            assert_eq!(unsafe { libc::dup2(opened.as_raw_fd(), fd) }, fd);
        } else {
            std::mem::forget(opened);
        }
        path
    }

    fn is_open(fd: RawFd) -> bool {
        Identity::of(fd).is_some()
    }

    fn status(write: std::io::Result<usize>) -> String {
        write.unwrap_err().to_string()
    }

    #[test]
    fn a_file_that_took_our_number_is_neither_read_nor_written_nor_closed() {
        const TEST: &str = "a_file_that_took_our_number_is_neither_read_nor_written_nor_closed";
        if !in_a_process_of_its_own(module_path!(), TEST) {
            return;
        }
        let create = [DirectFile::create, DirectFile::create_buffered];
        for (name, create) in ["direct", "buffered"].into_iter().zip(create) {
            let file = create(&disk_dir(), 4096).unwrap();
            let fd = file.as_raw_fd();
            let closed_in_child = ClosedInChild::new(fd);
            let path = replace(fd, name);
            let mut buffer = Aligned::zeroed(UNIT_BYTES).unwrap();
            assert!(status(file.write(0, &buffer.memory())).contains("closed descriptor"));
            assert!(status(file.read(0, &buffer.memory())).contains("closed descriptor"));
            close_in_child();
            drop((closed_in_child, file));
            assert!(is_open(fd), "the program's file was closed");
            assert_eq!(std::fs::read(&path).unwrap(), b"the program's");
            std::fs::remove_file(path).unwrap();
        }
    }

    #[test]
    fn a_file_that_took_the_number_of_a_ring_is_not_used_and_not_closed() {
        const TEST: &str = "a_file_that_took_the_number_of_a_ring_is_not_used_and_not_closed";
        if !in_a_process_of_its_own(module_path!(), TEST) {
            return;
        }
        let file = DirectFile::create(&disk_dir(), 4096).unwrap();
        let ring = match uring::set_up(&file, 2) {
            Ok(ring) => ring,
            Err(refusal) => return refused_here(&refusal.error),
        };
        let fd = ring.as_raw_fd();
        let path = replace(fd, "ring");
        assert!(ring.check().unwrap_err().to_string().contains("closed descriptor"));
        drop(ring);
        assert!(is_open(fd), "the program's file was closed");
        std::fs::remove_file(path).unwrap();
    }

    /// A new descriptor without a file.
    fn event() -> File {
        // SAFETY: a plain system call, whose descriptor has no other owner.
        unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC);
            assert!(fd >= 0, "{}", std::io::Error::last_os_error());
            std::os::fd::FromRawFd::from_raw_fd(fd)
        }
    }

    #[test]
    fn an_event_took_the_number_of_a_ring_that_can_be_told_from_it() {
        const TEST: &str = "an_event_took_the_number_of_a_ring_that_can_be_told_from_it";
        if !in_a_process_of_its_own(module_path!(), TEST) {
            return;
        }
        let file = DirectFile::create(&disk_dir(), 4096).unwrap();
        assert!(!has_common_identity(file.as_raw_fd()));
        assert!(has_common_identity(event().as_raw_fd()), "one inode for all of them");
        // What the identity does not tell apart is no ring of ours.
        let told = uring::tell_apart(event().as_raw_fd());
        assert_eq!(told.unwrap_err().error.kind(), std::io::ErrorKind::Unsupported);
        let ring = match uring::set_up(&file, 2) {
            Ok(ring) => ring,
            Err(refusal) => return refused_here(&refusal.error),
        };
        let fd = ring.as_raw_fd();
        // SAFETY: the program replaces a descriptor that it does not own, which is the point.
        assert_eq!(unsafe { libc::dup2(event().as_raw_fd(), fd) }, fd);
        assert!(ring.check().unwrap_err().to_string().contains("closed descriptor"));
        drop(ring);
        assert!(is_open(fd), "the program's event was closed");
    }

    /// The program closes every descriptor, while the tier holds data.
    #[test]
    fn a_tier_whose_descriptors_were_closed_stops_with_an_error() {
        const TEST: &str = "a_tier_whose_descriptors_were_closed_stops_with_an_error";
        if !in_a_process_of_its_own(module_path!(), TEST) {
            return;
        }
        let file = Arc::new(DirectFile::create(&disk_dir(), 1 << 20).unwrap());
        for engine in [IoEngine::Auto, IoEngine::Threads] {
            let chosen = choice::choose(&disk_dir(), &file, engine, 1, 2).unwrap();
            let mut queue = chosen.queues.into_iter().next().unwrap();
            let nvme = Nvme::with_storage(Arc::clone(&file) as Arc<dyn Storage>, 1 << 20, true);
            let mut extent = nvme.allocate(4096).unwrap();
            let mut buffer = Aligned::zeroed(UNIT_BYTES).unwrap();
            let memory = buffer.memory();
            if engine == IoEngine::Auto {
                extent.set_sums(extent.writer(memory, true).run(&mut *queue).unwrap().unwrap());
                // SAFETY: as `closefrom(3)`: the program closes what is not its own.
                assert_eq!(unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0) }, 0);
            }
            for _ in 0..2 {
                let written = extent.writer(memory, true).run(&mut *queue);
                let read = extent.reader(memory).run(&mut *queue);
                for result in [written, read] {
                    let Err(NvmeError::Failed { reason, .. }) = result else {
                        panic!("{result:?}")
                    };
                    assert!(reason.contains("closed descriptor"), "{reason}");
                }
            }
            nvme.release(extent);
        }
    }
}
