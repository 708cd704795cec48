//! Compares the planner's choices with all possible choices.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;

use super::draft::*;
use super::microbatches::{EdgeParts, Microbatches, SubtreePart};
use super::order::LeastMemory;
use super::predict::Predictor;
use super::residency::{ResidencyChoice, ResidencyProblem};
use super::tree::PlanTree;
use super::*;
use crate::Residency;
use crate::forest::{Forest, NO_PARENT};
use crate::{Machine, ModelShape};

/// The inputs of a plan, in one place.
struct Batch {
    forest: Forest,
    scoring: Vec<Scoring>,
    options: PlanOptions,
}

impl Batch {
    fn plan(&self) -> Result<crate::Plan, PlanError> {
        crate::Plan::new(&self.forest, &self.scoring, &self.options)
    }
}

/// Shapes and lengths of small forests, depth first.
fn forests(nodes: usize) -> impl Strategy<Value = (Vec<u32>, Vec<u64>)> {
    let picks = prop::collection::vec((any::<prop::sample::Index>(), 1_u64..30), 1..nodes);
    (picks, 1_u64..30).prop_map(|(picks, root)| {
        let (mut parents, mut lengths, mut path) = (vec![NO_PARENT], vec![root], vec![0_u32]);
        for (id, (pick, length)) in (1_u32..).zip(picks) {
            path.truncate(pick.index(path.len()) + 1);
            parents.push(*path.last().unwrap());
            lengths.push(length);
            path.push(id);
        }
        (parents, lengths)
    })
}

fn batch((parents, lengths): &(Vec<u32>, Vec<u64>), microbatch_rows: u32, from: u64) -> Batch {
    let forest = Forest::from_nodes(parents, lengths).unwrap();
    let scored = |tokens: u64| Scoring { loss: Loss::From(from.min(tokens)), weight: 1.0 };
    Batch {
        scoring: forest.endings().iter().map(|ending| scored(ending.tokens)).collect(),
        forest,
        options: PlanOptions {
            vocab: 3,
            microbatch_rows,
            wake_window_layers: 2,
            model: ModelShape {
                layers: 4,
                heads: 1,
                kv_heads: 1,
                head_dim: 1,
                dtype_bytes: 2,
                layer_linear_weights: 1000,
                kv_linear_weights: 10,
                last_layer_prefix_weights: 10,
                head_weights: 10,
                saved_bytes_per_token_layer: 16,
            },
            machine: Some(Machine {
                flops_per_s: 10_000,
                sleep_bytes_per_s: 20,
                wake_bytes_per_s: 20,
                ..Machine::default()
            }),
            ..PlanOptions::default()
        },
    }
}

/// Calls `with` with everything that is computed before a residency is chosen.
fn given<T>(
    batch: &Batch,
    with: impl FnOnce(&ResidencyProblem<'_>, &LeastMemory, &Draft<'_>) -> T,
) -> T {
    let request = &Request::new(&batch.forest, &batch.scoring, &batch.options).unwrap();
    let tree = &PlanTree::new(request, &[], 0).unwrap();
    let microbatch_rows = request.options.microbatch_rows;
    let draft = Draft { request, tree, microbatch_rows, dense: &[] };
    draft.given(|given, least| with(given, least, &draft))
}

/// Maximum bytes of any op.
fn device_peak(given: &ResidencyProblem<'_>, draft: &Draft<'_>, residency: &[Residency]) -> u64 {
    draft.ops(given, residency).iter().map(|op| op.device_bytes).max().unwrap_or(0)
}

fn keep_peak(given: &ResidencyProblem<'_>, draft: &Draft<'_>) -> u64 {
    device_peak(given, draft, &given.all(Residency::Keep).residency)
}

/// Device memory from the minimum to more than any plan holds, and some host memory.
fn budgets(
    given: &ResidencyProblem<'_>,
    least: &LeastMemory,
    draft: &Draft<'_>,
    host_eighths: Option<u64>,
) -> impl Iterator<Item = (u64, Option<u64>)> {
    let (least, most) = (least.bytes, keep_peak(given, draft));
    let host = host_eighths.map(|eighths| most * eighths / 16);
    (0..12).map(move |step| (least + (most - least) * step / 10, host))
}

