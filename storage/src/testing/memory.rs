//! Memory in the place of a file: as fast as sequences by the thousand need it.
#![allow(unsafe_code, reason = "memory lent by address, as to any file")]

use std::io;
use std::ops::Range;

use crate::file::{Aligned, IoMemory};
use crate::storage::Storage;
use crate::sync::{Mutex, lock};

/// A file of a fixed length, all zeroes at first.
#[derive(Debug)]
pub(super) struct MemoryFile(Mutex<Aligned>);

impl MemoryFile {
    pub(super) fn new(bytes: usize) -> Self {
        Self(Mutex::new(Aligned::zeroed(bytes).unwrap()))
    }

    /// What lies there in the other.
    pub(super) fn copy_from(&self, other: &Self, range: Range<usize>) {
        let from = lock(&other.0);
        lock(&self.0).as_mut_slice()[range.clone()].copy_from_slice(&from.as_slice()[range]);
    }
}

impl Storage for MemoryFile {
    fn read(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        let file = lock(&self.0);
        let from = file.as_slice().get(offset as usize..).unwrap_or_default();
        let bytes = memory.bytes().min(from.len());
        // SAFETY: `IoMemory::new`'s contract: writable for its length; the file is another
        // allocation, at least as long.
        unsafe {
            std::ptr::copy_nonoverlapping(from.as_ptr(), memory.address() as *mut u8, bytes);
        }
        Ok(bytes)
    }

    fn write(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        let mut file = lock(&self.0);
        let to = file.as_mut_slice().get_mut(offset as usize..).unwrap_or_default();
        let bytes = memory.bytes().min(to.len());
        // SAFETY: `IoMemory::new`'s contract: readable for its length; the file is another
        // allocation, at least as long.
        unsafe {
            std::ptr::copy_nonoverlapping(memory.address() as *const u8, to.as_mut_ptr(), bytes);
        }
        Ok(bytes)
    }

    fn is_buffered(&self) -> bool {
        false
    }

    fn drop_cache(&self, _offset: u64, _bytes: u64) {}
}
