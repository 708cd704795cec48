//! The system calls of the file tier, and the one type that lends memory to them.
//!
//! Memory by address, fallocate and statfs are used here only.
#![expect(unsafe_code, reason = "memory by address and raw system calls")]

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
use std::time::Duration;

#[cfg(any(not(target_arch = "x86_64"), miri))]
use crc32c::crc32c;
use dormouse_device::AddressRange;

use super::error::NvmeError;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use super::sum::crc32c;

/// Offsets, lengths and addresses of all I/O are multiples of this: the largest logical block of
/// current disks, and the size of a page.
pub const UNIT_BYTES: usize = 4096;
/// Limit of the names that are tried for the file.
const NAME_ATTEMPTS_MAX: u32 = 16;
/// Limit of the attempts of a call that signals interrupt.
const SIGNALS_MAX: u32 = 64;

const TMPFS_MAGIC: i64 = 0x0102_1994;
const RAMFS_MAGIC: i64 = 0x8584_58f6;

/// Memory lent to I/O. [`IoMemory::new`] promises that it stays valid, so its users need no unsafe code.
#[derive(Clone, Copy, Debug)]
pub struct IoMemory {
    start: usize,
    bytes: usize,
}

impl IoMemory {
    /// Lends `range`.
    ///
    /// # Safety
    /// Until the last copy of the result and of its parts is dropped, the range is readable, and writable
    /// if a file is read into it. Nothing else writes to it meanwhile, unless the bytes taken from it are
    /// discarded (a frozen span that was written to).
    #[must_use]
    pub const unsafe fn new(range: AddressRange) -> Self {
        Self { start: range.start, bytes: range.bytes }
    }

    /// Returns an empty range, for queues that ignore it.
    #[cfg(any(test, feature = "faults"))]
    #[must_use]
    pub const fn none() -> Self {
        Self { start: 0, bytes: 0 }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the first address.
    #[must_use]
    pub const fn address(&self) -> usize {
        self.start
    }

    /// Returns the part of `bytes` at `offset`, as far as the range goes.
    #[must_use]
    pub fn part(&self, offset: usize, bytes: usize) -> Self {
        let offset = offset.min(self.bytes);
        Self { start: self.start + offset, bytes: bytes.min(self.bytes - offset) }
    }

    /// Faults in all pages if the first one is missing. No byte changes. Otherwise a read into untouched
    /// memory would fault them in under the lock of the process's mappings: for 1 to 2 ms per 2 MiB no
    /// thread could map, unmap or protect memory. A touch from user space locks one mapping only. The
    /// thread's count of page faults shows whether the page was missing; `mincore` would take that lock.
    pub fn fault_in(&self) {
        let mut pages =
            (self.start & !(UNIT_BYTES - 1)..self.start + self.bytes).step_by(UNIT_BYTES);
        let before = faults_of_thread();
        let touch = |address: usize| {
            let byte = address.max(self.start) as *mut u8;
            // SAFETY: `new`'s contract: writable if read into, and nothing else writes. An exchange of
            // zero for zero faults the page in for writing and changes nothing.
            let byte = unsafe { AtomicU8::from_ptr(byte) };
            let _ = byte.compare_exchange(0, 0, Ordering::Relaxed, Ordering::Relaxed);
        };
        pages.next().into_iter().for_each(touch);
        if faults_of_thread() != before {
            pages.for_each(touch);
        }
    }

    /// Returns the CRC-32C of the bytes.
    #[must_use]
    pub fn crc32c(&self) -> u32 {
        // SAFETY: `new`'s contract: readable while `self` lives. A concurrent write to a frozen span
        // makes the sum invalid; it is discarded with the copy (I4 of the device).
        crc32c(unsafe { std::slice::from_raw_parts(self.start as *const u8, self.bytes) })
    }
}

/// Returns the number of minor page faults of this thread.
fn faults_of_thread() -> i64 {
    // SAFETY: all-zero is a valid value of this struct of integers.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: writes one such struct. A failed call leaves zeros.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    usage.ru_minflt
}

/// An owned page-aligned buffer, for measurements and bounces.
#[derive(Debug)]
pub struct Aligned {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: an owned allocation, like a Box<[u8]>.
unsafe impl Send for Aligned {}

impl Aligned {
    /// Allocates zeroed `bytes`, rounded up to whole units. `None` if memory is short.
    #[must_use]
    pub fn zeroed(bytes: usize) -> Option<Self> {
        let bytes = bytes.max(1).checked_next_multiple_of(UNIT_BYTES)?;
        let layout = Layout::from_size_align(bytes, UNIT_BYTES).ok()?;
        // SAFETY: the layout is not empty.
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        Some(Self { start, layout })
    }

