//! Compares router losses and gradients of the dense run, copy by copy, with statistics that are captured
//! once and weighted by copies, in FP64, to 1e-12.

use std::collections::BTreeMap;

use dormouse_parallel::experts::{
    Accounting, Baseline, ExpertsError, Formula, LastLayer, Router, Selection, Spanning,
};
use dormouse_schedule::forest::Forest;
use dormouse_schedule::{NodeId, PlanError};
use proptest::prelude::*;

use crate::experts_forest::{forest, physical};

const LAYERS: usize = 3;
const EXPERTS: usize = 5;
const TOP_K: usize = 2;
const NEAR: f64 = 1e-12;

pub(crate) fn router() -> Router {
    Router {
        experts: EXPERTS as u32,
        top_k: TOP_K as u32,
        layers: LAYERS as u32,
        last_layer: true,
        aux_coefficient: 0.7,
        z_coefficient: 0.3,
        ..Router::default()
    }
}

/// Layer by layer, expert by expert.
type Statistic = [[f64; EXPERTS]; LAYERS];
/// By physical row.
type Rows = BTreeMap<(u32, u64), Statistic>;

/// The routing of each physical row: its probabilities and its k best experts.
#[derive(Debug)]
struct Routed {
    probabilities: Rows,
    chosen: Rows,
}

/// A number from two, the same in every run.
fn noise(seed: u64, at: u64) -> f64 {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ at.wrapping_mul(0xD1B5_4A32_D192_ED03);
    x ^= x >> 31;
    x = x.wrapping_mul(0x94D0_49BB_1331_11EB);
    ((x ^ (x >> 29)) >> 11) as f64 / (1u64 << 53) as f64
}

fn route(case: &Case, seed: u64) -> Routed {
    let mut routed = Routed { probabilities: Rows::new(), chosen: Rows::new() };
    for (number, row) in case.fed().into_iter().flatten().enumerate() {
        let mut probabilities = Statistic::default();
        let mut chosen = Statistic::default();
        for layer in 0..LAYERS {
            let at = (number * LAYERS + layer) * EXPERTS;
            let raw: Vec<f64> =
                (0..EXPERTS).map(|expert| 0.01 + noise(seed, (at + expert) as u64)).collect();
            let sum: f64 = raw.iter().sum();
            let mut order: Vec<usize> = (0..EXPERTS).collect();
            order.sort_by(|one, other| raw[*other].total_cmp(&raw[*one]));
            for expert in 0..EXPERTS {
                probabilities[layer][expert] = raw[expert] / sum;
            }
            order[..TOP_K].iter().for_each(|expert| chosen[layer][*expert] = 1.0);
        }
        routed.probabilities.entry(row).or_insert(probabilities);
        routed.chosen.entry(row).or_insert(chosen);
    }
    routed
}

#[derive(Debug)]
struct Case {
    forest: Forest,
    microbatches: Vec<u32>,
    baseline: Baseline,
    /// Counts of other ranks, dense_microbatch by dense_microbatch, for the global-batch formula.
    elsewhere: Vec<Statistic>,
}

impl Case {
    /// Physical rows that each sequence of the dense run feeds.
    fn fed(&self) -> Vec<Vec<(u32, u64)>> {
        let unfed = u64::from(!self.baseline.feeds_last_token);
        let rows = |of: usize| 0..self.forest.endings()[of].tokens - unfed;
        (0..self.microbatches.len())
            .map(|of| rows(of).map(|row| physical(&self.forest, of, row)).collect())
            .collect()
    }

    fn accounting(&self) -> Accounting {
        Accounting::of(&self.forest, &self.microbatches, &self.baseline, &router()).unwrap()
    }
}

fn add(sum: &mut Statistic, factor: f64, more: &Statistic) {
    for layer in 0..LAYERS {
        for expert in 0..EXPERTS {
            sum[layer][expert] += factor * more[layer][expert];
        }
    }
}

