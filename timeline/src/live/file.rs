//! The file of a live page: mapped by its writer, read by everyone else.

use std::fs::{self, File, FileType, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::mem::offset_of;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};

use super::layout::{FIGURE_WORDS, HEADER_WORDS, PAGE_BYTES, check_header, first_page};
use super::{Figures, Live, LiveError};
use crate::clock::ClockAnchor;
use crate::ring::{Slot, complete_ticket};
use crate::snapshot::Process;
use crate::sync::{AtomicU64, Ordering, fence};

/// Attempts of a reader, [`READ_PAUSE`] apart. An update takes less than a microsecond.
const READ_TRIES_MAX: u32 = 50;
const READ_PAUSE: Duration = Duration::from_millis(1);

/// The words of a page in memory.
#[repr(C)]
struct Page {
    _header: [AtomicU64; HEADER_WORDS],
    figures: Slot<FIGURE_WORDS>,
}

const _: () = assert!(size_of::<Page>() <= PAGE_BYTES);

const HEADER_AT: u64 = 0;
/// The sequence of the slot, and its words.
const SEQUENCE_AT: u64 = offset_of!(Page, figures) as u64;
const WORDS_AT: u64 = SEQUENCE_AT + size_of::<u64>() as u64;

/// A mapping of [`PAGE_BYTES`] bytes, of the page's writer.
#[derive(Debug)]
struct Mapping(MmapRaw);

impl Mapping {
    fn page(&self) -> &Page {
        #[expect(unsafe_code, reason = "a mapping read as words")]
        // SAFETY: a mapping of `PAGE_BYTES` lives as long as `self`, begins at a page and is larger than a
        // `Page`. All fields are atomic words: any bytes are valid, and other processes may change them.
        unsafe {
            &*self.0.as_ptr().cast::<Page>()
        }
    }
}

/// The writer of a live page. The file is removed when the writer is dropped.
///
/// One thread at a time. Never blocks on a reader.
#[derive(Debug)]
pub struct LivePage {
    mapping: Mapping,
    /// For its length and its lock. `None` only during the drop.
    file: Option<File>,
    /// Device and inode, which the mapping keeps.
    identity: (u64, u64),
    path: PathBuf,
    pid: u32,
    updates: u64,
}

impl LivePage {
    /// Creates the file at `path` for the current process, readable by its owner only, with its first
    /// figures. An existing regular file is replaced atomically.
    ///
    /// # Errors
    /// `NotAFile` for a directory, device, FIFO, socket or symbolic link; `Io`, also for a full disk.
    pub fn create(path: &Path, process: &Process, figures: &Figures) -> Result<Self, LiveError> {
        match fs::symlink_metadata(path) {
            Ok(found) => check_kind(path, found.file_type())?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed("look at", path, &error)),
        }
        let pid = process.pid;
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(format!(".{pid}.tmp"));
        let temporary = Path::new(&temporary);
        // Left by an earlier process with this pid. An error is that of the creation below.
        let _absent = fs::remove_file(temporary);
        let bytes = first_page(process, ClockAnchor::now().realtime_ns, figures);
        let placed = write_new(temporary, &bytes).and_then(|file| {
            let mapping = Mapping(MmapOptions::new().len(PAGE_BYTES).map_raw(&file)?);
            fs::rename(temporary, path)?;
            let identity = identity(&file.metadata()?);
            Ok(Self { mapping, file: Some(file), identity, path: path.to_owned(), pid, updates: 0 })
        });
        placed.map_err(|error| {
            let _absent = fs::remove_file(temporary);
            failed("create", path, &error)
        })
    }

    /// Returns the length of the file; `None` if the program has closed the descriptor. Another file of its own may
    /// have the number now.
    fn bytes(&self) -> Option<u64> {
        let found = self.file.as_ref()?.metadata().ok()?;
        (identity(&found) == self.identity).then_some(found.len())
    }

    /// Publishes an update. Returns `false`, with nothing written, in a forked child, and after the file
    /// was truncated or its descriptor closed: a store behind its end would raise SIGBUS.
    pub fn publish(&mut self, figures: &Figures) -> bool {
        if std::process::id() != self.pid || self.bytes() != Some(PAGE_BYTES as u64) {
            return false;
        }
        self.updates += 1;
        self.mapping.page().figures.write(self.updates, figures.words());
        true
    }
}