    /// Returns the bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: our own allocation of that size, initialised (zeroed) from the start.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }

    /// Returns the bytes for writing.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }

    /// Lends the buffer.
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

/// Writes `memory` at `offset`. Returns the number of bytes written.
pub(super) fn write_at(file: &File, offset: u64, memory: &IoMemory) -> io::Result<usize> {
    let offset = i64::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: `IoMemory::new`'s contract: readable for its length.
    let n =
        unsafe { libc::pwrite64(file.as_raw_fd(), memory.start as *const _, memory.bytes, offset) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Reads into `memory` from `offset`. Returns the number of bytes read.
pub(super) fn read_at(file: &File, offset: u64, memory: &IoMemory) -> io::Result<usize> {
    let offset = i64::try_from(offset).map_err(io::Error::other)?;
    // SAFETY: `IoMemory::new`'s contract: writable for its length.
    let n =
        unsafe { libc::pread64(file.as_raw_fd(), memory.start as *mut _, memory.bytes, offset) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Waits until all written data is on the disk. The system reports a lost write once, to one caller, which
/// may not be its writer.
pub(super) fn sync(file: &File) -> io::Result<()> {
    // SAFETY: no memory is passed.
    uninterrupted(|| unsafe { libc::fdatasync(file.as_raw_fd()) })
}

/// Advises the kernel to drop the cached pages of `bytes` at `offset`.
pub(super) fn drop_cache(file: &File, offset: u64, bytes: u64) {
    let (Ok(offset), Ok(bytes)) = (i64::try_from(offset), i64::try_from(bytes)) else { return };
    // SAFETY: no memory is passed. A failed call changes nothing.
    unsafe {
        libc::posix_fadvise64(file.as_raw_fd(), offset, bytes, libc::POSIX_FADV_DONTNEED);
    }
}

/// Refuses a directory on tmpfs or ramfs: its files are memory.
pub(super) fn refuse_memory(dir: &Path) -> Result<(), NvmeError> {
    let path = CString::new(dir.as_os_str().as_bytes())
        .map_err(|e| NvmeError::setup(dir, "reading its name", &io::Error::other(e)))?;
    // SAFETY: statfs is plain data, for which zero is a value.
    let mut found: libc::statfs64 = unsafe { std::mem::zeroed() };
    // SAFETY: a terminated string and a writable struct, both ours.
    if unsafe { libc::statfs64(path.as_ptr(), &raw mut found) } != 0 {
        return Err(NvmeError::setup(
            dir,
            "looking at its file system",
            &io::Error::last_os_error(),
        ));
    }
    #[allow(clippy::unnecessary_cast, reason = "the field's type differs between C libraries")]
    let filesystem = match found.f_type as i64 {
        TMPFS_MAGIC => "tmpfs",
        RAMFS_MAGIC => "ramfs",
        _ => return Ok(()),
    };
    Err(NvmeError::IsMemory { dir: dir.to_owned(), filesystem })
}

/// Opens a new file without a name. It never has one, if the file system supports that: a process killed
/// between creation and unlinking would leave it.
pub(super) fn open_unlinked(dir: &Path, extra_flags: i32) -> io::Result<File> {
    let opened = options(extra_flags | libc::O_TMPFILE | libc::O_EXCL).open(dir);
    match opened.map_err(|e| (e.raw_os_error(), e)) {
        // Not supported by the file system; the last two are errors of old kernels.
        Err((Some(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT), _)) => {
            open_and_unlink(dir, extra_flags)
        }
        Err((_, e)) => Err(e),
        Ok(file) => Ok(file),
    }
}

fn options(flags: i32) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600).custom_flags(flags | libc::O_CLOEXEC);
    options
}

fn open_and_unlink(dir: &Path, extra_flags: i32) -> io::Result<File> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let mut last = io::Error::from_raw_os_error(libc::EEXIST);
    for _ in 0..NAME_ATTEMPTS_MAX {
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!(".dormouse-{}-{count}", std::process::id()));
        match options(extra_flags | libc::O_NOFOLLOW).create_new(true).open(&path) {
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => last = e,
            Err(e) => {
                // A file system may create the file and then refuse O_DIRECT.
                if e.raw_os_error() == Some(libc::EINVAL) {
                    let _ = std::fs::remove_file(&path);
                }
                return Err(e);
            }
        }
    }
    Err(last)
}

/// Attempts to find room for the file, and the pause between them. The kernel frees the unlinked file of a killed
/// process after its end, in up to 1.4 s on a nearly full disk.
const ROOM_ATTEMPTS_MAX: u32 = 150;
const ROOM_PAUSE: Duration = Duration::from_millis(20);

/// This part of a disk stays free when a file grows: other processes write to it too.
const DISK_KEPT_DIVISOR: u64 = 16;

/// The space of a disk, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct DiskSpace {
    pub(super) total_bytes: u64,
    pub(super) free_bytes: u64,
}

impl DiskSpace {
    /// Returns the space of the disk of `dir`.
    pub(super) fn of(dir: &Path) -> io::Result<Self> {
        let path = CString::new(dir.as_os_str().as_bytes()).map_err(io::Error::other)?;
        // SAFETY: a terminated string and a writable struct, both of this call.
        Self::from_call(|found| unsafe { libc::statvfs64(path.as_ptr(), found) })
    }

