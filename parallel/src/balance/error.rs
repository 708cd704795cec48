//! What a balance refuses.

use super::options::RANKS_MAX;
use dormouse_schedule::PlanError;
use dormouse_schedule::cost::CostError;

/// Why shares were not made.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BalanceError {
    /// A shape or a count that is not accepted.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A rate or a cost that is not accepted.
    #[error(transparent)]
    Cost(#[from] CostError),
    /// No ranks, or too many.
    #[error("{seen} ranks; accepted: 1 to {RANKS_MAX}")]
    RankCount {
        /// How many.
        seen: u32,
    },
    /// No sequence in the forest.
    #[error("the forest has no sequences; accepted: 1 or more")]
    Empty,
    /// Nothing to balance by.
    #[error("the whole forest costs 0 ps by these rates; accepted: 1 or more")]
    Free,
    /// Groups asked for and not given, or given for another batch.
    #[error("{seen} group numbers; accepted: {sequences}, one a sequence")]
    GroupCount {
        /// How many.
        seen: usize,
        /// Sequences of the forest.
        sequences: usize,
    },
    /// Ops of more or fewer ranks than there are shares.
    #[error("ops of {seen} ranks; accepted: {accepted}, one word a share")]
    Words {
        /// Of how many.
        seen: usize,
        /// Shares.
        accepted: usize,
    },
    /// Exchanging asked of a method that does not know who its neighbours are.
    #[error("exchange with {method}; accepted: contiguous")]
    Exchange {
        /// The method.
        method: &'static str,
    },
    /// Exchanging asked without the rate it is weighed by.
    #[error("exchange over 0 link_bytes_per_s; accepted: 1 or more")]
    Link,
}