impl Drop for LivePage {
    fn drop(&mut self) {
        // Another writer may have replaced the file.
        let named = fs::symlink_metadata(&self.path).map(|found| identity(&found)).ok();
        if std::process::id() == self.pid && named == Some(self.identity) {
            let _absent = fs::remove_file(&self.path);
        }
        if self.bytes().is_none() {
            // The number is not ours to close.
            std::mem::forget(self.file.take());
        }
    }
}

fn identity(found: &fs::Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

/// Reads the live page at `path`. Changes nothing, and never waits for longer than a few dozen
/// milliseconds. Any-thread.
///
/// # Errors
/// `NotAFile`, `Io`, `Size`, `Magic` or `Version` if the path is not a page of this layout; `Torn` if no
/// complete update was seen.
pub fn read(path: &Path) -> Result<Live, LiveError> {
    let page = open(path)?;
    let (process, started_unix_ns) = check_header(page.words(HEADER_AT)?)?;
    for _ in 0..READ_TRIES_MAX {
        if let Some((updates, words)) = page.update()? {
            let figures = Figures::from_words(words);
            let is_running = page.is_held();
            return Ok(Live { process, is_running, started_unix_ns, updates, figures });
        }
        std::thread::sleep(READ_PAUSE);
    }
    Err(LiveError::Torn(READ_TRIES_MAX))
}

/// A page of another process. It is not mapped: who may write the file may also cut it short, and a load behind its end
/// would raise SIGBUS.
#[derive(Debug)]
pub(super) struct Reader {
    file: File,
    path: PathBuf,
}

impl Reader {
    /// Whether a writer holds the lock of the page. `true` on a file system without locks.
    pub(super) fn is_held(&self) -> bool {
        // The lock, if taken, ends with the file.
        match self.file.try_lock_shared() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock | TryLockError::Error(_)) => true,
        }
    }

    /// Returns the number and the words of an update that was complete before and after its words were read.
    pub(super) fn update(&self) -> Result<Option<(u64, [u64; FIGURE_WORDS])>, LiveError> {
        let [before] = self.words(SEQUENCE_AT)?;
        let Some(updates) = complete_ticket(before) else { return Ok(None) };
        // The sequence lock of `Slot::read`. The kernel's loads are those of this thread.
        fence(Ordering::Acquire);
        let words = self.words(WORDS_AT)?;
        fence(Ordering::Acquire);
        let [after] = self.words(SEQUENCE_AT)?;
        Ok((after == before).then_some((updates, words)))
    }

    /// Reads the words at byte `at`.
    fn words<const WORDS: usize>(&self, at: u64) -> Result<[u64; WORDS], LiveError> {
        let mut bytes = vec![0; size_of::<[u64; WORDS]>()];
        self.file.read_exact_at(&mut bytes, at).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                LiveError::Size(self.file.metadata().map_or(0, |found| found.len()))
            }
            _ => failed("read", &self.path, &error),
        })?;
        let (words, _) = bytes.as_chunks();
        Ok(std::array::from_fn(|at| u64::from_ne_bytes(words[at])))
    }
}

/// Opens the file at `path` for reading.
pub(super) fn open(path: &Path) -> Result<Reader, LiveError> {
    let failed = |error: io::Error| failed("read", path, &error);
    let found = fs::symlink_metadata(path).map_err(failed)?;
    check_kind(path, found.file_type())?;
    // A FIFO that takes the file's place meanwhile must not block the reader.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let found = file.metadata().map_err(failed)?;
    check_kind(path, found.file_type())?;
    if found.len() != PAGE_BYTES as u64 {
        return Err(LiveError::Size(found.len()));
    }
    Ok(Reader { file, path: path.to_owned() })
}

/// Creates and locks a file that does not exist, with `bytes`: a full disk is an error here, and no SIGBUS later.
fn write_new(path: &Path, bytes: &[u8]) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let mut file = options.read(true).write(true).create_new(true).mode(0o600).open(path)?;
    // The system releases the lock when the process ends, however it ends. Without locks, a page that is
    // not updated any more tells as much.
    let _no_locks = file.try_lock();
    file.write_all(bytes)?;
    Ok(file)
}

/// Refuses everything but regular files.
fn check_kind(path: &Path, kind: FileType) -> Result<(), LiveError> {
    let seen = match kind {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_dir() => "directory",
        kind if kind.is_symlink() => "symbolic link",
        kind if kind.is_fifo() => "FIFO",
        kind if kind.is_socket() => "socket",
        _ => "device",
    };
    Err(LiveError::NotAFile(path.to_owned(), seen))
}

fn failed(operation: &'static str, path: &Path, error: &io::Error) -> LiveError {
    LiveError::Io(operation, path.to_owned(), error.to_string())
}