/// The dense run: the loss of each scope over all copies, by the literal formula, and the gradient that each
/// copy adds to its physical row.
fn dense(case: &Case, routed: &Routed) -> (f64, Rows) {
    let (mut loss, mut gradients) = (0.0, Rows::new());
    let mut running = Statistic::default();
    let (k, e, n) = (TOP_K as f64, EXPERTS as f64, LAYERS as f64);
    for (scope, weight) in case.baseline.scope_weights.iter().enumerate() {
        let members =
            (0..case.microbatches.len()).filter(|of| case.baseline.scopes[*of] == scope as u32);
        let fed = case.fed();
        let copies: Vec<(u32, u64)> = members.flat_map(|of| fed[of].clone()).collect();
        let (mut counts, mut sums) = (Statistic::default(), Statistic::default());
        for row in &copies {
            add(&mut counts, 1.0, &routed.chosen[row]);
            add(&mut sums, 1.0, &routed.probabilities[row]);
        }
        let t = copies.len() as f64;
        let mut coefficients = Statistic::default();
        let over_layers =
            |of: &Statistic, expert: usize| of.iter().map(|one| one[expert]).sum::<f64>();
        if let Formula::RunningCounts { .. } = case.baseline.formula {
            add(&mut running, 1.0, &counts);
            add(&mut running, 1.0, &case.elsewhere[scope]);
        }
        for layer in 0..LAYERS {
            for expert in 0..EXPERTS {
                // f, and the contribution of one probability to P.
                let (f, each) = match case.baseline.formula {
                    Formula::Switch => (counts[layer][expert] / (k * t), 1.0 / t),
                    Formula::PooledLayers => {
                        (over_layers(&counts, expert) / (n * t), 1.0 / (n * t))
                    }
                    Formula::RunningCounts { ranks, .. } => {
                        let (j, t) = (scope as f64 + 1.0, t * f64::from(ranks));
                        (running[layer][expert] / j / (k * t), 1.0 / t)
                    }
                    other => panic!("{other:?} is not tested"),
                };
                coefficients[layer][expert] = weight * 0.7 * e * f * each;
                loss += coefficients[layer][expert] * sums[layer][expert];
            }
        }
        for row in copies {
            add(gradients.entry(row).or_default(), 1.0, &coefficients);
        }
    }
    (loss, gradients)
}

/// The shared run: C and R of each portion, weighted by copies, and the gradient of its rows.
fn shared(case: &Case, accounting: &Accounting, routed: &Routed) -> (f64, Rows) {
    let rows_of = |portion: &dormouse_parallel::experts::Portion| {
        let node = portion.node.0;
        (portion.rows.begin..portion.rows.end).map(move |row| (node, row))
    };
    let captured: Vec<(Statistic, Statistic)> = accounting
        .portions
        .iter()
        .map(|portion| {
            let (mut counts, mut sums) = (Statistic::default(), Statistic::default());
            for row in rows_of(portion) {
                add(&mut counts, 1.0, &routed.chosen[&row]);
                add(&mut sums, 1.0, &routed.probabilities[&row]);
            }
            (counts, sums)
        })
        .collect();
    let mut leaves = vec![Statistic::default(); captured.len()];
    let (mut loss, mut running) = (0.0, Statistic::default());
    for (index, scope) in accounting.scopes.iter().enumerate() {
        let (mut counts, mut sums) = (Statistic::default(), Statistic::default());
        for read in &scope.reads {
            let (own_counts, own_sums) = &captured[read.portion as usize];
            add(&mut counts, read.copies.into(), own_counts);
            add(&mut sums, read.copies.into(), own_sums);
        }
        if let Formula::RunningCounts { .. } = accounting.formula {
            add(&mut running, 1.0, &counts);
            add(&mut running, 1.0, &case.elsewhere[index]);
            counts = running;
        }
        let flat = accounting.coefficients(index as u32, counts.as_flattened()).unwrap();
        let mut coefficients = Statistic::default();
        coefficients.as_flattened_mut().copy_from_slice(&flat);
        loss += sums.as_flattened().iter().zip(&flat).map(|(sum, each)| sum * each).sum::<f64>();
        for read in &scope.reads {
            add(&mut leaves[read.portion as usize], read.copies.into(), &coefficients);
        }
    }
    let portions = accounting.portions.iter().zip(leaves);
    let back = portions.flat_map(|(portion, leaf)| rows_of(portion).map(move |row| (row, leaf)));
    (loss, back.collect())
}

/// Largest difference of two gradients, over the largest entry; rows missing in one are zero there. No
/// entry may be NaN, as `max` drops it.
fn distance(one: &Rows, other: &Rows) -> f64 {
    let entry = |rows: &Rows, row: &(u32, u64)| rows.get(row).copied().unwrap_or_default();
    let (mut most, mut largest) = (0.0_f64, 0.0_f64);
    for row in one.keys().chain(other.keys()) {
        let (one, other) = (entry(one, row), entry(other, row));
        for (one, other) in one.as_flattened().iter().zip(other.as_flattened()) {
            assert!(one.is_finite() && other.is_finite(), "{row:?}: {one} {other}");
            most = most.max((one - other).abs());
            largest = largest.max(one.abs());
        }
    }
    most / largest
}

