//! The file of the tier, behind a trait that tests implement with failures.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;

use super::descriptors::{ClosedInChild, OwnFile};
use super::direct;
use super::error::NvmeError;
use super::file::{self, DiskSpace, IoMemory};
use crate::sync::{Mutex, lock};

/// Positioned reads and writes, which may transfer less than requested. Any-thread.
pub trait Storage: Send + Sync + Debug {
    /// Reads into `memory` from `offset`. Returns the number of bytes read, 0 past the end.
    ///
    /// # Errors
    /// The system's.
    fn read(&self, offset: u64, memory: &IoMemory) -> io::Result<usize>;
    /// Writes `memory` at `offset`. Returns the number of bytes that are on the disk, even if the system
    /// keeps them in the page cache too.
    ///
    /// # Errors
    /// The system's. The bytes on the disk are then undefined.
    fn write(&self, offset: u64, memory: &IoMemory) -> io::Result<usize>;
    /// Whether written data stays in the page cache, that is, in memory.
    fn is_buffered(&self) -> bool;
    /// Advises the system to drop the cached pages of this range. Data that is not on the disk yet stays.
    fn drop_cache(&self, offset: u64, bytes: u64);
    /// Reserves the bytes from `from_bytes` to `to_bytes`, behind those reserved so far.
    ///
    /// # Errors
    /// The system's; `Unsupported` for a file that does not grow.
    fn grow(&self, from_bytes: u64, to_bytes: u64) -> io::Result<()> {
        let _fixed = (from_bytes, to_bytes);
        Err(io::ErrorKind::Unsupported.into())
    }
    /// Returns the bytes that the disk lets the file grow by, if they are known.
    fn spare_bytes(&self) -> Option<u64> {
        None
    }
}

/// Writes to a buffered file. Each is on the disk before it returns.
///
/// The system reports a lost write once, to the first caller that asks, which may not be its writer; later
/// calls succeed. So one thread at a time writes and syncs, and after an error all writes fail.
#[derive(Debug, Default)]
pub(super) struct WriteThrough {
    /// The error of the system. Locked from before a write until after its sync.
    failed: Mutex<Option<i32>>,
}

impl WriteThrough {
    /// Runs `write` and then `sync`, or returns the error of an earlier one.
    pub(super) fn execute(
        &self,
        write: impl FnOnce() -> io::Result<usize>,
        sync: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<usize> {
        let mut failed = lock(&self.failed);
        if let Some(code) = *failed {
            return Err(io::Error::from_raw_os_error(code));
        }
        let written = match write() {
            // Nothing was done.
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return Err(e),
            // A write too may report the loss of other data, as on NFS.
            written => written.and_then(|bytes| sync().map(|()| bytes)),
        };
        if let Err(e) = &written {
            *failed = Some(e.raw_os_error().unwrap_or(libc::EIO));
        }
        written
    }
}

/// The real file: unlinked, mode 0600, past the page cache if the file system can.
#[derive(Debug)]
pub struct DirectFile {
    // Dropped first.
    _closed_in_child: ClosedInChild,
    file: OwnFile,
    /// If its bytes pass through the page cache.
    through: Option<WriteThrough>,
}

impl DirectFile {
    /// Creates it in `dir`, with its space reserved.
    ///
    /// # Errors
    /// `IsMemory` on tmpfs and ramfs; `Setup` with the message of the system.
    pub fn create(dir: &Path, file_bytes: u64) -> Result<Self, NvmeError> {
        Self::create_with(dir, file_bytes, libc::O_DIRECT)
    }

    /// As [`DirectFile::create`] without O_DIRECT.
    #[cfg(all(test, not(loom)))]
    pub(super) fn create_buffered(dir: &Path, file_bytes: u64) -> Result<Self, NvmeError> {
        Self::create_with(dir, file_bytes, 0)
    }

    fn create_with(dir: &Path, file_bytes: u64, flags: i32) -> Result<Self, NvmeError> {
        file::refuse_memory(dir)?;
        let (file, is_buffered) = match file::open_unlinked(dir, flags) {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => (file::open_unlinked(dir, 0), true),
            opened => (opened, flags == 0),
        };
        let file = file.map_err(|e| NvmeError::setup(dir, "creating the file", &e))?;
        let through = is_buffered.then(WriteThrough::default);
        let file = OwnFile::new(file);
        let mut created = Self { _closed_in_child: file.closed_in_child(), file, through };
        let reserve = || {
            let file = created.file.get()?;
            // A refused reservation may hold a part of the space.
            file::preallocate(file, 0, file_bytes).or_else(|e| file.set_len(0).and(Err(e)))
        };
        file::with_room(dir, file_bytes, reserve)?;
        if !created.is_buffered() {
            let buffered = |file| match direct::is_direct(file, file_bytes) {
                true => Ok(None),
                false => direct::make_buffered(file).map(|()| Some(WriteThrough::default())),
            };
            let through = created.file.get().and_then(buffered);
            let failed = |e| NvmeError::setup(dir, "opening the file without O_DIRECT", &e);
            created.through = through.map_err(failed)?;
        }
        Ok(created)
    }
}

impl AsRawFd for DirectFile {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Storage for DirectFile {
    fn read(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        file::read_at(self.file.get()?, offset, memory)
    }

