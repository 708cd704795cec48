//! The file behind the tier, as a trait, so that tests can put a failing one in its place.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;

use super::error::NvmeError;
use super::file::{self, Created, IoMemory};
use crate::sync::{Mutex, lock};

/// Positioned reads and writes, each as far as the system goes. Any-thread.
pub trait Storage: Send + Sync + Debug {
    /// Reads into `memory` from `offset`; how many bytes came, 0 past the end.
    ///
    /// # Errors
    /// The system's.
    fn read(&self, offset: u64, memory: &IoMemory) -> io::Result<usize>;
    /// Writes `memory` at `offset`; how many bytes went, to the disk also where the system keeps the
    /// file in memory too.
    ///
    /// # Errors
    /// The system's. What became of the bytes is then not known.
    fn write(&self, offset: u64, memory: &IoMemory) -> io::Result<usize>;
    /// Whether what is written stays in the page cache, that is, in memory.
    fn is_buffered(&self) -> bool;
    /// Asks the system to keep nothing of this range in memory. Advice: what is not on the disk yet
    /// stays.
    fn drop_cache(&self, offset: u64, bytes: u64);
}

/// Writes to a file that the system keeps in memory, each on the disk before it is answered.
///
/// That bytes did not get to the disk the system says once, to whoever asks first, and not whose they
/// were; asked again it says that all is well. So one at a time writes and asks, and after one that
/// was told nobody's writes are whole any more.
#[derive(Debug, Default)]
pub(super) struct WriteThrough {
    /// What the system said, held from before a write until it has been asked.
    failed: Mutex<Option<i32>>,
}

impl WriteThrough {
    /// Does `write` and then `sync`, or answers what they answered when they failed.
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
            // A write, too, may be told of others' bytes: NFS does that.
            written => written.and_then(|bytes| sync().map(|()| bytes)),
        };
        if let Err(e) = &written {
            *failed = Some(e.raw_os_error().unwrap_or(libc::EIO));
        }
        written
    }
}

/// The real file: unlinked, mode 0600, O_DIRECT where the file system has it.
#[derive(Debug)]
pub struct DirectFile {
    created: Created,
    through: WriteThrough,
}

impl DirectFile {
    /// Creates it in `dir` with its space reserved.
    ///
    /// # Errors
    /// `IsMemory` on tmpfs and ramfs; `Setup` with the system's words.
    pub fn create(dir: &Path, file_bytes: u64) -> Result<Self, NvmeError> {
        Ok(Self { created: file::create(dir, file_bytes)?, through: WriteThrough::default() })
    }

    /// As [`DirectFile::create`] where the file system has no O_DIRECT.
    #[cfg(all(test, not(loom)))]
    pub(super) fn create_buffered(dir: &Path, file_bytes: u64) -> Result<Self, NvmeError> {
        let created = file::create_buffered(dir, file_bytes)?;
        Ok(Self { created, through: WriteThrough::default() })
    }
}

impl AsRawFd for DirectFile {
    fn as_raw_fd(&self) -> RawFd {
        self.created.file.as_raw_fd()
    }
}

impl Storage for DirectFile {
    fn read(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        file::read_at(&self.created.file, offset, memory)
    }

    fn write(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        let Created { file, buffered, .. } = &self.created;
        let write = || file::write_at(file, offset, memory);
        if *buffered { self.through.execute(write, || file::sync(file)) } else { write() }
    }

    fn is_buffered(&self) -> bool {
        self.created.buffered
    }

    fn drop_cache(&self, offset: u64, bytes: u64) {
        if self.created.buffered {
            file::drop_cache(&self.created.file, offset, bytes);
        }
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
    /// Long enough for whoever does not wait to go by.
    const A_WHILE: Duration = Duration::from_millis(20);

    fn filled(byte: u8) -> Aligned {
        let mut data = Aligned::zeroed(UNIT_BYTES).unwrap();
        data.as_mut_slice().fill(byte);
        data
    }

    /// Writes a unit of that byte.
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
    fn a_write_that_did_not_reach_the_disk_fails_and_so_does_every_one_after_it() {
        let file = Arc::new(DirectFile::create_buffered(&disk_dir(), 8 * UNIT).unwrap());
        let nvme = Nvme::with_storage(file, 8 * UNIT, true);
        let sealed = put(&nvme, 1).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                refuse(libc::SYS_fdatasync, None, DISK_IS_GONE);
                // A read asks nothing, and so is not told of a write.
                assert!(holds(&nvme, &sealed, 1));
                let second = put(&nvme, 2);
                assert!(is_lost(&second), "{second:?}");
            });
        });
        // Where the system would say by now that all is well.
        let third = put(&nvme, 3);
        assert!(is_lost(&third), "{third:?}");
        assert!(holds(&nvme, &sealed, 1), "what was sealed is there");
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

    /// The system tells the first who asks, of everybody's bytes. Whoever asks between that and its
    /// being known to us is told that all is well.
    #[test]
    fn a_write_beside_the_one_that_is_told_is_not_whole_either() {
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
    fn what_stops_a_buffered_file_is_whatever_failed_but_no_signal() {
        let through = WriteThrough::default();
        let signal = || Err(io::ErrorKind::Interrupted.into());
        let interrupted = through.execute(signal, || Ok(())).unwrap_err();
        assert_eq!(interrupted.kind(), io::ErrorKind::Interrupted);
        assert_eq!(through.execute(|| Ok(5), || Ok(())).unwrap(), 5);
        let full = || Err(io::Error::from_raw_os_error(libc::ENOSPC));
        let asks_nothing = || panic!("a write that failed is not asked about");
        through.execute(full, asks_nothing).unwrap_err();
        let writes_nothing = || panic!("a write after it");
        let late = through.execute(writes_nothing, || Ok(())).unwrap_err();
        assert_eq!(late.raw_os_error(), Some(libc::ENOSPC));
    }

    /// A ring's writes would be answered before they are on the disk.
    #[test]
    fn a_buffered_file_has_no_rings() {
        let file = Arc::new(DirectFile::create_buffered(&disk_dir(), UNIT).unwrap());
        let chosen = choice::choose(&disk_dir(), &file, IoEngine::Auto, 1, 4).unwrap();
        assert_eq!(chosen.engine, IoEngine::Threads);
        assert!(chosen.note.get().unwrap().contains("opening the file with O_DIRECT"));
        choice::choose(&disk_dir(), &file, IoEngine::Uring, 1, 4).unwrap_err();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Three threads write while the system writes back by itself and some of it is lost: what
        /// was answered whole is on the disk.
        #[test]
        fn what_was_answered_whole_is_on_the_disk(
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
