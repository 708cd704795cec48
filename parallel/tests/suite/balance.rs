//! Checks shares of every method: each sequence once, units whole, bounds, waits, independence of numbering.

use std::collections::{BTreeMap, BTreeSet};

use crate::balance_common::{Case, case, every_option, options};
use dormouse_parallel::balance::*;
use dormouse_schedule::cost::{COST_MAX_PS, CostError, Rates};
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::*;
use proptest::prelude::*;

/// Exchange is never predicted slower than recomputing, and a replay takes the predicted time.
fn played_through(case: &Case) -> Result<(), TestCaseError> {
    let forest = case.forest();
    let batch = Workload { forest: &forest, groups: &case.groups, logit_rows: &[] };
    for options in every_option(case).into_iter().filter(|options| options.exchange) {
        let Ok(shares) = Shares::new(&batch, &options) else { continue };
        let alone = Shares::new(&batch, &BalanceOptions { exchange: false, ..options }).unwrap();
        prop_assert!(shares.largest_ps <= alone.largest_ps);
        let model = Model { forest: &forest, shares: &shares, link: u128::from(case.link) };
        model.check_exchanges()?;
        let finish: Vec<u64> = shares.shares.iter().map(|share| share.finish_ps).collect();
        prop_assert_eq!(model.play(), finish);
    }
    Ok(())
}

/// Divided nodes run before sent ones. One node here costs more to send than to compute, less to divide, and
/// its parent is worth sending.
#[test]
fn no_divided_node_has_a_sent_ancestor() {
    const NO: u32 = NO_PARENT;
    let case = Case {
        parents: vec![NO, 0, 0, NO, NO, NO, 5, NO, 7, 8, 8, 8, 11, 11, NO, NO, 15, 16, 17],
        lengths: vec![18, 15, 57, 48, 1, 38, 14, 13, 1, 24, 16, 13, 42, 3, 1, 33, 41, 44, 26],
        endings: vec![
            (3, 48),
            (4, 1),
            (6, 52),
            (9, 38),
            (10, 30),
            (12, 69),
            (13, 30),
            (14, 1),
            (18, 144),
            (9, 38),
            (1, 33),
            (2, 75),
        ],
        groups: vec![3, 0, 4, 0, 4, 1, 0, 4, 2, 2, 4, 4],
        ranks: 3,
        link: 5_000_000_000_000_000,
    };
    played_through(&case).unwrap();
}

/// The nodes that a share needs, from its sequences.
fn nodes_of(forest: &Forest, share: &RankShare) -> BTreeSet<u32> {
    let ends = share.sequences.iter().map(|s| forest.endings()[*s as usize].node);
    ends.flat_map(|node| forest.path(node)).map(|node| node.0).collect()
}