    fn write(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        let file = self.file.get()?;
        let write = || file::write_at(file, offset, memory);
        match &self.through {
            Some(through) => through.execute(write, || file::sync(file)),
            None => write(),
        }
    }

    fn is_buffered(&self) -> bool {
        self.through.is_some()
    }

    fn drop_cache(&self, offset: u64, bytes: u64) {
        if self.is_buffered()
            && let Ok(file) = self.file.get()
        {
            file::drop_cache(file, offset, bytes);
        }
    }

    fn grow(&self, from_bytes: u64, to_bytes: u64) -> io::Result<()> {
        let file = self.file.get()?;
        let space = DiskSpace::of_file(file)?;
        if to_bytes.saturating_sub(from_bytes) > space.spare_bytes() {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        file::preallocate(file, from_bytes, to_bytes)
            .or_else(|e| file.set_len(from_bytes).and(Err(e)))
    }

    fn spare_bytes(&self) -> Option<u64> {
        DiskSpace::of_file(self.file.get().ok()?).ok().map(|space| space.spare_bytes())
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use crate::error::IoOperation;
    use crate::testing::seccomp::refuse;
    use crate::testing::{CachedFile, disk_dir};
    use crate::{Aligned, Extent, IoEngine, Nvme, UNIT_BYTES, choice};

    const UNIT: u64 = UNIT_BYTES as u64;
    const DISK_IS_GONE: i32 = libc::EIO;
    /// Long enough for a thread that does not wait to finish.
    const A_WHILE: Duration = Duration::from_millis(20);

    fn filled(byte: u8) -> Aligned {
        let mut data = Aligned::zeroed(UNIT_BYTES).unwrap();
        data.as_mut_slice().fill(byte);
        data
    }

    /// Writes a unit filled with `byte`.
    fn put(nvme: &Nvme, byte: u8) -> Result<Extent, NvmeError> {
        let mut extent = nvme.allocate(UNIT).unwrap();
        let mut data = filled(byte);
        match extent.writer(data.memory(), true).run(&mut *nvme.take_queue()) {
            Ok(sums) => {
                extent.set_sums(sums.unwrap());
                Ok(extent)
            }
            Err(e) => {
                nvme.release(extent);
                Err(e)
            }
        }
    }

    fn holds(nvme: &Nvme, extent: &Extent, byte: u8) -> bool {
        let mut data = filled(!byte);
        let read = extent.reader(data.memory()).run(&mut *nvme.take_queue());
        read.is_ok() && data.as_slice().iter().all(|&b| b == byte)
    }

    fn is_lost(put: &Result<Extent, NvmeError>) -> bool {
        let Err(NvmeError::Failed { operation, code, .. }) = put else { return false };
        (*operation, *code) == (IoOperation::Write, DISK_IS_GONE)
    }

    #[test]
    fn a_lost_write_fails_and_so_do_all_later_writes() {
        let file = Arc::new(DirectFile::create_buffered(&disk_dir(), 8 * UNIT).unwrap());
        let nvme = Nvme::with_storage(file, 8 * UNIT, true);
        let sealed = put(&nvme, 1).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                refuse(libc::SYS_fdatasync, None, DISK_IS_GONE);
                // A read does not sync, so it reports no lost write.
                assert!(holds(&nvme, &sealed, 1));
                let second = put(&nvme, 2);
                assert!(is_lost(&second), "{second:?}");
            });
        });
        // The system itself would report no error now.
        let third = put(&nvme, 3);
        assert!(is_lost(&third), "{third:?}");
        assert!(holds(&nvme, &sealed, 1), "earlier data is intact");
        nvme.release(sealed);
    }