/// All residencies of the nodes with children.
fn assignments(tree: &PlanTree) -> Vec<Vec<Residency>> {
    let mut all = vec![vec![Residency::Keep; tree.len()]];
    for node in (0..tree.len()).filter(|id| !tree.is_leaf(*id)) {
        let choices = [Residency::Keep, Residency::Sleep, Residency::Recompute];
        let with = |base: &Vec<Residency>, choice| {
            let mut made = base.clone();
            made[node] = choice;
            made
        };
        all = all.iter().flat_map(|base| choices.map(|choice| with(base, choice))).collect();
    }
    all
}

fn inner_count(batch: &Batch) -> usize {
    let forest = &batch.forest;
    (0..forest.nodes().len() as u32).filter(|id| !forest.is_leaf(crate::NodeId(*id))).count()
}

/// The cheapest of all assignments whose ops fit.
fn cheapest(
    given: &ResidencyProblem<'_>,
    draft: &Draft<'_>,
    device: u64,
    host: u64,
) -> Option<f64> {
    let mut best: Option<f64> = None;
    for residency in assignments(given.tree) {
        let ops = draft.ops(given, &residency);
        if ops.iter().all(|op| op.device_bytes <= device && op.host_bytes <= host) {
            let cost = cost(given, &residency);
            best = Some(best.map_or(cost, |best| best.min(cost)));
        }
    }
    best
}

fn cost(given: &ResidencyProblem<'_>, residency: &[Residency]) -> f64 {
    residency.iter().enumerate().map(|(node, choice)| given.costs.of(node, *choice)).sum()
}

/// Predicted seconds of the plan with these residencies.
fn seconds(given: &ResidencyProblem<'_>, draft: &Draft<'_>, residency: &[Residency]) -> f64 {
    let choice = &ResidencyChoice { residency: residency.to_vec(), gap: 0.0 };
    let made = Predictor { request: draft.request, given, choice };
    let (prediction, _) = made.predict(draft.microbatch_rows, &[], &draft.ops(given, residency));
    prediction.seconds_shared.unwrap()
}

/// Device peak of a subtree, op by op, for a given order of parts and given residencies.
fn peak(
    given: &ResidencyProblem<'_>,
    node: usize,
    above: u64,
    orders: &[Vec<SubtreePart>],
    residency: &[Residency],
) -> u64 {
    let root = node == given.tree.len();
    let bytes = if root { NodeBytes::default() } else { given.tree.node_bytes(node) };
    let choice = if root { Residency::Keep } else { residency[node] };
    let mut most = if root { 0 } else { above + bytes.own(choice) };
    let parts = &orders[node];
    for (at, part) in parts.iter().enumerate() {
        // The window is held during the first part, and from the start of the last.
        let edge = at == 0 || at + 1 == parts.len();
        let held = above + bytes.held(choice, edge);
        most = most.max(match part {
            SubtreePart::Microbatch(microbatch) => held + given.items.microbatch(*microbatch).bytes,
            SubtreePart::Node(child) => peak(given, *child as usize, held, orders, residency),
        });
    }
    most
}

/// Every order of every node's parts.
fn all_orders(given: &ResidencyProblem<'_>) -> Vec<Vec<Vec<SubtreePart>>> {
    let mut all: Vec<Vec<Vec<SubtreePart>>> = vec![Vec::new()];
    for node in 0..=given.tree.len() {
        let leaf = node < given.tree.len() && given.tree.is_leaf(node);
        let parts: Vec<SubtreePart> =
            if leaf { Vec::new() } else { given.items.under(given.tree, node).collect() };
        let orders = permutations(&parts);
        let with = |base: &Vec<Vec<SubtreePart>>, order: &Vec<SubtreePart>| {
            [&base[..], std::slice::from_ref(order)].concat()
        };
        all = all.iter().flat_map(|base| orders.iter().map(|it| with(base, it))).collect();
    }
    all
}

