//! Compares the collective order of shares with the ops of the ranks' plans.

use crate::balance_common::{case, every_option, options};
use crate::batch::Batch;
use dormouse_parallel::balance::*;
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::*;
use proptest::prelude::*;

/// The passes of a rank's plan: always shared, unlimited memory, unless `change` sets other options.
fn word_of(
    forest: &Forest,
    shares: &Shares,
    rank: usize,
    options: &BalanceOptions,
    change: impl Fn(&mut Batch),
) -> Vec<PassKind> {
    let part = forest.part_of_sequences(&shares.shares[rank].sequences).unwrap();
    if part.sequences.is_empty() {
        return Vec::new();
    }
    let mut batch = Batch {
        scoring: vec![Scoring { weight: 1.0, ..Scoring::default() }; part.sequences.len()],
        forest: part.forest,
        options: PlanOptions {
            vocab: 9,
            microbatch_rows: options.microbatch_tokens,
            always_share: true,
            model: options.model,
            ..PlanOptions::default()
        },
    };
    change(&mut batch);
    let apart: Vec<NodeId> = (0_u32..)
        .zip(&part.nodes)
        .filter(|(_, node)| shares.exchanges.iter().any(|exchange| exchange.node == **node))
        .map(|(id, _)| NodeId(id))
        .collect();
    passes(&batch.plan().unwrap(), &apart)
}

/// The passes of a plan, without the exchanged nodes `apart`.
fn passes(plan: &Plan, apart: &[NodeId]) -> Vec<PassKind> {
    let runs_here = |node: &NodeId| !apart.contains(&plan.nodes()[node.0 as usize].origin);
    let pass = |op: &Op| match &op.kind {
        OpKind::PrefixForward { node, .. } | OpKind::ForwardAgain { node, .. } => {
            runs_here(node).then_some(PassKind::Forward)
        }
        OpKind::Microbatch { .. } => Some(PassKind::Microbatch),
        OpKind::PrefixBackward { node, .. } => runs_here(node).then_some(PassKind::Backward),
        OpKind::Done => None,
    };
    plan.ops().iter().filter_map(pass).collect()
}

fn own(shares: &Shares, rank: usize) -> Vec<PassKind> {
    let kinds = &shares.collective_order.kinds;
    shares.collective_order.own[rank].iter().map(|at| kinds[*at as usize]).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn passes_match_the_plans(case in case(), microbatch_tokens in 1_u32..100) {
        let forest = case.forest();
        let batch = Workload { forest: &forest, groups: &case.groups, logit_rows: &[] };
        for options in every_option(&case) {
            let options = BalanceOptions { ops_hold_collectives: true, microbatch_tokens, ..options };
            let Ok(shares) = Shares::new(&batch, &options) else { continue };
            for rank in 0..shares.shares.len() {
                let word = word_of(&forest, &shares, rank, &options, |_| {});
                prop_assert_eq!(own(&shares, rank), word, "rank {} of {:?}", rank, options);
            }
        }
    }

    /// Passes of plans with blocks or second forwards replace the assumed passes and all that depends on
    /// them.
    #[test]
    fn other_plans_bring_their_words(
        case in case(),
        block_rows in 1_u64..30,
        microbatch_tokens in 1_u32..100,
    ) {
        let forest = case.forest();
        let batch = Workload { forest: &forest, groups: &case.groups, logit_rows: &[] };
        for options in every_option(&case) {
            let options = BalanceOptions { microbatch_tokens, ..options };
            let Ok(shares) = Shares::new(&batch, &options) else { continue };
            let blocks = |batch: &mut Batch| batch.block_rows = block_rows;
            let words: Vec<Vec<PassKind>> = (0..shares.shares.len())
                .map(|rank| word_of(&forest, &shares, rank, &options, blocks))
                .collect();
            let others = shares.clone().with_passes(&words).unwrap();
            prop_assert_eq!(&others.exchanges.len(), &shares.exchanges.len());
            let exchanges = others.exchanges.len();
            let ops = &others.collectives[exchanges..exchanges + others.collective_order.kinds.len()];
            let kinds = others.collective_order.kinds.iter().map(|op| Collective::Op { op: *op });
            prop_assert_eq!(ops, kinds.collect::<Vec<_>>());
            for (rank, (share, word)) in others.shares.iter().zip(&words).enumerate() {
                prop_assert_eq!(&own(&others, rank), word);
                let dummies = [share.dummy_forwards, share.dummy_microbatches, share.dummy_backwards];
                let dummies: u32 = dummies.iter().sum();
                prop_assert_eq!(dummies as usize + word.len(), others.collective_order.kinds.len());
                let microbatches = word.iter().filter(|kind| **kind == PassKind::Microbatch).count();
                prop_assert_eq!(share.features.microbatches, microbatches as u64);
            }
            for (index, exchange) in (0_u32..).zip(&others.exchanges) {
                let [forward, backward] = [exchange.forward_at, exchange.backward_at];
                let at = |place: u32| others.collectives[place as usize];
                prop_assert_eq!(at(forward), Collective::PrefixForward { exchange: index });
                prop_assert_eq!(at(backward), Collective::PrefixBackward { exchange: index });
            }
        }
    }

    /// Exchanged nodes have rows. If ops contain collectives, exchanged nodes run before the ops, so their
    /// ancestors with rows are exchanged too.
    #[test]
    fn ancestors_of_exchanged_nodes_are_exchanged_before(case in case()) {
        let forest = case.forest();
        let batch = Workload { forest: &forest, groups: &case.groups, logit_rows: &[] };
        for mut options in every_option(&case).into_iter().filter(|options| options.exchange) {
            // The ops of a node have a cost, so short nodes are recomputed rather than exchanged.
            options.rates.nodes = 4e-12;
            let Ok(shares) = Shares::new(&batch, &options) else { continue };
            let mut done: Vec<NodeId> = Vec::new();
            for exchange in &shares.exchanges {
                let has_rows = |node: &NodeId| forest.node(*node).rows().count() > 0;
                prop_assert!(has_rows(&exchange.node));
                let above = forest.path(exchange.node).skip(1).filter(has_rows);
                prop_assert!(above.into_iter().all(|node| done.contains(&node)));
                done.push(exchange.node);
            }
        }
    }
}

