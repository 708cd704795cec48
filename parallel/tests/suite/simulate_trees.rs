//! Compares predicted bytes and times of trees' plans with their simulation.

use crate::balance_common::case;
use crate::batch::Batch;
use crate::simulate_properties::stall_ns;
use dormouse_parallel::simulate::*;
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::*;
use proptest::prelude::*;

/// One operation per nanosecond; links take no time.
fn machine() -> Machine {
    Machine {
        flops_per_s: 1_000_000_000,
        sleep_bytes_per_s: u64::MAX,
        wake_bytes_per_s: u64::MAX,
        op_overhead_ns: 1_000,
        prefix_attention_flops_per_s: 300_000_000,
        causal_attention_flops_per_s: 100_000_000,
        ..Machine::default()
    }
}

fn batch(forest: Forest, last_layer_dead: bool) -> Batch {
    let scoring = |index: usize| Scoring {
        loss: if index.is_multiple_of(2) { Loss::AllButFirst } else { Loss::From(1) },
        weight: 1.0,
    };
    Batch {
        scoring: (0..forest.endings().len()).map(scoring).collect(),
        forest,
        options: PlanOptions {
            vocab: 7,
            microbatch_rows: 64,
            wake_window_layers: 2,
            last_layer_dead,
            always_share: true,
            model: ModelShape {
                layers: 5,
                heads: 2,
                kv_heads: 1,
                head_dim: 4,
                dtype_bytes: 2,
                layer_linear_weights: 100,
                kv_linear_weights: 20,
                last_layer_prefix_weights: 25,
                head_weights: 50,
                saved_bytes_per_token_layer: 100,
            },
            machine: Some(machine()),
            ..PlanOptions::default()
        },
    }
}

/// A plan, if one fits.
fn planned(batch: &Batch) -> Result<Plan, TestCaseError> {
    batch.plan().map_err(|error| TestCaseError::reject(error.to_string()))
}

fn replay(plan: &Plan) -> Result<RankTimeline, SimulateError> {
    let rank = SimulatedRank::of_plan(plan, Tier::Host)?;
    Ok(World { ranks: vec![rank], ..World::default() }.run()?.ranks.remove(0))
}

/// Maximum bytes of a plan's ops.
fn most(plan: &Plan, of: fn(&Op) -> u64) -> u64 {
    plan.ops().iter().map(of).max().unwrap()
}

/// Each op is a step and holds the bytes of the plan while it runs.
fn ops_hold_what_they_should(plan: &Plan, timeline: &RankTimeline) {
    let ops = &plan.ops()[..plan.ops().len() - 1];
    assert_eq!(timeline.steps.len(), ops.len());
    for (op, step) in ops.iter().zip(&timeline.steps) {
        let after = timeline.bytes.partition_point(|sample| sample.ns <= step.start_ns);
        assert_eq!(timeline.bytes[after - 1].device_bytes, op.device_bytes, "{op:?}");
    }
}

/// Seconds of a plan's ops without stalls.
fn busy_s(plan: &Plan) -> f64 {
    let it = plan.predict();
    it.seconds_shared.unwrap() - it.wake_stall_s.unwrap_or(0.0) - it.sleep_stall_s.unwrap_or(0.0)
}

