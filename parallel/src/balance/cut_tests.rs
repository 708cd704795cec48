//! Compares cuts, bounds and collective orders with models without prefix sums.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::cut::Segments;
use super::leaves::{Leaves, starts};
use super::place::{VISITS_MAX, costs_by_part, unit_costs};
use super::{
    BalanceMethod, BalanceOptions, BalanceUnit, CollectiveOrder, PassKind, Shares, Workload, limit,
};
use dormouse_schedule::cost::Rates;
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::{Machine, ModelShape, NodeId};

/// A forest, the first and repeated costs of its nodes, and a group for each leaf.
#[derive(Clone, Debug)]
struct Case {
    forest: Forest,
    full: Vec<u64>,
    again: Vec<u64>,
    groups: Vec<u32>,
}

fn case(nodes: usize) -> impl Strategy<Value = Case> {
    let picks = prop::collection::vec(any::<prop::sample::Index>(), 0..nodes);
    let costs = prop::collection::vec((0_u64..40, 0_u64..=100), nodes);
    let groups = prop::collection::vec(0_u32..4, nodes);
    (picks, costs, groups).prop_map(|(picks, costs, mut groups)| {
        let (mut parents, mut path) = (vec![NO_PARENT], vec![0_u32]);
        for (id, pick) in (1_u32..).zip(picks) {
            path.truncate(pick.index(path.len() + 1));
            parents.push(path.last().copied().unwrap_or(NO_PARENT));
            path.push(id);
        }
        let forest = Forest::from_nodes(&parents, &vec![3; parents.len()]).unwrap();
        groups.truncate(forest.endings().len());
        let costs = costs.into_iter().take(parents.len());
        let (full, again) = costs.map(|(full, percent)| (full, full * percent / 100)).unzip();
        Case { forest, full, again, groups }
    })
}

impl Case {
    fn paths(&self, leaves: &Leaves<'_>, of: impl Iterator<Item = usize>) -> BTreeSet<u32> {
        let paths = of.map(|leaf| self.forest.path(NodeId(leaves.nodes[leaf])));
        paths.flatten().map(|id| id.0).collect()
    }

    /// Nodes shared with earlier leaves cost `again`, others `full`.
    fn segment(&self, leaves: &Leaves<'_>, begin: usize, end: usize) -> u64 {
        let before = self.paths(leaves, 0..begin);
        let cost =
            |id: &u32| if before.contains(id) { &self.again } else { &self.full }[*id as usize];
        self.paths(leaves, begin..end).iter().map(cost).sum()
    }

    /// Least largest segment over all cuts at `starts`, by dynamic programming.
    fn best_cut(&self, leaves: &Leaves<'_>, starts: &[u32], ranks: usize) -> u64 {
        let mut best = vec![u64::MAX; starts.len()];
        best[0] = 0;
        for _ in 0..ranks {
            let mut next = best.clone();
            for to in 1..starts.len() {
                for from in (0..to).filter(|from| best[*from] < u64::MAX) {
                    let cost = self.segment(leaves, starts[from] as usize, starts[to] as usize);
                    next[to] = next[to].min(best[from].max(cost));
                }
            }
            best = next;
        }
        *best.last().unwrap()
    }

    /// Least largest rank over all assignments of leaves, each node full on its cheapest rank.
    fn best_assignment(&self, leaves: &Leaves<'_>, ranks: usize) -> u64 {
        let n = leaves.count();
        let mut best = u64::MAX;
        for number in 0..ranks.pow(n as u32) {
            let rank_of = |leaf: usize| number / ranks.pow(leaf as u32) % ranks;
            let needs: Vec<BTreeSet<u32>> = (0..ranks)
                .map(|rank| self.paths(leaves, (0..n).filter(|leaf| rank_of(*leaf) == rank)))
                .collect();
            best = best.min(self.best_owners(&needs));
        }
        best
    }

    /// Smallest maximum cost over all choices of the rank that pays a node in full, given the ranks that need
    /// it.
    fn best_owners(&self, needs: &[BTreeSet<u32>]) -> u64 {
        let mut loads: Vec<u64> =
            needs.iter().map(|need| need.iter().map(|id| self.again[*id as usize]).sum()).collect();
        // The choice matters only if the two costs differ.
        let nodes: Vec<u32> = (0..self.full.len() as u32)
            .filter(|id| self.full[*id as usize] > self.again[*id as usize])
            .collect();
        self.place_rest(&nodes, needs, &mut loads)
    }

