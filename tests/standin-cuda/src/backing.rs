//! The sparse file whose bytes are physical memory.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};

use crate::code::Code;

/// The file's length: no handle's place is ever used twice, so it never ends in practice.
const FILE_BYTES: i64 = 1 << 62;

/// The file, and where the next handle begins.
pub(crate) struct Backing {
    file: File,
    next: i64,
}

impl Backing {
    pub(crate) fn new() -> Result<Self, Code> {
        // SAFETY: the name is a string with its zero; a new descriptor comes back, or an error.
        let descriptor = unsafe { libc::memfd_create(c"standin-cuda".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(Code::OPERATING_SYSTEM);
        }
        // SAFETY: the descriptor is new, and nobody else's.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(FILE_BYTES.unsigned_abs()).map_err(|_| Code::OPERATING_SYSTEM)?;
        Ok(Self { file, next: 0 })
    }

    pub(crate) fn descriptor(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// A place for `bytes`, which read as zeroes.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<i64, Code> {
        let bytes = i64::try_from(bytes).map_err(|_| Code::OUT_OF_MEMORY)?;
        let end = self.next.checked_add(bytes).filter(|end| *end <= FILE_BYTES);
        let place = self.next;
        self.next = end.ok_or(Code::OUT_OF_MEMORY)?;
        Ok(place)
    }

    /// Gives the memory of a place back to the system.
    pub(crate) fn give(&self, place: i64, bytes: usize) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the descriptor is open, and the place is mapped nowhere. Where this is refused
        // the memory stays used, which harms nobody.
        unsafe { libc::fallocate(self.descriptor(), mode, place, bytes as i64) };
    }
}
