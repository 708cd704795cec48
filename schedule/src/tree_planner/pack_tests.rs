use proptest::prelude::*;

use super::*;

/// Rows of each microbatch by first-fit decreasing as it is defined: each microbatch tried in turn.
fn first_fit_decreasing(rows: &[u64], budget: u64) -> Vec<u64> {
    let mut rows = rows.to_vec();
    rows.sort_by(|a, b| b.cmp(a));
    let mut microbatches: Vec<u64> = Vec::new();
    for rows in rows {
        match microbatches.iter_mut().find(|used| **used + rows <= budget) {
            Some(used) => *used += rows,
            None => microbatches.push(rows),
        }
    }
    microbatches
}

fn rows_of(microbatches: &[Vec<usize>], rows: &[u64]) -> Vec<u64> {
    microbatches.iter().map(|members| members.iter().map(|i| rows[*i]).sum()).collect()
}

/// Returns the rows of the largest microbatch in the assignment that makes it smallest. Tries every assignment to the
/// microbatches of `used`, which have these rows already.
fn smallest_largest(rows: &[u64], used: &mut Vec<u64>) -> u64 {
    let Some((first, rest)) = rows.split_first() else {
        return used.iter().max().copied().unwrap();
    };
    let mut best = u64::MAX;
    for microbatch in 0..used.len() {
        used[microbatch] += first;
        best = best.min(smallest_largest(rest, used));
        used[microbatch] -= first;
    }
    best
}

/// The fewest microbatches, by trying every assignment.
fn fewest(rows: &[u64], budget: u64, rooms: &mut Vec<u64>) -> usize {
    let Some((first, rest)) = rows.split_first() else { return rooms.len() };
    let mut best = usize::MAX;
    for microbatch in 0..rooms.len() {
        if rooms[microbatch] >= *first {
            rooms[microbatch] -= first;
            best = best.min(fewest(rest, budget, rooms));
            rooms[microbatch] += first;
        }
    }
    rooms.push(budget.saturating_sub(*first));
    best = best.min(fewest(rest, budget, rooms));
    rooms.pop();
    best
}

proptest! {
    #[test]
    fn microbatches_are_no_more_and_no_larger_than_by_first_fit_decreasing(
        rows in prop::collection::vec(1u64..40, 1..60),
        budget in 1u64..80,
    ) {
        let (ours, naive) = (rows_of(&pack(&rows, budget), &rows), first_fit_decreasing(&rows, budget));
        prop_assert!(ours.len() <= naive.len(), "{:?} beside {:?}", ours, naive);
        if ours.len() == naive.len() {
            prop_assert!(ours.iter().max() <= naive.iter().max(), "{:?} beside {:?}", ours, naive);
        }
    }

    /// The bound of longest-first list scheduling (Graham, 1969): 4/3 of the best, less a third of a share.
    #[test]
    fn where_all_fit_the_largest_microbatch_is_near_the_smallest_that_is_possible(
        rows in prop::collection::vec(1u64..40, 1..9),
        count in 1u64..5,
    ) {
        let budget = rows.iter().sum::<u64>().div_ceil(count) + 40;
        let sizes = rows_of(&pack(&rows, budget), &rows);
        let count = sizes.len() as u64;
        let best = smallest_largest(&rows, &mut vec![0; sizes.len()]);
        prop_assert!(3 * count * sizes.iter().max().unwrap() <= (4 * count - 1) * best, "{:?}, {}", sizes, best);
    }

    #[test]
    fn microbatches_and_their_members_are_in_sequence_order(
        rows in prop::collection::vec(1u64..40, 1..60),
        budget in 1u64..80,
    ) {
        let microbatches = pack(&rows, budget);
        prop_assert!(microbatches.iter().all(|members| members.is_sorted()));
        prop_assert!(microbatches.is_sorted_by_key(|members| members[0]));
    }

    #[test]
    fn every_suffix_is_in_one_microbatch_within_the_budget(
        rows in prop::collection::vec(1u64..1000, 1..200),
        budget in 1u64..1500,
    ) {
        let microbatches = pack(&rows, budget);
        let mut seen: Vec<usize> = microbatches.iter().flatten().copied().collect();
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..rows.len()).collect::<Vec<_>>());
        for members in &microbatches {
            let used: u64 = members.iter().map(|i| rows[*i]).sum();
            prop_assert!(members.len() == 1 || used <= budget, "{} rows in {:?}", used, members);
        }
    }

    #[test]
    fn microbatches_are_within_the_bound_of_first_fit_decreasing(
        rows in prop::collection::vec(1u64..12, 1..8),
        budget in 12u64..25,
    ) {
        let (ours, best) = (pack(&rows, budget).len(), fewest(&rows, budget, &mut Vec::new()));
        prop_assert!(9 * ours <= 11 * best + 6, "{} microbatches, {} possible", ours, best);
    }
}

#[test]
fn a_suffix_longer_than_the_budget_runs_alone() {
    assert_eq!(pack(&[2, 9, 2, 8], 4), [vec![0, 2], vec![1], vec![3]]);
    assert_eq!(pack(&[2, 9], 0), [vec![0], vec![1]]);
    assert_eq!(pack(&[u64::MAX - 1, 5, 7], u64::MAX), [vec![0], vec![1, 2]]);
    assert_eq!(pack(&[u64::MAX, 1, u64::MAX], 1), [vec![0], vec![1], vec![2]]);
}

#[test]
fn ties_go_by_index() {
    assert_eq!(pack(&[5, 5, 5, 5, 5], 10), [vec![0, 1], vec![2, 3], vec![4]]);
    assert_eq!(pack(&[5, 5, 5, 5, 5, 5, 5], 20), [vec![0, 1, 2, 3], vec![4, 5, 6]]);
    assert_eq!(pack(&[5, 5, 5, 5, 5, 5, 4], 25), [vec![0, 2, 4, 6], vec![1, 3, 5]]);
}

#[test]
fn suffixes_are_spread_over_as_few_microbatches_as_hold_them() {
    // First-fit decreasing makes 540, 552 and 108.
    let rows = [192, 180, 168, 156, 144, 132, 120, 108];
    assert_eq!(rows_of(&pack(&rows, 640), &rows), [600, 600]);
    // And 504, 468 and 228.
    assert_eq!(rows_of(&pack(&rows, 512), &rows), [444, 432, 324]);
    // Spread, these would be 7 and 5.
    assert_eq!(pack(&[3, 3, 2, 2, 2], 6), [vec![0, 1], vec![2, 3, 4]]);
}

/// Trying each microbatch in turn, this would take hours.
#[test]
fn the_maximum_number_of_microbatches_is_packed() {
    let rows = vec![3; crate::RESPONSES_MAX];
    let microbatches = pack(&rows, 5);
    assert!(microbatches.iter().enumerate().all(|(index, members)| *members == [index]));
    assert_eq!(microbatches.len(), crate::RESPONSES_MAX);
}
