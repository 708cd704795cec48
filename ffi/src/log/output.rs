//! Destinations of records: a file, written without waiting, and a queue that a program reads.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam::queue::ArrayQueue;
use dormouse_storage::OwnFile;

use super::record::Record;
use crate::{files, host};

/// Variables in which launchers set the rank of a process, in order of precedence.
const RANK_VARIABLES: &[&str] = &["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"];

/// Maximum length of one record, as a line or as JSON, in bytes. A pipe writes as much atomically.
pub(crate) const RECORD_BYTES_MAX: usize = 4096;
/// Maximum number of bytes of one read. The next read continues.
pub(crate) const READ_BYTES_MAX: u64 = 1 << 20;
/// Maximum number of unwritten lines. Beyond it the oldest is dropped and counted.
const LINES_MAX: usize = 256;
/// Maximum number of unread records. Beyond it the oldest is dropped and counted.
const RECORDS_MAX: usize = 4096;

static OUTPUT: OnceLock<Output> = OnceLock::new();
/// Whether unwritten lines exist; loaded by every function of the header.
static WAITING: AtomicBool = AtomicBool::new(false);
/// Whether a program has called [`read`].
static IS_READ: AtomicBool = AtomicBool::new(false);

#[derive(Debug)]
pub(super) struct Output {
    /// `None`: standard error.
    file: Option<OwnFile>,
    lines: ArrayQueue<String>,
    lines_dropped: AtomicU64,
    /// Created by the first read.
    records: OnceLock<ArrayQueue<Record>>,
    records_dropped: AtomicU64,
}

impl Output {
    /// Opens `path`, with `%` names expanded, for appending; standard error if `None`.
    pub(super) fn open(path: Option<&Path>) -> Result<(), String> {
        let open = |path: &Path| {
            let path = expand_path(path)?;
            let opened = files::open_in_place(path.as_ref());
            opened.map_err(|error| format!("could not open {path}: {error}"))
        };
        let output = Self::new(path.map(open).transpose()?);
        if IS_READ.load(Ordering::Relaxed) {
            let _first = output.records.set(ArrayQueue::new(RECORDS_MAX));
        }
        let _first_stays = OUTPUT.set(output);
        Ok(())
    }

    fn new(file: Option<File>) -> Self {
        Self {
            file: file.map(OwnFile::new),
            lines: ArrayQueue::new(LINES_MAX),
            lines_dropped: AtomicU64::new(0),
            records: OnceLock::new(),
            records_dropped: AtomicU64::new(0),
        }
    }

    fn queue_line(&self, line: String) {
        if self.lines.force_push(line).is_some() {
            self.lines_dropped.fetch_add(1, Ordering::Relaxed);
        }
        WAITING.store(true, Ordering::Release);
    }

    /// Writes queued lines, oldest first, while the file is ready.
    fn write_waiting(&self) {
        // Bounded: other threads can push meanwhile.
        for _ in 0..=LINES_MAX {
            if !self.is_ready() {
                return;
            }
            let lost = self.lines_dropped.swap(0, Ordering::Relaxed);
            if lost > 0 {
                self.write(&Record::dropped(lost).line(RECORD_BYTES_MAX));
                continue;
            }
            // Cleared first: a line pushed later is popped here or sets it again.
            WAITING.store(false, Ordering::Release);
            let Some(line) = self.lines.pop() else { return };
            WAITING.store(true, Ordering::Release);
            self.write(&line);
        }
    }