    #[test]
    fn a_read_of_a_buffered_file_does_not_wait_for_the_disk() {
        let file = Arc::new(DirectFile::create_buffered(&disk_dir(), 8 * UNIT).unwrap());
        let nvme = Nvme::with_storage(file, 8 * UNIT, true);
        let sealed = put(&nvme, 1).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                refuse(libc::SYS_fdatasync, None, DISK_IS_GONE);
                assert!(holds(&nvme, &sealed, 1));
            });
        });
        nvme.release(put(&nvme, 2).unwrap());
        nvme.release(sealed);
    }

    /// The system reports a lost write to the first thread that syncs. A thread that syncs before we have
    /// noted the error would see success.
    #[test]
    fn a_write_concurrent_with_a_reported_loss_fails_too() {
        let through = WriteThrough::default();
        let (told, was_told) = channel();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                let sync = || {
                    told.send(()).unwrap();
                    std::thread::sleep(A_WHILE);
                    Err(io::Error::from_raw_os_error(DISK_IS_GONE))
                };
                through.execute(|| Ok(UNIT_BYTES), sync)
            });
            was_told.recv().unwrap();
            let second = through.execute(|| Ok(UNIT_BYTES), || Ok(()));
            for answer in [second, first.join().unwrap()] {
                assert_eq!(answer.unwrap_err().raw_os_error(), Some(DISK_IS_GONE));
            }
        });
    }

    #[test]
    fn any_error_but_a_signal_stops_a_buffered_file() {
        let through = WriteThrough::default();
        let signal = || Err(io::ErrorKind::Interrupted.into());
        let interrupted = through.execute(signal, || Ok(())).unwrap_err();
        assert_eq!(interrupted.kind(), io::ErrorKind::Interrupted);
        assert_eq!(through.execute(|| Ok(5), || Ok(())).unwrap(), 5);
        let full = || Err(io::Error::from_raw_os_error(libc::ENOSPC));
        let no_sync = || panic!("a failed write is not synced");
        through.execute(full, no_sync).unwrap_err();
        let no_write = || panic!("a write after an error");
        let late = through.execute(no_write, || Ok(())).unwrap_err();
        assert_eq!(late.raw_os_error(), Some(libc::ENOSPC));
    }

    /// It accepts O_DIRECT when the file is opened, and refuses each write.
    #[test]
    fn a_file_system_that_refuses_direct_writes_is_used_through_the_page_cache() {
        let create = || {
            refuse(libc::SYS_statx, None, libc::ENOSYS);
            refuse(libc::SYS_pwrite64, None, libc::EINVAL);
            DirectFile::create(&disk_dir(), 8 * UNIT).unwrap()
        };
        let created = std::thread::scope(|scope| scope.spawn(create).join());
        let file = Arc::new(created.unwrap());
        assert!(file.is_buffered());
        let chosen = choice::choose(&disk_dir(), &file, IoEngine::Auto, 1, 4).unwrap();
        assert_eq!(chosen.engine, IoEngine::Threads);
        let nvme = Nvme::with_storage(file, 8 * UNIT, true);
        let extent = put(&nvme, 3).unwrap();
        assert!(holds(&nvme, &extent, 3));
        nvme.release(extent);
    }

    /// A ring's writes would complete before they are on the disk.
    #[test]
    fn a_buffered_file_has_no_rings() {
        let file = Arc::new(DirectFile::create_buffered(&disk_dir(), UNIT).unwrap());
        let chosen = choice::choose(&disk_dir(), &file, IoEngine::Auto, 1, 4).unwrap();
        assert_eq!(chosen.engine, IoEngine::Threads);
        assert!(chosen.note.get().unwrap().contains("I/O with O_DIRECT"));
        choice::choose(&disk_dir(), &file, IoEngine::Uring, 1, 4).unwrap_err();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Three threads write while the system writes back by itself and loses some of it.
        #[test]
        fn successful_writes_are_on_the_disk(
            writes in prop::collection::vec(1..24_u8, 3),
            (before, times) in (0..24_usize, 1..4_u32),
        ) {
            let file = Arc::new(CachedFile::new(128 * UNIT_BYTES));
            let nvme = Nvme::with_storage(Arc::clone(&file) as Arc<dyn Storage>, 128 * UNIT, false);
            let put_all = |count: u8| -> Vec<_> {
                (1..=count).filter_map(|byte| Some((put(&nvme, byte).ok()?, byte))).collect()
            };
            let whole: Vec<_> = std::thread::scope(|scope| {
                let writers: Vec<_> =
                    writes.iter().map(|&count| scope.spawn(move || put_all(count))).collect();
                for turn in 0..24 {
                    if turn == before {
                        file.fail_write_backs(times, DISK_IS_GONE);
                    }
                    file.write_back();
                }
                writers.into_iter().flat_map(|writer| writer.join().unwrap()).collect()
            });
            for (extent, byte) in whole {
                prop_assert!(holds(&nvme, &extent, byte));
                nvme.release(extent);
            }
        }
    }
}
