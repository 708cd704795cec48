//! Errors of queries: of the request itself, and of the module that answers it.

use super::{QUERY_VERSION, REQUEST_BYTES_MAX, queries};
use crate::balance::BalanceError;
use crate::context::ContextError;
use crate::experts::ExpertsError;
use crate::pipeline::PipelineError;
use crate::rollout::RolloutError;
use crate::simulate::SimulateError;
use dormouse_schedule::PlanError;
use dormouse_schedule::cost::CostError;
use dormouse_schedule::layout::LayoutError;

/// An error of a query.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueryError {
    /// The request is too long.
    #[error("request has {seen} bytes; accepted: at most {REQUEST_BYTES_MAX}")]
    Length {
        /// Size in bytes.
        seen: usize,
    },
    /// The request is not JSON, or a field is missing or of the wrong type.
    #[error("invalid request: {0}")]
    Json(#[from] serde_json::Error),
    /// The version is not supported.
    #[error("version is {seen}; accepted: {QUERY_VERSION}")]
    Version {
        /// The request's version.
        seen: u32,
    },
    /// No query has this name.
    #[error("unknown query {seen:?}; accepted: {}", queries().map(|(name, _)| name).collect::<Vec<_>>().join(", "))]
    Unknown {
        /// The request's query.
        seen: String,
    },
    /// A field that the query does not have.
    #[error("unknown field {path}; accepted: the fields of this query in docs/queries/")]
    Field {
        /// Path of the field.
        path: String,
    },
    /// An unknown form of a layout.
    #[error("form is {seen:?}; accepted: packed, padded")]
    Form {
        /// The form seen.
        seen: String,
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
