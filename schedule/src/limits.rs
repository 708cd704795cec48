//! Named limits. Far above any real group, low enough that no product below overflows 64 bits.

/// Responses of one group.
pub const RESPONSES_MAX: usize = 1 << 20;
/// Tokens of one prompt or response.
pub const TOKENS_MAX: u64 = 1 << 28;
/// Decoder layers.
pub const LAYERS_MAX: u32 = 1 << 12;
/// Tokens a prompt needs: one to hold as prefix, one to predict the first response token.
pub(crate) const PROMPT_TOKENS_MIN: u64 = 2;
/// Layers woken ahead of need when the spec leaves it open: a few are enough (docs/method.md §5).
pub(crate) const WAKE_WINDOW_LAYERS: u32 = 3;