fn rows(forest: &Forest, node: u32) -> u64 {
    forest.node(NodeId(node)).rows().count()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_sequence_is_on_one_rank_and_units_are_whole(case in case()) {
        let forest = case.forest();
        let batch = Workload { forest: &forest, groups: &case.groups, logit_rows: &[] };
        for options in every_option(&case) {
            let shares = match Shares::new(&batch, &options) {
                Err(BalanceError::Free) => continue,
                shares => shares.unwrap(),
            };
            let mut rank_of = BTreeMap::new();
            for (rank, share) in shares.shares.iter().enumerate() {
                for sequence in &share.sequences {
                    prop_assert!(rank_of.insert(*sequence, rank).is_none(), "twice");
                }
                // Each row of a path counts once, and a sequence ends in each leaf of the runs.
                let nodes = nodes_of(&forest, share);
                prop_assert_eq!(share.features.rows, nodes.iter().map(|n| rows(&forest, *n)).sum::<u64>());
                let leaves = nodes.iter().filter(|n| forest.is_leaf(NodeId(**n))).count() as u64;
                prop_assert_eq!(share.features.leaves, leaves);
                prop_assert_eq!(share.leaves.iter().map(|run| run.count()).sum::<u64>(), leaves);
                prop_assert!(options.method == BalanceMethod::LongestFirst || share.leaves.len() <= 1);
            }
            prop_assert_eq!(rank_of.len(), forest.endings().len());
            for (a, rank_a) in &rank_of {
                for (b, rank_b) in &rank_of {
                    let root = |s: &u32| forest.path(forest.endings()[*s as usize].node).last();
                    let together = match options.unit {
                        BalanceUnit::Leaf | BalanceUnit::GroupOrLeaf => false,
                        BalanceUnit::Group => case.groups[*a as usize] == case.groups[*b as usize],
                        BalanceUnit::Tree => root(a) == root(b),
                    };
                    prop_assert!(!together || rank_a == rank_b, "{} and {} parted", a, b);
                }
            }
            let cut: BTreeSet<u32> = rank_of
                .iter()
                .flat_map(|(a, rank_a)| rank_of.iter().map(move |(b, rank_b)| (a, b, rank_a != rank_b)))
                .filter(|(a, b, apart)| *apart && case.groups[**a as usize] == case.groups[**b as usize])
                .map(|(a, _, _)| case.groups[*a as usize])
                .collect();
            prop_assert_eq!(&shares.cut_groups, &cut.into_iter().collect::<Vec<_>>());
            if options.unit == BalanceUnit::GroupOrLeaf {
                let of = |unit| Shares::new(&batch, &BalanceOptions { unit, ..options }).unwrap();
                let (whole, cut) = (of(BalanceUnit::Group), of(BalanceUnit::Leaf));
                prop_assert_eq!(shares.largest_ps, whole.largest_ps.min(cut.largest_ps));
                prop_assert!(shares.cut_groups.is_empty() || cut.largest_ps < whole.largest_ps);
            }
            prop_assert!(shares.limit_ps <= shares.largest_ps, "{:?}", options);
            prop_assert!(u128::from(shares.limit_ps) * u128::from(options.ranks) >= u128::from(shares.uncut_ps));
            let json = serde_json::to_string(&shares).unwrap();
            prop_assert_eq!(serde_json::from_str::<Shares>(&json).unwrap(), shares);
        }
    }

    /// Renumbering sequences and groups does not change shares.
    #[test]
    fn the_numbering_of_sequences_does_not_matter(case in case(), shift in 1_usize..40) {
        let forest = case.forest();
        let count = case.endings.len();
        let mut moved = case.clone();
        moved.endings.rotate_left(shift % count);
        moved.groups.rotate_left(shift % count);
        moved.groups.iter_mut().for_each(|group| *group = 1_000 - *group * 7);
        let moved_forest = moved.forest();
        for options in every_option(&case) {
            let batch = Workload { forest: &forest, groups: &case.groups, logit_rows: &[] };
            let Ok(shares) = Shares::new(&batch, &options) else { continue };
            let batch = Workload { forest: &moved_forest, groups: &moved.groups, logit_rows: &[] };
            let mut others = Shares::new(&batch, &options).unwrap();
            for share in &mut others.shares {
                for sequence in &mut share.sequences {
                    *sequence = ((*sequence as usize + shift) % count) as u32;
                }
                share.sequences.sort_unstable();
            }
            others.cut_groups.iter_mut().for_each(|group| *group = (1_000 - *group) / 7);
            others.cut_groups.sort_unstable();
            let mut shares = shares;
            shares.shares.iter_mut().for_each(|share| share.sequences.sort_unstable());
            prop_assert_eq!(shares, others);
        }
    }

    /// Without exchange a share costs what its nodes do.
    #[test]
    fn costs_of_shares_count_their_nodes(case in case()) {
        let forest = case.forest();
        let batch = Workload { forest: &forest, groups: &case.groups, logit_rows: &[] };
        for options in every_option(&case) {
            let Ok(shares) = Shares::new(&batch, &options) else { continue };
            let costs = options.rates.node_costs_ps(&forest, &[], options.microbatch_tokens).unwrap();
            for share in &shares.shares {
                let nodes = nodes_of(&forest, share);
                prop_assert_eq!(share.alone_ps, nodes.iter().map(|id| costs[*id as usize]).sum::<u64>());
                if !options.exchange {
                    prop_assert_eq!(share.busy_ps, share.alone_ps);
                    prop_assert_eq!(share.finish_ps, share.features.rows, "one picosecond per row");
                }
            }
            prop_assert_eq!(shares.uncut_ps, (0..case.parents.len() as u32).map(|n| rows(&forest, n)).sum::<u64>());
        }
    }

    #[test]
    fn exchange_matches_its_simulation(case in case()) {
        played_through(&case)?;
    }

    /// If ops contain collectives, ranks nest their own forwards and backwards and count their microbatches.
    #[test]
    fn own_ops_nest(case in case()) {
        let forest = case.forest();
        let batch = Workload { forest: &forest, groups: &case.groups, logit_rows: &[] };
        for options in every_option(&case).into_iter().filter(|o| o.ops_hold_collectives) {
            let Ok(shares) = Shares::new(&batch, &options) else { continue };
            let apart: BTreeSet<u32> = shares.exchanges.iter().map(|e| e.node.0).collect();
            for (share, own) in shares.shares.iter().zip(&shares.collective_order.own) {
                let kinds: Vec<PassKind> =
                    own.iter().map(|at| shares.collective_order.kinds[*at as usize]).collect();
                let count = |kind| kinds.iter().filter(|k| **k == kind).count() as u64;
                let inner = nodes_of(&forest, share)
                    .into_iter()
                    .filter(|n| !forest.is_leaf(NodeId(*n)) && !apart.contains(n))
                    .filter(|n| rows(&forest, *n) > 0)
                    .count() as u64;
                prop_assert_eq!(count(PassKind::Forward), inner);
                prop_assert_eq!(count(PassKind::Backward), inner);
                prop_assert_eq!(count(PassKind::Microbatch), share.features.microbatches);
                prop_assert!(share.features.microbatches <= share.features.leaves);
                let mut open = 0_u64;
                for kind in kinds {
                    match kind {
                        PassKind::Forward => open += 1,
                        PassKind::Backward => open = open.checked_sub(1).unwrap(),
                        _ => {}
                    }
                }
                let all = |kind| shares.collective_order.kinds.iter().filter(|k| **k == kind).count() as u64;
                prop_assert_eq!(all(PassKind::Microbatch), share.features.microbatches + u64::from(share.dummy_microbatches));
                prop_assert_eq!(all(PassKind::Forward), inner + u64::from(share.dummy_forwards));
                prop_assert_eq!(all(PassKind::Backward), inner + u64::from(share.dummy_backwards));
            }
            let exchanges = shares.exchanges.len();
            prop_assert_eq!(shares.collectives.len(), 2 * exchanges + shares.collective_order.kinds.len() + 1);
            for (index, exchange) in (0_u32..).zip(&shares.exchanges) {
                prop_assert_eq!(
                    shares.collectives[exchange.forward_at as usize],
                    Collective::PrefixForward { exchange: index }
                );
                prop_assert_eq!(
                    shares.collectives[exchange.backward_at as usize],
                    Collective::PrefixBackward { exchange: index }
                );
            }
        }
    }
}

