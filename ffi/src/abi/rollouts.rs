//! Structs and constants of rollout histories.

use std::ffi::{c_char, c_void};

/// A history of rollouts. Any-thread.
#[derive(Debug)]
pub struct dormouse_history_t(());

/// `weighing` of a history: an occurrence weighs by its response's reward and epoch.
pub const DORMOUSE_WEIGHING_REWARD: i32 = 0;
/// Each occurrence weighs the same.
pub const DORMOUSE_WEIGHING_COUNT: i32 = 1;

/// Settings of a history.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_history_options_t {
    /// Size of the struct.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Token ids are from 0 to this less 1; at most 2³¹.
    pub vocab: u32,
    /// Epochs of a prompt whose responses are kept, the latest included; at most 64. 0: 2.
    pub epochs_kept: u32,
    /// Bytes of memory that prompts may take. Beyond it the least recently used ones go into the file of cold
    /// prompts, or are forgotten if it has no room for them.
    pub budget_bytes: u64,
    /// `DORMOUSE_WEIGHING_*`.
    pub weighing: i32,
    /// Must be zero.
    pub reserved: u32,
    /// Directory of the saved history, which no other process may use meanwhile. A history that is there is loaded.
    /// NULL: nothing is saved.
    pub dir: *const c_char,
    /// Size in bytes of the file of cold prompts, which is in `dir` and has no name. 0: no file.
    pub cold_bytes: u64,
}

/// Token ids.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_tokens_t {
    /// The ids; may be NULL if there are none.
    pub ids: *const c_void,
    /// Number of ids.
    pub count: u64,
    /// 4: `int32_t`; 8: `int64_t`.
    pub id_bytes: u32,
    /// Must be zero.
    pub reserved: u32,
}

/// A response to record.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_rollout_t {
    /// The prompt.
    pub prompt: dormouse_tokens_t,
    /// The response.
    pub response: dormouse_tokens_t,
    /// Its reward: a finite number. Rewards are compared within a prompt alone.
    pub reward: f32,
    /// Its epoch.
    pub epoch: u32,
}

/// Name of a prompt: XXH3-128, seed 0, of its ids as little-endian 32-bit numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct dormouse_digest_t {
    /// The lower 64 bits.
    pub low: u64,
    /// The upper 64 bits.
    pub high: u64,
}

/// The draft of one sequence, and its window. Zero it for a new sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_draft_t {
    /// In: the prompt.
    pub prompt: dormouse_digest_t,
    /// In: the last tokens of the sequence, prompt included. Of more than 7 the last 7 are read.
    pub end: dormouse_tokens_t,
    /// Where the drafted ids go: `capacity` elements of the caller.
    pub ids: *mut i32,
    /// In: most tokens to draft; the window may be smaller.
    pub capacity: u32,
    /// The window of the sequence: 2, and 2 more up to 32 with each draft that was accepted as a whole. Set by
    /// `dormouse_history_draft` if it is 0, and by `dormouse_history_feedback`.
    pub window_tokens: u32,
    /// Out: number of drafted tokens; 0 if too few match.
    pub count: u32,
    /// Out: number of tokens that match, 3 to 7; 0 without a match.
    pub matched_tokens: u32,
    /// In, for `dormouse_history_feedback`: how many of the drafted tokens were accepted.
    pub accepted: u32,
    /// Must be zero.
    pub reserved: u32,
}

/// Figures of a history.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_history_stats_t {
    /// In: size of the struct. Out: number of bytes written.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Prompts in memory.
    pub prompts: u64,
    /// Recorded tokens in memory.
    pub tokens: u64,
    /// Bytes of memory that they take.
    pub bytes: u64,
    /// Prompts in the file of cold prompts.
    pub cold_prompts: u64,
    /// Bytes of that file in use.
    pub cold_bytes: u64,
    /// Prompts that were forgotten: neither memory nor the file had room for them, or the file failed.
    pub forgotten_prompts: u64,
    /// Drafted tokens of which `dormouse_history_feedback` was told.
    pub drafted_tokens: u64,
    /// Those that were accepted.
    pub accepted_tokens: u64,
}
