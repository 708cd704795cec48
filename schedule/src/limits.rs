//! Limits, far above any real batch. Counts of rows and tokens below them fit 64 bits; bytes saturate.

/// Maximum responses of a group.
pub const RESPONSES_MAX: usize = 1 << 20;
/// Maximum tokens of a sequence.
pub const TOKENS_MAX: u64 = 1 << 28;
/// Maximum nodes of a batch.
pub const NODES_MAX: usize = 1 << 24;
/// Maximum decoder layers.
pub const LAYERS_MAX: u32 = 1 << 12;
/// Minimum tokens of a prompt: one as prefix, one to predict the first response token.
pub(crate) const PROMPT_TOKENS_MIN: u64 = 2;
/// Bytes of the widest element, FP64.
pub(crate) const DTYPE_BYTES_MAX: u32 = 8;
/// Default number of layers woken ahead of need (docs/method.md §5).
pub(crate) const WAKE_WINDOW_LAYERS: u32 = 3;
/// Minimum of the same: a layer falls asleep when the next one is done, so two are always awake.
pub(crate) const WAKE_WINDOW_LAYERS_MIN: u32 = 2;
/// Maximum runs of scored labels in a batch, one for each sequence, node on its path and span.
pub const SCORES_MAX: usize = 1 << 26;
/// Maximum points of a Pareto front if one tier is short.
pub(crate) const PARETO_POINTS_MAX: usize = 32;
/// Maximum points of a Pareto front if device and host are short: pairs of points are compared.
pub(crate) const PARETO_POINTS_TWO_TIERS_MAX: usize = 8;
/// Halvings of the largest microbatch that fits in search of a better size. Smaller microbatches use the
/// device less well than operation counts predict.
pub(crate) const MICROBATCH_HALVINGS_MAX: u32 = 3;
/// Maximum nodes of a plan for which microbatch sizes are tried; a try takes about 1 µs per node.
pub(crate) const MICROBATCH_SIZE_NODES_MAX: usize = 1 << 16;
