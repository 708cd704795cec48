//! What the cost model refuses.

use super::fit::{SAMPLES_MAX, SECONDS_MAX, SECONDS_MIN};
use super::rates::COST_MAX_PS;
use crate::PlanError;

/// Why a cost was not fitted or not counted.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CostError {
    /// A shape or a count that is not accepted.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A rate that is none.
    #[error("rate of {what} is {seen} s; accepted: finite, not negative")]
    Rate {
        /// Of which feature.
        what: &'static str,
        /// Its value.
        seen: f64,
    },
    /// More than whole picoseconds can be added up for.
    #[error("nodes up to {node} cost more than {COST_MAX_PS} ps; accepted: at most that")]
    TooCostly {
        /// The node that passed the limit.
        node: u32,
    },
    /// No measured steps, or too many.
    #[error("{seen} measured steps; accepted: 1 to {SAMPLES_MAX}")]
    SampleCount {
        /// How many.
        seen: usize,
    },
    /// A measured step that took no time, or no time that anyone would measure.
    #[error("measured step {index} took {seen} s; accepted: {SECONDS_MIN:e} to {SECONDS_MAX:e}")]
    Seconds {
        /// Which step.
        index: usize,
        /// Its seconds.
        seen: f64,
    },
    /// Every feature is 0 in every step: nothing to explain the seconds by.
    #[error("every feature of all {samples} measured steps is 0; accepted: some above 0")]
    NothingCounted {
        /// How many steps.
        samples: usize,
    },
    /// The active set did not settle.
    #[error("no fit after {iterations} changes of the active set")]
    Unsettled {
        /// How many were tried.
        iterations: usize,
    },
}
