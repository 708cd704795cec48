//! Structs and constants of dialogue histories.

use std::ffi::{c_char, c_void};

/// Earlier turns of dialogues. Any-thread.
#[derive(Debug)]
pub struct dormouse_dialogue_t(());

/// `kind` of a query: the entries of the greatest weight.
pub const DORMOUSE_QUERY_BEST: i32 = 0;
/// The most relevant entry to the query, then the most relevant one to both, and so on; at most 64, and none with a
/// relevance below 0.4.
pub const DORMOUSE_QUERY_CHAIN: i32 = 1;

/// Settings of a dialogue history.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_dialogue_options_t {
    /// Size of the struct.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Numbers of an embedding; at most 4096.
    pub dimension: u32,
    /// The share α of relevance in a weight, from 0 to 1; recency has the rest.
    pub alpha: f32,
    /// Most entries; at most 2²⁰. 0: 100,000.
    pub entries_max: u64,
    /// Entries that a retrieval looks at, at least; with as many as there are it is exact. 0: 2048.
    pub scanned_entries: u64,
    /// Seconds in which recency falls to 1/e. 0: 7 days.
    pub decay_s: f64,
    /// Directory of the log, which no other process or history may use meanwhile. Entries that are there are loaded.
    /// NULL: nothing is written.
    pub dir: *const c_char,
    /// 1: a record does not wait for the disk. The death of the process loses nothing, that of the machine perhaps the
    /// last seconds.
    pub unsynced: u32,
    /// Must be zero.
    pub reserved: u32,
}

/// Bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_bytes_t {
    /// The bytes; may be NULL if there are none.
    pub bytes: *const c_void,
    /// Number of bytes; at most 2²⁰.
    pub count: u64,
}

/// A turn to record. Its texts are bytes that are only stored.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_turn_t {
    /// The query's embedding: finite numbers. It need not be of length 1.
    pub embedding: *const f32,
    /// Number of numbers.
    pub dimension: u64,
    /// What was asked.
    pub query: dormouse_bytes_t,
    /// What was read for it.
    pub passage: dormouse_bytes_t,
    /// What was answered.
    pub response: dormouse_bytes_t,
    /// When, in seconds of a clock of the caller.
    pub time_s: f64,
}

/// What to retrieve.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_query_t {
    /// The query's embedding.
    pub embedding: *const f32,
    /// Number of numbers.
    pub dimension: u64,
    /// The time at which entries are weighed, in seconds.
    pub now_s: f64,
    /// Most entries; at most 1024.
    pub entries_max: u32,
    /// `DORMOUSE_QUERY_*`.
    pub kind: i32,
}

/// An entry that was retrieved.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_found_t {
    /// The entry.
    pub id: u64,
    /// Its time.
    pub time_s: f64,
    /// α · relevance + (1 − α) · recency.
    pub weight: f32,
    /// Cosine of the queries' embeddings; 0 for an embedding of zeros.
    pub relevance: f32,
    /// exp(−age / decay), 1 for an entry of a later time.
    pub recency: f32,
    /// Reserved; ignore the value.
    pub reserved: u32,
}

/// Texts of an entry, for `dormouse_dialogue_get_text`: what was asked.
pub const DORMOUSE_TEXT_QUERY: i32 = 0;
/// What was read for it.
pub const DORMOUSE_TEXT_PASSAGE: i32 = 1;
/// What was answered.
pub const DORMOUSE_TEXT_RESPONSE: i32 = 2;

/// Figures of a dialogue history.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_dialogue_stats_t {
    /// In: size of the struct. Out: number of bytes written.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Entries.
    pub entries: u64,
    /// Entries that were forgotten for better ones since the history was created.
    pub forgotten_entries: u64,
    /// Categories of summaries.
    pub categories: u64,
    /// Summaries of entries.
    pub summaries: u64,
    /// Bytes of the log.
    pub log_bytes: u64,
}
