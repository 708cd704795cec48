//! Errors of balancing.

use super::options::RANKS_MAX;
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
    /// The number of ranks is out of range.
    #[error("{seen} ranks; accepted: 1 to {RANKS_MAX}")]
    RankCount {
        /// The number seen.
        seen: u32,
    },
    /// The forest has no sequences.
    #[error("the forest has no sequences; accepted: 1 or more")]
    Empty,
    /// All costs are 0.
    #[error("the forest costs 0 ps at these rates; accepted: 1 ps or more")]
    Free,
    /// The number of group numbers differs from the number of sequences.
    #[error("{seen} group numbers; accepted: {sequences}, one per sequence")]
    GroupCount {
        /// The number seen.
        seen: usize,
        /// Sequences in the forest.
        sequences: usize,
    },
    /// The number of pass sequences differs from the number of shares.
    #[error("passes of {seen} ranks; accepted: {accepted}, one sequence per share")]
    PassCount {
        /// Pass sequences seen.
        seen: usize,
        /// Number of shares.
        accepted: usize,
    },
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