/// Ranks that take part.
fn parties(exchange: &PrefixExchange) -> Vec<u32> {
    [exchange.from].into_iter().chain(exchange.to.begin as u32..exchange.to.end as u32).collect()
}

/// An independent model of shares, one picosecond per row.
struct Model<'a> {
    forest: &'a Forest,
    shares: &'a Shares,
    link: u128,
}

impl Model<'_> {
    fn transfer_ps(&self, bytes: u128) -> u64 {
        (bytes * 1_000_000_000_000).div_ceil(self.link) as u64
    }

    fn needs(&self, rank: usize) -> BTreeSet<u32> {
        nodes_of(self.forest, &self.shares.shares[rank])
    }

    /// The ranks that need a node exchange it, ancestors come first, and a receiver has other work.
    fn check_exchanges(&self) -> Result<(), TestCaseError> {
        let ranks = 0..self.shares.shares.len();
        let mut sent: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (index, exchange) in self.shares.exchanges.iter().enumerate() {
            let node = exchange.node.0;
            let parties = parties(exchange);
            let wanted: Vec<u32> = ranks
                .clone()
                .filter(|rank| self.needs(*rank).contains(&node))
                .map(|rank| rank as u32)
                .collect();
            prop_assert_eq!(&parties, &wanted);
            prop_assert!(parties.len() >= 2);
            prop_assert_eq!(exchange.kv_bytes, 8 * rows(self.forest, node));
            prop_assert_eq!(exchange.gradient_bytes, 16 * rows(self.forest, node));
            for later in &self.shares.exchanges[index + 1..] {
                let below = self.forest.path(exchange.node).skip(1).any(|up| up == later.node);
                prop_assert!(!below, "an ancestor after its descendant");
            }
            if exchange.transfer == ExchangeMode::Send {
                sent.entry(exchange.to.begin as u32).or_default().push(node);
            }
        }
        for (rank, nodes) in sent {
            let top = NodeId(*nodes.iter().min().unwrap());
            let alone = self.needs(rank as usize).into_iter().filter(|node| {
                let shared = ranks.clone().filter(|r| self.needs(*r).contains(node)).count() > 1;
                !shared && self.forest.path(NodeId(*node)).all(|up| up != top)
            });
            let outside: u64 = alone.map(|node| rows(self.forest, node)).sum();
            let received: u64 = nodes.iter().map(|node| rows(self.forest, *node)).sum();
            prop_assert!(outside >= received, "{} to do, {} to wait for", outside, received);
        }
        Ok(())
    }

    /// Finish time of each rank: forwards, its own work, backwards.
    fn play(&self) -> Vec<u64> {
        let mut clocks = vec![0_u64; self.shares.shares.len()];
        let meet = |clocks: &mut Vec<u64>, exchange: &PrefixExchange, ps: u64| {
            let parties = parties(exchange);
            let start = parties.iter().map(|rank| clocks[*rank as usize]).max().unwrap();
            parties.into_iter().for_each(|rank| clocks[rank as usize] = start + ps);
        };
        let part = |exchange: &PrefixExchange, whole: u64, bytes: u64| {
            let g = exchange.to.count() + 1;
            let gathered = (u128::from(bytes) * u128::from(g - 1)).div_ceil(u128::from(g));
            let parts = g.min(rows(self.forest, exchange.node.0)).max(1);
            whole.div_ceil(parts) + self.transfer_ps(gathered)
        };
        let divided: Vec<&PrefixExchange> =
            self.shares.exchanges.iter().filter(|e| e.transfer == ExchangeMode::Divide).collect();
        for exchange in &divided {
            let rows = rows(self.forest, exchange.node.0);
            meet(&mut clocks, exchange, part(exchange, rows / 3, exchange.kv_bytes));
        }
        for (rank, clock) in clocks.iter_mut().enumerate() {
            for node in self.needs(rank) {
                let exchange = self.shares.exchanges.iter().find(|e| e.node.0 == node);
                *clock += match exchange {
                    Some(e) if e.transfer == ExchangeMode::Divide => 0,
                    Some(e) if e.from as usize != rank => {
                        self.transfer_ps(u128::from(e.kv_bytes) + u128::from(e.gradient_bytes))
                    }
                    _ => rows(self.forest, node),
                };
            }
        }
        for exchange in divided.iter().rev() {
            let rows = rows(self.forest, exchange.node.0);
            meet(&mut clocks, exchange, part(exchange, rows - rows / 3, exchange.gradient_bytes));
        }
        clocks
    }
}

