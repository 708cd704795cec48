//! Routers' losses and counts when a shared row runs once but counts as often as the baseline ran it.
//!
//! An auxiliary loss multiplies two sums over a *scope*, the tokens that the baseline pools: counts
//! `C_e` of rows routed to expert e, which have no gradient, and sums `R_e` of their probabilities.
//! Both are sums over rows, so a row that m of the scope's sequences feed counts m times: its
//! *copies*. Rows of a node with the same copies make a *portion*: A captures C and R of each portion
//! and presents R as a boundary leaf; the microbatch that runs the scope adds up `Σ copies · C` and
//! `Σ copies · R` over what it reads and its own portions; the leaf's gradient goes back in C.
//!
//! | formula | loss of one scope, w its weight, M its tokens |
//! |---|---|
//! | Switch, GShard | `w λ E Σ_e C_e/(k M) · R_e/M`, each layer for itself |
//! | transformers | `w λ E Σ_e ΣC_e/(n M) · ΣR_e/(n M)`, sums over all n router layers, k not divided by |
//! | Megatron's global batch | `w λ E Σ_e c_e/(j k M') · R_e/M'`: c counts of microbatches 1 … j on all ranks, `M' = M · ranks` |
//!
//! All of them are linear in R: their gradient is [`Accounting::coefficients`], `copies` times.
//! The z-loss is a mean over tokens, so a portion's share is known from lengths:
//! [`Portion::z_weight`]. Counts for metrics and expert biases are `Σ copies · C`.
//!
//! # Invariants
//! - **E1** `Σ copies · rows` over what a scope reads is the dense run's token count M.
//! - **E2** A scope's microbatch has run, or follows, everything it reads: its sequences end there.
//! - **E3** Nothing is approximated unless [`Spanning::CutAtMicrobatches`] asks for it by name.

mod count;
mod portions;
mod refuse;
mod terms;

use serde::{Deserialize, Serialize};

pub use refuse::ExpertsError;
pub use terms::{Accounting, LastLayer, Portion, Read, ScopeTerms};

/// Router layers × experts: a scope's statistics have so many numbers.
pub const STATISTICS_MAX: u64 = 1 << 24;
/// Visits of portions by sequences while copies are counted: sequences × nodes on their paths.
pub const VISITS_MAX: usize = 1 << 26;

/// How a router chooses experts for a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Selection {
    /// The k best of each row, whatever the other rows are.
    #[default]
    TopK,
    /// Each expert chooses its rows. Refused.
    ExpertChoice,
    /// Rows and experts normalised in turn. Refused.
    Sinkhorn,
    /// Rows assigned so that every expert has as many. Refused.
    BalancedAssignment,
}

/// Routers of a model: all its router layers are alike.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Router {
    /// Experts of a layer.
    pub experts: u32,
    /// Experts of a row.
    pub top_k: u32,
    /// Layers with a router.
    pub layers: u32,
    /// Whether the model's last layer has one.
    pub last_layer: bool,
    /// λ of the auxiliary loss, as the dense run applies it to each scope. 0 for none.
    pub aux_coefficient: f64,
    /// Coefficient of the z-loss, a mean over a scope's tokens. 0 for none.
    pub z_coefficient: f64,
    /// Whether counts are wanted for biases or metrics.
    pub counts_wanted: bool,
    /// How experts are chosen.
    pub selection: Selection,
    /// Whether an expert takes only so many rows. Refused.
    pub capacity_limit: bool,
    /// Whether rows are dropped. Refused.
    pub drops_tokens: bool,
    /// Whether router inputs are jittered. Refused.
    pub jitter: bool,
    /// Whether the baseline's statistics count padding rows. Refused.
    pub counts_padding: bool,
}

/// Which formula the baseline's loss has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Formula {
    /// Switch and GShard; Megatron's for a dense microbatch or a sequence.
    #[default]
    Switch,
    /// transformers': all layers pooled, not divided by k.
    PooledLayers,
    /// Megatron's for the global batch: counts of all microbatches so far, on all ranks.
    RunningCounts {
        /// Ranks whose counts are added up, at least 1.
        ranks: u32,
        /// Microbatches of this step on every rank.
        microbatches: u32,
    },
}

/// Handling of a scope whose sequences run in several microbatches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Spanning {
    /// It is refused: an early microbatch cannot know a later microbatch's counts.
    #[default]
    Refuse,
    /// **An approximation.** Each microbatch's part is a scope of its own, weighted by its share of tokens.
    CutAtMicrobatches,
}

/// The pooling of the dense run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Baseline {
    /// The formula.
    pub formula: Formula,
    /// Scope of each sequence, numbered from 0: itself for a loss per trajectory, its dense microbatch, or
    /// 0 for all. For [`Formula::RunningCounts`] microbatches in the baseline's order.
    pub scopes: Vec<u32>,
    /// Weight of each scope in the step's loss, from the dense run's dense microbatch counts.
    pub scope_weights: Vec<f64>,
    /// Whether the dense run feeds a sequence's last token. Its row then runs too, without a label.
    pub feeds_last_token: bool,
    /// Handling of scopes in several microbatches.
    pub spanning: Spanning,
}
