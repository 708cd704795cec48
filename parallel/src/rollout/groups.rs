//! Cutting ranked prompts into groups.

use super::GroupCut;

/// Where groups begin, and the end: `works[i]` is the predicted tokens of the i-th prompt by rank;
/// at least one prompt a group.
pub(super) fn cuts(works: &[u64], groups: usize, cut: GroupCut) -> Vec<usize> {
    match cut {
        GroupCut::EqualCount => (0..=groups).map(|group| group * works.len() / groups).collect(),
        GroupCut::EqualWork => equal_work(works, groups),
    }
}

/// Runs of at least one whose largest sum is least: the cap is found by halving, and each run then
/// takes all that fits under it and leaves one for each run to come.
fn equal_work(works: &[u64], groups: usize) -> Vec<usize> {
    let (mut low, mut high) = (works.iter().max().copied().unwrap_or(0), works.iter().sum::<u64>());
    while low < high {
        let middle = low.midpoint(high);
        if under(works, groups, middle).last() == Some(&works.len()) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    under(works, groups, low)
}

fn under(works: &[u64], groups: usize, cap: u64) -> Vec<usize> {
    let mut cuts = vec![0];
    let mut at = 0;
    for group in 1..=groups {
        let last = works.len() - (groups - group);
        let mut sum = 0;
        while at < last && sum + works[at] <= cap {
            sum += works[at];
            at += 1;
        }
        cuts.push(at);
    }
    cuts
}