fn permutations(parts: &[SubtreePart]) -> Vec<Vec<SubtreePart>> {
    if parts.is_empty() {
        return vec![Vec::new()];
    }
    (0..parts.len())
        .flat_map(|at| {
            let mut rest = parts.to_vec();
            let first = rest.remove(at);
            permutations(&rest).into_iter().map(move |tail| [vec![first], tail].concat())
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// The plan is the fastest of: all shared, subtrees separate as `tops` has them, all separate. A plan within
    /// a bound is the plan, or none if it is slower.
    #[test]
    fn the_fastest_candidate_is_planned(
        forest in forests(12),
        microbatch_rows in 40_u32..200,
        overhead_ns in 0_u64..200_000_000,
        short in any::<bool>(),
    ) {
        let mut batch = batch(&forest, microbatch_rows, 1);
        let machine = batch.options.machine.as_mut().unwrap();
        machine.op_overhead_ns = overhead_ns;
        if short {
            batch.options.device_bytes = 4_000;
        }
        let request = &Request::new(&batch.forest, &batch.scoring, &batch.options).unwrap();
        let tree = PlanTree::new(request, &[], 0).unwrap();
        let plan = |dense: &[bool]| {
            let tree = &PlanTree::new(request, dense, 0).unwrap();
            Draft { request, tree, microbatch_rows, dense }.plan()
        };
        let tops = super::dense::tops(&tree, microbatch_rows, batch.forest.nodes().len());
        let all = super::dense::all(&batch.forest, microbatch_rows.into());
        let shared = plan(&[]);
        let separate = tops.map(|tops| plan(&tops));
        let seconds = |made: &Result<Planned, PlanError>| {
            made.as_ref().ok().map(|made| made.prediction.seconds_shared.unwrap())
        };
        let found = super::plan(request);
        let candidates: Vec<f64> =
            [Some(&shared), separate.as_ref()].into_iter().flatten().filter_map(seconds).collect();
        let fastest = candidates.iter().copied().reduce(f64::min);
        if let (Some(fastest), Some(found)) = (fastest, seconds(&found)) {
            prop_assert!(found <= fastest, "{found} s, {fastest} s is possible");
            let all = all.and_then(|tops| seconds(&plan(&tops))).unwrap_or(f64::INFINITY);
            prop_assert!(found == fastest || found == all, "{found} s is none of the candidates");
        } else {
            prop_assert_eq!(fastest.is_some(), found.is_ok());
        }
        if let Ok(shared) = &shared {
            let own_s = shared.prediction.seconds_shared.unwrap();
            let draft = Draft { request, tree: &tree, microbatch_rows, dense: &[] };
            let within = draft.plan_within(own_s).unwrap();
            prop_assert_eq!(within.as_ref(), Some(shared));
            let slower = draft.plan_within(own_s * 0.999).unwrap();
            prop_assert_eq!(slower, None);
        }
    }

    /// The chosen residency is the cheapest of all that fit, and a plan is found if any fits.
    #[test]
    fn the_choice_is_optimal(
        shape in forests(12),
        microbatch_rows in 1_u32..60,
        from in 1_u64..60,
        host_eighths in prop::option::of(0_u64..8),
    ) {
        let batch = batch(&shape, microbatch_rows, from);
        prop_assume!(inner_count(&batch) <= 5);
        given(&batch, |given, least, draft| {
            for (device, host) in budgets(given, least, draft, host_eighths) {
                let best = cheapest(given, draft, device, host.unwrap_or(u64::MAX));
                let ours = given.choose(device, host);
                prop_assert_eq!(ours.is_some(), best.is_some());
                if let (Some(ours), Some(best)) = (ours, best) {
                    let cost = cost(given, &ours.residency);
                    // Rounded lists have a gap; few lists are rounded here.
                    prop_assert!(cost <= best + ours.gap + best * 1e-12, "{} {}", cost, best);
                    prop_assert!(ours.gap >= cost - best - best * 1e-12);
                    prop_assert!(host.is_some() || ours.gap == 0.0, "{}", ours.gap);
                }
            }
            Ok(())
        })?;
    }

    /// Shortened Pareto lists lose little, the gap bounds the loss, and a plan that fits one tier is found.
    #[test]
    fn the_gap_bounds_the_loss_of_rounded_lists(
        shape in forests(12),
        microbatch_rows in 1_u32..60,
        from in 1_u64..60,
        host_eighths in prop::option::of(0_u64..8),
    ) {
        let batch = batch(&shape, microbatch_rows, from);
        prop_assume!(inner_count(&batch) <= 5);
        given(&batch, |given, least, draft| {
            let given = &ResidencyProblem { points_max: [2, 2], ..*given };
            for (device, host) in budgets(given, least, draft, host_eighths) {
                let best = cheapest(given, draft, device, host.unwrap_or(u64::MAX));
                let ours = given.choose(device, host);
                prop_assert!(host.is_some() || ours.is_some() == best.is_some());
                if let Some(ours) = ours {
                    let ops = draft.ops(given, &ours.residency);
                    let host = host.unwrap_or(u64::MAX);
                    prop_assert!(ops.iter().all(|op| op.device_bytes <= device));
                    prop_assert!(ops.iter().all(|op| op.host_bytes <= host));
                    let (cost, best) = (cost(given, &ours.residency), best.unwrap());
                    prop_assert!(cost - best <= ours.gap + cost * 1e-12, "{} {} {}", cost, best, ours.gap);
                }
            }
            Ok(())
        })?;
    }

    /// No other residency that fits has a smaller predicted time.
    #[test]
    fn no_other_choice_has_a_faster_prediction(
        shape in forests(9),
        microbatch_rows in 1_u32..60,
        from in 1_u64..60,
        links in prop::collection::vec(prop::sample::select(vec![20_u64, 200, 2_000]), 2),
        op_overhead_ns in prop::sample::select(vec![0_u64, 1_000_000_000]),
    ) {
        let mut batch = batch(&shape, microbatch_rows, from);
        prop_assume!(inner_count(&batch) <= 4);
        let [sleep_bytes_per_s, wake_bytes_per_s] = [links[0], links[1]];
        let rates = |it| Machine { sleep_bytes_per_s, wake_bytes_per_s, op_overhead_ns, ..it };
        batch.options.machine = batch.options.machine.map(rates);
        given(&batch, |given, least, draft| {
            let all = assignments(given.tree);
            let runs: Vec<(u64, f64)> =
                all.iter().map(|it| (device_peak(given, draft, it), seconds(given, draft, it))).collect();
            let most = keep_peak(given, draft);
            for device in (0..6).map(|step| least.bytes + (most - least.bytes) * step / 5) {
                let ours = seconds(given, draft, &given.choose(device, None).unwrap().residency);
                let fitting = runs.iter().filter(|(bytes, _)| *bytes <= device);
                let best = fitting.fold(f64::INFINITY, |best, (_, run_s)| best.min(*run_s));
                prop_assert!(ours <= best * (1.0 + 1e-9), "{} {}", ours, best);
            }
            Ok(())
        })?;
    }

    /// No order of parts and no residency needs less memory than `LeastMemory`.
    #[test]
    fn the_least_peak_is_least_over_all_orders(
        shape in forests(8),
        microbatch_rows in 1_u32..40,
        from in 1_u64..60,
    ) {
        let batch = batch(&shape, microbatch_rows, from);
        given(&batch, |given, least, draft| {
            let (orders, residencies) = (all_orders(given), assignments(given.tree));
            prop_assume!(orders.len() * residencies.len() < 20_000);
            let root = given.tree.len();
            let pairs = orders.iter().flat_map(|o| residencies.iter().map(move |r| (o, r)));
            let best = pairs.map(|(o, r)| peak(given, root, 0, o, r)).min().unwrap();
            prop_assert_eq!(least.bytes, best);
            // The ops of that order and residency have that peak.
            prop_assert_eq!(device_peak(given, draft, &least.residency), best);
            Ok(())
        })?;
    }

    /// The returned maximum rows of a microbatch fit.
    #[test]
    fn the_most_rows_of_a_microbatch_fit(shape in forests(12), from in 1_u64..60, share in 0_u64..=10) {
        let batch = batch(&shape, 1, from);
        given(&batch, |given, least, _| {
            let most = packed_peak(given, u32::MAX);
            let device = least.bytes + (most - least.bytes) * share / 10;
            let rows = fit::most_rows(given.tree, device, &order::ANY);
            prop_assert!(packed_peak(given, rows.unwrap_or(0)) <= device, "{:?} rows", rows);
            let none = fit::most_rows(given.tree, least.bytes.saturating_sub(1), &order::ANY);
            prop_assert!(none.is_none());
            Ok(())
        })?;
    }

    /// Leaves of one row fill all microbatches whose rows divide their number. So one more row does not fit.
    #[test]
    fn one_more_row_of_a_microbatch_does_not_fit(
        prompt in 2_u64..20, leaves in prop::sample::select(vec![1_usize, 6, 12, 60]), share in 0_u64..10,
    ) {
        let parents = [vec![NO_PARENT], vec![0; leaves]].concat();
        let batch = batch(&(parents, [vec![prompt], vec![1; leaves]].concat()), 1, 1);
        given(&batch, |given, least, _| {
            let most = packed_peak(given, u32::MAX);
            let device = least.bytes + (most - least.bytes) * share / 10;
            let rows = fit::most_rows(given.tree, device, &order::ANY).unwrap_or(0);
            prop_assert!(packed_peak(given, rows) <= device);
            prop_assume!((leaves as u32).is_multiple_of(rows + 1) || most <= device);
            prop_assert!(most <= device || packed_peak(given, rows + 1) > device, "{} rows", rows);
            Ok(())
        })?;
    }
}

/// The smallest peak with packed microbatches of `rows` rows.
fn packed_peak(given: &ResidencyProblem<'_>, rows: u32) -> u64 {
    let items = Microbatches::new(given.tree, rows.into());
    LeastMemory::new(given.tree, &items).bytes
}

/// A chain of nodes with a leaf at each has more Pareto points than lists hold: the choice still fits and
/// reports its gap.
#[test]
fn the_gap_of_long_lists_is_small() {
    let count = 40_u32;
    let (mut parents, mut lengths) = (Vec::new(), Vec::new());
    for id in 0..count {
        parents.push(if id == 0 { NO_PARENT } else { 2 * id - 2 });
        lengths.push(u64::from(id * id % 31) + 2);
        parents.push(2 * id);
        lengths.push(3);
    }
    // Children of a node lie together: the leaf comes first, then the rest of the chain.
    let batch = batch(&(parents, lengths), 8, 1);
    given(&batch, |given, least, draft| {
        let most = keep_peak(given, draft);
        let mut rounded = 0;
        for step in 0..=20 {
            let device = least.bytes + (most - least.bytes) * step / 20;
            let choice = given.choose(device, None).unwrap();
            let all = cost(given, &given.all(Residency::Recompute).residency);
            assert!(choice.gap >= 0.0 && choice.gap <= 0.2 * all, "{} of {all}", choice.gap);
            rounded += u32::from(choice.gap > 0.0);
        }
        assert!(rounded > 0, "no list was too long");
        assert_eq!(given.choose(most, None).unwrap().gap, 0.0);
        assert!(given.choose(least.bytes - 1, None).is_none());
    });
}

#[test]
fn ends_of_equal_parts_stay_the_ends() {
    let batch = batch(&(vec![NO_PARENT, 0, 0, 0, 0], vec![4, 3, 3, 3, 3]), 3, 1);
    given(&batch, |_, least, _| {
        let ends = EdgeParts {
            first: Some(SubtreePart::Microbatch(0)),
            last: Some(SubtreePart::Microbatch(3)),
        };
        assert_eq!(least.ends[0], ends);
    });
}

/// Leaves of 8 rows run one by one in microbatches of 15, 7, 3 or 1 rows: the largest that fits is chosen.
#[test]
fn the_largest_of_equally_fast_sizes_is_chosen() {
    let mut batch = batch(&(vec![NO_PARENT, 0, 0, 0], vec![20, 8, 8, 8]), 0, 20);
    batch.options.device_bytes = 2_200;
    batch.options.machine =
        batch.options.machine.map(|it| Machine { op_overhead_ns: 1_000_000, ..it });
    let plan = batch.plan().unwrap();
    assert_eq!(plan.nodes()[0].residency, Residency::Recompute);
    assert_eq!(plan.microbatch_rows(), 15);
}

/// A prompt that keeps its tensors leaves room for one row, below an eighth of the largest size.
#[test]
fn sizes_below_an_eighth_are_not_tried() {
    let shape = ([vec![NO_PARENT], vec![0; 64]].concat(), [vec![40], vec![1; 64]].concat());
    let mut batch = batch(&shape, 0, 40);
    batch.options.device_bytes = 4_450;
    batch.options.machine = batch.options.machine.map(|it| Machine { op_overhead_ns: 1_000, ..it });
    let plan = batch.plan().unwrap();
    assert_eq!((plan.microbatch_rows(), plan.nodes()[0].residency), (31, Residency::Recompute));
}

/// A root of one token with two sharing children and a leaf, a tree of two, a longer one, a sequence.
#[test]
fn the_topmost_nodes_that_fit_a_microbatch_are_separated() {
    let none = NO_PARENT;
    let parents = [none, 0, 1, 1, 0, none, 5, 5, none, 8, 8, none];
    let forest = Forest::from_nodes(&parents, &[1, 4, 2, 3, 2, 5, 1, 2, 5, 9, 1, 3]).unwrap();
    let tops = |microbatch_rows| {
        let tops = dense::all(&forest, microbatch_rows)?;
        Some((0..tops.len()).filter(|id| tops[*id]).collect::<Vec<_>>())
    };
    assert_eq!(tops(u64::MAX), Some(vec![1, 5, 8]));
    assert_eq!([tops(12), tops(7)], [Some(vec![1, 5]), Some(vec![1, 5])]);
    assert_eq!([tops(6), tops(5)], [Some(vec![5]), None]);
}

/// The lead of a node with two inner descendants is the link time that their wakes leave.
#[test]
fn the_lead_excludes_link_time_of_descendants() {
    let mut batch = batch(&(vec![NO_PARENT, 0, 1, 2], vec![21, 10, 10, 10]), 10, 40);
    // Waking the two takes 64 s of the 77 s that they run.
    batch.options.machine = Some(Machine {
        flops_per_s: 10_000,
        wake_bytes_per_s: 20,
        op_overhead_ns: 100_000_000,
        ..Machine::default()
    });
    given(&batch, |given, _, _| {
        let model = &given.tree.model;
        let run_s = |node: usize| model.seconds(given.tree.node_flops(node)).unwrap();
        let bytes = (10.0 + 10.0) * 4.0 * 16.0;
        // A forward and a backward of each node, and of a microbatch.
        let lead_s = run_s(1) + run_s(2) + run_s(3) + 6.0 * 0.1 - bytes / 20.0;
        assert!(lead_s > 0.0 && lead_s < 20.0 * 16.0 / 20.0, "{lead_s}");
        let wanted = model.wake_stall_s(given.tree.nodes[0].rows, 0, lead_s).unwrap();
        let seen = given.costs.stalls[0].wake_s.unwrap();
        assert!((seen - wanted).abs() < 1e-9, "{seen} {wanted}");
    });
}

/// With both tiers short and lists shortened, sleeping is found if nothing else fits.
#[test]
fn sleeping_is_found_if_nothing_else_fits() {
    let batch = batch(&(vec![NO_PARENT, 0, 1, 1], vec![30, 4, 2, 2]), 2, 1);
    given(&batch, |given, _, _| {
        let given = ResidencyProblem { points_max: [1, 1], ..*given };
        let choice = given.choose(3_200, Some(1_900)).unwrap();
        assert_eq!(choice.residency[..2], [Residency::Sleep, Residency::Recompute]);
        assert!(given.choose(3_200, Some(1_800)).is_none(), "no room on the host");
    });
}
