//! Rates fitted to measured steps, and counted rates.

use std::collections::BTreeSet;

use crate::batch::FlatGroup;
use crate::tree_planner_support::{batch, labels, sequences};
use dormouse_schedule::cost::*;
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::tree_planner::scored_rows;
use dormouse_schedule::*;
use proptest::prelude::*;

/// Fixed numbers without a pattern.
fn random(state: &mut u64, most: u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) % (most + 1)
}

fn steps(count: usize, rates: &Rates, noise: f64) -> Vec<Sample> {
    let mut state = 7;
    let most = [0, 400, 900, 300, 300_000, 90_000, 4_000_000_000, 900_000_000, 200_000];
    (0..count)
        .map(|_| {
            let mut counts = most.map(|most| random(&mut state, most));
            counts[0] = 1;
            let features = Features::from_array(counts);
            let wobble = 1.0 + noise * (random(&mut state, 2_000) as f64 / 1_000.0 - 1.0);
            Sample { features, seconds: rates.seconds(&features) * wobble }
        })
        .collect()
}

const TRUE: Rates = Rates {
    steps: 0.2,
    nodes: 2e-3,
    leaves: 0.0,
    microbatches: 5e-3,
    rows: 3e-5,
    forward_only_rows: 1e-5,
    prefix_pairs: 2e-9,
    causal_pairs: 3e-9,
    logit_rows: 6e-6,
};

#[test]
fn exact_samples_recover_their_rates() {
    for weighting in [Weighting::Absolute, Weighting::Relative] {
        let fit = Fit::new(&steps(200, &TRUE, 0.0), weighting).unwrap();
        for (name, (got, wanted)) in
            FEATURE_NAMES.iter().zip(fit.rates.to_array().into_iter().zip(TRUE.to_array()))
        {
            let near = (got - wanted).abs() <= 1e-7 * wanted.max(1e-6);
            assert!(near, "{name}: {got} for {wanted}, {weighting:?}");
        }
        assert!(fit.worst_relative_error < 1e-9, "{}", fit.worst_relative_error);
        assert_eq!((fit.samples, fit.weighting, fit.version), (200, weighting, FIT_VERSION));
    }
}

/// With measurements off by 5 %, the reported errors are those of the reported rates.
#[test]
fn reported_errors_match_the_rates() {
    let steps = steps(101, &TRUE, 0.05);
    let fit = Fit::new(&steps, Weighting::Relative).unwrap();
    let mut errors: Vec<f64> =
        steps.iter().map(|s| (fit.rates.seconds(&s.features) / s.seconds - 1.0).abs()).collect();
    errors.sort_by(f64::total_cmp);
    assert!((fit.median_relative_error - errors[50]).abs() < 1e-12);
    assert!((fit.worst_relative_error - errors[100]).abs() < 1e-12);
    assert!(fit.median_relative_error > 0.01 && fit.worst_relative_error < 0.07, "{fit:?}");
    assert!(fit.rates.to_array().iter().all(|rate| *rate >= 0.0));
}

/// A wrong measurement of a long step changes an absolute fit much, a relative one little.
#[test]
fn weighting_selects_the_minimised_error() {
    let sample =
        |rows, seconds| Sample { features: Features { rows, ..Features::default() }, seconds };
    let steps = [sample(10, 1.0), sample(10, 1.0), sample(10, 1.0), sample(10_000, 2_000.0)];
    let rate = |weighting| Fit::new(&steps, weighting).unwrap().rates.rows;
    assert!((rate(Weighting::Absolute) - 0.2).abs() < 1e-4);
    // Relative: minimise 3·(10r − 1)² + (5r − 1)², so r = (30 + 5) ÷ (300 + 25).
    assert!((rate(Weighting::Relative) - 35.0 / 325.0).abs() < 1e-12);
}

