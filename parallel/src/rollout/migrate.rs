//! Migration of rollouts that exceed their prediction.

use serde::{Deserialize, Serialize};

use super::remaining::{DRAWS, Drawn, Remaining};
use super::{
    Assignment, Curve, History, LengthPredictor, PERMILLE, Progress, Rollout, RolloutError,
    RolloutRequest, curve::busy,
};
use dormouse_schedule::check_range;

/// Maximum destinations that are compared: the busy workers that end last.
const DESTINATIONS_MAX: usize = 16;
/// Maximum rollouts that leave a worker together; with more, it has no tail yet.
const LEAVING_MAX: usize = 64;

/// Part of what a migration saves that its cost must stay below: two equal sums may differ by their rounding.
const GAIN: f64 = 1.0 - 1e-9;

/// Options of migration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MigrationOptions {
    /// Share of a worker's rollouts, in thousandths, that is its tail. A worker migrates rollouts only when at
    /// most this share, or a single rollout, is unfinished. 0 disables migration.
    pub tail_permille: u32,
    /// Ratio of actual to predicted length, in thousandths, above which a rollout migrates.
    pub growth_permille: u32,
    /// Maximum unfinished rollouts of a destination worker, including the migrated one.
    pub batch_max: u32,
    /// Measured decoding speed; `None` if a token takes the same time in any batch.
    #[serde(default)]
    pub curve: Option<Curve>,
    /// Time to recompute the K and V of one token, in thousandths of the time in which a rollout that is alone
    /// decodes one.
    #[serde(default = "recompute_permille")]
    pub recompute_permille: u32,
    /// What a later end of the step costs, in thousandths of the time by which it is later, for each worker.
    #[serde(default = "late_permille")]
    pub late_permille: u32,
    /// Whether rollouts may wait for the next step.
    #[serde(default = "next_step")]
    pub next_step: bool,
    /// How the assignment's lengths were predicted.
    #[serde(default)]
    pub predictor: LengthPredictor,
}

fn recompute_permille() -> u32 {
    PERMILLE / 100
}

fn late_permille() -> u32 {
    PERMILLE
}

fn next_step() -> bool {
    true
}

impl Default for MigrationOptions {
    fn default() -> Self {
        Self {
            tail_permille: PERMILLE / 10,
            growth_permille: 3 * PERMILLE / 2,
            batch_max: u32::MAX,
            curve: None,
            recompute_permille: recompute_permille(),
            late_permille: late_permille(),
            next_step: next_step(),
            predictor: LengthPredictor::default(),
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

/// Proposes migrations of rollouts in their worker's tail that exceed their prediction.
///
/// A rollout may go on as responses of `history` did that were longer and had nearly its prediction; it ends, if
/// none was longer; without lengths in `history`, it grows by `growth_permille`. The time of a step is that of all
/// workers, and that of its end for each of them, by `late_permille`; it is predicted in the mean of what rollouts
/// may have left. What has outgrown its prediction leaves a worker together, if that lowers the predicted time, with
/// the K and V that destinations recompute. A destination is a busy worker. If there is none, rollouts are deferred for
/// which only their worker keeps the step, if the step is predicted to end earlier by more than the
/// recomputation. Workers with the fewest unfinished rollouts choose first; no worker both migrates and receives.
///
/// # Errors
/// [`RolloutError::Progress`] for progress that does not match the assignment, [`RolloutError::Count`] for
/// numbers out of range or a wrong number of requests.
pub fn migrate(
    assignment: &Assignment,
    requests: &[RolloutRequest],
    history: &History,
    progress: &Progress,
    options: &MigrationOptions,
) -> Result<Vec<Migration>, RolloutError> {
    check_range("tail_permille", options.tail_permille, 0, PERMILLE)?;
    check_range("growth_permille", options.growth_permille, PERMILLE, u32::MAX)?;
    options.curve.as_ref().map_or(Ok(()), Curve::check)?;
    let placed = assignment.placed.len() as u64;
    check_range("requests", requests.len() as u64, placed, placed)?;
    options.predictor.check(requests)?;
    progress.check(assignment)?;
    let remaining = Remaining::of(history, &options.predictor, options.growth_permille)?;
    let mut load = Load::of(assignment, requests, &remaining, progress, options);
    let mut sources: Vec<usize> =
        (0..load.workers.len()).filter(|&worker| load.workers[worker].in_tail(options)).collect();
    sources.sort_by_key(|&worker| load.workers[worker].unfinished.len());
    let mut migrations = Vec::new();
    for from in sources {
        migrations.extend(load.leave(from));
    }
    migrations
        .sort_unstable_by_key(|one| (std::cmp::Reverse(one.tokens), one.request, one.response));
    Ok(migrations)
}

/// An unfinished rollout.
#[derive(Clone, Copy)]
struct Unfinished<'a> {
    rollout: &'a Rollout,
    grown: bool,
    remaining_tokens: Drawn<u64>,
    recompute_tokens: u64,
}

/// What a worker has.
#[derive(Default)]
struct Worker<'a> {
    rollouts: u64,
    unfinished: Vec<Unfinished<'a>>,
    /// Time of recomputation for rollouts that it receives.
    recompute: f64,
    received: bool,
    migrated: bool,
}

impl Worker<'_> {
    fn in_tail(&self, options: &MigrationOptions) -> bool {
        let left = self.unfinished.len() as u64;
        let share = left * u64::from(PERMILLE) <= self.rollouts * u64::from(options.tail_permille);
        left > 0 && (share || left == 1 && options.tail_permille > 0)
    }
}

