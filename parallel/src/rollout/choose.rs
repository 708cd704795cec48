//! Choice of groups and tiers by the time that they take in trials.
//!
//! The time of a choice is that of two steps in turn, in which the worker that ends the first one earliest
//! takes the longest prompts of the second. Equal tiers are safe: if lengths have nothing to do with their
//! history, they are a random deal. Other tiers are chosen only if they take less than [`TAKEN_PERMILLE`] of
//! the time of the best equal ones, as the least of many times that have noise is too low.

use super::assign::{Dealt, Ranked};
use super::trial::Trial;
use super::{Curve, PERMILLE, RolloutError, StepOptions, curve::busy, tier_sizes};

/// Maximum rollouts of a step with trials; with more, tiers that are not given are equal.
const TRIED_ROLLOUTS_MAX: usize = 1 << 15;
/// Slopes to try, in thousandths.
const SLOPES_PERMILLE: [u32; 8] = [0, 500, 1000, 2000, 4000, 8000, 12_000, 16_000];
/// Time of tiers that are taken instead of equal ones, in thousandths of theirs.
const TAKEN_PERMILLE: u32 = 980;

/// Workers of each group.
struct Candidate {
    sizes: Vec<u32>,
    equal: bool,
}

/// Returns the workers of each group, as many as groups. `trials` may be empty: then equal tiers are chosen
/// by the predicted lengths.
pub(super) fn sizes(
    ranked: &Ranked<'_>,
    trials: impl FnOnce() -> Vec<Trial>,
    options: &StepOptions,
) -> Result<Vec<u32>, RolloutError> {
    let mut candidates = candidates(ranked, options)?;
    let rollouts: usize = ranked.responses().sum();
    if candidates.len() < 2 || rollouts > TRIED_ROLLOUTS_MAX {
        return Ok(candidates.swap_remove(0).sizes);
    }
    let mut trials = trials();
    if trials.is_empty() {
        candidates.retain(|one| one.equal);
        trials.push(ranked.as_trial());
    }
    let curve = options.curve.as_ref();
    let time = |one: &Candidate| -> f64 {
        trials.iter().map(|trial| two_steps(ranked, trial, &one.sizes, curve)).sum()
    };
    let mut best: [Option<(f64, &Candidate)>; 2] = [None, None];
    for one in &candidates {
        let (time, best) = (time(one), &mut best[usize::from(one.equal)]);
        if best.is_none_or(|(least, _)| time < least) {
            *best = Some((time, one));
        }
    }
    let taken = f64::from(TAKEN_PERMILLE) / f64::from(PERMILLE);
    let chosen = match best {
        [Some((tiered, one)), Some((equal, _))] if tiered < equal * taken => one,
        [_, Some((_, one))] | [Some((_, one)), None] => one,
        [None, None] => &candidates[0],
    };
    Ok(chosen.sizes.clone())
}

/// Returns what to choose from, at least one; the first is what is taken without trials.
fn candidates(ranked: &Ranked<'_>, options: &StepOptions) -> Result<Vec<Candidate>, RolloutError> {
    let workers = options.workers;
    let mut all = Vec::new();
    for groups in options.groups.map_or_else(|| halves(workers), |groups| vec![groups]) {
        let Some(curve) = &options.curve else {
            if !workers.is_multiple_of(groups) {
                return Err(RolloutError::Tiers { workers, groups });
            }
            all.push(Candidate { sizes: equal_sizes(workers, groups), equal: true });
            continue;
        };
        let lengths = ranked.grouped_lengths(groups);
        let sized = |slope| tier_sizes(curve, &lengths, workers, slope);
        if let Some(slope) = options.slope_permille {
            all.push(Candidate { sizes: sized(slope)?, equal: false });
            continue;
        }
        curve.check()?;
        all.push(Candidate { sizes: equal_sizes(workers, groups), equal: true });
        for slope in SLOPES_PERMILLE {
            let sizes = sized(slope)?;
            if all.iter().all(|one| one.sizes != sizes) {
                all.push(Candidate { sizes, equal: false });
            }
        }
    }
    Ok(all)
}

/// Returns a number, its half and so on while that is whole, and 1.
fn halves(workers: u32) -> Vec<u32> {
    let powers = 0..=workers.trailing_zeros();
    let mut halves: Vec<u32> = powers.map(|power| workers >> power).collect();
    if halves.last() != Some(&1) {
        halves.push(1);
    }
    halves
}

/// Returns equal tiers, within one worker.
fn equal_sizes(workers: u32, groups: u32) -> Vec<u32> {
    let begin = |group: u32| (u64::from(group) * u64::from(workers) / u64::from(groups)) as u32;
    (0..groups).map(|group| begin(group + 1) - begin(group)).collect()
}

fn two_steps(ranked: &Ranked<'_>, trial: &Trial, sizes: &[u32], curve: Option<&Curve>) -> f64 {
    let dealt = Dealt::of(&ranked.with(&trial.predicted), sizes);
    let mut lengths: Vec<Vec<(u64, u32)>> = vec![Vec::new(); dealt.workers];
    for (place, took) in dealt.places.iter().zip(&trial.lengths) {
        lengths[place.slot as usize].extend(took.iter().map(|tokens| (*tokens, 1)));
    }
    let second: Vec<f64> = lengths
        .into_iter()
        .map(|mut all| {
            all.sort_unstable_by(|one, other| other.cmp(one));
            busy(curve, &all)
        })
        .collect();
    let mut first = second.clone();
    first.sort_unstable_by(f64::total_cmp);
    let ends = first.iter().zip(second.iter().rev()).map(|(first, second)| first + second);
    ends.fold(0.0, f64::max)
}
