//! What a query refuses: its own form, and whatever the rooms do.

use super::{QUERY_VERSION, REQUEST_BYTES_MAX, names};
use crate::agree::Disagreement;
use crate::balance::BalanceError;
use crate::context::ContextError;
use crate::experts::ExpertsError;
use crate::pipeline::PipelineError;
use crate::rollout::RolloutError;
use crate::simulate::SimulateError;
use dormouse_schedule::PlanError;
use dormouse_schedule::cost::CostError;
use dormouse_schedule::layout::LayoutError;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueryError {
    /// A request too long to read.
    #[error("the request has {seen} bytes; accepted: at most {REQUEST_BYTES_MAX}")]
    Length {
        /// Its bytes.
        seen: usize,
    },
    /// Text that is no request: not JSON, a field missing, or one of another type.
    #[error("the request: {0}")]
    Json(#[from] serde_json::Error),
    /// A form this library does not know.
    #[error("version is {seen}; accepted: {QUERY_VERSION}")]
    Version {
        /// Which.
        seen: u32,
    },
    /// Nothing of that name is asked here.
    #[error("query is {seen:?}; accepted: {}", names().collect::<Vec<_>>().join(", "))]
    Unknown {
        /// Its name.
        seen: String,
    },
    /// A field that nothing reads.
    #[error("field {path} is not known; accepted: the fields docs/queries.md has for this query")]
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