/// The workers, and the time that they are predicted to take from now.
struct Load<'a> {
    workers: Vec<Worker<'a>>,
    ends: Vec<Drawn<f64>>,
    options: &'a MigrationOptions,
}

impl<'a> Load<'a> {
    fn of(
        assignment: &Assignment,
        requests: &[RolloutRequest],
        remaining: &Remaining,
        progress: &'a Progress,
        options: &'a MigrationOptions,
    ) -> Self {
        let mut workers: Vec<Worker<'a>> = Vec::new();
        workers.resize_with(assignment.workers as usize, Worker::default);
        let (growth, whole) = (u128::from(options.growth_permille), u128::from(PERMILLE));
        for one in &progress.rollouts {
            let worker = &mut workers[one.worker as usize];
            worker.rollouts += 1;
            if one.finished {
                continue;
            }
            let predicted = assignment.placed[one.request as usize].predicted_tokens;
            let tokens = u128::from(one.tokens);
            worker.unfinished.push(Unfinished {
                rollout: one,
                grown: tokens * whole > u128::from(predicted) * growth,
                remaining_tokens: remaining.tokens(predicted, one),
                recompute_tokens: requests[one.request as usize]
                    .prompt_tokens
                    .saturating_add(one.tokens),
            });
        }
        let mut load = Self { ends: vec![[0.0; DRAWS]; workers.len()], workers, options };
        for worker in 0..load.workers.len() {
            load.ends[worker] = load.end(worker);
        }
        load
    }

