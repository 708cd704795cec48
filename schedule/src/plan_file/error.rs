//! Errors of plan files.

use super::PLAN_FILE_VERSION;
use crate::PlanError;

/// Why a plan file is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanFileError {
    /// The first line is not that of a plan file.
    #[error("it does not begin as a plan file; accepted: what `dormouse plan --out` wrote")]
    Head,
    /// Another version.
    #[error("it has version {seen}; accepted: {PLAN_FILE_VERSION}")]
    Version {
        /// The version.
        seen: u32,
    },
    /// Cut off, or longer than it was.
    #[error("it is damaged: {seen} bytes after its first line; accepted: {stated}, as that states")]
    Length {
        /// Bytes after the first line.
        seen: u64,
        /// Bytes that it states.
        stated: u64,
    },
    /// Changed since it was written.
    #[error("it is damaged: its checksum is {seen}; accepted: {stated}, as its first line states")]
    Checksum {
        /// The checksum of its bytes.
        seen: String,
        /// The checksum that it states.
        stated: String,
    },
    /// Fields are missing or of another type.
    #[error("it has no plan: {0}")]
    Json(#[from] serde_json::Error),
    /// A number out of range.
    #[error("it has no plan: {0}")]
    Number(#[from] PlanError),
    /// A node that cannot follow the nodes before it.
    #[error("it has no plan: node {node} {what}")]
    Node {
        /// The node.
        node: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// An op that cannot follow the ops before it.
    #[error("it has no plan: op {op} {what}")]
    Op {
        /// The op.
        op: usize,
        /// What is wrong.
        what: &'static str,
    },
}
