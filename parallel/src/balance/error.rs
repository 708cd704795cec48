//! Errors of balancing.

use dormouse_schedule::PlanError;
use dormouse_schedule::cost::CostError;

/// An error of balancing.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BalanceError {
    /// An invalid shape or count.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// An invalid rate or cost.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// All costs are 0.
    #[error("the forest costs 0 ps at these rates; accepted: 1 or more")]
    Free,
    /// The method does not support exchange.
    #[error("exchange with method {method}; accepted: contiguous")]
    PrefixExchange {
        /// The method.
        method: &'static str,
    },
    /// Exchange is enabled without a link rate.
    #[error("exchange with link_bytes_per_s 0; accepted: 1 or more")]
    Link,
}