/// Longest first is within 4/3 − 1/(3m) of the best assignment of whole trees, which share nothing.
#[test]
fn longest_first_is_within_its_bound() {
    for seed in 0_u64..60 {
        let lengths: Vec<u64> = (0..7).map(|i| 2 + (seed * 31 + i * i * 17 + i * 7) % 23).collect();
        let forest = Forest::from_nodes(&[NO_PARENT; 7], &lengths).unwrap();
        for ranks in 2_u32..4 {
            let options = BalanceOptions {
                method: BalanceMethod::LongestFirst,
                unit: BalanceUnit::Tree,
                ..options(ranks)
            };
            let batch = Workload { forest: &forest, groups: &[], logit_rows: &[] };
            let shares = Shares::new(&batch, &options).unwrap();
            let best = (0..ranks.pow(7))
                .map(|number| {
                    let mut loads = vec![0; ranks as usize];
                    for (tree, length) in lengths.iter().enumerate() {
                        loads[(number / ranks.pow(tree as u32) % ranks) as usize] += length - 1;
                    }
                    loads.into_iter().max().unwrap()
                })
                .min()
                .unwrap();
            assert!(shares.limit_ps <= best, "{} above {best}", shares.limit_ps);
            assert!(shares.largest_ps >= best);
            let m = u64::from(ranks);
            assert!(
                shares.largest_ps * 3 * m <= best * (4 * m - 1),
                "{} of {best}",
                shares.largest_ps
            );
        }
    }
}