    /// The time of a worker with these unfinished rollouts.
    fn time<'b>(&self, unfinished: impl Iterator<Item = &'b Unfinished<'b>>) -> Drawn<f64> {
        let unfinished: Vec<&Unfinished<'_>> = unfinished.collect();
        std::array::from_fn(|draw| {
            let left = unfinished.iter().map(|one| (one.remaining_tokens[draw], 1));
            busy(self.options.curve.as_ref(), &mut left.collect::<Vec<(u64, u32)>>())
        })
    }

    fn end(&self, worker: usize) -> Drawn<f64> {
        let worker = &self.workers[worker];
        self.time(worker.unfinished.iter()).map(|time| worker.recompute + time)
    }

    /// Time of the step for each unit of time by which it ends later.
    fn late(&self) -> f64 {
        let share = f64::from(self.options.late_permille) / f64::from(PERMILLE);
        share * self.workers.len() as f64
    }

    fn recompute(&self, one: &Unfinished<'_>) -> f64 {
        let token = self.options.curve.as_ref().map_or(1.0, |curve| curve.token_s(1));
        let share = f64::from(self.options.recompute_permille) / f64::from(PERMILLE);
        one.recompute_tokens as f64 * share * token
    }

    /// Moves what has outgrown its prediction from a worker if that saves more than it costs.
    fn leave(&mut self, from: usize) -> Vec<Migration> {
        let (leaving, staying): (Vec<_>, Vec<_>) =
            self.workers[from].unfinished.iter().copied().partition(|one| one.grown);
        if !(1..=LEAVING_MAX).contains(&leaving.len()) || self.workers[from].received {
            return Vec::new();
        }
        let (before, after) = (self.ends[from], self.time(staying.iter()));
        let others = (0..self.ends.len()).filter(|worker| *worker != from);
        let rest = others.fold(after, |rest, other| latest(&rest, &self.ends[other]));
        let earlier = mean(|draw| (before[draw] - rest[draw]).max(0.0));
        let saved = mean(|draw| before[draw] - after[draw]) + earlier * self.late();
        let recompute: f64 = leaving.iter().map(|one| self.recompute(one)).sum();
        let to: Vec<Destination> = match self.destinations(from, &leaving, saved, &rest) {
            Some(chosen) => {
                for (one, to) in leaving.iter().zip(&chosen) {
                    self.receive(*to, *one);
                }
                chosen.into_iter().map(|to| Destination::Worker(to as u32)).collect()
            }
            None if self.options.next_step && recompute < earlier * GAIN => {
                vec![Destination::NextStep; leaving.len()]
            }
            None => return Vec::new(),
        };
        self.workers[from].unfinished = staying;
        self.workers[from].migrated = true;
        self.ends[from] = after;
        let migration = |(one, to): (Unfinished<'_>, Destination)| Migration {
            request: one.rollout.request,
            response: one.rollout.response,
            from: from as u32,
            to,
            tokens: one.rollout.tokens,
            recompute_tokens: one.recompute_tokens,
        };
        leaving.into_iter().zip(to).map(migration).collect()
    }

    fn receive(&mut self, to: usize, one: Unfinished<'a>) {
        let recompute = self.recompute(&one);
        let worker = &mut self.workers[to];
        worker.unfinished.push(one);
        worker.recompute += recompute;
        worker.received = true;
        self.ends[to] = self.end(to);
    }

    /// Returns the worker to which each rollout costs least, ties to the one with the most unfinished, if
    /// together they cost less than `saved`. `rest` is when all that does not leave ends.
    fn destinations(
        &self,
        from: usize,
        leaving: &[Unfinished<'a>],
        saved: f64,
        rest: &Drawn<f64>,
    ) -> Option<Vec<usize>> {
        let mut busy: Vec<usize> = (0..self.workers.len())
            .filter(|&to| to != from && !self.workers[to].migrated)
            .filter(|&to| !self.workers[to].unfinished.is_empty())
            .filter(|&to| self.workers[to].unfinished.len() < self.options.batch_max as usize)
            .collect();
        let end = |worker: usize| mean(|draw| self.ends[worker][draw]);
        busy.sort_by(|one, other| end(*other).total_cmp(&end(*one)));
        busy.truncate(DESTINATIONS_MAX);
        let mut received: Vec<Vec<Unfinished<'a>>> = vec![Vec::new(); busy.len()];
        let mut chosen = Vec::with_capacity(leaving.len());
        let (mut added, mut last) = (0.0, *rest);
        for one in leaving {
            let end = |slot: usize, extra: &[Unfinished<'a>]| {
                let worker = &self.workers[busy[slot]];
                let new = || received[slot].iter().chain(extra);
                let recompute: f64 = new().map(|one| self.recompute(one)).sum();
                let time = self.time(worker.unfinished.iter().chain(new()));
                time.map(|time| worker.recompute + recompute + time)
            };
            let left =
                |slot: usize| self.workers[busy[slot]].unfinished.len() + received[slot].len();
            let cost = |slot: usize| {
                let (end_with, end) = (end(slot, &[*one]), end(slot, &[]));
                let later = mean(|draw| (end_with[draw] - last[draw]).max(0.0));
                let longer = mean(|draw| end_with[draw] - end[draw]);
                (longer + later * self.late(), end_with, slot)
            };
            let (least, end_with, slot) = (0..busy.len())
                .filter(|&slot| left(slot) < self.options.batch_max as usize)
                .map(cost)
                .min_by(|(one, _, a), (other, _, b)| {
                    one.total_cmp(other).then(left(*b).cmp(&left(*a)))
                })?;
            added += least;
            last = latest(&last, &end_with);
            received[slot].push(*one);
            chosen.push(busy[slot]);
        }
        (added < saved * GAIN).then_some(chosen)
    }
}

fn mean(of: impl Fn(usize) -> f64) -> f64 {
    (0..DRAWS).map(of).sum::<f64>() / DRAWS as f64
}

fn latest(ends: &Drawn<f64>, others: &Drawn<f64>) -> Drawn<f64> {
    std::array::from_fn(|draw| ends[draw].max(others[draw]))
}