fn case(sequences: &[Vec<u8>], block: usize, formula: u8, scopes: &[u32], feeds: bool) -> Case {
    let forest = forest(sequences, block);
    let scopes: Vec<u32> = scopes[..sequences.len()].to_vec();
    let last = *scopes.iter().max().unwrap();
    let weight = |scope: u32| 0.5 + 0.25 * f64::from(scope);
    let baseline = Baseline {
        formula: match formula {
            0 => Formula::Switch,
            1 => Formula::PooledLayers,
            _ => Formula::RunningCounts { ranks: 2, microbatches: last + 1 },
        },
        scope_weights: (0..=last).map(weight).collect(),
        scopes: scopes.clone(),
        feeds_last_token: feeds,
        spanning: Spanning::Refuse,
    };
    let other = |scope: u32| {
        let mut counts = Statistic::default();
        let flat = counts.as_flattened_mut().iter_mut().enumerate();
        flat.for_each(|(at, count)| *count = (noise(u64::from(scope), at as u64) * 9.0).floor());
        counts
    };
    Case { forest, microbatches: scopes, baseline, elsewhere: (0..=last).map(other).collect() }
}

/// Up to eight sequences of few different tokens, so that they share, nest and repeat.
fn cases() -> impl Strategy<Value = Case> {
    let sequences = prop::collection::vec(prop::collection::vec(0u8..3, 2..9), 1..9);
    (sequences, 1usize..5, 0u8..3, prop::collection::vec(0u32..3, 9), any::<bool>(), any::<bool>())
        .prop_map(|(sequences, block, formula, mut scopes, each, feeds)| {
            // Scopes are numbered without gaps; or one for each trajectory.
            if each {
                scopes = (0..9).collect();
            }
            let mut names: Vec<u32> = scopes[..sequences.len()].to_vec();
            names.sort_unstable();
            names.dedup();
            let rename = |scope: &u32| names.binary_search(scope).unwrap_or(0) as u32;
            let scopes: Vec<u32> = scopes.iter().map(rename).collect();
            case(&sequences, block, formula, &scopes, feeds)
        })
}

proptest! {
    #[test]
    fn loss_and_gradient_equal_the_dense_run(case in cases(), seed: u64) {
        let routed = route(&case, seed);
        let (wanted, gradient) = dense(&case, &routed);
        let accounting = case.accounting();
        let (got, back) = shared(&case, &accounting, &routed);
        prop_assert!((got - wanted).abs() <= NEAR * wanted.abs(), "{} {}", got, wanted);
        prop_assert!(distance(&gradient, &back) <= NEAR, "{}", distance(&gradient, &back));
        for scope in &accounting.scopes {
            let of = |read: &dormouse_parallel::experts::Read| {
                accounting.portions[read.portion as usize].rows.count() * u64::from(read.copies)
            };
            prop_assert_eq!(scope.tokens, scope.reads.iter().map(of).sum::<u64>());
        }
    }

    #[test]
    fn z_loss_and_counts_need_only_copies(case in cases(), seed: u64) {
        let routed = route(&case, seed);
        let z = |row: &(u32, u64)| noise(seed, u64::from(row.0) * 1000 + row.1);
        let (mut loss, mut counts) = (0.0, Statistic::default());
        let fed = case.fed();
        for (scope, weight) in case.baseline.scope_weights.iter().enumerate() {
            let of_scope = |of: &&usize| case.baseline.scopes[**of] == scope as u32;
            let all: Vec<usize> = (0..fed.len()).collect();
            let rows: Vec<(u32, u64)> =
                all.iter().filter(of_scope).flat_map(|of| fed[*of].clone()).collect();
            loss += weight * 0.3 * rows.iter().map(z).sum::<f64>() / rows.len() as f64;
            rows.iter().for_each(|row| add(&mut counts, 1.0, &routed.chosen[row]));
        }
        let (mut by_portions, mut weighted) = (0.0, Statistic::default());
        for portion in case.accounting().portions {
            for row in portion.rows.begin..portion.rows.end {
                by_portions += portion.z_weight * z(&(portion.node.0, row));
                add(&mut weighted, portion.copies as f64, &routed.chosen[&(portion.node.0, row)]);
            }
        }
        prop_assert!((by_portions - loss).abs() <= NEAR * loss);
        prop_assert_eq!(weighted, counts);
    }

    /// With `CutAtMicrobatches`, each part equals a separate scope.
    #[test]
    fn the_approximation_is_what_its_name_says(
        mut case in cases(), microbatches in prop::collection::vec(0u32..3, 9), seed: u64,
    ) {
        prop_assume!(!matches!(case.baseline.formula, Formula::RunningCounts { .. }));
        case.microbatches = microbatches[..case.microbatches.len()].to_vec();
        case.baseline.spanning = Spanning::CutAtMicrobatches;
        let routed = route(&case, seed);
        let (got, _) = shared(&case, &case.accounting(), &routed);
        let mut parts: Vec<(u32, u32)> =
            case.baseline.scopes.iter().copied().zip(case.microbatches.iter().copied()).collect();
        let of = parts.clone();
        parts.sort_unstable();
        parts.dedup();
        let fed: Vec<usize> = case.fed().iter().map(Vec::len).collect();
        let tokens = |inside: &dyn Fn(&(u32, u32)) -> bool| -> f64 {
            of.iter().zip(&fed).filter(|(part, _)| inside(part)).map(|(_, fed)| *fed as f64).sum()
        };
        let weight = |part: &(u32, u32)| {
            let whole = tokens(&|other| other.0 == part.0);
            case.baseline.scope_weights[part.0 as usize] * tokens(&|other| other == part) / whole
        };
        let scope_weights = parts.iter().map(weight).collect();
        let scopes = of.iter().map(|part| parts.binary_search(part).unwrap() as u32).collect();
        let baseline = Baseline { scopes, scope_weights, ..case.baseline.clone() };
        let (wanted, _) = dense(&Case { baseline, ..case }, &routed);
        prop_assert!((got - wanted).abs() <= NEAR * wanted.abs(), "{} {}", got, wanted);
    }
}

