//! The error of an invalid description of a step.

/// A figure of a [`StepWork`](crate::plan::StepWork) that does not fit the others or a limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {seen}; accepted: {accepted}")]
pub struct WorkError {
    /// The figure.
    pub what: &'static str,
    /// The value seen.
    pub seen: String,
    /// The values accepted.
    pub accepted: String,
}

impl WorkError {
    pub(crate) fn new(what: &'static str, seen: impl ToString, accepted: impl ToString) -> Self {
        Self { what, seen: seen.to_string(), accepted: accepted.to_string() }
    }
}
