//! Choice of groups and tiers by the time that they take in trials.
//!
//! The time of a choice is that of two steps in turn, in which the worker that ends the first one earliest
//! takes the longest prompts of the second. Equal tiers are safe: if lengths have nothing to do with their
//! history, they are a random deal. Other tiers are chosen only if they take less than [`TAKEN_PERMILLE`] of
//! the time of the best equal ones, as the least of many times that have noise is too low.
//!
//! Numbers of prompts may rise from group to group. Without a curve that is safe too: the expected longest of n responses
//! grows slower than n, so a worker that has few prompts in one step and many in the next ends no later, in the mean,
//! than one that has as many in both, whatever the law of the lengths. Numbers that fall are not: the first to be free takes the
//! longest group, which has few prompts after few.

use super::assign::{Dealt, Ranked, Tiers};
use super::trial::Trial;
use super::{Curve, PERMILLE, RolloutError, StepOptions, curve::busy, tier_sizes};

/// Maximum rollouts of a step with trials; with more, tiers that are not given are equal.
const TRIED_ROLLOUTS_MAX: usize = 1 << 15;
/// Rises of the number of prompts to try ([`Tiers::rise_permille`]); negative ones fall, and are tried with a curve.
const RISES_PERMILLE: [i32; 4] = [-900, -450, 450, 900];
/// Slopes to try, in thousandths.
const SLOPES_PERMILLE: [u32; 8] = [0, 500, 1000, 2000, 4000, 8000, 12_000, 16_000];
/// Time of tiers that are taken instead of equal ones, in thousandths of theirs.
const TAKEN_PERMILLE: u32 = 980;

struct Candidate {
    tiers: Tiers,
    /// No later than a random deal in the mean, if lengths have nothing to do with their history.
    safe: bool,
}

/// Returns the tiers of the groups. `trials` may be empty: then safe ones are chosen by the predicted lengths.
pub(super) fn tiers(
    ranked: &Ranked<'_>,
    trials: impl FnOnce() -> Vec<Trial>,
    options: &StepOptions,
) -> Result<Tiers, RolloutError> {
    let mut candidates = candidates(ranked, options)?;
    let rollouts: usize = ranked.responses().sum();
    if candidates.len() < 2 || rollouts > TRIED_ROLLOUTS_MAX {
        return Ok(candidates.swap_remove(0).tiers);
    }
    let mut trials = trials();
    if trials.is_empty() {
        // A given slope leaves no choice that is safe.
        if candidates.iter().any(|one| one.safe) {
            candidates.retain(|one| one.safe);
        }
        trials.push(ranked.as_trial());
    }
    let curve = options.curve.as_ref();
    let ranked: Vec<Ranked<'_>> = trials.iter().map(|one| ranked.with(&one.predicted)).collect();
    let time = |one: &Candidate| {
        let both = ranked.iter().zip(&trials);
        let times =
            both.map(|(ranked, trial)| Time::of_two_steps(ranked, trial, &one.tiers, curve));
        times.fold(Time::default(), Time::plus)
    };
    let mut best: [Option<(Time, &Candidate)>; 2] = [None, None];
    for one in &candidates {
        let (time, best) = (time(one), &mut best[usize::from(one.safe)]);
        if best.is_none_or(|(least, _)| time < least) {
            *best = Some((time, one));
        }
    }
    let taken = f64::from(TAKEN_PERMILLE) / f64::from(PERMILLE);
    let chosen = match best {
        [Some((other, one)), Some((safe, _))] if other.end < safe.end * taken => one,
        [_, Some((_, one))] | [Some((_, one)), None] => one,
        [None, None] => &candidates[0],
    };
    Ok(chosen.tiers.clone())
}

/// Returns what to choose from, at least one; the first is what is taken without trials.
fn candidates(ranked: &Ranked<'_>, options: &StepOptions) -> Result<Vec<Candidate>, RolloutError> {
    let workers = options.workers;
    let mut all = Vec::new();
    for groups in options.groups.map_or_else(|| halves(workers), |groups| vec![groups]) {
        if options.curve.is_none() && !workers.is_multiple_of(groups) {
            return Err(RolloutError::Tiers { workers, groups });
        }
        if let (Some(curve), Some(slope)) = (&options.curve, options.slope_permille) {
            let sizes = tier_sizes(curve, &ranked.grouped_lengths(groups), workers, slope)?;
            all.push(Candidate { tiers: Tiers::level(sizes), safe: false });
            continue;
        }
        let sizes = equal_sizes(workers, groups);
        let safe = options.curve.is_none();
        let tried = |rise: &&i32| options.groups.is_none() && (**rise > 0 || !safe);
        let rising = |rise: &i32| Tiers { sizes: sizes.clone(), rise_permille: *rise };
        let rising = RISES_PERMILLE.iter().filter(tried).map(rising);
        let rising = rising.filter(|tiers| ranked.can_rise(tiers));
        let level = Tiers::level(sizes.clone());
        // Tiers of a curve's slopes are there too, and leave no worker idle.
        if options.curve.is_none() || ranked.fills(&level) {
            all.push(Candidate { tiers: level, safe: true });
        }
        all.extend(rising.map(|tiers| Candidate { tiers, safe }));
        if let Some(curve) = &options.curve {
            sloping(&mut all, curve, &ranked.grouped_lengths(groups), workers)?;
        }
    }
    Ok(all)
}

/// Adds tiers that a curve gives for each slope.
fn sloping(
    all: &mut Vec<Candidate>,
    curve: &Curve,
    lengths: &[Vec<(u64, u32)>],
    workers: u32,
) -> Result<(), RolloutError> {
    curve.check()?;
    for slope in SLOPES_PERMILLE {
        let tiers = Tiers::level(tier_sizes(curve, lengths, workers, slope)?);
        if all.iter().all(|one| one.tiers != tiers) {
            all.push(Candidate { tiers, safe: false });
        }
    }
    Ok(())
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

/// When two steps in turn end. The least has the least end, and of equal ends the least sum.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
struct Time {
    /// Of the last worker.
    end: f64,
    /// Of all workers: those that end early go on with the next step.
    sum: f64,
}

impl Time {
    fn plus(self, other: Self) -> Self {
        Self { end: self.end + other.end, sum: self.sum + other.sum }
    }

    fn of_two_steps(
        ranked: &Ranked<'_>,
        trial: &Trial,
        tiers: &Tiers,
        curve: Option<&Curve>,
    ) -> Self {
        let dealt = Dealt::of(ranked, tiers, curve);
        let mut lengths: Vec<Vec<(u64, u32)>> = vec![Vec::new(); dealt.workers];
        for (place, took) in dealt.places.iter().zip(&trial.lengths) {
            lengths[place.slot as usize].extend(took.iter().map(|tokens| (*tokens, 1)));
        }
        let second: Vec<f64> = lengths.iter_mut().map(|all| busy(curve, all)).collect();
        let mut first = second.clone();
        first.sort_unstable_by(f64::total_cmp);
        let ends = first.iter().zip(second.iter().rev()).map(|(first, second)| first + second);
        ends.fold(Self::default(), |time, end| Self { end: time.end.max(end), sum: time.sum + end })
    }
}
