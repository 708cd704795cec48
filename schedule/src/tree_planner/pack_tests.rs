use proptest::prelude::*;

use super::*;

/// First-fit decreasing as it is defined: each microbatch tried in turn.
fn naive(rows: &[u64], budget: u64) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by(|&a, &b| rows[b].cmp(&rows[a]).then(a.cmp(&b)));
    let mut microbatches: Vec<(u64, Vec<usize>)> = Vec::new();
    for index in order {
        match microbatches.iter_mut().find(|(used, _)| used + rows[index] <= budget) {
            Some((used, members)) => {
                *used += rows[index];
                members.push(index);
            }
            None => microbatches.push((rows[index], vec![index])),
        }
    }
    let mut microbatches: Vec<Vec<usize>> =
        microbatches.into_iter().map(|(_, members)| members).collect();
    microbatches.iter_mut().for_each(|members| members.sort());
    microbatches.sort();
    microbatches
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
    fn microbatches_are_first_fit_decreasing(
        rows in prop::collection::vec(1u64..40, 1..60),
        budget in 1u64..80,
    ) {
        prop_assert_eq!(pack(&rows, budget), naive(&rows, budget));
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
    assert_eq!(pack(&[u64::MAX, 1, u64::MAX], 1), [vec![0], vec![1], vec![2]]);
}

#[test]
fn ties_go_by_index() {
    assert_eq!(pack(&[5, 5, 5, 5, 5], 10), [vec![0, 1], vec![2, 3], vec![4]]);
}

/// Trying each microbatch in turn, this would take hours.
#[test]
fn the_maximum_number_of_microbatches_is_packed() {
    let rows = vec![3; crate::RESPONSES_MAX];
    let microbatches = pack(&rows, 5);
    assert!(microbatches.iter().enumerate().all(|(index, members)| *members == [index]));
    assert_eq!(microbatches.len(), crate::RESPONSES_MAX);
}