    fn place_rest(&self, nodes: &[u32], needs: &[BTreeSet<u32>], loads: &mut [u64]) -> u64 {
        let Some((id, rest)) = nodes.split_first() else { return *loads.iter().max().unwrap() };
        let more = self.full[*id as usize] - self.again[*id as usize];
        let mut best = u64::MAX;
        for rank in (0..loads.len()).filter(|rank| needs[*rank].contains(id)) {
            loads[rank] += more;
            best = best.min(self.place_rest(rest, needs, loads));
            loads[rank] -= more;
        }
        best
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn segment_costs_equal_the_costs_of_their_paths(case in case(16)) {
        let leaves = Leaves::of(&case.forest);
        let segments = Segments::new(&leaves, &case.full, &case.again);
        for end in 0..=leaves.count() {
            for begin in 0..=end {
                prop_assert_eq!(segments.cost(begin, end), case.segment(&leaves, begin, end));
            }
        }
    }

    #[test]
    fn contiguous_cuts_are_optimal(case in case(18), ranks in 1_u32..6, grouped: bool) {
        let leaves = Leaves::of(&case.forest);
        let batch = Workload { forest: &case.forest, groups: &case.groups, logit_rows: &[] };
        let units = leaves.units(&batch, if grouped { BalanceUnit::Group } else { BalanceUnit::Leaf });
        let starts = starts(&units);
        let segments = Segments::new(&leaves, &case.full, &case.again);
        let ends = segments.cut(&starts, ranks);
        prop_assert!(ends.len() <= ranks as usize);
        prop_assert!(ends.iter().all(|end| starts.contains(end)));
        let mut begin = 0;
        let mut largest = 0;
        for end in ends {
            prop_assert!(end > begin, "no segment is empty");
            largest = largest.max(case.segment(&leaves, begin as usize, end as usize));
            begin = end;
        }
        prop_assert_eq!(begin as usize, leaves.count());
        prop_assert_eq!(largest, case.best_cut(&leaves, &starts, ranks as usize));
    }

    /// No group has leaves on both sides of a start.
    #[test]
    fn starts_lie_between_units(case in case(18)) {
        let leaves = Leaves::of(&case.forest);
        let batch = Workload { forest: &case.forest, groups: &case.groups, logit_rows: &[] };
        for unit in [BalanceUnit::Leaf, BalanceUnit::Group, BalanceUnit::Tree] {
            let key = |leaf: usize| match unit {
                BalanceUnit::Leaf | BalanceUnit::GroupOrLeaf => leaf as u32,
                BalanceUnit::Group => case.groups[leaf],
                BalanceUnit::Tree => case.forest.path(NodeId(leaves.nodes[leaf])).last().unwrap().0,
            };
            let n = leaves.count();
            let whole = |at: &usize| (0..*at).all(|a| (*at..n).all(|b| key(a) != key(b)));
            let wanted: Vec<u32> = (0..=n).filter(whole).map(|at| at as u32).collect();
            let units = leaves.units(&batch, unit);
            prop_assert_eq!(starts(&units), wanted);
            for a in 0..n {
                for b in 0..n {
                    prop_assert_eq!(units[a] == units[b], key(a) == key(b));
                }
            }
        }
    }

    /// No assignment of leaves, contiguous or not, beats the bound; with one rank it is met.
    #[test]
    fn the_limit_is_below_every_assignment(case in case(9), ranks in 1_u32..4, recompute: bool) {
        let again = if recompute { case.full.clone() } else { case.again.clone() };
        let case = Case { again, ..case };
        let leaves = Leaves::of(&case.forest);
        prop_assume!(leaves.count() <= 6);
        let limit = limit::least_largest(&leaves, &case.full, &case.again, ranks);
        let best = case.best_assignment(&leaves, ranks as usize);
        prop_assert!(limit <= best, "{} above {}", limit, best);
        prop_assert!(u128::from(limit) * u128::from(ranks) >= case.full.iter().map(|c| u128::from(*c)).sum());
        for leaf in &leaves.nodes {
            let above = case.forest.path(NodeId(*leaf)).skip(1);
            let path: u64 = above.map(|id| case.again[id.0 as usize]).sum();
            prop_assert!(limit >= path + case.full[*leaf as usize], "some rank has that leaf");
        }
        if ranks == 1 {
            prop_assert_eq!(limit, best);
        }
    }

    #[test]
    fn largest_unit_counts_only_unshared_nodes(case in case(16)) {
        let leaves = Leaves::of(&case.forest);
        let batch = Workload { forest: &case.forest, groups: &case.groups, logit_rows: &[] };
        let units = leaves.units(&batch, BalanceUnit::Group);
        let own = |unit: u32| -> u64 {
            let ours = case.paths(&leaves, (0..leaves.count()).filter(|leaf| units[*leaf] == unit));
            let others = case.paths(&leaves, (0..leaves.count()).filter(|leaf| units[*leaf] != unit));
            ours.difference(&others).map(|id| case.full[*id as usize]).sum()
        };
        let wanted = units.iter().map(|unit| own(*unit)).max().unwrap();
        prop_assert_eq!(limit::largest_unit(&leaves, &units, &case.full), wanted);
    }

    /// A unit costs the nodes on the paths of its leaves; where each leaf is a unit, without visiting them.
    #[test]
    fn units_cost_their_paths(case in case(16), grouped: bool) {
        let leaves = Leaves::of(&case.forest);
        let batch = Workload { forest: &case.forest, groups: &case.groups, logit_rows: &[] };
        let units = leaves.units(&batch, if grouped { BalanceUnit::Group } else { BalanceUnit::Leaf });
        let costs = unit_costs(&leaves, &units, !grouped, &case.full).unwrap();
        for (unit, cost) in (0_u32..).zip(costs) {
            let own = case.paths(&leaves, (0..leaves.count()).filter(|leaf| units[*leaf] == unit));
            prop_assert_eq!(cost, own.iter().map(|id| case.full[*id as usize]).sum::<u64>());
        }
    }

    #[test]
    fn the_collective_order_contains_every_rank(
        words in prop::collection::vec(prop::collection::vec(0_usize..3, 0..9), 0..6),
    ) {
        let kinds = [PassKind::Forward, PassKind::Microbatch, PassKind::Backward];
        let words: Vec<Vec<PassKind>> =
            words.iter().map(|word| word.iter().map(|kind| kinds[*kind]).collect()).collect();
        let agreed = CollectiveOrder::of(&words);
        let mut served = vec![false; agreed.kinds.len()];
        for (rank, (word, own)) in words.iter().zip(&agreed.own).enumerate() {
            prop_assert!(own.windows(2).all(|pair| pair[0] < pair[1]));
            let got: Vec<PassKind> = own.iter().map(|at| agreed.kinds[*at as usize]).collect();
            prop_assert_eq!(&got, word);
            own.iter().for_each(|at| served[*at as usize] = true);
            let dummies: u32 = kinds.iter().map(|kind| agreed.dummies(rank, *kind)).sum();
            prop_assert_eq!(dummies as usize, agreed.kinds.len() - word.len());
        }
        prop_assert!(served.iter().all(|served| *served), "an op that no rank needs");
        let all_alike = words.windows(2).all(|pair| pair[0] == pair[1]);
        if let (true, Some(word)) = (all_alike, words.first()) {
            prop_assert_eq!(&agreed.kinds, word);
        }
    }
}

/// A caterpillar: a path of 2^16 nodes, each with a leaf. Its leaves' paths have 2^31 nodes together, which nothing
/// visits one by one.
#[test]
fn a_deep_tree_is_divided_by_leaves_without_visiting_their_paths() {
    const LEVELS: u32 = 1 << 16;
    let mut parents = vec![NO_PARENT];
    for level in 1..LEVELS {
        let above = 2 * (level - 1);
        // The leaf of the level before, then its next node.
        parents.extend([above, above]);
    }
    let last = parents.len() as u32 - 1;
    parents.extend([last, last]);
    let forest = Forest::from_nodes(&parents, &vec![2; parents.len()]).unwrap();
    let leaves = Leaves::of(&forest);
    assert_eq!(leaves.count() as u32, LEVELS + 1);
    let units: Vec<u32> = (0..leaves.count() as u32).collect();
    let full = vec![1; parents.len()];
    let refused = costs_by_part(&leaves, &units, &full).unwrap_err().to_string();
    assert!(refused.ends_with(&format!("; accepted: 0 to {VISITS_MAX}")), "{refused}");
    // The root and a node of each further level, then the leaf.
    let costs = unit_costs(&leaves, &units, true, &full).unwrap();
    assert_eq!((costs[0], costs[units.len() - 1]), (2, u64::from(LEVELS) + 1));
    let options = |unit, method| BalanceOptions {
        ranks: 4,
        method,
        unit,
        exchange: false,
        ops_hold_collectives: false,
        microbatch_tokens: 64,
        rates: Rates { rows: 1e-9, ..Rates::default() },
        model: ModelShape::default(),
        machine: Machine::default(),
    };
    let groups: Vec<u32> = (0..forest.endings().len() as u32).collect();
    let batch = Workload { forest: &forest, groups: &groups, logit_rows: &[] };
    for method in [BalanceMethod::Contiguous, BalanceMethod::Greedy, BalanceMethod::LongestFirst] {
        let shares = Shares::new(&batch, &options(BalanceUnit::Leaf, method)).unwrap();
        assert!(shares.limit_ps <= shares.largest_ps, "{method:?}");
        let refused = Shares::new(&batch, &options(BalanceUnit::Group, method)).unwrap_err();
        assert!(refused.to_string().starts_with("nodes of all units or shares is "), "{refused}");
    }
}
