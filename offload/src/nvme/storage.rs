//! The file behind the tier, as a trait, so that tests can put a failing one in its place.

use std::fmt::Debug;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;

use super::error::NvmeError;
use super::file::{self, Created, IoMemory};

/// Positioned reads and writes, each as far as the system goes. Any-thread.
pub trait Storage: Send + Sync + Debug {
    /// Reads into `memory` from `offset`; how many bytes came, 0 past the end.
    ///
    /// # Errors
    /// The system's.
    fn read(&self, offset: u64, memory: &IoMemory) -> io::Result<usize>;
    /// Writes `memory` at `offset`; how many bytes went.
    ///
    /// # Errors
    /// The system's.
    fn write(&self, offset: u64, memory: &IoMemory) -> io::Result<usize>;
    /// Whether what is written stays in the page cache, that is, in memory.
    fn is_buffered(&self) -> bool;
    /// Asks the system to keep nothing of this range in memory.
    fn drop_cache(&self, offset: u64, bytes: u64);
}

/// The real file: unlinked, mode 0600, O_DIRECT where the file system has it.
#[derive(Debug)]
pub struct DirectFile {
    created: Created,
}

impl DirectFile {
    /// Creates it in `dir` with its space reserved.
    ///
    /// # Errors
    /// `IsMemory` on tmpfs and ramfs; `Setup` with the system's words.
    pub fn create(dir: &Path, file_bytes: u64) -> Result<Self, NvmeError> {
        Ok(Self { created: file::create(dir, file_bytes)? })
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
        file::write_at(&self.created.file, offset, memory)
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
