//! A history in a file: saved under another name and renamed, checked as a whole before it is believed.
//!
//! ```text
//! magic [8] · version u32 · vocab u32 · prompts u64
//! for each prompt: digest u128 · bytes u64 · the prompt (format.rs)
//! CRC-32C of all of this u32
//! ```

use std::fs::{File, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use crate::bytes::take;
use crate::digest::Digest;
use crate::error::HistoryError;
use crate::history::{History, parent};
use crate::limits::PROMPTS_MAX;
use crate::prompt::Prompt;

const MAGIC: [u8; 8] = *b"dmhistry";
/// Version of the format. It counts up with every change.
pub const FILE_VERSION: u32 = 1;
/// Name of the history in a directory.
pub const FILE_NAME: &str = "history.dormouse";
/// Name of the file that is locked while a directory is in use.
const LOCK_NAME: &str = "history.lock";
/// Longest text that a lock says of its owner.
const OWNER_BYTES_MAX: u64 = 256;

/// A directory with a saved history, locked against other processes until it is dropped.
#[derive(Debug)]
pub struct HistoryDir {
    dir: PathBuf,
    /// Its lock ends when it is closed, also by the death of the process.
    _lock: File,
}

impl HistoryDir {
    /// Locks a directory, and makes it if it is missing.
    ///
    /// # Errors
    /// `InUse` with the owner; `File`.
    pub fn lock(dir: &Path) -> Result<Self, HistoryError> {
        let path = dir.join(LOCK_NAME);
        let failed = |action| {
            let path = path.clone();
            move |source| HistoryError::File { path, action, source }
        };
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
        Ok(Self { dir: dir.to_owned(), _lock: lock })
    }

    /// Returns the path of the saved history.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.dir.join(FILE_NAME)
    }
}

impl History {
    /// Saves everything. The file at `path` is replaced as a whole, or stays as it is.
    ///
    /// # Errors
    /// `File`; `Cold` and `Damaged` if a cold prompt cannot be read.
    pub fn save(&self, path: &Path) -> Result<(), HistoryError> {
        let bytes = self.encode()?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let aside = parent(path).join(format!(".{name}.{}", std::process::id()));
        let write = || {
            let mut file = File::create(&aside)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            std::fs::rename(&aside, path)?;
            // The rename itself is on the disk once the directory is.
            File::open(parent(path))?.sync_all()
        };
        write().map_err(|source: io::Error| {
            // What remains of a full disk, if anything.
            let _ = std::fs::remove_file(&aside);
            HistoryError::File { path: path.to_owned(), action: "saving", source }
        })
    }

    /// Replaces everything by the history saved at `path`.
    ///
    /// # Errors
    /// `File`; `Damaged` for a file that is cut, changed, of another version or of a larger vocabulary. Nothing
    /// changes then.
    pub fn load(&self, path: &Path) -> Result<(), HistoryError> {
        let bytes = std::fs::read(path).map_err(|source| HistoryError::File {
            path: path.to_owned(),
            action: "reading",
            source,
        })?;
        let prompts = self
            .decode(&bytes)
            .map_err(|reason| HistoryError::Damaged { path: path.to_owned(), reason })?;
        self.replace(prompts);
        Ok(())
    }

    fn encode(&self) -> Result<Vec<u8>, HistoryError> {
        let all = self.all()?;
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&FILE_VERSION.to_le_bytes());
        bytes.extend_from_slice(&self.options().vocab.to_le_bytes());
        bytes.extend_from_slice(&(all.len() as u64).to_le_bytes());
        let mut own = Vec::new();
        for (digest, prompt) in all {
            own.clear();
            prompt.encode(&mut own);
            bytes.extend_from_slice(&digest.0.to_le_bytes());
            bytes.extend_from_slice(&(own.len() as u64).to_le_bytes());
            bytes.extend_from_slice(&own);
        }
        let sum = crc32c::crc32c(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        Ok(bytes)
    }

    fn decode(&self, bytes: &[u8]) -> Result<Vec<(Digest, Prompt)>, String> {
        let mut rest = bytes;
        if take::<8>(&mut rest)? != MAGIC {
            return Err("it does not begin as a history does".into());
        }
        let version = u32::from_le_bytes(take(&mut rest)?);
        if version != FILE_VERSION {
            return Err(format!("its version is {version}, and this release reads {FILE_VERSION}"));
        }
        let (covered, sum) = bytes.split_last_chunk::<4>().ok_or("it has no checksum")?;
        let (sum, found) = (u32::from_le_bytes(*sum), crc32c::crc32c(covered));
        if sum != found {
            return Err(format!("its checksum is {found:08x}, and it was saved with {sum:08x}"));
        }
        let (vocab, own) = (u32::from_le_bytes(take(&mut rest)?), self.options().vocab);
        if vocab > own {
            return Err(format!("its vocabulary has {vocab} tokens, and this one {own}"));
        }
        let count = u64::from_le_bytes(take(&mut rest)?);
        if count > PROMPTS_MAX as u64 {
            return Err(format!("it has {count} prompts"));
        }
        let mut prompts = Vec::new();
        for _ in 0..count {
            let digest = Digest(u128::from_le_bytes(take(&mut rest)?));
            let bytes = u64::from_le_bytes(take(&mut rest)?);
            let own = usize::try_from(bytes).ok().and_then(|it| rest.split_at_checked(it));
            let (own, after) = own.ok_or_else(|| format!("a prompt of {bytes} bytes"))?;
            rest = after;
            prompts.push((digest, Prompt::decode(own)?));
        }
        match rest.len() {
            4 => Ok(prompts),
            _ => Err(format!("it has {} bytes after its prompts", rest.len())),
        }
    }
}
