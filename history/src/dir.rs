//! A directory that one history has to itself.

use std::fs::{File, TryLockError};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};

use dormouse_storage::{ClosedInChild, OwnFile};

use crate::error::HistoryError;
use crate::replace::is_absent;
use crate::save::FILE_NAME;

/// Name of the file that is locked while a directory is in use.
const LOCK_NAME: &str = "history.lock";
/// Longest text that a lock says of its owner.
const OWNER_BYTES_MAX: u64 = 256;

/// A directory with a saved history, locked against other processes until it is dropped or the process ends.
#[derive(Debug)]
pub struct HistoryDir {
    dir: PathBuf,
    /// A forked child would keep the lock after the death of its parent.
    _closed_in_child: ClosedInChild,
    lock: OwnFile,
}

impl HistoryDir {
    /// Locks a directory, and makes it if it is missing.
    ///
    /// # Errors
    /// `InUse` with the owner; `File`.
    pub fn lock(dir: &Path) -> Result<Self, HistoryError> {
        let path = dir.join(LOCK_NAME);
        let failed = |action| HistoryError::file(&path, action);
        std::fs::create_dir_all(dir).map_err(failed("making the directory"))?;
        let mut options = File::options();
        let open = options.read(true).write(true).create(true).truncate(false).open(&path);
        let mut lock = open.map_err(failed("opening the lock"))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut owner = String::new();
                let read = lock.take(OWNER_BYTES_MAX).read_to_string(&mut owner);
                let owner = owner.trim().to_owned();
                let known = read.is_ok() && !owner.is_empty();
                let owner = if known { owner } else { "another process".into() };
                return Err(HistoryError::InUse { dir: dir.to_owned(), owner });
            }
            Err(TryLockError::Error(source)) => return Err(failed("locking")(source)),
        }
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let owner = format!("process {} on {}", std::process::id(), host.trim());
        let named = lock.set_len(0).and_then(|()| lock.write_all(owner.as_bytes()));
        named.map_err(failed("naming the owner"))?;
        let lock = OwnFile::new(lock);
        Ok(Self { dir: dir.to_owned(), _closed_in_child: lock.closed_in_child(), lock })
    }

    /// Returns the path of the saved history.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.dir.join(FILE_NAME)
    }

    /// Returns the path of the saved history, if there is one.
    #[must_use]
    pub fn saved(&self) -> Option<PathBuf> {
        Some(self.path()).filter(|path| !is_absent(path))
    }
}

impl Drop for HistoryDir {
    /// Unlocks: a child of a fork that runs no handlers may have the file open.
    fn drop(&mut self) {
        if let Ok(lock) = self.lock.get() {
            let _ = lock.unlock();
        }
    }
}