/// A prompt of four tokens, three responses, one of them in a tree with a branch and a nested end.
fn group() -> Vec<Vec<u8>> {
    let tokens: [&[u8]; 4] =
        [&[0, 1, 2, 3, 4, 4], &[0, 1, 2, 3, 5], &[0, 1, 2, 3, 4], &[0, 1, 2, 3, 6, 6, 6]];
    tokens.map(<[u8]>::to_vec).into()
}

/// Detects multiplicity 1, R without gradient, and omitted last tokens.
#[test]
fn wrong_accounting_changes_loss_or_gradient() {
    for formula in 0..3 {
        for feeds in [false, true] {
            let case = case(&group(), 9, formula, &[0, 0, 0, 1], feeds);
            let routed = route(&case, 7);
            let (loss, gradient) = dense(&case, &routed);
            let accounting = case.accounting();
            let (exact, back) = shared(&case, &accounting, &routed);
            assert!((exact - loss).abs() < NEAR * loss && distance(&gradient, &back) < NEAR);

            let mut once = accounting.clone();
            once.scopes.iter_mut().flat_map(|one| &mut one.reads).for_each(|read| read.copies = 1);
            let (wrong, back) = shared(&case, &once, &routed);
            assert!((wrong - loss).abs() > 1e-3 * loss && distance(&gradient, &back) > 1e-2);

            // R of portions that another microbatch ran, without gradient.
            let (_, mut back) = shared(&case, &accounting, &routed);
            back.retain(|row, _| case.forest.is_leaf(NodeId(row.0)));
            assert!(distance(&gradient, &back) > 0.5);

            // Exactly one of the dense run and the plan runs the rows of last tokens.
            let mut other = Case {
                baseline: case.baseline.clone(),
                ..self::case(&group(), 9, formula, &[0, 0, 0, 1], feeds)
            };
            other.baseline.feeds_last_token = !feeds;
            let fewer = shared(&other, &other.accounting(), &route(&other, 7)).0;
            assert!((fewer - loss).abs() > 1e-3 * loss);
        }
    }
}

fn refused(case: &Case, router: &Router) -> ExpertsError {
    Accounting::of(&case.forest, &case.microbatches, &case.baseline, router).unwrap_err()
}

