//! The log's file: records are added at its end, and it is written anew when most of it is forgotten.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use super::record::{Contents, decode, encode_entry, encode_forget, encode_header, entry_bytes};
use super::state::State;
use crate::error::HistoryError;
use crate::history::parent;

/// Name of the log in a directory.
pub(crate) const LOG_NAME: &str = "dialogue.dormouse";
/// Bytes of forgotten entries that a log may hold, besides as many as the others take.
const SURPLUS_BYTES: u64 = 1 << 20;

/// Where a log's bytes are.
pub(crate) trait Storage: std::fmt::Debug + Send {
    /// Adds bytes at the end.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Cuts off what is behind the first `bytes`.
    fn cut(&mut self, bytes: u64) -> io::Result<()>;
}

/// A file, whose bytes are on the disk when a call returns if it is `synced`.
#[derive(Debug)]
struct LogFile {
    file: File,
    synced: bool,
}

impl Storage for LogFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        if self.synced { self.file.sync_data() } else { Ok(()) }
    }

    fn cut(&mut self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)?;
        self.file.sync_all()
    }
}

/// The log of a dialogue.
#[derive(Debug)]
pub(crate) struct Log {
    storage: Box<dyn Storage>,
    path: PathBuf,
    synced: bool,
    /// Bytes of sound records.
    bytes: u64,
    /// Those of entries that are not forgotten.
    live_bytes: u64,
    /// It is not written anew before it has more bytes, for an attempt failed.
    rewritten_above: u64,
    /// The reason that the file may end with part of a record, if it may.
    failure: Option<String>,
}

impl Log {
    pub(crate) fn over(storage: Box<dyn Storage>, path: PathBuf, bytes: u64) -> Self {
        Self {
            storage,
            path,
            synced: true,
            bytes,
            live_bytes: 0,
            rewritten_above: 0,
            failure: None,
        }
    }

    /// Opens the log in `dir`, made if it is missing. What was not written to its end is cut off.
    pub(crate) fn open(
        dir: &Path,
        dimension: usize,
        synced: bool,
    ) -> Result<(Self, Contents), HistoryError> {
        let path = dir.join(LOG_NAME);
        let failed = |action| {
            let path = path.clone();
            move |source| HistoryError::File { path, action, source }
        };
        if !path.exists() {
            let log = Self::create(&path, &State::new(dimension), 0, dimension, synced);
            return Ok((log.map_err(failed("making"))?, Contents::default()));
        }
        let bytes = std::fs::read(&path).map_err(failed("reading"))?;
        let contents = decode(&bytes, dimension)
            .map_err(|reason| HistoryError::Damaged { path: path.clone(), reason })?;
        let file = File::options().append(true).open(&path).map_err(failed("opening"))?;
        let mut storage = LogFile { file, synced };
        let sound_bytes = contents.sound_bytes as u64;
        if contents.torn.is_some() {
            storage.cut(sound_bytes).map_err(failed("cutting"))?;
        }
        let live = contents.entries.values().map(|(entry, _)| entry_bytes(entry, dimension));
        let live_bytes: u64 = live.sum();
        let log = Self { synced, live_bytes, ..Self::over(Box::new(storage), path, sound_bytes) };
        Ok((log, contents))
    }

    /// Makes a log of the entries in memory, in the place of what is there, as a whole or not at all.
    fn create(
        path: &Path,
        state: &State,
        next_id: u64,
        dimension: usize,
        synced: bool,
    ) -> io::Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let aside = parent(path).join(format!(".{name}.{}", std::process::id()));
        let write = || {
            // What a crash left there is not in the way.
            let _ = std::fs::remove_file(&aside);
            let file = File::options().append(true).create_new(true).open(&aside)?;
            let mut bytes = encode_header(dimension, next_id);
            let mut written = bytes.len() as u64;
            let mut writer = BufWriter::new(file);
            writer.write_all(&bytes)?;
            for (id, entry) in &state.entries {
                bytes.clear();
                let row = state.index.get(*id).map_or(&[][..], |row| row.embedding);
                encode_entry(entry, row, &mut bytes);
                writer.write_all(&bytes)?;
                written += bytes.len() as u64;
            }
            let file = writer.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.sync_all()?;
            std::fs::rename(&aside, path)?;
            // The rename itself is on the disk once the directory is.
            File::open(parent(path))?.sync_all()?;
            Ok((file, written))
        };
        let (file, written) = write().inspect_err(|_: &io::Error| {
            // What remains of a full disk, if anything.
            let _ = std::fs::remove_file(&aside);
        })?;
        let storage = Box::new(LogFile { file, synced });
        let live = state.entries.values().map(|entry| entry_bytes(entry, dimension));
        let live_bytes = live.sum();
        Ok(Self { synced, live_bytes, ..Self::over(storage, path.to_owned(), written) })
    }

    /// Adds entries, and which ones are forgotten for them.
    pub(crate) fn append(
        &mut self,
        entries: &[(super::Entry, Vec<f32>)],
        forgotten: &[u64],
    ) -> Result<(), HistoryError> {
        let path = self.path.clone();
        let failed = |source| HistoryError::File { path, action: "recording", source };
        if let Some(reason) = &self.failure {
            return Err(failed(io::Error::other(format!("it could not be cut after: {reason}"))));
        }
        let mut bytes = Vec::new();
        for (entry, embedding) in entries {
            encode_entry(entry, embedding, &mut bytes);
        }
        let live_bytes = bytes.len() as u64;
        encode_forget(forgotten, &mut bytes);
        if let Err(e) = self.storage.append(&bytes) {
            if self.storage.cut(self.bytes).is_err() {
                self.failure = Some(e.to_string());
            }
            return Err(failed(e));
        }
        self.bytes += bytes.len() as u64;
        self.live_bytes += live_bytes;
        Ok(())
    }

    /// Counts an entry's bytes as those of a forgotten one.
    pub(crate) fn count_forgotten(&mut self, bytes: u64) {
        self.live_bytes = self.live_bytes.saturating_sub(bytes);
    }

    /// Writes the log anew if most of it is forgotten. If that fails, the log that is there is the log, and the next
    /// attempt comes when it is twice as long.
    pub(crate) fn shorten(&mut self, state: &State, next_id: u64, dimension: usize) {
        if self.bytes <= self.rewritten_above || self.bytes <= self.surplus_limit() {
            return;
        }
        match Self::create(&self.path, state, next_id, dimension, self.synced) {
            Ok(new) => *self = new,
            Err(_) => self.rewritten_above = self.bytes * 2,
        }
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    const fn surplus_limit(&self) -> u64 {
        2 * self.live_bytes + SURPLUS_BYTES
    }
}
