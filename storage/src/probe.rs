//! What a directory's disk offers a file tier, before there is one.

use std::path::Path;

use super::error::NvmeError;
use super::file::{self, DiskSpace};
use super::storage::DirectFile;
use super::uring;

/// A directory's disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskProbe {
    /// Bytes that this user can still take.
    pub free_bytes: u64,
    /// Bytes of the whole disk.
    pub total_bytes: u64,
    /// The longest file that this process may write (`ulimit -f`), in bytes.
    pub file_bytes_max: u64,
    /// Why io_uring cannot be used; `None`: it can.
    pub no_uring: Option<String>,
}

/// Looks at the disk of `dir`, with an empty file that has no name.
///
/// # Errors
/// `IsMemory`; `Setup` with the message of the system.
pub fn probe(dir: &Path) -> Result<DiskProbe, NvmeError> {
    let opened = DirectFile::create(dir, 0)?;
    let no_uring = if super::Storage::is_buffered(&opened) {
        Some("the file system has no direct I/O of 4 KiB".to_owned())
    } else {
        uring::set_up(&opened, 1).err().map(|refusal| refusal.to_string())
    };
    let space =
        DiskSpace::of(dir).map_err(|e| NvmeError::setup(dir, "looking at its file system", &e))?;
    Ok(DiskProbe {
        free_bytes: space.free_bytes,
        total_bytes: space.total_bytes,
        file_bytes_max: file::file_bytes_max(),
        no_uring,
    })
}
