//! Errors of the NVMe tier, with the offsets, lengths and checksums seen.

use std::path::{Path, PathBuf};

/// A file operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoOperation {
    /// Reading an extent.
    Read,
    /// Writing an extent.
    Write,
}

/// An I/O thread could not be started.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("thread {name} could not be started: {reason}")]
pub struct ThreadError {
    /// The thread's name.
    pub name: String,
    /// The system's message.
    pub reason: String,
}

/// Why the NVMe tier did not do what was requested. The source bytes are unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvmeError {
    /// The tier could not be set up.
    #[error("NVMe tier in {}: {what} failed: {reason} (code {code})", dir.display())]
    Setup {
        /// The directory given.
        dir: PathBuf,
        /// The step that failed.
        what: &'static str,
        /// The system's message.
        reason: String,
        /// errno.
        code: i32,
    },
    /// The directory is on a file system that is memory.
    #[error("NVMe tier in {}: the directory is on {filesystem}, which is memory; accepted: a directory on a disk", dir.display())]
    IsMemory {
        /// The directory given.
        dir: PathBuf,
        /// Its file system.
        filesystem: &'static str,
    },
    /// The disk has no room for the file, or a quota leaves none.
    #[error("NVMe tier in {}: a file of {asked_bytes} bytes; accepted: at most {free_bytes}, the free bytes of the disk, and what a quota leaves", dir.display())]
    NoRoom {
        /// The directory given.
        dir: PathBuf,
        /// The size of the file.
        asked_bytes: u64,
        /// Free bytes of the disk.
        free_bytes: u64,
    },
    /// The configuration is out of range.
    #[error("NVMe tier: {what} is {seen}; accepted: {accepted}")]
    Config {
        /// The setting.
        what: &'static str,
        /// The value seen.
        seen: u64,
        /// The accepted values.
        accepted: String,
    },
    /// No free extent of that length.
    #[error(
        "the NVMe file has no room for {asked_bytes} bytes: {used_bytes} of {budget_bytes} bytes are used"
    )]
    Full {
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes used.
        used_bytes: u64,
        /// The budget.
        budget_bytes: u64,
    },
    /// The write budget does not suffice.
    #[error(
        "the NVMe tier may write {budget_bytes} bytes a day: {left_bytes} are left and {asked_bytes} \
         are asked for, which {}", when(*enough_in_s)
    )]
    Spent {
        /// Bytes asked for.
        asked_bytes: u64,
        /// Bytes that may be written now.
        left_bytes: u64,
        /// Bytes per day.
        budget_bytes: u64,
        /// Seconds until it suffices, if all reserved bytes are written and none are added; `None` if the
        /// request exceeds a day's budget.
        enough_in_s: Option<u64>,
    },
    /// The tier has stopped taking data after a failed write.
    #[error("the NVMe tier takes no more data: {reason}")]
    Stopped {
        /// The reason.
        reason: String,
    },
    /// The system failed the operation.
    #[error(
        "{operation:?} of {bytes} bytes at file offset {offset} failed: {reason} (code {code})"
    )]
    Failed {
        /// The operation.
        operation: IoOperation,
        /// Offset in the file.
        offset: u64,
        /// Length in bytes.
        bytes: u64,
        /// errno.
        code: i32,
        /// The system's message.
        reason: String,
    },
    /// The file ends before the extent: it was truncated.
    #[error(
        "read at file offset {offset}: the file ends {seen_bytes} bytes into the {expected_bytes} expected"
    )]
    Truncated {
        /// Offset in the file.
        offset: u64,
        /// Bytes expected there.
        expected_bytes: u64,
        /// Bytes found.
        seen_bytes: u64,
    },
    /// The system repeatedly transferred less than requested.
    #[error(
        "{operation:?} at file offset {offset}: {done_bytes} of {bytes} bytes after {attempts} attempts"
    )]
    Short {
        /// The operation.
        operation: IoOperation,
        /// Offset in the file.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes transferred.
        done_bytes: u64,
        /// Attempts made.
        attempts: u32,
    },
    /// Two reads returned other bytes than were written.
    #[error(
        "extent {extent:#x}, file offset {offset}: CRC-32C is {seen:#010x}, expected {expected:#010x}, also when read again"
    )]
    Corrupted {
        /// The extent's first byte in the file.
        extent: u64,
        /// The chunk's first byte in the file.
        offset: u64,
        /// Checksum of the written bytes.
        expected: u32,
        /// Checksum of the bytes read.
        seen: u32,
    },
    /// The transfer was cancelled.
    #[error("the transfer was cancelled")]
    Cancelled,
}

impl NvmeError {
    /// Returns true if the tier is full, out of write budget or stopped. The data stays awake, and what
    /// the tier holds is intact.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Full { .. } | Self::Spent { .. } | Self::Stopped { .. })
    }

    pub(super) fn setup(dir: &Path, what: &'static str, e: &std::io::Error) -> Self {
        let code = e.raw_os_error().unwrap_or(0);
        Self::Setup { dir: dir.to_owned(), what, reason: e.to_string(), code }
    }

    pub(super) fn failed(
        operation: IoOperation,
        offset: u64,
        bytes: usize,
        e: &std::io::Error,
    ) -> Self {
        Self::Failed {
            operation,
            offset,
            bytes: bytes as u64,
            code: e.raw_os_error().unwrap_or(0),
            reason: e.to_string(),
        }
    }
}

fn when(enough_in_s: Option<u64>) -> String {
    enough_in_s.map_or_else(
        || "is more than a day's".to_owned(),
        |seconds| format!("it may in {seconds} s"),
    )
}
