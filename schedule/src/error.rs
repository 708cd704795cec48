//! Errors of forests and plans, with the value seen and what is accepted.

use crate::OpId;

/// An error of a forest or a plan.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A prompt, response, sequence or node that is too short or too long.
    #[error("{of} has {seen} tokens; accepted: {accepted}")]
    Tokens {
        /// Its kind and number.
        of: String,
        /// Its tokens.
        seen: u64,
        /// The accepted range.
        accepted: String,
    },
    /// A token outside the vocabulary.
    #[error("sequence {sequence} has token id {seen} at {index}; accepted: 0 to {}", vocab.saturating_sub(1))]
    TokenId {
        /// Index of the sequence.
        sequence: usize,
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
        /// The accepted range.
        accepted: String,
    },
    /// A node out of depth-first order.
    #[error(
        "node {id} has parent {parent}; accepted: none, or a node on the path to the previous node"
    )]
    Node {
        /// The node.
        id: u32,
        /// Its parent.
        parent: u32,
    },
    /// Offsets that decrease or exceed the ids.
    #[error(
        "sequence {index} has offsets {begin} to {end}; accepted: ascending offsets from 0 to {ids}"
    )]
    Offsets {
        /// Index of the sequence.
        index: usize,
        /// Its first id.
        begin: u64,
        /// One past its last id.
        end: u64,
        /// Number of ids.
        ids: u64,
    },
    /// A sequence that ends outside its node.
    #[error("sequence {sequence} ends in node {node} after {seen} tokens; accepted: {accepted}")]
    Ending {
        /// Index of the sequence.
        sequence: usize,
        /// Its node.
        node: u32,
        /// Its tokens.
        seen: u64,
        /// The accepted range.
        accepted: String,
    },
    /// A leaf at whose end no sequence ends.
    #[error("0 sequences end at the end of leaf {node}; accepted: 1 or more")]
    Leaf {
        /// The leaf.
        node: u32,
    },
    /// Labels out of range or out of order.
    #[error(
        "sequence {sequence} scores labels {begin} to {end}; accepted: ascending disjoint spans \
         within 1 to {tokens}"
    )]
    Labels {
        /// Index of the sequence.
        sequence: usize,
        /// First label of the span.
        begin: u64,
        /// One past its last.
        end: u64,
        /// The sequence's tokens.
        tokens: u64,
    },
    /// A plan that exceeds memory for every choice of residency.
    #[error("op {} needs {needed_bytes} bytes of {budget_bytes} on the {tier}; {remedy}", op.0)]
    DoesNotFit {
        /// `device` or `host`.
        tier: &'static str,
        /// The op that needs the most.
        op: OpId,
        /// Bytes it needs in the plan of least memory.
        needed_bytes: u64,
        /// The budget in bytes.
        budget_bytes: u64,
        /// A change with which the plan fits.
        remedy: Remedy,
    },
    /// A completion of an op that is not outstanding.
    #[error("op {seen} {disorder}; accepted: {}", match expected {
        Some(id) => format!("op {}, returned last", id.0),
        None => "none; no op is outstanding".to_owned(),
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

/// A change with which a plan fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Remedy {
    /// Smaller microbatches, with at most these rows.
    #[error("microbatches of {0} rows fit")]
    MicrobatchRows(u32),
    /// Shorter blocks or more memory: microbatches of one row do not fit.
    #[error("shorter blocks or more memory would fit")]
    BlocksOrBytes,
}

/// The reason for refusing a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Disorder {
    /// The op is not in the plan.
    #[error("is not in the plan")]
    Unknown,
    /// The op is already completed.
    #[error("is already completed")]
    Twice,
    /// The op has not been returned yet.
    #[error("has not been returned yet")]
    Early,
    /// The op marks the end of the plan and is never completed.
    #[error("marks the end of the plan")]
    End,
}