    /// Returns the space of the disk of an open file.
    pub(super) fn of_file(file: &File) -> io::Result<Self> {
        // SAFETY: an open descriptor and a writable struct.
        Self::from_call(|found| unsafe { libc::fstatvfs64(file.as_raw_fd(), found) })
    }

    fn from_call(call: impl FnOnce(*mut libc::statvfs64) -> libc::c_int) -> io::Result<Self> {
        // SAFETY: statvfs is plain data, for which zero is a value.
        let mut found: libc::statvfs64 = unsafe { std::mem::zeroed() };
        if call(&raw mut found) != 0 {
            return Err(io::Error::last_os_error());
        }
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Ok(Self { total_bytes: bytes(found.f_blocks), free_bytes: bytes(found.f_bavail) })
    }

    /// Returns the bytes that a file may grow by.
    pub(super) const fn spare_bytes(&self) -> u64 {
        self.free_bytes.saturating_sub(self.total_bytes / DISK_KEPT_DIVISOR)
    }
}

/// Creates a file of `bytes` by `create`, once the disk has room: a file that is too large would fill the disk before
/// it is refused.
pub(super) fn with_room<T>(
    dir: &Path,
    bytes: u64,
    create: impl FnMut() -> io::Result<T>,
) -> Result<T, NvmeError> {
    let space = || DiskSpace::of(dir);
    retry_while_full(dir, bytes, space, create, || std::thread::sleep(ROOM_PAUSE))
}

fn retry_while_full<T>(
    dir: &Path,
    bytes: u64,
    space: impl Fn() -> io::Result<DiskSpace>,
    mut create: impl FnMut() -> io::Result<T>,
    mut pause: impl FnMut(),
) -> Result<T, NvmeError> {
    let failed = |e: &io::Error| NvmeError::setup(dir, "reserving its space", e);
    let mut attempt = 0;
    loop {
        attempt += 1;
        let DiskSpace { total_bytes, free_bytes } = space().map_err(|e| failed(&e))?;
        if bytes <= free_bytes {
            match create() {
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) => {}
                created => return created.map_err(|e| failed(&e)),
            }
        }
        if attempt == ROOM_ATTEMPTS_MAX || bytes > total_bytes {
            return Err(NvmeError::NoRoom { dir: dir.to_owned(), asked_bytes: bytes, free_bytes });
        }
        if attempt == 1 {
            tracing::debug!(target: "storage", bytes, free_bytes, "the disk has no room yet");
        }
        pause();
    }
}

/// Returns the longest file that this process may create (`ulimit -f`). It is checked first: by default the
/// system ends a process that exceeds it with a signal.
pub(super) fn file_bytes_max() -> u64 {
    let mut limit = libc::rlimit64 { rlim_cur: libc::RLIM64_INFINITY, rlim_max: 0 };
    // SAFETY: writes one such struct. A failed call leaves no limit.
    unsafe { libc::getrlimit64(libc::RLIMIT_FSIZE, &raw mut limit) };
    limit.rlim_cur
}

/// Reserves the file's space on the disk, from `from_bytes` to `to_bytes`.
pub(super) fn preallocate(file: &File, from_bytes: u64, to_bytes: u64) -> io::Result<()> {
    let [from, length] = [from_bytes, to_bytes.saturating_sub(from_bytes)].map(i64::try_from);
    let (from, length) = (from.map_err(io::Error::other)?, length.map_err(io::Error::other)?);
    if file_bytes_max() < to_bytes {
        return Err(io::Error::from_raw_os_error(libc::EFBIG));
    }
    if length == 0 {
        return Ok(());
    }
    // SAFETY: no memory is passed.
    let allocated =
        uninterrupted(|| unsafe { libc::fallocate64(file.as_raw_fd(), 0, from, length) });
    allocated.or_else(|e| match e.raw_os_error() {
        // Not supported by the file system: a full disk is then an error of a write.
        Some(libc::EOPNOTSUPP | libc::ENOSYS) => file.set_len(to_bytes),
        _ => Err(e),
    })
}

/// Repeats a system call that a signal interrupts: some take so long that a timer of the program interrupts
/// each attempt.
fn uninterrupted(mut call: impl FnMut() -> libc::c_int) -> io::Result<()> {
    for attempt in 1.. {
        if call() == 0 {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted || attempt == SIGNALS_MAX {
            return Err(error);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(not(loom))]
    use crate::DirectFile;
    #[cfg(not(loom))]
    use crate::testing::seccomp::limit_files;
    #[cfg(not(loom))]
    use crate::testing::{disk_dir, in_a_process_of_its_own};

    const PAGES: usize = 64;

    /// Runs `work` on untouched pages. Returns the number of resident pages after it.
    fn faulted_in(work: impl FnOnce(IoMemory)) -> usize {
        let bytes = PAGES * UNIT_BYTES;
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let mut there = [0_u8; PAGES];
        // SAFETY: a mapping of the test, and one byte for each page.
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
    fn fault_in_makes_exactly_the_pages_of_the_range_resident() {
        assert_eq!(faulted_in(|_| ()), 0);
        assert_eq!(faulted_in(|memory| memory.fault_in()), PAGES);
        assert_eq!(faulted_in(|memory| memory.part(UNIT_BYTES, 3 * UNIT_BYTES).fault_in()), 3);
        // An unaligned start: parts of two pages.
        assert_eq!(faulted_in(|memory| memory.part(7, UNIT_BYTES).fault_in()), 2);
    }

    /// Runs on a disk of 100 bytes, of which `free` are free before each attempt. A quota refuses every other creation
    /// that is refused. Returns the result and the pauses.
    fn with_free(bytes: u64, free: &[u64], refusals: u32) -> (Result<u32, NvmeError>, u32) {
        let (pauses, mut creations) = (std::cell::Cell::new(0), 0);
        let result = retry_while_full(
            Path::new("/disk"),
            bytes,
            || {
                let at = (pauses.get() as usize).min(free.len() - 1);
                Ok(DiskSpace { total_bytes: 100, free_bytes: free[at] })
            },
            || {
                creations += 1;
                let code = if creations % 2 == 0 { libc::ENOSPC } else { libc::EDQUOT };
                let is_refused = creations <= refusals;
                if is_refused { Err(io::Error::from_raw_os_error(code)) } else { Ok(creations) }
            },
            || pauses.set(pauses.get() + 1),
        );
        (result, pauses.get())
    }

    #[test]
    fn a_file_waits_for_room_that_the_kernel_is_about_to_free() {
        assert_eq!(with_free(40, &[40], 0), (Ok(1), 0));
        assert_eq!(with_free(40, &[0, 39, 40], 0), (Ok(1), 2));
        // The count is ahead of what the file system gives.
        assert_eq!(with_free(40, &[40], 2), (Ok(3), 2));
        let refused = |free_bytes, asked_bytes| {
            Err(NvmeError::NoRoom { dir: "/disk".into(), asked_bytes, free_bytes })
        };
        assert_eq!(with_free(40, &[39], 0), (refused(39, 40), ROOM_ATTEMPTS_MAX - 1));
        assert_eq!(with_free(40, &[40], u32::MAX), (refused(40, 40), ROOM_ATTEMPTS_MAX - 1));
        assert_eq!(with_free(101, &[39], 0), (refused(39, 101), 0), "no wait for a larger disk");
    }

    #[test]
    fn an_interrupted_call_is_repeated_up_to_the_limit() {
        let mut calls = 0;
        let mut interrupted = |times: u32, then: i32| {
            calls = 0;
            let result = uninterrupted(|| {
                calls += 1;
                let code = if calls <= times { libc::EINTR } else { then };
                // SAFETY: errno of this thread.
                unsafe { *libc::__errno_location() = code };
                if code == 0 { 0 } else { -1 }
            });
            result.map(|()| calls).map_err(|e| (e.raw_os_error().unwrap(), calls))
        };
        assert_eq!(interrupted(3, 0), Ok(4));
        assert_eq!(interrupted(0, libc::ENOSPC), Err((libc::ENOSPC, 1)));
        assert_eq!(interrupted(SIGNALS_MAX - 1, libc::EIO), Err((libc::EIO, SIGNALS_MAX)));
        assert_eq!(interrupted(u32::MAX, 0), Err((libc::EINTR, SIGNALS_MAX)));
    }

    #[test]
    fn fault_in_changes_no_byte_and_stops_at_a_resident_first_page() {
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
    fn a_file_above_the_size_limit_is_an_error_not_a_signal() {
        const TEST: &str = "a_file_above_the_size_limit_is_an_error_not_a_signal";
        const LIMIT: u64 = 1 << 20;
        if !in_a_process_of_its_own(module_path!(), TEST) {
            return;
        }
        limit_files(LIMIT);
        let refused = DirectFile::create(&disk_dir(), LIMIT + UNIT_BYTES as u64).unwrap_err();
        let NvmeError::Setup { what, code, .. } = refused else { panic!("{refused}") };
        assert_eq!((what, code), ("reserving its space", libc::EFBIG));
        DirectFile::create(&disk_dir(), LIMIT).unwrap();
        // SAFETY: a plain system call.
        let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_DFL) };
        assert_eq!(before, libc::SIG_DFL, "the disposition of the signal is the program's");
    }
}
