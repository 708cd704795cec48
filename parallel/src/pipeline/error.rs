//! Errors of pipelines and of op lists.

use dormouse_schedule::PlanError;

/// An error of a pipeline or of its op lists.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// A number is out of range.
    #[error(transparent)]
    Count(#[from] PlanError),
    /// A field of a group is out of range.
    #[error("group {group}: {source}")]
    Group {
        /// Group number.
        group: usize,
        /// The field, the value seen and the values accepted.
        source: PlanError,
    },
    /// A list does not have one entry per part.
    #[error("{what} has {seen} entries; accepted: 0, or {parts}, one per part")]
    Parts {
        /// Name of the field.
        what: &'static str,
        /// Number of entries.
        seen: usize,
        /// Stages times virtual stages.
        parts: u32,
    },
    /// An op of a stage is unexpected, duplicate or missing.
    #[error("stage {stage}: {op} {problem}")]
    Op {
        /// Stage number.
        stage: u32,
        /// Description of the op.
        op: String,
        /// Description of the problem.
        problem: &'static str,
    },
    /// An op precedes something it needs.
    #[error("stage {stage}: {op} comes before {needs}")]
    Early {
        /// Stage number.
        stage: u32,
        /// Description of the op.
        op: String,
        /// Description of what it needs.
        needs: String,
    },
    /// A send and its matching receive differ.
    #[error("stage {from} sends {sent}, but stage {to} receives {received}")]
    Mismatch {
        /// The sender.
        from: u32,
        /// The receiver.
        to: u32,
        /// The payload.
        sent: String,
        /// The expected payload.
        received: String,
    },
    /// Deadlock: stages wait for each other.
    #[error("deadlock ({meeting}): {}", waits.join("; "))]
    Cycle {
        /// Timing mode of transfers.
        meeting: &'static str,
        /// What each stage of the cycle waits for.
        waits: Vec<String>,
    },
    /// A stage has no room for one group and one microbatch at a time.
    #[error(
        "stage {stage} needs {needed_bytes} bytes with one group and one microbatch in flight; its room is \
         {room_bytes}"
    )]
    Room {
        /// Stage number.
        stage: u32,
        /// Bytes it needs.
        needed_bytes: u64,
        /// Bytes it has.
        room_bytes: u64,
    },
    /// A memory bound is exceeded.
    #[error("stage {stage} holds {seen} {what}; accepted: at most {most}")]
    Bound {
        /// Stage number.
        stage: u32,
        /// The bounded quantity.
        what: &'static str,
        /// The number seen.
        seen: u32,
        /// The bound.
        most: u32,
    },
}