    /// Returns whether a line can be written without waiting. A full pipe is not ready.
    fn is_ready(&self) -> bool {
        let Some(fd) = self.descriptor() else { return false };
        let mut poll = libc::pollfd { fd, events: libc::POLLOUT, revents: 0 };
        // SAFETY: one live pollfd; a timeout of 0 returns at once.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }

    fn write(&self, line: &str) {
        // One call per line, so that lines of threads and processes do not mix. A failed write cannot be reported.
        if let Some(fd) = self.descriptor() {
            let _ignored = files::write_without_signal(fd, line.as_bytes());
        }
    }

    /// `None` if the program has closed the file. Another file of its own may have the number now.
    fn descriptor(&self) -> Option<i32> {
        let Some(file) = &self.file else { return Some(libc::STDERR_FILENO) };
        file.get().ok().map(AsRawFd::as_raw_fd)
    }
}

/// Queues a record, and writes it unless `deferred`.
pub(super) fn emit(record: Record, deferred: bool) {
    let Some(output) = OUTPUT.get() else { return };
    let records = output.records.get();
    // A program that reads records shows them itself; a named file gets them as well.
    if records.is_none() || output.file.is_some() {
        output.queue_line(record.line(RECORD_BYTES_MAX));
        if !deferred {
            output.write_waiting();
        }
    }
    if let Some(records) = records
        && records.force_push(record).is_some()
    {
        output.records_dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// Writes deferred lines. One load if there are none.
#[inline]
pub(crate) fn drain() {
    if WAITING.load(Ordering::Relaxed)
        && let Some(output) = OUTPUT.get()
    {
        output.write_waiting();
    }
}

/// Removes records, oldest first, and returns them as lines of JSON, at most `bytes_max` bytes. The
/// first call creates the queue.
pub(crate) fn read(bytes_max: usize) -> String {
    IS_READ.store(true, Ordering::Relaxed);
    let mut text = String::new();
    let Some(output) = OUTPUT.get() else { return text };
    let records = output.records.get_or_init(|| ArrayQueue::new(RECORDS_MAX));
    while text.len() + RECORD_BYTES_MAX <= bytes_max {
        let lost = output.records_dropped.swap(0, Ordering::Relaxed);
        let record = if lost > 0 { Some(Record::dropped(lost)) } else { records.pop() };
        let Some(record) = record else { break };
        text.push_str(&record.json(RECORD_BYTES_MAX));
    }
    text
}

/// Replaces `%h` by the host, `%p` by the pid, `%r` by the rank and `%%` by `%`.
pub(crate) fn expand_path(path: &Path) -> Result<String, String> {
    expand(&path.to_string_lossy(), &host::name(), rank())
}

fn expand(path: &str, host: &str, rank: Option<u64>) -> Result<String, String> {
    let mut expanded = String::with_capacity(path.len());
    let mut letters = path.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            expanded.push(letter);
            continue;
        }
        match letters.next() {
            Some('h') => expanded.push_str(host),
            Some('p') => expanded.push_str(&std::process::id().to_string()),
            Some('r') => expanded.push_str(&rank.unwrap_or(0).to_string()),
            Some('u') => expanded.push_str(&user()?.to_string()),
            Some('%') => expanded.push('%'),
            other => {
                let seen = other.map_or_else(|| "%".to_owned(), |letter| format!("%{letter}"));
                return Err(format!(
                    "{seen} is unknown; accepted: %h host, %p pid, %r rank, %u user id, %%"
                ));
            }
        }
    }
    Ok(expanded)
}

/// Returns the rank of this process, as its launcher set it.
pub(crate) fn rank() -> Option<u64> {
    rank_from(|name| std::env::var(name).ok())
}

fn rank_from(variable: impl Fn(&str) -> Option<String>) -> Option<u64> {
    RANK_VARIABLES.iter().find_map(|name| variable(name)?.trim().parse().ok())
}

/// Returns the effective user id, to whom files of this process belong.
fn user() -> Result<u32, String> {
    let of_process = std::fs::metadata("/proc/self");
    of_process.map(|found| found.uid()).map_err(|error| format!("%u is unknown: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_are_expanded() {
        let pid = std::process::id();
        assert_eq!(
            expand("/tmp/%h.%r.%p.log", "n1", Some(7)).unwrap(),
            format!("/tmp/n1.7.{pid}.log")
        );
        assert_eq!(expand("100%%", "n1", None).unwrap(), "100%");
        assert_eq!(expand("%r", "n1", None).unwrap(), "0");
        // SAFETY: returns a number.
        let user = unsafe { libc::geteuid() };
        assert_eq!(expand("/dev/shm/%u", "n1", None).unwrap(), format!("/dev/shm/{user}"));
        for path in ["%x", "a%"] {
            assert!(expand(path, "n1", None).unwrap_err().contains("accepted: %h"), "{path}");
        }
    }

    #[test]
    fn the_rank_is_the_first_that_a_launcher_set() {
        let of = |set: &'static [(&str, &str)]| {
            rank_from(move |name| {
                set.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("SLURM_PROCID", "3"), ("OMPI_COMM_WORLD_RANK", "2")]), Some(2));
        assert_eq!(of(&[("RANK", "none"), ("SLURM_PROCID", "3")]), Some(3));
    }

    #[test]
    fn a_file_that_took_the_number_of_the_log_gets_no_line() {
        let (mut reader, theirs) = std::io::pipe().unwrap();
        let (_unread, ours) = std::io::pipe().unwrap();
        let output = Output::new(Some(File::from(std::os::fd::OwnedFd::from(ours))));
        let fd = output.descriptor().unwrap();
        // SAFETY: the program closes a descriptor that it does not own, which is the point.
        assert_eq!(unsafe { libc::dup2(theirs.as_raw_fd(), fd) }, fd);
        output.queue_line(Record::dropped(1).line(RECORD_BYTES_MAX));
        output.write_waiting();
        drop((output, theirs));
        // SAFETY: the program's own descriptor, still open.
        assert_eq!(unsafe { libc::close(fd) }, 0);
        let mut text = String::new();
        std::io::Read::read_to_string(&mut reader, &mut text).unwrap();
        assert_eq!(text, "");
    }

    #[test]
    fn a_full_pipe_does_not_block_and_dropped_lines_are_counted() {
        use std::io::Read;
        let (mut reader, writer) = std::io::pipe().unwrap();
        let output = Output::new(Some(File::from(std::os::fd::OwnedFd::from(writer))));
        let line = Record::dropped(1).line(RECORD_BYTES_MAX);
        // 64 KiB fill the pipe; the rest waits, up to its limit.
        let count = 65_536 / line.len() + 2 * LINES_MAX;
        for _ in 0..count {
            output.queue_line(line.clone());
            output.write_waiting();
        }
        assert_eq!(output.lines.len(), LINES_MAX);
        let lost = output.lines_dropped.load(Ordering::Relaxed);
        assert!(lost > 0);
        let written = count - LINES_MAX - usize::try_from(lost).unwrap();
        let mut text = vec![0; written * line.len()];
        reader.read_exact(&mut text).unwrap();
        output.write_waiting();
        assert!(output.lines.is_empty());
        drop(output);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        let first = rest.lines().next().unwrap();
        assert!(first.ends_with(&format!("count={lost}")), "{first}");
        assert_eq!(rest.lines().count(), 1 + LINES_MAX);
    }
}