proptest! {
    #![proptest_config(ProptestConfig { max_global_rejects: 8_000, ..ProptestConfig::with_cases(200) })]

    /// Without sleep the simulation matches the prediction, with unlimited memory and with recomputing.
    #[test]
    fn a_plan_without_sleep_matches_the_prediction(case in case(), dead: bool, short in 0_u64..=100) {
        let mut batch = batch(case.forest(), dead);
        let plan = planned(&batch)?;
        let timeline = replay(&plan).unwrap();
        ops_hold_what_they_should(&plan, &timeline);
        prop_assert!((timeline.end_ns as f64 - 1e9 * busy_s(&plan)).abs() <= plan.ops().len() as f64);
        prop_assert_eq!(stall_ns(&timeline), 0);
        // Less: nodes run forward twice.
        batch.device_bytes = most(&plan, |op| op.device_bytes) * short / 100;
        batch.host_bytes = 1;
        let plan = planned(&batch)?;
        let timeline = replay(&plan).unwrap();
        ops_hold_what_they_should(&plan, &timeline);
        prop_assert!((timeline.end_ns as f64 - 1e9 * busy_s(&plan)).abs() <= plan.ops().len() as f64);
        prop_assert_eq!(stall_ns(&timeline), 0);
    }

    /// A plan within a memory limit is simulated within that limit at any link rate. It takes its compute
    /// time and stalls; with links that take no time it has no stall.
    #[test]
    fn sleeping_plans_fit_the_device(
        case in case(),
        dead: bool,
        short in 20_u64..=100,
        window in 1_u32..=6,
        rate in prop::sample::select(vec![1_u64, 100, 10_000, 1_000_000_000]),
    ) {
        let mut batch = batch(case.forest(), dead);
        batch.wake_window_layers = window;
        let plan = planned(&batch)?;
        batch.device_bytes = most(&plan, |op| op.device_bytes) * short / 100;
        batch.host_bytes = 1 << 40;
        let plan = planned(&batch)?;
        let timeline = replay(&plan).unwrap();
        prop_assert!(timeline.peak.device_bytes <= batch.device_bytes);
        prop_assert!(timeline.peak.host_bytes <= most(&plan, |op| op.host_bytes));
        let computed = 1e9 * busy_s(&plan);
        prop_assert!((timeline.compute_ns as f64 - computed).abs() <= plan.ops().len() as f64);
        let copies = timeline.copies.len() as u64;
        prop_assert!(stall_ns(&timeline) <= copies, "a copy is a nanosecond at most");
        prop_assert_eq!(timeline.end_ns, timeline.compute_ns + stall_ns(&timeline));
        prop_assert_eq!(timeline.demand_wakes, 0, "all blocks wake ahead of need");
        let slow = Machine { sleep_bytes_per_s: rate, wake_bytes_per_s: rate, ..machine() };
        batch.machine = Some(slow);
        let plan = planned(&batch)?;
        let timeline = replay(&plan).unwrap();
        prop_assert!(timeline.peak.device_bytes <= batch.device_bytes);
        prop_assert!(timeline.peak.host_bytes <= most(&plan, |op| op.host_bytes));
        prop_assert_eq!(timeline.end_ns, timeline.compute_ns + stall_ns(&timeline));
        prop_assert_eq!(timeline.demand_wakes, 0, "all blocks wake ahead of need");
    }
}

/// Calculated by hand: a sleeping root with two inner children, layers of 100 ns forward.
#[test]
fn a_root_sleeps_while_its_subtree_runs() {
    let parents = [NO_PARENT, 0, 1, 1, 0, 4, 4];
    let forest = Forest::from_nodes(&parents, &[201, 40, 9, 9, 40, 9, 9]).unwrap();
    let mut batch = batch(forest, false);
    let awake = batch.plan().unwrap();
    let all = replay(&awake).unwrap().peak.device_bytes;
    // 200 rows of 5 layers, 100 bytes each: the root's saved bytes without its window of two layers.
    batch.device_bytes = all - 60_000;
    batch.host_bytes = 1 << 30;
    let plan = batch.plan().unwrap();
    assert_eq!(plan.nodes()[0].residency, Residency::Sleep);
    let rank = SimulatedRank::of_plan(&plan, Tier::Host).unwrap();
    let asleep: Vec<Vec<u32>> = rank
        .steps
        .iter()
        .filter(|step| !step.sleeps.is_empty())
        .map(|step| step.sleeps.iter().map(|sleep| sleep.block).collect())
        .collect();
    assert_eq!(asleep, [vec![1], vec![2], vec![3], vec![4, 5]], "block 0 is the root's boundary");
    let woken: Vec<Vec<u32>> =
        rank.steps.iter().map(|step| step.wakes.clone()).filter(|it| !it.is_empty()).collect();
    assert_eq!(woken, [vec![5, 4], vec![3], vec![2], vec![1]]);
    // Five steps forward and back for the root, two for each child, a microbatch for each: 16.
    assert_eq!(rank.steps.len(), 16);
    let timeline = World { ranks: vec![rank], ..World::default() }.run().unwrap().ranks.remove(0);
    assert_eq!(timeline.copies.len(), 10);
    assert_eq!(timeline.peak.host_bytes, 100_000);
    assert!(timeline.peak.device_bytes <= batch.device_bytes);
}

#[test]
fn refuses_a_plan_without_flops_per_s() {
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0], &[9, 4, 4]).unwrap();
    let mut batch = batch(forest, false);
    batch.machine = None;
    let plan = batch.plan().unwrap();
    let refused = SimulatedRank::of_plan(&plan, Tier::Host).unwrap_err();
    assert!(refused.to_string().starts_with("flops_per_s is 0; accepted: 1 to "));
}