#[test]
fn unvaried_features_are_absent_or_dependent() {
    // Two steps, three features, one of them twice another.
    let sample = |rows, seconds| Sample {
        features: Features { rows, logit_rows: 2 * rows, leaves: 3, ..Features::default() },
        seconds,
    };
    let fit = Fit::new(&[sample(10, 7.0), sample(20, 9.0)], Weighting::Absolute).unwrap();
    let standing = |name| fit.standing[FEATURE_NAMES.iter().position(|n| *n == name).unwrap()];
    assert_eq!(standing("leaves"), Standing::Positive);
    assert_eq!(standing("microbatches"), Standing::Absent);
    let mut pair = [standing("rows"), standing("logit_rows")];
    pair.sort_by_key(|standing| *standing == Standing::Dependent);
    assert_eq!(pair, [Standing::Positive, Standing::Dependent]);
    assert!((fit.rates.rows + 2.0 * fit.rates.logit_rows - 0.2).abs() < 1e-12);
    assert!(fit.worst_relative_error < 1e-12);
    // Steps that cost less with more rows: no rate is below 0.
    let fit = Fit::new(&[sample(10, 9.0), sample(20, 7.0)], Weighting::Absolute).unwrap();
    assert_eq!((fit.rates.rows, fit.rates.logit_rows), (0.0, 0.0));
    assert!((fit.rates.leaves - 8.0 / 3.0).abs() < 1e-12);
}

#[test]
fn invalid_samples_are_refused() {
    let sample =
        |rows, seconds| Sample { features: Features { rows, ..Features::default() }, seconds };
    let refused = |steps: &[Sample]| Fit::new(steps, Weighting::Relative).unwrap_err();
    assert_eq!(refused(&[]), CostError::SampleCount { seen: 0 });
    for seconds in [0.0, -1.0, f64::INFINITY, 1e-13] {
        let error = refused(&[sample(1, 1.0), sample(1, seconds)]);
        assert_eq!(error, CostError::Seconds { index: 1, seen: seconds });
    }
    let nan = refused(&[sample(1, f64::NAN)]);
    assert!(matches!(nan, CostError::Seconds { index: 0, .. }));
    assert_eq!(refused(&[sample(0, 1.0)]), CostError::NothingCounted { samples: 1 });
    let largest = Features::from_array([u64::MAX; FEATURES]);
    let fit = Fit::new(&[Sample { features: largest, seconds: SECONDS_MIN }], Weighting::Relative);
    assert!(fit.unwrap().worst_relative_error < 1e-9);
}

/// JSON matches the recording and reads back with the same bits.
#[test]
fn json_is_stable() {
    let fit = Fit::new(&steps(50, &TRUE, 0.03), Weighting::Relative).unwrap();
    let json = serde_json::to_string(&fit).unwrap();
    assert_eq!(serde_json::from_str::<Fit>(&json).unwrap(), fit);
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    for name in FEATURE_NAMES {
        assert!(value["rates"][name].is_f64(), "{name}");
    }
    assert_eq!(value["weighting"], "relative");
    assert_eq!(value["samples"], 50);
    assert_eq!(value["standing"][4], "positive");
}

/// For a flat group, counting by features and counting by phases are the same.
#[test]
fn counted_rates_agree_with_the_prediction() {
    let model = ModelShape {
        layers: 3,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        dtype_bytes: 2,
        layer_linear_weights: 1_000,
        head_weights: 700,
        ..ModelShape::default()
    };
    let lengths = [5, 9, 2];
    let machine = Machine {
        flops_per_s: 1_000,
        prefix_attention_flops_per_s: 300,
        causal_attention_flops_per_s: 100,
        ..Machine::default()
    };
    let (vocab, microbatch_rows, machine_known) = (10, 8, Some(machine));
    let options =
        PlanOptions { vocab, microbatch_rows, model, machine: machine_known, ..Default::default() };
    let responses = lengths.map(|length| (length, 1.0)).to_vec();
    let plan = FlatGroup { prompt: 40, responses, options }.plan().unwrap();
    let wanted_s = plan.predict().seconds_shared.unwrap();
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0, 0], &[40, 5, 9, 2]).unwrap();
    let start = Features { steps: 1, microbatches: 2, ..Features::default() };
    let features = (0..4).map(NodeId).fold(start, |sum, id| {
        let logit_rows = logit_rows_of(&forest, &[], id).unwrap();
        sum.plus(Features::of_node(forest.node(id), forest.is_leaf(id), logit_rows))
    });
    let counted = Rates::counted(&model, &machine).unwrap();
    assert!((counted.seconds(&features) / wanted_s - 1.0).abs() < 1e-12);
    // A node with children and a microbatch cost a forward and a backward each.
    let machine = Machine { op_overhead_ns: 500_000_000, ..machine };
    let slower = Rates::counted(&model, &machine).unwrap();
    assert!((slower.seconds(&features) - counted.seconds(&features) - 3.0).abs() < 1e-9);
    assert!(Rates::counted(&ModelShape { layers: 0, ..model }, &machine).is_err());
}

