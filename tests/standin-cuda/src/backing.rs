//! The sparse file whose bytes are physical memory, and the pages of the arena that show it.
//!
//! Without a file device addresses are numbers: all is accounted for, nothing is there. That is for
//! tools that have too few addresses for a device, and for users that never read the bytes.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};

use crate::code::Code;
use crate::system;

/// The file's length: no handle's place is ever used twice, so it never ends in practice.
const FILE_BYTES: i64 = 1 << 62;

/// The file if there is one, and where the next handle begins.
pub(crate) struct Backing {
    file: Option<File>,
    next: i64,
}

impl Backing {
    pub(crate) fn new() -> Result<Self, Code> {
        // SAFETY: the name is a string with its zero; a new descriptor comes back, or an error.
        let descriptor = unsafe { libc::memfd_create(c"standin-cuda".as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(Code::OPERATING_SYSTEM);
        }
        // SAFETY: the descriptor is new, with no other owner.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(FILE_BYTES.unsigned_abs()).map_err(|_| Code::OPERATING_SYSTEM)?;
        Ok(Self { file: Some(file), next: 0 })
    }

    /// Addresses that are numbers.
    pub(crate) fn none() -> Self {
        Self { file: None, next: 0 }
    }

    /// Whether there are bytes at device addresses.
    pub(crate) fn is_there(&self) -> bool {
        self.file.is_some()
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
        let Some(file) = &self.file else { return };
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the descriptor is open, and the place is mapped nowhere. Where this is refused
        // the memory stays used, which is harmless.
        unsafe { libc::fallocate(file.as_raw_fd(), mode, place, bytes as i64) };
    }

    /// Puts a place at an address, with no access.
    ///
    /// # Safety
    /// The range lies in the arena, and has nothing that is wanted.
    pub(crate) unsafe fn map(&self, start: usize, bytes: usize, place: i64) -> Result<(), Code> {
        let Some(file) = &self.file else { return Ok(()) };
        // SAFETY: the caller's.
        unsafe { system::map_file(start, bytes, file.as_raw_fd(), place) }
    }

    /// Puts fresh pages of no place there.
    ///
    /// # Safety
    /// The range lies in the arena, and its bytes are not wanted.
    pub(crate) unsafe fn clear(
        &self,
        start: usize,
        bytes: usize,
        protection: i32,
    ) -> Result<(), Code> {
        if self.file.is_none() {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { system::map_fresh(start, bytes, protection) }
    }

    /// Sets the protection of a range.
    ///
    /// # Safety
    /// The range lies in the arena, and no Rust reference points into it.
    pub(crate) unsafe fn protect(
        &self,
        start: usize,
        bytes: usize,
        protection: i32,
    ) -> Result<(), Code> {
        if self.file.is_none() {
            return Ok(());
        }
        // SAFETY: the caller's.
        unsafe { system::protect(start, bytes, protection) }
    }
}
