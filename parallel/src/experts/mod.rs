//! Router losses and counts for shared rows, which run once but count as often as in the baseline.
//!
//! An auxiliary loss multiplies two sums over a *scope*, the tokens that the baseline pools: counts `C_e` of
//! rows routed to expert e, which have no gradient, and sums `R_e` of router probabilities. Both are sums
//! over rows, so a row that m of the scope's sequences read counts m times: its *copies*. Rows of a node
//! with equal copies form a *portion*. Phase A captures C and R of each portion and presents R as a boundary
//! leaf; the microbatch that runs the scope sums `Σ copies · C` and `Σ copies · R` over the portions it reads
//! and its own; the gradient of the leaf flows back in phase C.
//!
//! | formula | loss of one scope, w its weight, M its tokens |
//! |---|---|
//! | Switch, GShard | `w λ E Σ_e C_e/(k M) · R_e/M`, each layer for itself |
//! | transformers | `w λ E Σ_e ΣC_e/(n M) · ΣR_e/(n M)`, sums over all n router layers, not divided by k |
//! | Megatron's global batch | `w λ E Σ_e c_e/(j k M') · R_e/M'`: c counts of microbatches 1 … j on all ranks, `M' = M · ranks` |
//!
//! Counts of a scope must be whole when the first backward that reads its loss begins. The accounting is for trainers
//! in which a microbatch's backward follows its forward, so a scope is one microbatch's. Where all forwards come before
//! the backwards, as in `dormouse.megatron` (decision 0052), they count first, and scopes and their order are free.
//!
//! All are linear in R: their gradient is `copies` times [`Accounting::coefficients`]. The z-loss is a mean
//! over tokens, so a portion's share follows from lengths: [`Portion::z_weight`]. Counts for metrics and
//! expert biases are `Σ copies · C`.
//!
//! # Invariants
//! - **E1** `Σ copies · rows` over the portions of a scope is the dense run's token count M.
//! - **E2** A scope's microbatch runs after everything it reads.
//! - **E3** Nothing is approximated except by [`Spanning::CutAtMicrobatches`].

mod count;
mod portions;
mod refuse;
mod terms;

use serde::{Deserialize, Serialize};

pub use refuse::ExpertsError;
pub use terms::{Accounting, LastLayer, Portion, Read, ScopeTerms};

/// Maximum router layers × experts, the size of a scope's statistics.
pub const STATISTICS_MAX: u64 = 1 << 24;
/// Maximum portions visited while copies are counted: sequences × nodes on their paths.
pub const VISITS_MAX: usize = 1 << 26;

/// How a router chooses experts for a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Selection {
    /// The k best of each row, independent of other rows.
    #[default]
    TopK,
    /// Each expert chooses its rows. Refused.
    ExpertChoice,
    /// Alternating normalisation of rows and experts. Refused.
    Sinkhorn,
    /// Rows assigned evenly to experts. Refused.
    BalancedAssignment,
}

/// The routers of a model; all router layers are equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Router {
    /// Experts per layer.
    pub experts: u32,
    /// Experts per row.
    pub top_k: u32,
    /// Number of layers with a router.
    pub layers: u32,
    /// Whether the model's last layer has a router.
    pub last_layer: bool,
    /// Coefficient λ of the auxiliary loss per scope; 0 for none.
    pub aux_coefficient: f64,
    /// Coefficient of the z-loss, a mean over a scope's tokens; 0 for none.
    pub z_coefficient: f64,
    /// Whether counts are needed for biases or metrics.
    pub counts_wanted: bool,
    /// Selection of experts.
    pub selection: Selection,
    /// Whether experts have a capacity limit. Refused.
    pub capacity_limit: bool,
    /// Whether rows are dropped. Refused.
    pub drops_tokens: bool,
    /// Whether router inputs are jittered. Refused.
    pub jitter: bool,
    /// Whether the baseline's statistics count padding rows. Refused.
    pub counts_padding: bool,
}

/// Formula of the baseline's auxiliary loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Formula {
    /// Switch and GShard; Megatron's per dense microbatch or sequence.
    #[default]
    Switch,
    /// Hugging Face transformers: all layers pooled, not divided by k.
    PooledLayers,
    /// Megatron's for the global batch: counts of all previous microbatches on all ranks.
    RunningCounts {
        /// Ranks whose counts are summed, at least 1.
        ranks: u32,
        /// Microbatches per step and rank.
        microbatches: u32,
    },
}

/// Handling of a scope whose sequences run in several microbatches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spanning {
    /// Refused: the backward of an early microbatch begins before a later one is counted.
    #[default]
    Refuse,
    /// **An approximation.** Each microbatch's part is a separate scope, weighted by its share of tokens.
    CutAtMicrobatches,
}

/// The auxiliary loss of the dense run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Baseline {
    /// The formula.
    pub formula: Formula,
    /// Scope of each sequence, numbered from 0: the sequence for a loss per trajectory, its dense microbatch,
    /// or 0 for all. For [`Formula::RunningCounts`], microbatches in the baseline's order.
    pub scopes: Vec<u32>,
    /// Weight of each scope in the step's loss.
    pub scope_weights: Vec<f64>,
    /// Whether the dense run also runs the row of a sequence's last token, which has no label.
    pub feeds_last_token: bool,
    /// Handling of scopes in several microbatches.
    pub spanning: Spanning,
}
