//! The system calls of the file tier, and the one type that lends memory to them.
//!
//! Everything unsafe in I/O is here: memory given by address, O_DIRECT, fallocate, statfs.
#![expect(unsafe_code, reason = "memory by address and raw system calls; nowhere else in I/O")]

use std::alloc::Layout;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

#[cfg(any(not(target_arch = "x86_64"), miri))]
use crc32c::crc32c;
use dormouse_device::AddressRange;

use super::error::NvmeError;
use super::forked::ClosedInChild;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use super::sum::crc32c;

/// Offsets, lengths and addresses of all I/O are multiples of this: the largest logical block of
/// today's disks, and the size of a page.
pub const UNIT_BYTES: usize = 4096;
/// How many names are tried before giving up on creating the file.
const NAME_ATTEMPTS_MAX: u32 = 16;
/// How often a call is made that a signal interrupts each time.
const SIGNALS_MAX: u32 = 64;

const TMPFS_MAGIC: i64 = 0x0102_1994;
const RAMFS_MAGIC: i64 = 0x8584_58f6;

/// Memory lent to I/O. Its maker promises that it stays valid; its users need no unsafe.
#[derive(Clone, Copy, Debug)]
pub struct IoMemory {
    start: usize,
    bytes: usize,
}

impl IoMemory {
    /// Lends `range`.
    ///
    /// # Safety
    /// The range is readable, and writable where it will be read into, until the last copy of the
    /// result (and of its parts) is gone; nobody else writes to it meanwhile, unless the bytes
    /// taken from it are thrown away (a frozen span that turns out written).
    #[must_use]
    pub const unsafe fn new(range: AddressRange) -> Self {
        Self { start: range.start, bytes: range.bytes }
    }

    /// No memory, for queues that do nothing with it.
    #[cfg(any(test, feature = "faults"))]
    #[must_use]
    pub const fn none() -> Self {
        Self { start: 0, bytes: 0 }
    }

    /// Length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// First address.
    #[must_use]
    pub const fn address(&self) -> usize {
        self.start
    }

    /// The part at `offset`, cut to what there is.
    #[must_use]
    pub fn part(&self, offset: usize, bytes: usize) -> Self {
        let offset = offset.min(self.bytes);
        Self { start: self.start + offset, bytes: bytes.min(self.bytes - offset) }
    }

    /// Makes sure that pages are there, where the first is not; no byte changes. Whoever reads
    /// into memory that nobody has touched would otherwise have the system fault its pages in, all
    /// of them under the lock of the process's mappings: for 1 to 2 ms per 2 MiB no thread could map,
    /// unmap or protect anything. A touch of ours locks the one mapping only, and whether it found a
    /// page is asked of the thread's count of faults: `mincore` takes that lock.
    pub fn fault_in(&self) {
        let mut pages =
            (self.start & !(UNIT_BYTES - 1)..self.start + self.bytes).step_by(UNIT_BYTES);
        let before = faults_of_thread();
        let touch = |address: usize| {
            let byte = address.max(self.start) as *mut u8;
            // SAFETY: `new`'s contract: writable where it is read into, and nobody else writes; an
            // exchange of zero for zero faults the page in for writing and changes nothing.
            let byte = unsafe { AtomicU8::from_ptr(byte) };
            let _ = byte.compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
        };
        pages.next().into_iter().for_each(touch);
        if faults_of_thread() != before {
            pages.for_each(touch);
        }
    }

    /// CRC-32C of the bytes.
    #[must_use]
    pub fn crc32c(&self) -> u32 {
        // SAFETY: `new`'s contract: readable for our life. A racing write to a frozen span tears
        // the sum, which is thrown away with the copy (I4 of the device).
        crc32c(unsafe { std::slice::from_raw_parts(self.start as *const u8, self.bytes) })
    }
}

/// How often this thread has touched a page that was not there.
fn faults_of_thread() -> i64 {
    // SAFETY: all-zero is a valid value of this struct of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: writes one such struct. A refusal leaves zeros, both times.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_minflt
}

