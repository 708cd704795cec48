//! Limits, and the constants of the drafting rule (arXiv 2508.18588).

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
