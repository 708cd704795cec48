//! What a plan refuses, with the values seen.

use std::fmt;

use crate::OpId;
use crate::limits::{PROMPT_TOKENS_MIN, RESPONSES_MAX, TOKENS_MAX};

/// Why a plan was not made, or did not move on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Too short to share.
    #[error("prompt has {seen} tokens; accepted: {PROMPT_TOKENS_MIN} to {TOKENS_MAX}")]
    PromptLength {
        /// Its tokens.
        seen: u64,
    },
    /// Nothing to train on, or too long.
    #[error("response {index} has {seen} tokens; accepted: 1 to {TOKENS_MAX}")]
    ResponseLength {
        /// Which response.
        index: usize,
        /// Its tokens.
        seen: u64,
    },
    /// No responses, or too many.
    #[error("{seen} responses; accepted: 1 to {RESPONSES_MAX}")]
    ResponseCount {
        /// How many.
        seen: usize,
    },
    /// A token outside the vocabulary.
    #[error("{place} has token id {seen} at {index}; accepted: 0 to {}", vocab.saturating_sub(1))]
    TokenId {
        /// `prompt`, `response i` or `sequence i`.
        place: String,
        /// Which token of it.
        index: usize,
        /// The id.
        seen: i64,
        /// The vocabulary.
        vocab: u32,
    },
    /// A weight that is not finite.
    #[error("weight {index} is {seen}; accepted: finite numbers")]
    Weight {
        /// Which response.
        index: usize,
        /// Its weight.
        seen: f64,
    },
    /// A count that must not be what it is.
    #[error("{what} is {seen}; accepted: {accepted}")]
    Count {
        /// Which field.
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
    /// A batch that no choice of residency brings within memory.
    #[error("op {} needs {needed_bytes} bytes of {budget_bytes} on the {tier}; {remedy}", op.0)]
    DoesNotFit {
        /// `device` or `host`.
        tier: &'static str,
        /// The op that needs most.
        op: OpId,
        /// What it needs, in the plan that needs least.
        needed_bytes: u64,
        /// What there is.
        budget_bytes: u64,
        /// What would fit.
        remedy: Remedy,
    },
    /// An op completed that is not the one given last.
    #[error("op {seen} completed {disorder}; accepted: {}", match expected {
        Some(id) => format!("op {}, given last", id.0),
        None => "none, no op is outstanding".to_owned(),
    })]
    Order {
        /// The id seen.
        seen: u64,
        /// What is wrong with it.
        disorder: Disorder,
        /// The op that is outstanding.
        expected: Option<OpId>,
    },
}

/// What would fit where a batch does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remedy {
    /// Smaller microbatches; the most rows of one that fit.
    MicrobatchRows(u32),
    /// Microbatches of a row are still too many: shorter blocks, or as much memory as is needed.
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

/// What is wrong with a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Disorder {
    /// The plan has no such op.
    Unknown,
    /// It was completed before.
    Twice,
    /// It was not given yet.
    Early,
    /// It is the end of the plan, which nobody completes.
    End,
}

impl fmt::Display for Disorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unknown => "that the plan does not have",
            Self::Twice => "a second time",
            Self::Early => "before it was given",
            Self::End => "that only says that nothing is left",
        })
    }
}
