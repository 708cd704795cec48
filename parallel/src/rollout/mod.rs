//! Which rollout worker generates which prompts, from what the same prompts took before.
//!
//! A step ends with its longest response, so workers with short ones idle. Prompts are *ranked* by
//! predicted length and cut into *groups*; in odd steps groups go to workers ascending, in even steps
//! descending, so that a worker's long group overlaps its short one of the next step. A group's
//! workers are its *tier*; long groups get larger tiers, so that batches are smaller and decode
//! faster. A rollout that outgrows its prediction *migrates*, now or to the next step.
//!
//! # Invariants
//! - **R1** Every prompt has one group and one worker; groups ascend by predicted length.
//! - **R2** Migrations neither lose nor double a rollout.
//! - **R3** Ties are broken by number: the same data gives the same assignment on every rank.
//!
//! ```text
//!   History ─► predict ─► rank ─► groups ─► tiers ─► Assignment ──Progress──► Migration …
//!                                            ▲                      └───────► RolloutReport
//!   step 1   worker 0 ▒▒      1 ▒▒▒▒      2 ▒▒▒▒▒▒▒▒     Curve
//!   step 2   worker 0 ████████ 1 ████     2 ██
//! ```

mod assign;
mod curve;
mod groups;
mod history;
mod migrate;
mod progress;
mod report;
mod tiers;

use serde::{Deserialize, Serialize};

pub use assign::{Assignment, PlacedPrompt, RolloutGroup};
pub use curve::Curve;
pub use history::{History, LengthPredictor, Predicted, PromptHistory};
pub use migrate::{Destination, Migration, MigrationOptions, migrate};
pub use progress::{Progress, Rollout};
pub use report::{RankShift, RolloutReport, WorkerReport};
pub use tiers::tier_sizes;

use dormouse_schedule::PlanError;

/// Maximum prompts per step.
pub const PROMPTS_MAX: u64 = 1 << 20;
/// Maximum prompts with a history.
pub const HISTORY_PROMPTS_MAX: u64 = 1 << 24;
/// Maximum responses per prompt and step.
pub const PROMPT_RESPONSES_MAX: u32 = 1 << 12;
/// Maximum rollouts per step.
pub const ROLLOUTS_MAX: u64 = 1 << 24;
/// Maximum number of workers.
pub const WORKERS_MAX: u32 = 1 << 12;
/// One, in thousandths.
pub const PERMILLE: u32 = 1000;

/// A prompt to generate responses for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutRequest {
    /// The caller's identifier of the prompt, stable across steps.
    pub prompt: u64,
    /// Its tokens: what a migration computes again with what was generated.
    pub prompt_tokens: u64,
    /// Responses to generate.
    pub responses: u32,
    /// Tokens of a rollout deferred to this step; 0 for none. No prediction is shorter.
    pub begun_tokens: u64,
}

/// How ranked prompts are divided into groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupCut {
    /// Equal numbers of prompts, within one.
    #[default]
    EqualCount,
    /// As even in predicted tokens as runs of ranked prompts can be: the largest is least.
    EqualWork,
}

/// Options of an assignment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepOptions {
    /// Number of the step: odd ones ascend, even ones descend.
    pub step: u64,
    /// Rollout workers, 1 to [`WORKERS_MAX`] and at most the prompts.
    pub workers: u32,
    /// Groups, at most the workers. Without a curve they divide the workers.
    pub groups: u32,
    /// How prompts are cut into groups.
    pub cut: GroupCut,
    /// Measured decoding speed, by which tiers get their sizes; `None` for equal tiers.
    pub curve: Option<Curve>,
    /// How much longer the longest group may take than the shortest, in thousandths: 0 for equal
    /// times. Groups between lie on a line, so that a worker's two steps add up to the same.
    pub slope_permille: u32,
}

/// An error of rollout planning.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RolloutError {
    /// A number is out of range.
    #[error(transparent)]
    Count(#[from] PlanError),
    /// A prompt occurs twice.
    #[error("prompt {prompt} is named twice; accepted: each once")]
    Twice {
        /// The prompt.
        prompt: u64,
    },
    /// The workers are not a multiple of the groups and no curve is given.
    #[error("{workers} workers for {groups} groups; accepted: a multiple, or a measured curve")]
    Tiers {
        /// Workers.
        workers: u32,
        /// Groups.
        groups: u32,
    },
    /// An invalid point of a curve.
    #[error(
        "curve point {index} is {tokens_per_s} tokens/s at batch {batch}; accepted: larger batches \
         in turn, speeds above 0, and no more for each sequence than at the point before"
    )]
    Curve {
        /// Index of the point.
        index: usize,
        /// Batch size.
        batch: u32,
        /// Tokens per second.
        tokens_per_s: f64,
    },
    /// Progress does not match the assignment.
    #[error(
        "rollout {index} is response {response} of request {request} on worker {worker}; accepted: each \
         response of each request once, on a worker of the step"
    )]
    Progress {
        /// Index of the rollout.
        index: usize,
        /// Request number.
        request: u32,
        /// Response number.
        response: u32,
        /// Worker number.
        worker: u32,
    },
}
