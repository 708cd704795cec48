//! The log's file: records are added at its end, and it is written anew when most of it is forgotten.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use dormouse_storage::OwnFile;

use super::record::{Contents, decode, encode_entry, encode_forget, encode_header, entry_bytes};
use super::state::State;
use crate::error::HistoryError;
use crate::replace::{is_absent, replace};

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
    file: OwnFile,
    synced: bool,
}

impl Storage for LogFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.file.get()?;
        file.write_all(bytes)?;
        if self.synced { file.sync_data() } else { Ok(()) }
    }

    fn cut(&mut self, bytes: u64) -> io::Result<()> {
        let file = self.file.get()?;
        file.set_len(bytes)?;
        file.sync_all()
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
    /// The reason that what is recorded could be lost, if it could.
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
        let failed = |action| HistoryError::file(&path, action);
        if is_absent(&path) {
            let log = Self::create(&path, &State::new(dimension), 0, dimension, synced)?;
            return Ok((log, Contents::default()));
        }
        let bytes = std::fs::read(&path).map_err(failed("reading"))?;
        let contents = decode(&bytes, dimension)
            .map_err(|reason| HistoryError::Damaged { path: path.clone(), reason })?;
        let file = File::options().append(true).open(&path).map_err(failed("opening"))?;
        let mut storage = LogFile { file: OwnFile::new(file), synced };
        let sound_bytes = contents.sound_bytes as u64;
        if contents.torn.is_some() {
            storage.cut(sound_bytes).map_err(failed("cutting"))?;
        }
        let live = contents.entries.values().map(|(entry, _)| entry_bytes(entry, dimension));
        let live_bytes: u64 = live.sum();
        let log = Self { synced, live_bytes, ..Self::over(Box::new(storage), path, sound_bytes) };
        Ok((log, contents))
    }

    /// Writes a new log of the entries in memory and replaces the existing one with it. On an error the existing log is
    /// unchanged. If the directory cannot be synced, the new log refuses further records.
    fn create(
        path: &Path,
        state: &State,
        next_id: u64,
        dimension: usize,
        synced: bool,
    ) -> Result<Self, HistoryError> {
        const ACTION: &str = "making";
        let mut written = 0;
        let mut write = |file: &File| {
            let mut writer = BufWriter::new(file);
            let mut bytes = encode_header(dimension, next_id);
            let mut write = |bytes: &[u8]| {
                written += bytes.len() as u64;
                writer.write_all(bytes)
            };
            write(&bytes)?;
            for (id, entry) in &state.entries {
                bytes.clear();
                let row = state.index.get(*id).map_or(&[][..], |row| row.embedding);
                encode_entry(entry, row, &mut bytes);
                write(&bytes)?;
            }
            writer.flush()
        };
        let write = |file: &File| write(file).map_err(HistoryError::file(path, ACTION));
        let made = replace(path, ACTION, File::options().append(true), write)?;
        let storage = Box::new(LogFile { file: OwnFile::new(made.file), synced });
        let live = state.entries.values().map(|entry| entry_bytes(entry, dimension));
        let live_bytes = live.sum();
        let failure = made.synced.err().map(|e| format!("its directory is not on the disk: {e}"));
        let log = Self::over(storage, path.to_owned(), written);
        Ok(Self { synced, live_bytes, failure, ..log })
    }

    /// Adds entries, and which ones are forgotten for them.
    pub(crate) fn append(
        &mut self,
        entries: &[(super::Entry, Vec<f32>)],
        forgotten: &[u64],
    ) -> Result<(), HistoryError> {
        let failed = HistoryError::file(&self.path, "recording");
        if let Some(reason) = &self.failure {
            return Err(failed(io::Error::other(reason.clone())));
        }
        let mut bytes = Vec::new();
        for (entry, embedding) in entries {
            encode_entry(entry, embedding, &mut bytes);
        }
        let live_bytes = bytes.len() as u64;
        encode_forget(forgotten, &mut bytes);
        if let Err(e) = self.storage.append(&bytes) {
            if self.storage.cut(self.bytes).is_err() {
                self.failure = Some(format!("it could not be cut after: {e}"));
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
