//! A disk behind a cache, as in the system: a lost write is reported once.

use std::io;
use std::ops::Range;

use super::memory::MemoryFile;
use crate::file::IoMemory;
use crate::storage::{Storage, WriteThrough};
use crate::sync::{Mutex, lock};

#[derive(Debug, Default)]
struct Cache {
    dirty: Vec<Range<usize>>,
    /// Number of pieces that are lost, and their errno.
    failures: Option<(u32, i32)>,
    /// The error that is not reported yet.
    untold: Option<i32>,
}

/// A file of a fixed length. Only what is on the disk is read.
#[derive(Debug)]
pub struct CachedFile {
    memory: MemoryFile,
    disk: MemoryFile,
    cache: Mutex<Cache>,
    through: WriteThrough,
}

impl CachedFile {
    pub fn new(bytes: usize) -> Self {
        let (memory, disk) = (MemoryFile::new(bytes), MemoryFile::new(bytes));
        Self { memory, disk, cache: Mutex::default(), through: WriteThrough::default() }
    }

    /// Loses the next pieces.
    pub fn fail_write_backs(&self, times: u32, errno: i32) {
        lock(&self.cache).failures = Some((times, errno));
    }

    /// Writes back, as the system does at any time.
    pub fn write_back(&self) {
        let mut cache = lock(&self.cache);
        for range in std::mem::take(&mut cache.dirty) {
            match &mut cache.failures {
                Some((left @ 1.., errno)) => {
                    *left -= 1;
                    cache.untold = Some(*errno);
                }
                _ => self.disk.copy_from(&self.memory, range),
            }
        }
    }

    fn sync(&self) -> io::Result<()> {
        self.write_back();
        let untold = lock(&self.cache).untold.take();
        untold.map_or(Ok(()), |code| Err(io::Error::from_raw_os_error(code)))
    }
}

impl Storage for CachedFile {
    fn read(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        self.disk.read(offset, memory)
    }

    fn write(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        let write = || {
            let bytes = self.memory.write(offset, memory)?;
            lock(&self.cache).dirty.push(offset as usize..offset as usize + bytes);
            Ok(bytes)
        };
        self.through.execute(write, || self.sync())
    }

    fn is_buffered(&self) -> bool {
        true
    }

    fn drop_cache(&self, _offset: u64, _bytes: u64) {}
}
