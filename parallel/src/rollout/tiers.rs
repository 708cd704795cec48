//! How many workers each group gets.
//!
//! A tier of n workers deals its group's prompts so that none has more than `⌈prompts/n⌉`; the time
//! is that of a worker with so many of the longest, an upper bound which does not rise with n. The
//! sizes sought make the latest time, each divided by its place on the line, least: a binary search
//! over every time that any size gives, each tier taking the fewest workers that keep to it.

use super::{Curve, PERMILLE, PROMPTS_MAX, RolloutError, WORKERS_MAX};
use dormouse_schedule::check_range;

/// Workers for each group: `groups[g]` is each prompt's predicted length and responses. All workers
/// are given out; no tier has more than its group has prompts.
///
/// # Errors
/// [`RolloutError`]: a curve that is none, a group of no prompts, fewer workers than groups or more
/// than prompts.
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
            times(curve, group, workers, line(number, groups.len(), slope_permille))
        })
        .collect();
    let mut all: Vec<f64> = times.iter().flatten().copied().collect();
    all.sort_unstable_by(f64::total_cmp);
    let fits = |cap: f64| sizes(&times, cap).is_some_and(|sizes| total(&sizes) <= workers.into());
    let least = all.partition_point(|cap| !fits(*cap));
    // The largest time of all is kept by one worker a group, so some cap fits.
    let mut sizes = sizes(&times, all[least.min(all.len() - 1)]).unwrap_or_default();
    while total(&sizes) < workers.into() {
        let Some(slowest) = slowest(&times, &sizes) else { break };
        sizes[slowest] += 1;
    }
    Ok(sizes)
}

/// A group's place on the line: 1 for the shortest.
fn line(group: usize, groups: usize, slope_permille: u32) -> f64 {
    let last = groups.max(2) - 1;
    1.0 + f64::from(slope_permille) / f64::from(PERMILLE) * group as f64 / last as f64
}

/// Time of each tier size from 1, over the group's place on the line.
fn times(curve: &Curve, group: &[(u64, u32)], workers: u32, place: f64) -> Vec<f64> {
    let mut longest: Vec<(u64, u32)> = group.to_vec();
    longest.sort_unstable_by(|one, other| other.cmp(one));
    (1..=group.len().min(workers as usize))
        .map(|size| curve.decode_s(&longest[..group.len().div_ceil(size)]) / place)
        .collect()
}

/// The fewest workers of each tier that keep to a cap.
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

/// The tier that is latest and can grow; the longer group where two are.
fn slowest(times: &[Vec<f64>], sizes: &[u32]) -> Option<usize> {
    (0..sizes.len()).filter(|group| (sizes[*group] as usize) < times[*group].len()).max_by(
        |one, other| {
            let time = |group: &usize| times[*group][sizes[*group] as usize - 1];
            time(one).total_cmp(&time(other)).then(one.cmp(other))
        },
    )
}