#[test]
fn refuses_routers_that_a_shared_prefix_cannot_reproduce() {
    let ok = case(&group(), 9, 0, &[0, 0, 1, 1], true);
    let with = |change: &dyn Fn(&mut Router)| {
        let mut router = router();
        change(&mut router);
        refused(&ok, &router)
    };
    type Change = fn(&mut Router);
    let changes: [(&str, Change); 7] = [
        ("capacity limit", |r| r.capacity_limit = true),
        ("token dropping", |r| r.drops_tokens = true),
        ("router jitter", |r| r.jitter = true),
        ("statistics that count padding", |r| r.counts_padding = true),
        ("expert choice", |r| r.selection = Selection::ExpertChoice),
        ("sinkhorn", |r| r.selection = Selection::Sinkhorn),
        ("balanced assignment", |r| r.selection = Selection::BalancedAssignment),
    ];
    for (feature, change) in changes {
        let error = with(&change);
        assert!(matches!(error, ExpertsError::Router(_)), "{error:?}");
        assert!(error.to_string().starts_with(&format!("{feature}: ")), "{error}");
    }
    assert_eq!(
        with(&|r| r.aux_coefficient = f64::INFINITY).to_string(),
        "aux_coefficient is inf; accepted: finite numbers"
    );
    assert!(with(&|r| r.top_k = 6).to_string().starts_with("top_k is 6; accepted: 1 to 5"));
    assert!(matches!(with(&|r| r.layers = 0), ExpertsError::Count(PlanError::Count { .. })));
    let many = with(&|r| (r.experts, r.layers) = (1 << 20, 64));
    assert!(many.to_string().starts_with("experts of all router layers is 67108864"));

    let change = |change: &dyn Fn(&mut Case)| {
        let mut case = case(&group(), 9, 0, &[0, 0, 1, 1], true);
        change(&mut case);
        refused(&case, &router()).to_string()
    };
    assert_eq!(
        change(&|case| case.microbatches[3] = 4),
        "scope 1 spans microbatches 1 and 4, so the backward of one begins before the other is counted; accepted: one \
         microbatch per scope, or the approximation cut_at_microbatches; a trainer that runs all forwards before its \
         backwards counts first and needs neither"
    );
    let running = |case: &mut Case, microbatches| {
        case.baseline.formula = Formula::RunningCounts { ranks: 1, microbatches };
    };
    let swapped = change(&|case| {
        running(case, 2);
        case.microbatches = vec![1, 1, 0, 0];
    });
    assert!(
        swapped.starts_with("sequence 0 runs in microbatch 1; accepted: 0, as in the dense run")
    );
    assert!(change(&|case| running(case, 3)).starts_with("microbatches is 3; accepted: 2 to 2"));
    assert!(
        change(&|case| case.microbatches.truncate(3)).starts_with("microbatches of sequences is 3")
    );
    assert!(change(&|case| case.baseline.scopes.push(0)).starts_with("scopes of sequences is 5"));
    assert!(
        change(&|case| case.baseline.scope_weights.truncate(1)).starts_with("scope_weights is 1")
    );
    assert!(change(&|case| case.baseline.scope_weights[1] = f64::NAN).contains("weight is NaN"));
    let mut short = case(&[vec![1]], 9, 0, &[0], false);
    assert!(refused(&short, &router()).to_string().starts_with("tokens of a scope is 0"));
    short.baseline.feeds_last_token = true;
    let accounting = short.accounting();
    assert_eq!(accounting.scopes[0].tokens, 1);
    assert!(accounting.coefficients(0, &[0.0; 14]).is_err());
    assert!(accounting.coefficients(1, &[0.0; 15]).is_err());
}

#[test]
fn the_last_layer_runs_as_far_as_its_router_is_needed() {
    let case = case(&group(), 9, 0, &[0, 0, 1, 1], true);
    let of = |aux, z, counts_wanted, last_layer| {
        let losses = Router { aux_coefficient: aux, z_coefficient: z, ..router() };
        let router = Router { counts_wanted, last_layer, ..losses };
        let got =
            Accounting::of(&case.forest, &case.microbatches, &case.baseline, &router).unwrap();
        (got.last_layer, got.counts, got.sums)
    };
    assert_eq!(of(0.1, 0.0, false, true), (LastLayer::LiveToRouter, true, true));
    assert_eq!(of(0.0, 0.1, false, true), (LastLayer::LiveToRouter, false, false));
    assert_eq!(of(0.0, 0.0, true, true), (LastLayer::ForwardToRouter, true, false));
    assert_eq!(of(0.0, 0.0, false, true), (LastLayer::Dead, false, false));
    assert_eq!(of(0.1, 0.1, true, false), (LastLayer::Dead, true, true));
}
