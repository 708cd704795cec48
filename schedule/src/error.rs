//! Errors of forests and plans, with the value seen and what is accepted.

use std::fmt;

use crate::OpId;
use crate::limits::{PROMPT_TOKENS_MIN, RESPONSES_MAX, TOKENS_MAX};

/// Why a forest or plan was refused, or an op was not completed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A prompt that is too short to share, or too long.
    #[error("prompt has {seen} tokens; accepted: {PROMPT_TOKENS_MIN} to {TOKENS_MAX}")]
    PromptLength {
        /// Its tokens.
        seen: u64,
    },
    /// A response that is empty or too long.
    #[error("response {index} has {seen} tokens; accepted: 1 to {TOKENS_MAX}")]
    ResponseLength {
        /// Which response.
        index: usize,
        /// Its tokens.
        seen: u64,
    },
    /// A group without responses, or with too many.
    #[error("{seen} responses; accepted: 1 to {RESPONSES_MAX}")]
    ResponseCount {
        /// Number of responses.
        seen: usize,
    },
    /// A token outside the vocabulary.
    #[error("{place} has token id {seen} at {index}; accepted: 0 to {}", vocab.saturating_sub(1))]
    TokenId {
        /// `sequence i`.
        place: String,
        /// Index of the token.
        index: usize,
        /// The token id.
        seen: i64,
        /// Size of the vocabulary.
        vocab: u32,
    },
    /// A weight that is not finite.
    #[error("weight {index} is {seen}; accepted: finite numbers")]
    Weight {
        /// Index of the sequence.
        index: usize,
        /// Its weight.
        seen: f64,
    },
    /// A number outside its limits.
    #[error("{what} is {seen}; accepted: {accepted}")]
    Count {
        /// Name of the field.
        what: &'static str,
        /// Its value.
        seen: u64,
        /// What is accepted.
        accepted: String,
    },
    /// A node whose parent is not on the path to the node before it.
    #[error(
        "node {id} has parent {parent}; accepted: a node on the path to the one before, or none"
    )]
    Node {
        /// Which node.
        id: u32,
        /// Its parent.
        parent: u32,
    },
    /// A node with no tokens, or a path too long.
    #[error("node {id} has {seen} tokens after {begin}; accepted: 1 to {TOKENS_MAX} in all")]
    NodeLength {
        /// Which node.
        id: u32,
        /// Its tokens.
        seen: u64,
        /// Tokens of its ancestors.
        begin: u64,
    },
    /// A sequence that is empty, or too long.
    #[error("sequence {index} has {seen} tokens; accepted: 1 to {TOKENS_MAX}")]
    SequenceLength {
        /// Which sequence.
        index: usize,
        /// Its tokens.
        seen: u64,
    },
    /// Offsets that are no run of the ids.
    #[error(
        "sequence {index} is ids {begin} to {end}; accepted: offsets that rise, to {ids} at most"
    )]
    Offsets {
        /// Which sequence.
        index: usize,
        /// Its first id.
        begin: u64,
        /// One past its last.
        end: u64,
        /// Ids of the batch.
        ids: u64,
    },
    /// A sequence that ends where its node is not.
    #[error("sequence {sequence} ends in node {node} after {seen} tokens; accepted: {accepted}")]
    Ending {
        /// Which sequence.
        sequence: usize,
        /// In which node.
        node: u32,
        /// After how many tokens.
        seen: u64,
        /// What is accepted.
        accepted: String,
    },
    /// A leaf whose last tokens belong to no sequence.
    #[error("no sequence ends at the end of leaf {node}; accepted: one or more")]
    Leaf {
        /// Which leaf.
        node: u32,
    },
    /// Labels that a sequence does not have, or that are not in order.
    #[error(
        "sequence {sequence} scores labels {begin} to {end}; accepted: spans after one another \
         within 1 to {tokens}"
    )]
    Labels {
        /// Which sequence.
        sequence: usize,
        /// First label of the span.
        begin: u64,
        /// One past its last.
        end: u64,
        /// The sequence's tokens.
        tokens: u64,
    },
    /// No choice of residency brings the plan within memory.
    #[error("op {} needs {needed_bytes} bytes of {budget_bytes} on the {tier}; {remedy}", op.0)]
    DoesNotFit {
        /// `device` or `host`.
        tier: &'static str,
        /// The op that needs the most.
        op: OpId,
        /// Bytes it needs, in the plan that needs the least.
        needed_bytes: u64,
        /// The budget in bytes.
        budget_bytes: u64,
        /// A change that would fit.
        remedy: Remedy,
    },
    /// A completion of an op other than the outstanding one.
    #[error("op {seen} {disorder}; accepted: {}", match expected {
        Some(id) => format!("op {}, given last", id.0),
        None => "none, no op is outstanding".to_owned(),
    })]
    Order {
        /// The id seen.
        seen: u64,
        /// The reason.
        disorder: Disorder,
        /// The outstanding op.
        expected: Option<OpId>,
    },
}

/// A change that makes a plan fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Smaller microbatches: the maximum rows of one that fit.
    MicrobatchRows(u32),
    /// Microbatches of one row do not fit: shorter blocks or more memory.
    BlocksOrBytes,
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MicrobatchRows(rows) => write!(f, "microbatches of {rows} rows fit"),
            Self::BlocksOrBytes => f.write_str("shorter blocks or more memory would fit"),
        }
    }
}

/// Why a completion is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Disorder {
    /// The op is not in the plan.
    Unknown,
    /// The op is already completed.
    Twice,
    /// The op has not been given yet.
    Early,
    /// The op marks the end of the plan and is never completed.
    End,
}

impl fmt::Display for Disorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "is not in the plan",
            Self::Twice => "is already completed",
            Self::Early => "has not been given yet",
            Self::End => "marks the end of the plan",
        })
    }
}
