//! Assignment of prompts to rollout workers by the lengths of earlier responses.
//!
//! A step ends with its longest response, so workers with short responses idle. Prompts are *ranked* by
//! predicted length and cut into *groups*; workers ascend by predicted time in odd steps and
//! descend in even steps, so that a worker's long share overlaps its short one of the next step.
//! A group's workers are its *tier*; long groups get larger tiers, hence smaller batches that decode faster.
//! Groups, their numbers of prompts and tiers that are not given are chosen by *trials*: each recent step of the
//! history, predicted from the others. A rollout that exceeds its prediction *migrates* to another worker or to the next step.
//!
//! # Invariants
//! - **R1** Every prompt has one group and one worker; groups ascend by predicted length.
//! - **R2** Migrations neither lose nor duplicate a rollout, and each is predicted to save more than it costs, in the
//!   mean of what rollouts may have left.
//! - **R3** Ties are broken by number: the same data gives the same assignment on every rank.
//! - **R4** In the trials, what was chosen takes no longer than equal tiers whose groups have equal numbers of prompts.
//!
//! ```text
//!   History ─► predict ─► rank ─► groups ─► tiers ─► Assignment ──Progress──► Migration …
//!                                            ▲                      └───────► RolloutReport
//!   step 1   worker 0 ▒▒      1 ▒▒▒▒      2 ▒▒▒▒▒▒▒▒     Curve
//!   step 2   worker 0 ████████ 1 ████     2 ██
//! ```

mod assign;
mod choose;
mod curve;
mod history;
mod migrate;
mod progress;
mod remaining;
mod report;
mod tiers;
mod trial;

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
/// A share of 1, in thousandths.
pub const PERMILLE: u32 = 1000;

/// A prompt to generate responses for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutRequest {
    /// The caller's identifier of the prompt, stable across steps.
    pub prompt: u64,
    /// Tokens of the prompt, which a migration recomputes.
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
    /// Equal numbers of prompts, within one. Where groups are chosen, their numbers may rise or fall, from
    /// a tenth of the mean to 1.9 times.
    #[default]
    EqualCount,
    /// Runs of ranked prompts that minimise the largest sum of predicted tokens.
    EqualWork,
}

/// Options of an assignment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepOptions {
    /// Step number: groups ascend in odd steps and descend in even steps.
    pub step: u64,
    /// Rollout workers, 1 to [`WORKERS_MAX`] and at most the prompts.
    pub workers: u32,
    /// Groups, at most the workers; without a curve, a divisor of the workers. `None` to choose.
    #[serde(default)]
    pub groups: Option<u32>,
    /// How prompts are cut into groups.
    pub cut: GroupCut,
    /// Measured decoding speed, which determines tier sizes; `None` for equal tiers.
    #[serde(default)]
    pub curve: Option<Curve>,
    /// Additional time of the longest group over the shortest, in thousandths; 0 for equal times. Other
    /// groups are interpolated linearly, so that two successive steps of a worker add up evenly. `None` to
    /// choose it, or equal tiers.
    #[serde(default)]
    pub slope_permille: Option<u32>,
}

/// An error of rollout planning.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RolloutError {
    /// A number is out of range.
    #[error(transparent)]
    Count(#[from] PlanError),
    /// A prompt occurs twice.
    #[error("prompt {prompt} occurs twice; accepted: once")]
    Twice {
        /// The prompt.
        prompt: u64,
    },
    /// The workers are not a multiple of the groups and no curve is given.
    #[error(
        "{workers} workers for {groups} groups; accepted: a multiple of the groups, or a curve"
    )]
    Tiers {
        /// Workers.
        workers: u32,
        /// Groups.
        groups: u32,
    },
    /// An invalid point of a curve.
    #[error(
        "curve point {index} is {tokens_per_s} tokens/s at batch {batch}; accepted: ascending \
         batches, speeds above 0, and no higher speed per sequence than at the previous point"
    )]
    Curve {
        /// Index of the point.
        index: usize,
        /// Batch size.
        batch: u32,
        /// Tokens per second.
        tokens_per_s: f64,
    },
    /// A migration of a rollout that is not there to migrate.
    #[error(
        "migration {index} is of response {response} of request {request}; accepted: an unfinished rollout \
         on the worker that it leaves, once"
    )]
    Migration {
        /// Index of the migration.
        index: usize,
        /// Request number.
        request: u32,
        /// Response number.
        response: u32,
    },
    /// Progress does not match the assignment.
    #[error(
        "rollout {index} is response {response} of request {request} on worker {worker}; accepted: each \
         response of each request once, on a worker of the assignment"
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
