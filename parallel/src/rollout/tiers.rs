//! Number of workers per group.
//!
//! A worker of a tier of n workers has at most `⌈prompts/n⌉` prompts; the tier's time is bounded by that of
//! a worker with as many of the longest prompts, which does not grow with n. The sizes minimise the largest
//! weighted time: a binary search over all times, with each tier taking the fewest workers that meet it.

use super::{Curve, PERMILLE, PROMPTS_MAX, RolloutError, WORKERS_MAX};
use dormouse_schedule::check_range;

/// Returns the workers of each group; `groups[g]` lists each prompt's predicted length and responses. All
/// workers are used; no tier has more workers than prompts.
///
/// # Errors
/// [`RolloutError`] for an invalid curve, an empty group, fewer workers than groups or more than prompts.
pub fn tier_sizes(
    curve: &Curve,
    groups: &[Vec<(u64, u32)>],
    workers: u32,
    slope_permille: u32,
) -> Result<Vec<u32>, RolloutError> {
    curve.check()?;
    for group in groups {
        check_range("prompts of a group", group.len() as u64, 1, PROMPTS_MAX)?;
    }
    let prompts: u64 = groups.iter().map(|group| group.len() as u64).sum();
    let most = prompts.min(WORKERS_MAX.into());
    check_range("groups", groups.len() as u64, 1, most)?;
    check_range("workers", u64::from(workers), groups.len() as u64, most)?;
    let times: Vec<Vec<f64>> = groups
        .iter()
        .enumerate()
        .map(|(number, group)| {
            times(curve, group, workers, weight(number, groups.len(), slope_permille))
        })
        .collect();
    let mut all: Vec<f64> = times.iter().flatten().copied().collect();
    all.sort_unstable_by(f64::total_cmp);
    let fits = |cap: f64| sizes(&times, cap).is_some_and(|sizes| total(&sizes) <= workers.into());
    let least = all.partition_point(|cap| !fits(*cap));
    // One worker per group meets the largest time, so some cap fits.
    let mut sizes = sizes(&times, all[least.min(all.len() - 1)]).unwrap_or_default();
    while total(&sizes) < workers.into() {
        let Some(slowest) = slowest(&times, &sizes) else { break };
        sizes[slowest] += 1;
    }
    Ok(sizes)
}

/// Returns the weight of a group's time: 1 for the shortest, rising linearly.
fn weight(group: usize, groups: usize, slope_permille: u32) -> f64 {
    let last = groups.max(2) - 1;
    1.0 + f64::from(slope_permille) / f64::from(PERMILLE) * group as f64 / last as f64
}

/// Returns the weighted time of each tier size from 1.
fn times(curve: &Curve, group: &[(u64, u32)], workers: u32, weight: f64) -> Vec<f64> {
    let mut longest: Vec<(u64, u32)> = group.to_vec();
    longest.sort_unstable_by(|one, other| other.cmp(one));
    (1..=group.len().min(workers as usize))
        .map(|size| curve.decode_s(&longest[..group.len().div_ceil(size)]) / weight)
        .collect()
}

/// Returns the fewest workers of each tier that meet a cap.
fn sizes(times: &[Vec<f64>], cap: f64) -> Option<Vec<u32>> {
    times
        .iter()
        .map(|times| {
            let size = times.partition_point(|time| *time > cap);
            (size < times.len()).then_some(size as u32 + 1)
        })
        .collect()
}

fn total(sizes: &[u32]) -> u64 {
    sizes.iter().map(|size| u64::from(*size)).sum()
}

/// Returns the slowest tier that can grow; ties go to the longer group.
fn slowest(times: &[Vec<f64>], sizes: &[u32]) -> Option<usize> {
    (0..sizes.len()).filter(|group| (sizes[*group] as usize) < times[*group].len()).max_by(
        |one, other| {
            let time = |group: &usize| times[*group][sizes[*group] as usize - 1];
            time(one).total_cmp(&time(other)).then(one.cmp(other))
        },
    )
}
