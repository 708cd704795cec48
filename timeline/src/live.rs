//! Live figures: one page of a file that a process updates and other processes read.
//!
//! ```text
//!   byte 0       16    24        32     40     64         72                      256    896         2968       3024
//!   ┌───────┬─────────┬─────┬─────────┬──────┬──────┬──────────┬───────────────────────┬──────┬───────────┬──────────┬───┐
//!   │ magic │ version │ pid │ started │ rank │ name │ sequence │ numbers, 8 bytes each │ tags │ last dump │ settings │ 0 │  4096 bytes
//!   │       │ + size  │     │         │      │      │          │                       │      │           │          │   │
//!   └───────┴─────────┴─────┴─────────┴──────┴──────┴──────────┴───────────────────────┴──────┴───────────┴──────────┴───┘
//! ```
//! The header never changes. Sequence and figures (numbers, tags, last dump, settings) are a slot of the event ring: one sequence
//! lock serves both. All words are in the byte order of the machine. The writer holds a lock of the file, so a reader
//! knows when it has ended, in whatever pid namespace. See `docs/decisions/0021-live-figures.md`.

mod file;
mod layout;
mod places;

use std::path::PathBuf;

use crate::snapshot::Process;

pub use file::{LivePage, read};
pub use layout::{
    DUMP_PATH_BYTES_MAX, DUMP_REASON_BYTES_MAX, LAYOUT_VERSION, PAGE_BYTES, PAGE_TAGS_MAX,
    TAG_NAME_BYTES_MAX,
};
pub use places::{DEFAULT_DIR, default_pages, default_prefix, free_place, remove_ended};

/// The settings on a page: those that the runtime may choose, by the names of their parameters.
pub const SETTINGS: [&str; 6] = [
    "DORMOUSE_HOST_BUDGET_BYTES",
    "DORMOUSE_NVME_FILE_BYTES",
    "DORMOUSE_NVME_QUEUE_DEPTH",
    "DORMOUSE_OFFLOAD_IO_THREADS",
    "DORMOUSE_OFFLOAD_INFLIGHT_BYTES",
    "DORMOUSE_OFFLOAD_WINDOW_LAYERS",
];

/// The figures of one update, those of `dormouse_runtime_get_stats`. Tiers: device, host, NVMe. Links:
/// device to host, host to device, NVMe write, NVMe read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Time of the update, `CLOCK_MONOTONIC` in nanoseconds ([`crate::now_ns`]).
    pub updated_ns: u64,
    /// Bytes in use by tier; for the device, mapped bytes.
    pub tier_used_bytes: [u64; 3],
    /// Peak of the bytes in use by tier, since the last reset.
    pub tier_peak_bytes: [u64; 3],
    /// Limit by tier, in bytes; 0 if the tier is closed.
    pub tier_budget_bytes: [u64; 3],
    /// Bytes copied by link since creation.
    pub link_copied_bytes: [u64; 4],
    /// Recent throughput by link, in bytes/s; 0 if unknown.
    pub link_bytes_per_s: [u64; 4],
    /// Allocated bytes that are asleep.
    pub asleep_bytes: u64,
    /// Free bytes that stay mapped for reuse.
    pub cached_bytes: u64,
    /// Time that callers were blocked on copies, in nanoseconds.
    pub stall_ns: u64,
    /// Number of allocations that failed.
    pub alloc_failures: u64,
    /// Number of tags.
    pub tag_count: u64,
    /// The largest tags, the first [`PAGE_TAGS_MAX`] of them.
    pub tags: Vec<TagFigures>,
    /// The dump that was written last.
    pub last_dump: Option<DumpFigures>,
    /// In the order of [`SETTINGS`].
    pub settings: [SettingFigure; SETTINGS.len()],
}

/// A setting that the runtime may choose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SettingFigure {
    /// Its current value, in the unit of its name; 0 if it has none, or the page is of a release without settings.
    pub value: u64,
    /// Whether the runtime has chosen it.
    pub is_automatic: bool,
}

/// The bytes of one tag.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TagFigures {
    /// Its name: at most [`TAG_NAME_BYTES_MAX`] bytes, not empty.
    pub name: String,
    /// Bytes on the device.
    pub resident_bytes: u64,
    /// Bytes asleep.
    pub asleep_bytes: u64,
}

/// A dump that was written.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DumpFigures {
    /// When it was complete, Unix time in nanoseconds; not 0.
    pub written_unix_ns: u64,
    /// Why it was written, in one word: at most [`DUMP_REASON_BYTES_MAX`] bytes.
    pub reason: String,
    /// Its path. Of one beyond [`DUMP_PATH_BYTES_MAX`] bytes, the end.
    pub path: String,
}

/// What a live page held when it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Live {
    /// Process that writes the page; its pid is that of its own pid namespace, its name at most 16 bytes.
    pub process: Process,
    /// Whether the writer may still update the page. `false`: it has ended, or closed the file.
    pub is_running: bool,
    /// Creation of the page, Unix time in nanoseconds.
    pub started_unix_ns: u64,
    /// Number of updates since creation.
    pub updates: u64,
    /// The latest figures.
    pub figures: Figures,
}

/// Reason that a live page could not be created or read, with the value seen.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LiveError {
    /// The path names something that is never replaced or read.
    #[error("{path} is a {1}; accepted: a regular file, or no file", path = .0.display())]
    NotAFile(PathBuf, &'static str),
    /// A call of the system failed: what was attempted, the file, the reason.
    #[error("could not {0} {path}: {2}", path = .1.display())]
    Io(&'static str, PathBuf, String),
    /// The file, or the page as it states, has another size in bytes.
    #[error("the page has {0} bytes; accepted: {PAGE_BYTES}")]
    Size(u64),
    /// The file begins with another word.
    #[error("the file begins with {0:#018x}; accepted: {magic:#018x}", magic = layout::MAGIC)]
    Magic(u64),
    /// The page has the layout of another release.
    #[error(
        "the page has layout version {0}, that of another release of dormouse; accepted: {LAYOUT_VERSION}"
    )]
    Version(u32),
    /// No complete update in this number of attempts: the writer ended, or was stopped, during one.
    #[error("no complete update in {0} attempts; accepted: a page between two updates")]
    Torn(u32),
}

#[cfg(test)]
mod tests;
