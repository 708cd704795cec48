//! What a pipeline refuses, and what is wrong with a list.

/// Why a pipeline has no plan, or a plan does not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PipelineError {
    /// A number outside what is accepted.
    #[error("{what} is {seen}; accepted: {least} to {most}")]
    Count {
        /// Which field.
        what: &'static str,
        /// Its value.
        seen: u64,
        /// Least accepted.
        least: u64,
        /// Most accepted.
        most: u64,
    },
    /// A field of one group.
    #[error("group {group}: {what} is {seen}; accepted: {least} to {most}")]
    Group {
        /// Which group.
        group: usize,
        /// Which field.
        what: &'static str,
        /// Its value.
        seen: u64,
        /// Least accepted.
        least: u64,
        /// Most accepted.
        most: u64,
    },
    /// A list does not have one number for each part.
    #[error("{what} has {seen} entries; accepted: none, or one for each of {parts} parts")]
    Parts {
        /// Which field.
        what: &'static str,
        /// Its entries.
        seen: usize,
        /// Stages times virtual stages.
        parts: u32,
    },
    /// An op that a stage's list should not hold, or holds twice, or does not hold.
    #[error("stage {stage}: {op} {problem}")]
    Op {
        /// Which stage.
        stage: u32,
        /// The op, in words.
        op: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// An op before something it needs.
    #[error("stage {stage}: {op} comes before {needs}")]
    Early {
        /// Which stage.
        stage: u32,
        /// The op, in words.
        op: String,
        /// What it needs, in words.
        needs: String,
    },
    /// A send and a receive that meet are not of the same thing.
    #[error("stage {from} sends {sent} where stage {to} receives {received}")]
    Mismatch {
        /// Who sends.
        from: u32,
        /// Who receives.
        to: u32,
        /// What is sent.
        sent: String,
        /// What is received.
        received: String,
    },
    /// Stages that wait for each other, each named with what it waits at.
    #[error("no stage moves on ({meeting}): {}", waits.join("; "))]
    Cycle {
        /// How transfers meet.
        meeting: &'static str,
        /// One sentence for each stage of the circle.
        waits: Vec<String>,
    },
    /// A bound exceeded.
    #[error("stage {stage} holds {seen} {what}; accepted: 1 to {most}")]
    Bound {
        /// Which stage.
        stage: u32,
        /// What it holds.
        what: &'static str,
        /// How many.
        seen: u32,
        /// The caller's bound.
        most: u32,
    },
}