/// The root is too short to divide. Ranks recompute it, unless ops contain collectives: then it is divided
/// for the long node below it, or neither is exchanged.
#[test]
fn a_short_root_is_divided_for_its_descendants() {
    let shares = |root: u64, child: u64, in_lockstep: bool| {
        let forest = Forest::from_nodes(&[NO_PARENT, 0, 1, 1], &[root, child, 9_000, 9_000]);
        let forest = forest.unwrap();
        let batch = Workload { forest: &forest, groups: &[], logit_rows: &[] };
        let mut options = BalanceOptions { exchange: true, ..options(2) };
        options.ops_hold_collectives = in_lockstep;
        // An op costs as much as 1,000 rows, and 50 bytes over the link as much as one row.
        options.machine.op_overhead_ns = 1;
        options.machine.link_bytes_per_s = 50_000_000_000_000;
        Shares::new(&batch, &options).unwrap()
    };
    let exchanged = |root, child, in_lockstep| -> Vec<u32> {
        let shares = shares(root, child, in_lockstep);
        shares.exchanges.iter().map(|exchange| exchange.node.0).collect()
    };
    assert_eq!(exchanged(3, 30_000, false), [1]);
    assert_eq!(exchanged(3, 30_000, true), [0, 1]);
    // The child saves less than dividing the root costs.
    assert_eq!(exchanged(3, 12_000, false), [1]);
    assert_eq!(exchanged(3, 12_000, true), [0_u32; 0]);
    // Each way costs an op and one or two bytes; each rank computes one row of two.
    let largest = |in_lockstep| shares(3, 30_000, in_lockstep).largest_ps;
    assert_eq!(largest(true), largest(false) + 2 * 1_000 + 2 + 1 - 2);
    // A root of one token has no rows, so it neither runs nor blocks an exchange.
    assert_eq!(exchanged(1, 30_000, true), [1]);
}

/// A node without rows is not sent, although its ops have a cost at these rates.
#[test]
fn nodes_without_rows_are_not_sent() {
    let parents = [NO_PARENT, NO_PARENT, 1, 1, NO_PARENT];
    let forest = Forest::from_nodes(&parents, &[7_001, 1, 3_001, 4_001, 8_501]).unwrap();
    let batch = Workload { forest: &forest, groups: &[], logit_rows: &[] };
    let mut options = BalanceOptions { exchange: true, ..options(2) };
    options.rates.nodes = 4e-12;
    let shares = Shares::new(&batch, &options).unwrap();
    assert_eq!(shares.shares[0].sequences, [0, 1], "cut below the root of one token");
    assert_eq!(shares.exchanges, []);
}

/// A second forward on one rank is a dummy forward on the other.
#[test]
fn a_second_forward_has_a_dummy_on_other_ranks() {
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0, NO_PARENT, 3], &[9, 4, 4, 9, 4]).unwrap();
    let batch = Workload { forest: &forest, groups: &[], logit_rows: &[] };
    let options =
        BalanceOptions { ops_hold_collectives: true, unit: BalanceUnit::Tree, ..options(2) };
    let shares = Shares::new(&batch, &options).unwrap();
    use PassKind::{Backward as B, Forward as F, Microbatch as W};
    assert_eq!(shares.collective_order.kinds, [F, W, B]);
    let mut words = vec![vec![F, W, B]; 2];
    words[1] = vec![F, W, F, B];
    let again = shares.clone().with_passes(&words).unwrap();
    assert_eq!(again.collective_order.kinds, [F, W, F, B]);
    assert_eq!(again.collective_order.own, [vec![0, 1, 3], vec![0, 1, 2, 3]]);
    assert_eq!(again.shares[0].dummy_forwards, 1);
    let error = shares.with_passes(&words[..1]).unwrap_err();
    assert_eq!(error.to_string(), "passes of ranks is 1; accepted: 2 to 2");
}

/// Second forwards of a plan with little memory count as forwards.
#[test]
fn passes_contain_all_ops_that_run() {
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0], &[40, 4, 4]).unwrap();
    let model = ModelShape { saved_bytes_per_token_layer: 1_000, layers: 4, ..options(1).model };
    let batch = Batch {
        scoring: vec![Scoring { weight: 1.0, ..Scoring::default() }; 2],
        forest,
        options: PlanOptions {
            vocab: 9,
            microbatch_rows: 8,
            always_share: true,
            device_bytes: 170_000,
            host_bytes: 1,
            model,
            ..PlanOptions::default()
        },
    };
    let plan = batch.plan().unwrap();
    assert_eq!(plan.nodes()[0].residency, Residency::Recompute);
    use PassKind::{Backward as B, Forward as F, Microbatch as W};
    assert_eq!(passes(&plan, &[]), [F, W, F, B]);
    assert_eq!(passes(&plan, &[NodeId(0)]), [W]);
}
