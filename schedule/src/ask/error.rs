//! What an ask refuses: its own form, and whatever the rooms do.

use super::{ASK_BYTES_MAX, ASK_VERSION, names};
use crate::PlanError;
use crate::agree::Disagreement;
use crate::balance::BalanceError;
use crate::context::ContextError;
use crate::cost::CostError;
use crate::experts::ExpertsError;
use crate::layout::LayoutError;
use crate::pipeline::PipelineError;
use crate::rollout::RolloutError;
use crate::simulate::SimulateError;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AskError {
    /// A request too long to read.
    #[error("the request has {seen} bytes; accepted: at most {ASK_BYTES_MAX}")]
    Length {
        /// Its bytes.
        seen: usize,
    },
    /// Text that is no request: not JSON, a field missing, or one of another type.
    #[error("the request: {0}")]
    Json(#[from] serde_json::Error),
    /// A form this library does not know.
    #[error("version is {seen}; accepted: {ASK_VERSION}")]
    Version {
        /// Which.
        seen: u32,
    },
    /// Nothing of that name is asked here.
    #[error("ask is {seen:?}; accepted: {}", names().collect::<Vec<_>>().join(", "))]
    Unknown {
        /// Its name.
        seen: String,
    },
    /// A field that nothing reads.
    #[error("field {path} is not known; accepted: the fields docs/asks.md has for this ask")]
    Field {
        /// Where it is.
        path: String,
    },
    /// See [`PlanError`].
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// See [`CostError`].
    #[error(transparent)]
    Cost(#[from] CostError),
    /// See [`BalanceError`].
    #[error(transparent)]
    Balance(#[from] BalanceError),
    /// See [`Disagreement`].
    #[error(transparent)]
    Disagreement(#[from] Disagreement),
    /// See [`PipelineError`].
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// See [`SimulateError`].
    #[error(transparent)]
    Simulate(#[from] SimulateError),
    /// See [`LayoutError`].
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// See [`ContextError`].
    #[error(transparent)]
    Context(#[from] ContextError),
    /// See [`ExpertsError`].
    #[error(transparent)]
    Experts(#[from] ExpertsError),
    /// See [`RolloutError`].
    #[error(transparent)]
    Rollout(#[from] RolloutError),
}
