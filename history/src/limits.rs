//! Limits, and the constants of the rules of drafts (arXiv 2508.18588) and of dialogues (arXiv 2502.13847).

/// Most tokens before a position that are compared with the end of a sequence.
pub const CONTEXT_TOKENS: usize = 7;
/// Fewest equal tokens that make a match.
pub const MATCH_TOKENS_MIN: usize = 3;
/// Tokens of the first draft of a sequence, and after a rejection.
pub const WINDOW_TOKENS_MIN: u32 = 2;
/// Tokens by which the window grows when a draft is accepted as a whole.
pub const WINDOW_TOKENS_STEP: u32 = 2;
/// Largest window.
pub const WINDOW_TOKENS_MAX: u32 = 32;
/// Positions that vote on a draft. Of more, evenly spaced ones do.
pub const VOTES_MAX: usize = 32;
/// A draft ends before the votes for all of its tokens fall below this share.
pub const PATH_SHARE_MIN: f32 = 0.1;
/// Weight of a response of one epoch earlier, over that of this epoch.
pub const EPOCH_DECAY: f32 = 0.5;
/// Weight of the response with the least reward of a prompt; the greatest has 1 more.
pub const REWARD_WEIGHT_MIN: f32 = 0.05;

/// Most tokens of a response.
pub const RESPONSE_TOKENS_MAX: usize = 1 << 24;
/// Most recorded tokens of a prompt, with [`CONTEXT_TOKENS`] more for each response.
pub const PROMPT_HISTORY_TOKENS_MAX: usize = 1 << 30;
/// Most epochs whose responses are kept.
pub const EPOCHS_KEPT_MAX: u32 = 64;
/// Largest vocabulary.
pub const VOCAB_MAX: u32 = 1 << 31;
/// Most prompts.
pub const PROMPTS_MAX: usize = 1 << 24;

/// Most numbers of an embedding.
pub const DIMENSION_MAX: usize = 4096;
/// Most entries of a dialogue.
pub const ENTRIES_MAX: usize = 1 << 20;
/// Most entries that a dialogue ever has. Their ids are below this.
pub const ENTRY_IDS_MAX: u64 = 1 << 63;
/// Most entries that one call records.
pub const RECORDED_ENTRIES_MAX: usize = 1 << 12;
/// Most bytes of an entry's query, of its passage and of its response.
pub const TEXT_BYTES_MAX: usize = 1 << 20;
/// Most entries that one call retrieves.
pub const RETRIEVED_MAX: usize = 1 << 10;
/// Entries that every retrieval looks at: the last ones, whose recency is the greatest.
pub const RECENT_ENTRIES: usize = 256;
/// Most entries of a chain, five in the authors' code (arXiv 2502.13847).
pub const CHAIN_ENTRIES_MAX: usize = 64;
/// Least relevance of an entry of a chain, from the authors' code.
pub const CHAIN_RELEVANCE_MIN: f32 = 0.4;
/// Most bytes of a record of a dialogue's log.
pub const LOG_RECORD_BYTES_MAX: usize = 1 << 22;
