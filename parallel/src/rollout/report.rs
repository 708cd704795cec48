//! Predicted versus actual lengths.

use serde::{Deserialize, Serialize};

use super::{Assignment, Curve, PERMILLE, Progress, RolloutError, curve};
use dormouse_schedule::check_range;

/// One worker's step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkerReport {
    /// Predicted tokens of its rollouts.
    pub predicted_tokens: u64,
    /// Actual tokens of the rollouts now on it, and of those deferred from it.
    pub actual_tokens: u64,
    /// Decoding time of the predicted lengths in seconds; 0 without a curve.
    pub predicted_s: f64,
    /// Decoding time of the actual lengths in seconds; 0 without a curve.
    pub actual_s: f64,
    /// Share of the step in which it idles, by time, or without a curve by its longest response.
    pub idle_share: f64,
}

/// Shift of prompts from predicted to actual rank; 1 is from one end to the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankShift {
    /// Mean shift.
    pub mean: f64,
    /// Largest shift.
    pub most: f64,
    /// Share of prompts that shifted by more than `strong_permille`.
    pub strong_share: f64,
}

/// Predicted versus actual lengths.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RolloutReport {
    /// By worker.
    pub workers: Vec<WorkerReport>,
    /// Predicted tokens of the busiest worker divided by the mean.
    pub predicted_imbalance: f64,
    /// Actual tokens of the busiest worker divided by the mean.
    pub actual_imbalance: f64,
    /// Mean of the workers' idle shares.
    pub idle_share: f64,
    /// Shift of the prompts' ranks.
    pub rank_shift: RankShift,
}

/// Lengths on one worker, each with its number of sequences.
type Lengths = Vec<(u64, u32)>;

impl RolloutReport {
    /// Reports a finished or running step; a rollout counts for the worker it is on, a deferred one for the
    /// worker that it left.
    ///
    /// # Errors
    /// [`RolloutError`] for progress that does not match the assignment, an invalid curve, or
    /// `strong_permille` above 1000.
    pub fn of(
        assignment: &Assignment,
        progress: &Progress,
        curve: Option<&Curve>,
        strong_permille: u32,
    ) -> Result<Self, RolloutError> {
        check_range("strong_permille", strong_permille, 0, PERMILLE)?;
        curve.map_or(Ok(()), Curve::check)?;
        progress.check(assignment)?;
        let workers = assignment.workers as usize;
        let mut predicted: Vec<Lengths> = vec![Vec::new(); workers];
        let mut actual = predicted.clone();
        for one in &assignment.placed {
            predicted[one.worker as usize].push((one.predicted_tokens, one.responses));
        }
        for one in progress.all() {
            actual[one.worker as usize].push((one.tokens, 1));
        }
        let mut report = Self::default();
        let mut busy = Vec::with_capacity(workers);
        for (mut predicted, mut actual) in predicted.into_iter().zip(actual) {
            predicted.sort_unstable_by(|one, other| other.cmp(one));
            let seconds = |lengths: &Lengths| curve.map_or(0.0, |curve| curve.decode_s(lengths));
            // Sorts them.
            busy.push(curve::busy(curve, &mut actual));
            let worker = WorkerReport {
                predicted_tokens: tokens(&predicted),
                actual_tokens: tokens(&actual),
                predicted_s: seconds(&predicted),
                actual_s: seconds(&actual),
                idle_share: 0.0,
            };
            report.workers.push(worker);
        }
        let step = busy.iter().copied().fold(0.0, f64::max);
        for (worker, busy) in report.workers.iter_mut().zip(busy) {
            worker.idle_share = if step > 0.0 { 1.0 - busy / step } else { 0.0 };
        }
        let idle: f64 = report.workers.iter().map(|worker| worker.idle_share).sum();
        report.idle_share = idle / workers.max(1) as f64;
        report.predicted_imbalance = imbalance(report.workers.iter().map(|w| w.predicted_tokens));
        report.actual_imbalance = imbalance(report.workers.iter().map(|w| w.actual_tokens));
        report.rank_shift = rank_shift(assignment, progress, strong_permille);
        Ok(report)
    }
}

fn tokens(lengths: &Lengths) -> u64 {
    lengths.iter().map(|(tokens, sequences)| tokens * u64::from(*sequences)).sum()
}

/// Returns the largest divided by the mean; 1 if all are 0.
fn imbalance(tokens: impl Iterator<Item = u64> + Clone) -> f64 {
    let (most, all) = (tokens.clone().max().unwrap_or(0), tokens.clone().sum::<u64>());
    if all == 0 { 1.0 } else { most as f64 * tokens.count() as f64 / all as f64 }
}

/// Compares the ranks of prompts by predicted length and by mean actual length; ties by number.
fn rank_shift(assignment: &Assignment, progress: &Progress, strong_permille: u32) -> RankShift {
    let prompts = assignment.placed.len();
    if prompts < 2 {
        return RankShift::default();
    }
    let mut sums = vec![0_u64; prompts];
    for one in progress.all() {
        sums[one.request as usize] += one.tokens;
    }
    let predicted = ranks(prompts, |request| assignment.placed[request].predicted_tokens as f64);
    let mean =
        |request: usize| sums[request] as f64 / f64::from(assignment.placed[request].responses);
    let actual = ranks(prompts, mean);
    let shifts = || {
        predicted
            .iter()
            .zip(&actual)
            .map(|(one, other)| one.abs_diff(*other) as f64 / (prompts - 1) as f64)
    };
    let strong = f64::from(strong_permille) / f64::from(PERMILLE);
    RankShift {
        mean: shifts().sum::<f64>() / prompts as f64,
        most: shifts().fold(0.0, f64::max),
        strong_share: shifts().filter(|shift| *shift > strong).count() as f64 / prompts as f64,
    }
}

fn ranks(prompts: usize, length: impl Fn(usize) -> f64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..prompts).collect();
    order.sort_unstable_by(|&one, &other| {
        length(one).total_cmp(&length(other)).then(one.cmp(&other))
    });
    let mut ranks = vec![0; prompts];
    for (rank, request) in order.into_iter().enumerate() {
        ranks[request] = rank;
    }
    ranks
}
