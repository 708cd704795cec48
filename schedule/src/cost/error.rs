//! Errors and limits of the cost model.

use crate::PlanError;

/// Maximum picoseconds of a forest, about 53 days; twice that fits 64 bits.
pub const COST_MAX_PS: u64 = 1 << 62;
/// Maximum measured steps of a fit.
pub const SAMPLES_MAX: usize = 1 << 20;
/// Minimum seconds of a measured step.
pub const SECONDS_MIN: f64 = 1e-12;
/// Maximum seconds of a measured step.
pub const SECONDS_MAX: f64 = 1e12;

/// An error of fitting or counting costs.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CostError {
    /// An invalid shape or count.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A rate that is negative or not finite.
    #[error("rate of {what} is {seen} s; accepted: finite, not negative")]
    Rate {
        /// Its feature.
        what: &'static str,
        /// Its value.
        seen: f64,
    },
    /// A cost above [`COST_MAX_PS`].
    #[error("nodes 0 to {node} cost more than {COST_MAX_PS} ps; accepted: 0 to {COST_MAX_PS} ps")]
    TooCostly {
        /// The node that exceeds the limit.
        node: u32,
    },
    /// Too few or too many measured steps.
    #[error("{seen} measured steps; accepted: 1 to {SAMPLES_MAX}")]
    SampleCount {
        /// Number of steps.
        seen: usize,
    },
    /// A measured step with seconds out of range.
    #[error("measured step {index} took {seen} s; accepted: {SECONDS_MIN:e} to {SECONDS_MAX:e}")]
    Seconds {
        /// Index of the step.
        index: usize,
        /// Its seconds.
        seen: f64,
    },
    /// Every feature is 0 in every step.
    #[error("all features of the {samples} measured steps are 0; accepted: at least one above 0")]
    NothingCounted {
        /// Number of steps.
        samples: usize,
    },
    /// The active set did not converge.
    #[error("no fit after {iterations} changes of the active set")]
    Unsettled {
        /// Number of changes tried.
        iterations: usize,
    },
}
