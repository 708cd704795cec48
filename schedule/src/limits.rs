//! Named limits: far above any real group, and low enough that a plan of that size is still made in
//! seconds. Counts of rows and tokens below them fit 64 bits with room to spare; bytes are added up
//! in 128 bits and stop at the largest 64-bit number (see `predict`).

/// Responses of one group.
pub const RESPONSES_MAX: usize = 1 << 20;
/// Tokens of one prompt or response.
pub const TOKENS_MAX: u64 = 1 << 28;
/// Nodes of all trees of a batch.
pub const NODES_MAX: usize = 1 << 24;
/// Decoder layers.
pub const LAYERS_MAX: u32 = 1 << 12;
/// Tokens a prompt needs: one to hold as prefix, one to predict the first response token.
pub(crate) const PROMPT_TOKENS_MIN: u64 = 2;
/// Bytes of the widest element, FP64.
pub(crate) const DTYPE_BYTES_MAX: u32 = 8;
/// Layers woken ahead of need when the spec leaves it open: a few are enough (docs/method.md §5).
pub(crate) const WAKE_WINDOW_LAYERS: u32 = 3;