/// A page-aligned buffer of our own, for measuring and bouncing.
#[derive(Debug)]
pub struct Aligned {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: an owned allocation, like a Box<[u8]>; nothing in it is tied to a thread.
unsafe impl Send for Aligned {}

impl Aligned {
    /// Zeroed, `bytes` rounded up to the unit; `None` where memory is short.
    #[must_use]
    pub fn zeroed(bytes: usize) -> Option<Self> {
        let bytes = bytes.max(1).checked_next_multiple_of(UNIT_BYTES)?;
        let layout = Layout::from_size_align(bytes, UNIT_BYTES).ok()?;
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        Some(Self { start, layout })
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: our own allocation of that size, initialised (zeroed) from the start.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }

    /// The bytes, to be changed.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }

    /// The buffer as I/O memory. Exclusive, so only one transfer uses it at a time.
    pub fn memory(&mut self) -> IoMemory {
        IoMemory { start: self.start.as_ptr() as usize, bytes: self.layout.size() }
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeroed` with this layout, freed once.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// One positioned write, as far as the system takes it.
pub(super) fn write_at(file: &File, offset: u64, memory: &IoMemory) -> io::Result<usize> {
    let offset = i64::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: `IoMemory::new`'s contract: readable for its length.
    let n =
        unsafe { libc::pwrite64(file.as_raw_fd(), memory.start as *const _, memory.bytes, offset) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// One positioned read, as far as the system gives.
pub(super) fn read_at(file: &File, offset: u64, memory: &IoMemory) -> io::Result<usize> {
    let offset = i64::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: `IoMemory::new`'s contract: writable for its length.
    let n =
        unsafe { libc::pread64(file.as_raw_fd(), memory.start as *mut _, memory.bytes, offset) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Waits until all that was written is on the disk. An error is told once and to one caller, also
/// where it befell what another wrote.
pub(super) fn sync(file: &File) -> io::Result<()> {
    uninterrupted(|| {
        // SAFETY: no memory is passed.
        let result = unsafe { libc::fdatasync(file.as_raw_fd()) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    })
}

/// Asks the kernel to keep no pages of `bytes` at `offset`.
pub(super) fn drop_cache(file: &File, offset: u64, bytes: u64) {
    let (Ok(offset), Ok(bytes)) = (i64::try_from(offset), i64::try_from(bytes)) else { return };
    // SAFETY: no memory is passed. Only advice: a refusal changes nothing.
    unsafe {
        libc::posix_fadvise64(file.as_raw_fd(), offset, bytes, libc::POSIX_FADV_DONTNEED);
    }
}

/// The file that has been made.
#[derive(Debug)]
pub(super) struct Created {
    // Dropped first.
    _closed_in_child: ClosedInChild,
    pub(super) file: File,
    /// Whether the system refused O_DIRECT.
    pub(super) buffered: bool,
}

impl Created {
    fn new(file: File, buffered: bool) -> Self {
        Self { _closed_in_child: ClosedInChild::new(file.as_raw_fd()), file, buffered }
    }
}

/// Creates the private, unlinked, preallocated file.
pub(super) fn create(dir: &Path, file_bytes: u64) -> Result<Created, NvmeError> {
    refuse_memory(dir)?;
    let created = match open_unlinked(dir, libc::O_DIRECT) {
        Ok(file) => Created::new(file, false),
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
            return create_buffered(dir, file_bytes);
        }
        Err(e) => return Err(setup(dir, "creating the file", &e)),
    };
    reserved(dir, created, file_bytes)
}

/// As [`create`] where O_DIRECT is refused.
pub(super) fn create_buffered(dir: &Path, file_bytes: u64) -> Result<Created, NvmeError> {
    let file = open_unlinked(dir, 0).map_err(|e| setup(dir, "creating the file", &e))?;
    reserved(dir, Created::new(file, true), file_bytes)
}

fn reserved(dir: &Path, created: Created, file_bytes: u64) -> Result<Created, NvmeError> {
    preallocate(&created.file, file_bytes).map_err(|e| setup(dir, "reserving its space", &e))?;
    Ok(created)
}

fn setup(dir: &Path, what: &'static str, e: &io::Error) -> NvmeError {
    let code = e.raw_os_error().unwrap_or(0);
    NvmeError::Setup { dir: dir.to_owned(), what, reason: e.to_string(), code }
}

/// A file on tmpfs is memory under another name: sleeping there would free nothing.
fn refuse_memory(dir: &Path) -> Result<(), NvmeError> {
    let path = CString::new(dir.as_os_str().as_bytes())
        .map_err(|e| setup(dir, "reading its name", &io::Error::other(e)))?;
    // SAFETY: statfs is plain data, for which zero is a value.
    let mut found: libc::statfs64 = unsafe { std::mem::zeroed() };
    // SAFETY: a terminated string and a writable struct, both ours.
    if unsafe { libc::statfs64(path.as_ptr(), &raw mut found) } != 0 {
        return Err(setup(dir, "looking at its file system", &io::Error::last_os_error()));
    }
    #[allow(clippy::unnecessary_cast, reason = "the field's type differs between C libraries")]
    let filesystem = match found.f_type as i64 {
        TMPFS_MAGIC => "tmpfs",
        RAMFS_MAGIC => "ramfs",
        _ => return Ok(()),
    };
    Err(NvmeError::IsMemory { dir: dir.to_owned(), filesystem })
}

/// A file without a name: it never has one where the file system can do that, or a process killed in
/// between would leave it.
fn open_unlinked(dir: &Path, extra_flags: i32) -> io::Result<File> {
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .mode(0o600)
        .custom_flags(extra_flags | libc::O_TMPFILE | libc::O_EXCL | libc::O_CLOEXEC)
        .open(dir);
    match opened.map_err(|e| (e.raw_os_error(), e)) {
        // The file system has no such files: all but the first are the answers of old kernels.
        Err((Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT), _)) => {
            open_and_unlink(dir, extra_flags)
        }
        Err((_, e)) => Err(e),
        Ok(file) => Ok(file),
    }
}

fn open_and_unlink(dir: &Path, extra_flags: i32) -> io::Result<File> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let mut last = io::Error::from_raw_os_error(libc::EEXIST);
    for _ in 0..NAME_ATTEMPTS_MAX {
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!(".dormouse-{}-{count}", std::process::id()));
        let opened = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(extra_flags | libc::O_CLOEXEC | libc::O_NOFOLLOW)
            .open(&path);
        match opened {
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => last = e,
            Err(e) => {
                // A file system may create the file and only then refuse O_DIRECT.
                if e.raw_os_error() == Some(libc::EINVAL) {
                    let _ = std::fs::remove_file(&path);
                }
                return Err(e);
            }
        }
    }
    Err(last)
}

/// How long this process may make a file (`ulimit -f`). Asked before: the system ends a process that
/// tries to make one longer, unless it has said what else is to become of that signal.
fn file_bytes_max() -> u64 {
    let mut limit = libc::rlimit64 { rlim_cur: libc::RLIM64_INFINITY, rlim_max: 0 };
    // SAFETY: writes one such struct. A refusal leaves no limit.
    unsafe { libc::getrlimit64(libc::RLIMIT_FSIZE, &raw mut limit) };
    limit.rlim_cur
}

fn preallocate(file: &File, bytes: u64) -> io::Result<()> {
    let length = i64::try_from(bytes).map_err(io::Error::other)?;
    if file_bytes_max() < bytes {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    let allocate = || {
        // SAFETY: no memory is passed.
        let result = unsafe { libc::fallocate64(file.as_raw_fd(), 0, 0, length) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    uninterrupted(allocate).or_else(|e| match e.raw_os_error() {
        // No preallocation on this file system: a full disk then shows at the write.
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => file.set_len(bytes),
        _ => Err(e),
    })
}

/// What `call` answers, asked again where a signal came in between: some calls take long enough for
/// a timer of the program's to go off in each.
fn uninterrupted<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    for _ in 1..SIGNALS_MAX {
        match call() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            answer => return answer,
        }
    }
    call()
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(not(loom))]
    use crate::testing::{disk_dir, in_a_process_of_its_own};

    const PAGES: usize = 64;

    /// Runs `work` on pages of which nobody has touched one, and says how many are there then.
    fn faulted_in(work: impl FnOnce(IoMemory)) -> usize {
        let bytes = PAGES * UNIT_BYTES;
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let mut there = [0_u8; PAGES];
        // SAFETY: a mapping of our own from its making to its end, and a byte for each page.
        unsafe {
            let start = libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            work(IoMemory { start: start.addr(), bytes });
            assert_eq!(libc::mincore(start, bytes, there.as_mut_ptr()), 0);
            assert_eq!(libc::munmap(start, bytes), 0);
        }
        there.iter().filter(|page| *page & 1 == 1).count()
    }

    #[test]
    fn pages_nobody_has_touched_are_there_after_it_and_none_beside_them() {
        assert_eq!(faulted_in(|_| ()), 0);
        assert_eq!(faulted_in(|memory| memory.fault_in()), PAGES);
        assert_eq!(faulted_in(|memory| memory.part(UNIT_BYTES, 3 * UNIT_BYTES).fault_in()), 3);
        // From an odd place, a page and a byte.
        assert_eq!(faulted_in(|memory| memory.part(7, UNIT_BYTES).fault_in()), 2);
    }

    #[test]
    fn a_call_that_a_signal_interrupts_is_made_again_so_often_and_no_more() {
        let mut calls = 0;
        let mut interrupted = |times: u32, then: i32| {
            calls = 0;
            uninterrupted::<()>(|| {
                calls += 1;
                let code = if calls <= times { libc::EINTR } else { then };
                Err(io::Error::from_raw_os_error(code))
            })
            .map_err(|e| (e.raw_os_error().unwrap(), calls))
        };
        assert_eq!(interrupted(0, libc::ENOSPC), Err((libc::ENOSPC, 1)));
        assert_eq!(interrupted(SIGNALS_MAX - 1, libc::EIO), Err((libc::EIO, SIGNALS_MAX)));
        assert_eq!(interrupted(u32::MAX, 0), Err((libc::EINTR, SIGNALS_MAX)));
    }

    #[test]
    fn no_byte_changes_and_what_begins_with_a_page_is_left_alone() {
        let there = faulted_in(|memory| {
            // SAFETY: a byte of the mapping.
            let last = unsafe { AtomicU8::from_ptr((memory.start + UNIT_BYTES - 1) as *mut u8) };
            last.store(5, Ordering::Relaxed);
            memory.fault_in();
            let next = memory.part(UNIT_BYTES, UNIT_BYTES);
            next.fault_in();
            let zeros = vec![0; UNIT_BYTES];
            assert_eq!(next.crc32c(), crc32c::crc32c(&zeros));
            assert_eq!(last.load(Ordering::Relaxed), 5);
        });
        assert_eq!(there, 2);
    }

    #[test]
    #[cfg(not(loom))]
    fn a_longer_file_than_the_process_may_make_is_an_error_and_not_its_end() {
        const TEST: &str = "a_longer_file_than_the_process_may_make_is_an_error_and_not_its_end";
        const LIMIT: u64 = 1 << 20;
        if !in_a_process_of_its_own(module_path!(), TEST) {
            return;
        }
        let limit = libc::rlimit64 { rlim_cur: LIMIT, rlim_max: libc::RLIM64_INFINITY };
        // SAFETY: plain system calls; the limit is a live local.
        unsafe {
            libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
            assert_eq!(libc::setrlimit64(libc::RLIMIT_FSIZE, &raw const limit), 0);
        }
        let refused = create(&disk_dir(), LIMIT + UNIT_BYTES as u64).unwrap_err();
        let NvmeError::Setup { what, code, .. } = refused else { panic!("{refused}") };
        assert_eq!((what, code), ("reserving its space", libc::EFBIG));
        create(&disk_dir(), LIMIT).unwrap();
        // SAFETY: a plain system call.
        let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_DFL) };
        assert_eq!(before, libc::SIG_DFL, "what becomes of the signal is the program's to say");
    }
}
