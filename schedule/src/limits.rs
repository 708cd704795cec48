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
/// The least of them: a layer falls asleep when the next is done, so two are awake whatever is asked.
pub(crate) const WAKE_WINDOW_LAYERS_MIN: u32 = 2;
/// Runs of scored labels in a batch, one for each sequence, node on its path and span.
pub const SCORES_MAX: usize = 1 << 26;
/// Ways to share memory between a node and its ancestors that are weighed against each other.
pub(crate) const PARETO_POINTS_MAX: usize = 32;
/// … where both the device and the host are short: pairs of them are weighed, not only neighbours.
pub(crate) const PARETO_POINTS_TWO_TIERS_MAX: usize = 8;
/// How often the most rows of a microbatch that fit are halved in search of a better size: smaller microbatches
/// use the device less well than a count of operations says.
pub(crate) const MICROBATCH_HALVINGS_MAX: u32 = 3;
/// Nodes of a plan for which sizes of microbatches are tried; each try takes about a microsecond a node.
pub(crate) const MICROBATCH_SIZE_NODES_MAX: usize = 1 << 16;