/// Node costs are in picoseconds: each feature at its rate, and a leaf's part of a microbatch.
#[test]
fn nodes_cost_the_sum_of_their_features() {
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 1, 1], &[4, 3, 6, 2]).unwrap();
    let ps = 1e-12;
    let rates = Rates {
        steps: 1.0,
        nodes: 1_000.0 * ps,
        leaves: 2_000.0 * ps,
        microbatches: 40_000.0 * ps,
        rows: 10.0 * ps,
        forward_only_rows: 100_000.0 * ps,
        prefix_pairs: 1_000_000.0 * ps,
        causal_pairs: 100_000_000.0 * ps,
        logit_rows: 10_000_000_000.0 * ps,
    };
    let costs = rates.node_costs_ps(&forest, &[0, 1, 6, 0], 8).unwrap();
    // Rows 3, 3, 6, 2 at positions 0, 3, 6, 6; six rows are 6/8 of a microbatch.
    let wanted = [
        1_000 + 3 * 10 + 3 * 100_000 + 6 * 100_000_000,
        1_000 + 3 * 10 + 3 * 100_000 + 9 * 1_000_000 + 6 * 100_000_000 + 10_000_000_000,
        2_000 + 30_000 + 60 + 36 * 1_000_000 + 21 * 100_000_000 + 60_000_000_000,
        2_000 + 10_000 + 20 + 12 * 1_000_000 + 3 * 100_000_000,
    ];
    assert_eq!(costs, wanted);
}

/// Prompts have no logits by default; a tree that is a single sequence is no prompt.
#[test]
fn a_root_without_children_has_logits_by_default() {
    let forest = Forest::from_nodes(&[NO_PARENT, 0, NO_PARENT], &[4, 3, 6]).unwrap();
    let rows =
        |given: &[u64]| [0, 1, 2].map(|id| logit_rows_of(&forest, given, NodeId(id)).unwrap());
    assert_eq!(rows(&[]), [0, 3, 5]);
    assert_eq!(rows(&[1, 2, 4]), [1, 2, 4]);
}

#[test]
fn scorings_that_a_plan_refuses_have_no_rows() {
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0], &[4, 3, 6]).unwrap();
    let of = |loss: [Loss; 2]| loss.map(|loss| Scoring { loss, weight: 1.0 });
    let both = of([Loss::AllButFirst, Loss::From(5)]);
    assert_eq!(scored_rows(&forest, &both).unwrap(), [3, 3, 5]);
    let refused = scored_rows(&forest, &both[..1]).unwrap_err().to_string();
    assert_eq!(refused, "scoring is 1; accepted: 2, one for each sequence");
    let late = of([Loss::AllButFirst, Loss::From(11)]);
    assert!(matches!(scored_rows(&forest, &late), Err(PlanError::Labels { sequence: 1, .. })));
}

proptest! {
    /// The rows of a node that predict a label of any sequence on whose path it is, counted one by one.
    #[test]
    fn scored_rows_are_those_before_labels(
        sequences in sequences(),
        losses in prop::collection::vec(any::<u32>(), 1..8),
    ) {
        let batch = batch(&sequences, &losses, 8);
        let forest = &batch.forest;
        let mut rows = vec![BTreeSet::new(); forest.nodes().len()];
        for (ending, scoring) in forest.endings().iter().zip(&batch.scoring) {
            for label in labels(scoring, ending.tokens) {
                for id in forest.path(ending.node) {
                    let own = forest.node(id).rows();
                    if own.begin < label && label <= own.end {
                        rows[id.0 as usize].insert(label - 1);
                    }
                }
            }
        }
        let wanted: Vec<u64> = rows.iter().map(|rows| rows.len() as u64).collect();
        prop_assert_eq!(scored_rows(forest, &batch.scoring).unwrap(), wanted);
    }
}