#[test]
fn refuses_invalid_input() {
    let forest = Forest::from_nodes(&[NO_PARENT, 0], &[5, 3]).unwrap();
    let batch = Workload { forest: &forest, groups: &[], logit_rows: &[] };
    let refused =
        |batch: &Workload<'_>, options: BalanceOptions| Shares::new(batch, &options).unwrap_err();
    assert_eq!(refused(&batch, options(0)).to_string(), "ranks is 0; accepted: 1 to 16384");
    assert!(refused(&batch, options(RANKS_MAX + 1)).to_string().starts_with("ranks is 16385;"));
    let free = BalanceOptions { rates: Rates::default(), ..options(2) };
    assert_eq!(refused(&batch, free), BalanceError::Free);
    // Trees of one token have no rows.
    let short = Forest::from_nodes(&[NO_PARENT, NO_PARENT], &[1, 1]).unwrap();
    assert_eq!(refused(&Workload { forest: &short, ..batch }, options(1)), BalanceError::Free);
    let mut no_link = BalanceOptions { exchange: true, ..options(2) };
    no_link.machine.link_bytes_per_s = 0;
    assert_eq!(refused(&batch, no_link), BalanceError::Link);
    let empty = Forest::default();
    let nobody = Workload { forest: &empty, ..batch };
    assert!(refused(&nobody, options(2)).to_string().starts_with("sequences is 0; accepted: 1 "));
    let groups = Workload { groups: &[1, 2], ..batch };
    let said = refused(&groups, options(2)).to_string();
    assert_eq!(said, "group numbers is 2; accepted: 1 to 1");
    let logits = Workload { logit_rows: &[0, 4], ..batch };
    assert!(matches!(
        refused(&logits, options(2)),
        BalanceError::Cost(CostError::Plan(PlanError::Count { seen: 4, .. }))
    ));
    let microbatches = BalanceOptions { microbatch_tokens: 0, ..options(2) };
    assert!(matches!(
        refused(&batch, microbatches),
        BalanceError::Cost(CostError::Plan(PlanError::Count { what: "microbatch_tokens", .. }))
    ));
    for rows in [-1.0, f64::NAN, f64::INFINITY] {
        let rates = Rates { rows, ..Rates::default() };
        let error = refused(&batch, BalanceOptions { rates, ..options(2) });
        assert!(matches!(error, BalanceError::Cost(CostError::Rate { what: "rows", .. })));
    }
}

/// The largest accepted numbers add up without overflow; larger ones are refused.
#[test]
fn refuses_costs_above_the_limit() {
    let half = COST_MAX_PS / 2;
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0], &[2, 2, 2]).unwrap();
    let batch = Workload { forest: &forest, groups: &[], logit_rows: &[0, 1, 1] };
    let rates = Rates { logit_rows: half as f64 * 1e-15, ..Rates::default() };
    // 64-bit femtoseconds allow a thousandth of the limit per row, so many rows are needed.
    let shares =
        Shares::new(&batch, &BalanceOptions { rates, exchange: true, ..options(2) }).unwrap();
    assert_eq!(shares.uncut_ps, 2 * half.div_ceil(1_000));
    let long = Forest::from_nodes(&[NO_PARENT, 0, 0], &[TOKENS_MAX / 2; 3]).unwrap();
    let batch = Workload { forest: &long, groups: &[], logit_rows: &[] };
    let rates = Rates { prefix_pairs: 1e9, ..Rates::default() };
    assert_eq!(
        Shares::new(&batch, &BalanceOptions { rates, ..options(2) }),
        Err(BalanceError::Cost(CostError::TooCostly { node: 1 }))
    );
    let rates = Rates { rows: 1e-3, ..Rates::default() };
    let most = BalanceOptions { rates, exchange: true, ..options(RANKS_MAX) };
    let shares = Shares::new(&batch, &most).unwrap();
    assert_eq!(shares.uncut_ps, (3 * TOKENS_MAX / 2 - 1) * 1_000_000_000);
}
