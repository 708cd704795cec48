//! Migration of rollouts that exceed their prediction.

use serde::{Deserialize, Serialize};

use super::{Assignment, PERMILLE, Progress, Rollout, RolloutError, RolloutRequest};
use dormouse_schedule::check_range;

/// Options of migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationOptions {
    /// Share of a worker's rollouts, in thousandths, that is its tail. A worker migrates rollouts only when at
    /// most this share, or a single rollout, is unfinished. 0 disables migration.
    pub tail_permille: u32,
    /// Ratio of actual to predicted length, in thousandths, above which a rollout migrates.
    pub growth_permille: u32,
    /// Maximum unfinished rollouts of a destination worker, including the migrated one.
    pub batch_max: u32,
}

impl Default for MigrationOptions {
    fn default() -> Self {
        Self {
            tail_permille: PERMILLE / 10,
            growth_permille: 3 * PERMILLE / 2,
            batch_max: u32::MAX,
        }
    }
}

/// Destination of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Destination {
    /// Another worker, in this step.
    Worker(u32),
    /// The next step, as a request with `begun_tokens`.
    NextStep,
}

/// A proposed migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Migration {
    /// Request number.
    pub request: u32,
    /// Response number.
    pub response: u32,
    /// The worker it leaves.
    pub from: u32,
    /// Destination.
    pub to: Destination,
    /// Tokens so far.
    pub tokens: u64,
    /// Tokens whose K and V are recomputed at the destination: the prompt's and its own.
    pub recompute_tokens: u64,
}

/// Proposes migrations of rollouts in their worker's tail that exceed their prediction. The destination is
/// the worker with the fewest unfinished rollouts among busy workers of longer groups whose predicted length
/// exceeds the rollout's; if there is none, the next step. Longest rollouts choose first.
///
/// # Errors
/// [`RolloutError::Progress`] for progress that does not match the assignment, [`RolloutError::Count`] for
/// numbers out of range or a wrong number of requests.
pub fn migrate(
    assignment: &Assignment,
    requests: &[RolloutRequest],
    progress: &Progress,
    options: &MigrationOptions,
) -> Result<Vec<Migration>, RolloutError> {
    check_range("tail_permille", options.tail_permille, 0, PERMILLE)?;
    check_range("growth_permille", options.growth_permille, PERMILLE, u32::MAX)?;
    let placed = assignment.placed.len() as u64;
    check_range("requests", requests.len() as u64, placed, placed)?;
    progress.check(assignment)?;
    let mut load = Load::of(assignment, progress);
    let mut grown: Vec<&Rollout> = progress
        .rollouts
        .iter()
        .filter(|one| {
            let predicted = assignment.placed[one.request as usize].predicted_tokens;
            let limit = u128::from(predicted) * u128::from(options.growth_permille);
            !one.finished
                && load.in_tail(one.worker, options.tail_permille)
                && u128::from(one.tokens) * u128::from(PERMILLE) > limit
        })
        .collect();
    grown.sort_unstable_by_key(|one| (std::cmp::Reverse(one.tokens), one.request, one.response));
    Ok(grown
        .into_iter()
        .map(|one| Migration {
            request: one.request,
            response: one.response,
            from: one.worker,
            to: load.take(one, options.batch_max),
            tokens: one.tokens,
            recompute_tokens: requests[one.request as usize]
                .prompt_tokens
                .saturating_add(one.tokens),
        })
        .collect())
}

/// Remaining work of each worker.
struct Load {
    rollouts: Vec<u64>,
    unfinished: Vec<u64>,
    /// Predicted tokens of the longest response of its group.
    longest_tokens: Vec<u64>,
}

impl Load {
    fn of(assignment: &Assignment, progress: &Progress) -> Self {
        let workers = assignment.workers as usize;
        let mut load = Self {
            rollouts: vec![0; workers],
            unfinished: vec![0; workers],
            longest_tokens: vec![0; workers],
        };
        for one in &progress.rollouts {
            load.rollouts[one.worker as usize] += 1;
            load.unfinished[one.worker as usize] += u64::from(!one.finished);
        }
        for group in &assignment.groups {
            for worker in group.workers.begin..group.workers.end {
                load.longest_tokens[worker as usize] = group.longest_tokens;
            }
        }
        load
    }

    fn in_tail(&self, worker: u32, tail_permille: u32) -> bool {
        let (left, all) = (self.unfinished[worker as usize], self.rollouts[worker as usize]);
        let last = left == 1 && tail_permille > 0;
        last || left * u64::from(PERMILLE) <= all * u64::from(tail_permille)
    }

    fn take(&mut self, one: &Rollout, batch_max: u32) -> Destination {
        let from = one.worker as usize;
        let to = (0..self.unfinished.len())
            .filter(|&worker| {
                worker != from
                    && (1..u64::from(batch_max)).contains(&self.unfinished[worker])
                    && self.longest_tokens[worker] > one.tokens.max(self.longest_tokens[from])
            })
            .min_by_key(|&worker| (self.unfinished[worker], worker));
        self.unfinished[from] -= 1;
        let Some(to) = to else { return Destination::NextStep };
        self.unfinished[to] += 1;
        Destination::Worker(to as u32)
    }
}
