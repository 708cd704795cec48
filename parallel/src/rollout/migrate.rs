//! Moving rollouts that outgrow their prediction.

use serde::{Deserialize, Serialize};

use super::{Assignment, PERMILLE, Progress, Rollout, RolloutError, RolloutRequest};
use dormouse_schedule::check_range;

/// When a rollout is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationOptions {
    /// Share of a worker's rollouts, in thousandths, that are its tail: it is looked at only once no
    /// more than these are unfinished, or the last alone is. 0 moves nothing.
    pub tail_permille: u32,
    /// How much longer than predicted a rollout must be, in thousandths: 1500 is half as long again.
    pub growth_permille: u32,
    /// Unfinished rollouts a worker may have when one is moved to it.
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
    /// On another worker, in this step.
    Worker(u32),
    /// In the next step, as an request of its own with `begun_tokens`.
    NextStep,
}

/// One proposed move.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Migration {
    /// Which request.
    pub request: u32,
    /// Which of its responses.
    pub response: u32,
    /// The worker it leaves.
    pub from: u32,
    /// Destination.
    pub to: Destination,
    /// Tokens so far.
    pub tokens: u64,
    /// Tokens whose keys and values are computed again there: the prompt's and its own.
    pub recompute_tokens: u64,
}

/// Moves for rollouts in their worker's tail that have outgrown their prediction. A rollout moves to
/// a worker still busy of a longer group that is predicted to run on for longer than it has run, the
/// one with fewest unfinished, and waits for the next step where there is none. Longest rollouts
/// choose first.
///
/// # Errors
/// [`RolloutError::Progress`] for progress that is not the assignment's, [`RolloutError::Count`] for
/// options or tokens outside their limits, or as many requests as were not assigned.
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

/// What each worker has left.
struct Load {
    rollouts: Vec<u64>,
    unfinished: Vec<u64>,
    /// Predicted tokens of the longest its group has.
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
