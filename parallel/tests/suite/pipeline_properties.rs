//! Compares op lists of random pipelines with a tick-by-tick replay.

use std::collections::{BTreeMap, BTreeSet};

use crate::batch::FlatGroup;
use crate::naive_pipeline::{self, name};
use dormouse_parallel::pipeline::*;
use dormouse_parallel::simulate::World;
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::{Machine, ModelShape, Plan, PlanOptions, Scoring};
use proptest::prelude::*;

prop_compose! {
    fn group()(
        prefix_rows in 1u64..24,
        forward in 0u64..16,
        backward in 0u64..24,
        microbatches in prop::collection::vec((1u64..9, 0u64..5, 0u64..7), 1..6),
    ) -> PipelineGroup {
        let microbatch = |(rows, forward_ns, backward_ns)| PipelineMicrobatch { rows, forward_ns, backward_ns };
        PipelineGroup {
            prefix_rows,
            forward: StageShare { linear_ns: forward, pairs_ns: 0 },
            backward: StageShare { linear_ns: backward, pairs_ns: 0 },
            microbatches: microbatches.into_iter().map(microbatch).collect(),
        }
    }
}

prop_compose! {
    /// What each of five stages holds.
    pub(crate) fn stage_bytes()(own in prop::collection::vec(prop::array::uniform8(0u64..9), 5)) -> Vec<StageBytes> {
        let bytes = |own: [u64; 8]| {
            let [boundary, prefix_saved, prefix_asleep, prefix_working, ..] = own;
            let [.., microbatch_saved, microbatch_working, microbatch_logits, fixed] = own;
            let prefix = StageBytes { boundary, prefix_saved, prefix_asleep, prefix_working, ..StageBytes::default() };
            StageBytes { microbatch_saved, microbatch_working, microbatch_logits, fixed, ..prefix }
        };
        own.into_iter().map(bytes).collect()
    }
}

/// From copies that outlast the list to copies of less than an op.
pub(crate) fn link_rate() -> impl Strategy<Value = u64> {
    (0u32..5).prop_map(|exponent| 10_000_000 * 10u64.pow(exponent))
}

prop_compose! {
    pub(crate) fn pipeline()(
        stages in 1u32..6,
        virtual_stages in prop_oneof![3 => Just(1u32), 2 => 2u32..4],
        groups in prop::collection::vec(group(), 1..4),
        stream in any::<bool>(),
        chunks in 1u32..6,
        (chunk_rows_multiple, chunk_rows_min) in (0u32..4, 0u32..4),
        (live_groups_max, in_flight_max) in (0u32..3, 0u32..5),
        blocking in any::<bool>(),
        (op_overhead_ns, transfer_latency_ns) in (0u64..3, 0u64..4),
        link_bytes_per_s in prop_oneof![Just(0u64), Just(2_000_000_000u64)],
    ) -> Pipeline {
        Pipeline {
            stages,
            virtual_stages,
            groups,
            order: if stream { PipelineOrder::Stream } else { PipelineOrder::GroupByGroup },
            chunks,
            chunk_rows_multiple,
            chunk_rows_min,
            bounds: MemoryBounds { live_groups_max, in_flight_max },
            blocking,
            rates: PipelineRates {
                op_overhead_ns,
                transfer_latency_ns,
                link_bytes_per_s,
                ..PipelineRates::default()
            },
            row_bytes: RowBytes { activation: 1, boundary: 2, prefix_saved: 5, microbatch_saved: 3 },
            ..Pipeline::default()
        }
    }
}

/// Every op of every part is in one list, on its part's stage, with the right rows.
fn holds_every_op(case: &Pipeline, stages: &Stages) {
    let chunks = naive_pipeline::chunks(stages);
    let mut wanted = BTreeSet::new();
    for (group, of_group) in (0..).zip(&case.groups) {
        for part in 0..case.stages * case.virtual_stages {
            for kind in StageOpKind::ALL {
                let microbatches = of_group.microbatches.len() as u32;
                let count = if kind.is_prefix() { chunks[&group] } else { microbatches };
                wanted.extend((0..count).map(|index| (kind, group, index, part)));
            }
        }
    }
    let mut rows: BTreeMap<(u32, u32, bool), u64> = BTreeMap::new();
    let mut seen = 0;
    for (number, stage) in (0..).zip(&stages.stages) {
        for op in &stage.ops {
            assert!(wanted.remove(&name(op)), "{op:?} twice or unknown");
            assert_eq!((op.part % case.stages, op.part / case.stages), (number, op.virtual_stage));
            if op.kind.is_prefix() {
                *rows.entry((op.group, op.part, op.kind.is_forward())).or_default() +=
                    op.rows.count();
            } else {
                let microbatch = case.groups[op.group as usize].microbatches[op.index as usize];
                assert_eq!(op.rows.count(), microbatch.rows);
            }
            seen += 1;
        }
        assert_eq!(stage.sync_after_op as usize, stage.ops.len() - 1);
        let computes = |step: &StageStep| step.kind == StageStepKind::Compute;
        let batches = stage.steps.split(computes).filter(|batch| !batch.is_empty());
        for (number, batch) in (1..).zip(batches) {
            assert!(batch.iter().all(|step| step.batch == number), "one number per batch");
        }
    }
    assert!(wanted.is_empty(), "missing: {wanted:?} of {seen}");
    for ((group, ..), rows) in rows {
        assert_eq!(rows, case.groups[group as usize].prefix_rows, "chunks cover the prefix");
    }
}

/// Maximum groups and microbatches alive, counted op by op.
fn most_held(stage: &StageList) -> (u32, u32) {
    let (mut groups, mut microbatches) = (BTreeMap::new(), BTreeMap::new());
    let (mut most_groups, mut most_microbatches) = (0, 0);
    for op in &stage.ops {
        let change = if op.kind.is_forward() { 1 } else { -1 };
        if op.kind.is_prefix() {
            *groups.entry(op.group).or_insert(0) += change;
        } else {
            *microbatches.entry((op.group, op.index)).or_insert(0) += change;
        }
        most_groups = most_groups.max(groups.values().filter(|held| **held > 0).count());
        most_microbatches =
            most_microbatches.max(microbatches.values().filter(|held| **held > 0).count());
    }
    (most_groups as u32, most_microbatches as u32)
}

/// Ops of a stage do not overlap; each starts after the ops that it needs and after transfers from other
/// stages.
fn in_time(case: &Pipeline, stages: &Stages, times: &PipelineTimes) {
    let chunks = naive_pipeline::chunks(stages);
    let mut ends = BTreeMap::new();
    for (stage, times) in stages.stages.iter().zip(&times.ops) {
        let mut last = 0;
        for (op, time) in stage.ops.iter().zip(times) {
            assert!(last <= time.start_ns && time.start_ns < time.end_ns);
            last = time.end_ns;
            ends.insert(name(op), time.end_ns);
        }
    }
    let parts = case.stages * case.virtual_stages;
    for (stage, times) in stages.stages.iter().zip(&times.ops) {
        for (op, time) in stage.ops.iter().zip(times) {
            let microbatches = case.groups[op.group as usize].microbatches.len() as u32;
            for need in naive_pipeline::needs(op, parts, chunks[&op.group], microbatches) {
                let hop = if need.3 % case.stages == op.part % case.stages {
                    0
                } else {
                    case.rates.transfer_latency_ns
                };
                assert!(ends[&need] + hop <= time.start_ns, "{op:?} before {need:?}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, ..ProptestConfig::default() })]

    /// Lists never deadlock in any timing mode, contain every op, respect dependencies and bounds, and have a
    /// bubble of at least its lower bound.
    #[test]
    fn lists_are_valid(case in pipeline()) {
        let stages = case.plan().unwrap();
        stages.check(&case).unwrap();
        holds_every_op(&case, &stages);
        for stage in &stages.stages {
            let (groups, microbatches) = most_held(stage);
            prop_assert_eq!((groups, microbatches), (stage.peak.live_groups, stage.peak.in_flight));
            let within = |seen, most| most == 0 || seen <= most;
            prop_assert!(within(microbatches, case.bounds.in_flight_max));
            prop_assert!(within(groups, case.bounds.live_groups_max));
            prop_assert!(case.order == PipelineOrder::Stream || groups == 1);
        }
        let meeting = if case.blocking { TransferTiming::Batched } else { TransferTiming::Overlapped };
        let times = stages.times(&case, meeting).unwrap();
        in_time(&case, &stages, &times);
        let report = stages.report;
        prop_assert_eq!(times.makespan_ns, report.makespan_ns);
        prop_assert!(report.bubble >= report.bubble_bound - 1e-9);
        for costs in stages.op_ns(&case).unwrap() {
            prop_assert!(costs.iter().sum::<u64>() <= times.makespan_ns);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// The tick-by-tick replay gives the same times in every timing mode.
    #[test]
    fn times_match_the_naive_replay(case in pipeline()) {
        let stages = case.plan().unwrap();
        for meeting in TransferTiming::ALL {
            let times = stages.times(&case, meeting).unwrap();
            prop_assert_eq!(Some(times.ops), naive_pipeline::run(&case, &stages, meeting), "{:?}", meeting);
        }
    }

    /// The simulator of ranks gives the same times and peak bytes for the same lists.
    #[test]
    fn simulated_ranks_match_the_stages(mut case in pipeline(), own in stage_bytes()) {
        case.blocking = false;
        case.stage_bytes = own.into_iter().take(case.stages as usize).collect();
        let stages = case.plan().unwrap();
        let times = stages.times(&case, TransferTiming::Overlapped).unwrap();
        let timeline = World::of_stages(&case, &stages).unwrap().run().unwrap();
        for ((stage, rank), ops) in stages.stages.iter().zip(&timeline.ranks).zip(&times.ops) {
            let steps: Vec<TimeSpan> = rank
                .steps
                .iter()
                .map(|step| TimeSpan { start_ns: step.start_ns, end_ns: step.end_ns })
                .collect();
            prop_assert_eq!(&steps, ops);
            prop_assert_eq!(rank.peak.device_bytes, stage.peak.bytes);
            prop_assert_eq!(rank.compute_ns + rank.waits.exchanges_ns, rank.end_ns);
        }
        prop_assert_eq!(timeline.total_ns, times.makespan_ns);
    }

    /// However slowly prefixes fall asleep and wake, lists run in their order within the planned peaks, and
    /// waits are all that they cost; one byte less on any stage, and they never end.
    #[test]
    fn simulated_ranks_need_the_planned_peaks_at_any_rate(
        mut case in pipeline(),
        own in stage_bytes(),
        sleep_bytes_per_s in link_rate(),
        wake_bytes_per_s in link_rate(),
    ) {
        case.blocking = false;
        case.stage_bytes = own.into_iter().take(case.stages as usize).collect();
        let stages = case.plan().unwrap();
        case.rates = PipelineRates { sleep_bytes_per_s, wake_bytes_per_s, ..case.rates };
        let world = World::of_stages(&case, &stages).unwrap();
        let timeline = world.run().unwrap();
        prop_assert!(timeline.total_ns >= stages.report.makespan_ns);
        for (number, (stage, rank)) in stages.stages.iter().zip(&timeline.ranks).enumerate() {
            prop_assert!(rank.peak.device_bytes <= stage.peak.bytes);
            let waits = rank.waits;
            let waited_ns = waits.exchanges_ns + waits.room_ns + waits.wakes_ns;
            prop_assert_eq!(rank.compute_ns + waited_ns, rank.end_ns);
            // A device of 0 bytes has no bound.
            if stage.peak.bytes > 1 {
                let mut smaller = world.clone();
                smaller.ranks[number].machine.device_bytes -= 1;
                prop_assert!(smaller.run().is_err());
            }
        }
    }

    /// The check refuses a list with two swapped steps exactly if the tick-by-tick replay does.
    #[test]
    fn check_finds_swapped_steps(case in pipeline(), at in any::<prop::sample::Index>(), far in 1usize..4) {
        let mut stages = case.plan().unwrap();
        let stage = at.index(stages.stages.len());
        let steps = &mut stages.stages[stage].steps;
        let first = at.index(steps.len());
        let second = (first + far).min(steps.len() - 1);
        steps.swap(first, second);
        // The replay stops at the first mode that fails; `check` tries all.
        let holds = TransferTiming::ALL.iter().all(|meeting| naive_pipeline::run(&case, &stages, *meeting).is_some());
        let checked = stages.check(&case);
        prop_assert_eq!(checked.is_ok(), holds, "{:?}", checked);
    }

    /// Equal pipelines give equal plans, and plans read back from JSON.
    #[test]
    fn plans_are_deterministic_and_round_trip(case in pipeline()) {
        let stages = case.plan().unwrap();
        prop_assert_eq!(&case.plan().unwrap(), &stages);
        let text = serde_json::to_string(&(&case, &stages)).unwrap();
        let (read, mut back): (Pipeline, Stages) = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(read, case);
        // A bubble may lose its last digit in JSON.
        prop_assert!((back.report.bubble - stages.report.bubble).abs() < 1e-12);
        prop_assert!((back.report.bubble_bound - stages.report.bubble_bound).abs() < 1e-12);
        (back.report.bubble, back.report.bubble_bound) =
            (stages.report.bubble, stages.report.bubble_bound);
        prop_assert_eq!(back, stages);
    }
}

/// Microbatches and prefixes of one size.
fn uniform(
    stages: u32,
    virtual_stages: u32,
    groups: usize,
    microbatches: usize,
    prefix: u64,
) -> Pipeline {
    let microbatch = PipelineMicrobatch { rows: 10, forward_ns: 100, backward_ns: 200 };
    let share = |ns| StageShare { linear_ns: prefix * ns, pairs_ns: 0 };
    let group = PipelineGroup {
        prefix_rows: 1 << 12,
        forward: share(100),
        backward: share(200),
        microbatches: vec![microbatch; microbatches],
    };
    Pipeline {
        stages,
        virtual_stages,
        groups: vec![group; groups],
        order: PipelineOrder::GroupByGroup,
        chunks: 1,
        ..Pipeline::default()
    }
}

/// Microbatches of a stage's list, as (forward, microbatch, virtual stage).
fn microbatches_of(stage: &StageList) -> Vec<(bool, u32, u32)> {
    let microbatches = stage.ops.iter().filter(|op| !op.kind.is_prefix());
    microbatches.map(|op| (op.kind.is_forward(), op.index, op.virtual_stage)).collect()
}

/// `warm_up` forwards, then alternating forwards and backwards, then the remaining backwards.
fn one_f_one_b<T: Copy>(forwards: &[T], backwards: &[T], warm_up: usize) -> Vec<(bool, T)> {
    let warm_up = warm_up.min(forwards.len());
    let mut list: Vec<(bool, T)> =
        forwards[..warm_up].iter().map(|microbatch| (true, *microbatch)).collect();
    for (done, microbatch) in forwards[warm_up..].iter().enumerate() {
        list.push((true, *microbatch));
        list.push((false, backwards[done]));
    }
    list.extend(
        backwards[forwards.len() - warm_up..].iter().map(|microbatch| (false, *microbatch)),
    );
    list
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Group by group, microbatches run 1F1B: `p − 1 − s` forwards, then alternating.
    #[test]
    fn one_group_is_1f1b(stages in 1u32..9, microbatches in 1usize..20, prefix in 1u64..6) {
        let plan = uniform(stages, 1, 2, microbatches, prefix).plan().unwrap();
        let all: Vec<u32> = (0..microbatches as u32).collect();
        for (stage, list) in plan.stages.iter().enumerate() {
            let wanted = one_f_one_b(&all, &all, stages as usize - 1 - stage);
            let seen: Vec<(bool, u32)> =
                microbatches_of(list).into_iter().map(|(forward, microbatch, _)| (forward, microbatch)).collect();
            prop_assert_eq!(&seen[..2 * microbatches], &wanted[..]);
            prop_assert_eq!(&seen[2 * microbatches..], &wanted[..]);
        }
    }

    /// Interleaved 1F1B, in turns of p microbatches: `2(p − 1 − s) + (v − 1)p` forwards first.
    #[test]
    fn one_group_is_interleaved_1f1b(stages in 2u32..6, virtual_stages in 2u32..4, turns in 1u32..4) {
        let microbatches = stages * turns;
        let plan = uniform(stages, virtual_stages, 1, microbatches as usize, 2).plan().unwrap();
        let order = |forward: bool| {
            let mut order: Vec<(u32, u32)> = Vec::new();
            for turn in 0..turns {
                for part in 0..virtual_stages {
                    let part = if forward { part } else { virtual_stages - 1 - part };
                    order.extend((turn * stages..(turn + 1) * stages).map(|microbatch| (microbatch, part)));
                }
            }
            order
        };
        for (stage, list) in (0..stages).zip(&plan.stages) {
            let warm_up = 2 * (stages - 1 - stage) + (virtual_stages - 1) * stages;
            let wanted = one_f_one_b(&order(true), &order(false), warm_up as usize);
            let seen: Vec<(bool, (u32, u32))> =
                microbatches_of(list).into_iter().map(|(forward, microbatch, part)| (forward, (microbatch, part))).collect();
            prop_assert_eq!(seen, wanted, "stage {}", stage);
        }
    }

    /// docs/method.md §9: one group's bubble is `(p−1)(max(a_f, b_f) + max(a_b, b_b))`.
    #[test]
    fn one_groups_bubble_is_the_closed_form(
        stages in 1u32..7,
        more in 0usize..8,
        prefix in 1u64..9,
        chunks in prop_oneof![Just(1u32), Just(2), Just(4), Just(8)],
    ) {
        let mut case = uniform(stages, 1, 1, stages as usize + more, prefix * 8);
        case.chunks = chunks;
        let report = case.plan().unwrap().report;
        let chunk = prefix * 8 / u64::from(chunks);
        let bubble = u64::from(stages - 1) * (100.max(100 * chunk) + 200.max(200 * chunk));
        prop_assert_eq!(report.makespan_ns, report.ideal_ns + bubble);
    }

    /// The chosen number of chunks is the best of those tried, except for the slack that prefers fewer.
    #[test]
    fn chosen_chunks_are_the_best_tried(
        mut case in pipeline(),
        overhead in 0u64..4,
        stages in 2u32..4,
    ) {
        (case.stages, case.virtual_stages, case.order) = (stages, 1, PipelineOrder::Stream);
        case.rates.op_overhead_ns = overhead;
        let plan = |chunks| Pipeline { chunks, ..case.clone() }.plan().unwrap().report;
        let chosen = plan(0).makespan_ns;
        for chunks in [1, 2, 4, 6, 8] {
            if case.groups.iter().all(|group| group.prefix_rows >= u64::from(chunks)) {
                let fixed = plan(chunks).makespan_ns;
                prop_assert!(chosen <= fixed + (fixed >> 8), "{} {} {}", chunks, chosen, fixed);
            }
        }
    }
}

#[test]
fn the_bubble_meets_the_bar() {
    let bubble = |order, chunks, groups| {
        let bounds = MemoryBounds { live_groups_max: 2, in_flight_max: 4 };
        let case = Pipeline { order, chunks, bounds, ..uniform(4, 1, groups, 8, 5) };
        let stages = case.plan().unwrap();
        stages.check(&case).unwrap();
        stages.report.bubble
    };
    let near = |seen: f64, wanted: f64| (seen - wanted).abs() < 1e-3;
    assert!(near(bubble(PipelineOrder::GroupByGroup, 1, 1), 45.0 / 39.0), "whole prefix: 115 %");
    assert!(near(bubble(PipelineOrder::GroupByGroup, 8, 1), 9.0 / 39.0), "8 chunks: 23 %");
    // The limit is 12 %; 9/156 is the time of one microbatch through all stages and back, once for four
    // groups.
    assert!(
        near(bubble(PipelineOrder::Stream, 8, 4), 9.0 / 156.0),
        "{}",
        bubble(PipelineOrder::Stream, 8, 4)
    );
    assert!(bubble(PipelineOrder::Stream, 0, 4) <= 0.058);
}

/// Of all swaps of neighbouring steps in one plan, the check refuses the harmful ones, which are the
/// majority.
#[test]
fn check_finds_every_harmful_swap() {
    let bounds = MemoryBounds { live_groups_max: 2, in_flight_max: 3 };
    let case =
        Pipeline { order: PipelineOrder::Stream, chunks: 2, bounds, ..uniform(3, 1, 2, 3, 2) };
    let stages = case.plan().unwrap();
    let (mut found, mut harmless) = (0, 0);
    for stage in 0..3 {
        for at in 1..stages.stages[stage].steps.len() {
            let mut swapped = stages.clone();
            swapped.stages[stage].steps.swap(at - 1, at);
            let holds = TransferTiming::ALL
                .iter()
                .all(|m| naive_pipeline::run(&case, &swapped, *m).is_some());
            assert_eq!(swapped.check(&case).is_ok(), holds, "stage {stage}, step {at}");
            if holds { harmless += 1 } else { found += 1 }
        }
    }
    assert!(found > harmless && harmless > 0, "{found} found, {harmless} harmless");
}

#[test]
fn an_error_names_the_deadlock() {
    let case = Pipeline { chunks: 1, ..uniform(2, 1, 1, 1, 1) };
    let mut stages = case.plan().unwrap();
    // Both stages would receive before they send.
    let first = &mut stages.stages[0].steps;
    let send = first.iter().rposition(|step| step.kind == StageStepKind::Send).unwrap();
    let receive = first.iter().position(|step| step.kind == StageStepKind::Receive).unwrap();
    assert!(send < receive);
    let moved = first.remove(receive);
    first.insert(send, moved);
    first[send].batch = 99;
    let error = stages.check(&case).unwrap_err().to_string();
    assert_eq!(
        error,
        "deadlock (blocking batches): stage 0 would receive from stage 1 microbatch 0 backward \
         of group 0, part 1; stage 1 would receive from stage 0 microbatch 0 forward of group 0, part 0"
    );
}

/// What an op works with counts during that op, and a stage has bytes of its own.
#[test]
fn working_bytes_count_during_an_op() {
    let mut case = Pipeline { chunks: 1, ..uniform(2, 1, 1, 2, 1) };
    let (rows, each) = (case.groups[0].prefix_rows, case.groups[0].microbatches[0].rows);
    let prefix = StageBytes { boundary: 3, prefix_asleep: 5, ..StageBytes::default() };
    let own = StageBytes { prefix_working: 2, fixed: 100, ..prefix };
    let last = StageBytes { microbatch_saved: 5000, microbatch_working: 1000, ..own };
    case.stage_bytes = vec![own, last];
    let peaks: Vec<StagePeak> = case.plan().unwrap().stages.iter().map(|s| s.peak).collect();
    assert_eq!((peaks[0].bytes, peaks[0].prefix_bytes), (100 + 10 * rows, 0));
    assert_eq!(peaks[1].bytes, 100 + 3 * rows + 6000 * each);
    case.stage_bytes.pop();
    assert_eq!(case.plan().unwrap_err().to_string(), "stage_bytes is 1; accepted: 2 to 2");
}

/// A step waits for a prefix that is falling asleep if the planned peak has no room for both.
#[test]
fn steps_wait_for_room_where_the_peak_has_none() {
    let mut case = Pipeline { chunks: 1, ..uniform(1, 1, 1, 2, 1) };
    case.groups[0].prefix_rows = 1;
    case.groups[0].microbatches.iter_mut().for_each(|it| it.rows = 1);
    let own = StageBytes { prefix_asleep: 1000, microbatch_saved: 1000, ..StageBytes::default() };
    let mut waits_ns = |own: StageBytes, sleep_bytes_per_s| {
        case.stage_bytes = vec![own];
        case.rates.sleep_bytes_per_s = sleep_bytes_per_s;
        case.rates.wake_bytes_per_s = 1_000_000_000;
        let stages = case.plan().unwrap();
        let timeline = World::of_stages(&case, &stages).unwrap().run().unwrap();
        (stages.stages[0].peak.bytes, timeline.ranks[0].waits.room_ns)
    };
    assert_eq!(waits_ns(own, 1_000_000_000), (1000, 1000));
    assert_eq!(waits_ns(own, 10_000_000_000), (1000, 100));
    let small = StageBytes { microbatch_saved: 10, ..own };
    assert_eq!(waits_ns(small, 1_000_000_000), (1000, 1000), "a chunk leaves as a whole");
    // The prefix worked with as many bytes as the microbatch takes.
    let roomy = StageBytes { prefix_working: 1000, ..own };
    assert_eq!(waits_ns(roomy, 1), (2000, 0));
    // One rate alone: it leaves in no time.
    assert_eq!(waits_ns(own, 0), (1000, 0));
}

#[test]
fn check_enforces_memory_bounds() {
    let case = Pipeline { order: PipelineOrder::Stream, chunks: 2, ..uniform(3, 1, 3, 4, 2) };
    let stages = case.plan().unwrap();
    let held = stages.stages[0].peak;
    assert!(held.live_groups > 1 && held.in_flight > 1, "{held:?}");
    let mut tight = case.clone();
    tight.bounds.live_groups_max = 1;
    assert_eq!(
        stages.check(&tight).unwrap_err().to_string(),
        format!("stage 0 holds {} groups alive; accepted: at most 1", held.live_groups)
    );
    tight.bounds = MemoryBounds { live_groups_max: 0, in_flight_max: 1 };
    assert_eq!(
        stages.check(&tight).unwrap_err().to_string(),
        format!("stage 0 holds {} microbatches in flight; accepted: at most 1", held.in_flight)
    );
}

#[test]
fn errors_name_the_value_seen_and_the_values_accepted() {
    let refused = |change: fn(&mut Pipeline)| {
        let mut case = uniform(2, 1, 2, 2, 1);
        change(&mut case);
        case.plan().unwrap_err().to_string()
    };
    let cases = [
        (refused(|p| p.stages = 0), "stages is 0; accepted: 1 to 256"),
        (refused(|p| p.stages = 257), "stages is 257; accepted: 1 to 256"),
        (refused(|p| p.virtual_stages = 0), "virtual_stages is 0; accepted: 1 to 64"),
        (refused(|p| p.groups.clear()), "groups is 0; accepted: 1 to 65536"),
        (refused(|p| p.chunks = 1025), "chunks is 1025; accepted: 0 to 1024"),
        (refused(|p| p.groups[1].prefix_rows = 0), "group 1: prefix_rows is 0; accepted: 1 to"),
        (
            refused(|p| p.groups[1].microbatches.clear()),
            "group 1: microbatches is 0; accepted: 1 to 65536",
        ),
        (refused(|p| p.groups[0].microbatches[1].rows = 0), "group 0: rows of a microbatch is 0"),
        (refused(|p| p.groups[0].forward.pairs_ns = u64::MAX), "group 0: pairs_ns is 184467"),
        (refused(|p| p.rates.op_overhead_ns = NS_MAX + 1), "op_overhead_ns is 1099511627777"),
        (
            refused(|p| p.microbatch_permille = vec![1]),
            "microbatch_permille has 1 entries; accepted: 0, or 2",
        ),
        (refused(|p| p.prefix_permille = vec![1, u32::MAX]), "prefix_permille is 4294967295"),
        (
            refused(|p| {
                (p.stages, p.virtual_stages) = (256, 64);
                p.groups = vec![p.groups[0].clone(); 64];
            }),
            "ops of the first groups is 4227072; accepted: 1 to 4194304",
        ),
    ];
    for (seen, wanted) in cases {
        assert!(seen.contains(wanted), "{seen:?} does not say {wanted:?}");
    }
}

#[test]
fn the_largest_numbers_do_not_overflow() {
    let mut case = uniform(3, 2, 2, 2, 1);
    case.order = PipelineOrder::Stream;
    for group in &mut case.groups {
        let share = StageShare { linear_ns: NS_MAX, pairs_ns: NS_MAX };
        (group.prefix_rows, group.forward, group.backward) = (1 << 28, share, share);
        group.microbatches =
            vec![PipelineMicrobatch { rows: 1 << 28, forward_ns: NS_MAX, backward_ns: NS_MAX }; 2];
    }
    case.prefix_permille = vec![1_000_000; 6];
    case.rates = PipelineRates {
        op_overhead_ns: NS_MAX,
        transfer_latency_ns: NS_MAX,
        link_bytes_per_s: 1,
        ..PipelineRates::default()
    };
    let all = u64::MAX;
    case.row_bytes =
        RowBytes { activation: all, boundary: all, prefix_saved: all, microbatch_saved: all };
    let stages = case.plan().unwrap();
    stages.check(&case).unwrap();
    assert_eq!(stages.stages[0].peak.bytes, u64::MAX);
    World::of_stages(&case, &stages).unwrap().run().unwrap();
}

/// Later chunks see more keys: chunks of equal cost have fewer and fewer rows.
#[test]
fn chunks_have_equal_costs_and_keep_their_multiple() {
    let mut case = uniform(1, 1, 1, 1, 1);
    (case.chunks, case.chunk_rows_multiple) = (4, 8);
    case.groups[0].prefix_rows = 1001;
    case.groups[0].forward = StageShare { linear_ns: 0, pairs_ns: 4_000_000 };
    case.groups[0].backward = StageShare { linear_ns: 0, pairs_ns: 8_000_000 };
    let stages = case.plan().unwrap();
    let costs = stages.op_ns(&case).unwrap().remove(0);
    let chunks = stages.stages[0].ops.iter().zip(costs);
    let chunks: Vec<_> = chunks.filter(|(op, _)| op.kind == StageOpKind::PrefixForward).collect();
    let rows: Vec<(u64, u64)> = chunks.iter().map(|(op, _)| (op.rows.begin, op.rows.end)).collect();
    // √(1/4), √(1/2), √(3/4) of 1001 are 500.5, 707.8, 866.9: the next multiples of 8.
    assert_eq!(rows, [(0, 504), (504, 712), (712, 872), (872, 1001)]);
    assert_eq!(chunks.iter().map(|(_, cost)| cost).sum::<u64>(), 4_000_000);
    assert!(chunks.iter().all(|(_, cost)| cost.abs_diff(1_000_000) < 50_000), "{chunks:?}");
}

/// Short prefixes have fewer chunks than long ones, and those that are shorter than the least are whole.
#[test]
fn chunks_have_the_least_rows() {
    let mut case = uniform(1, 1, 3, 1, 1);
    (case.chunks, case.chunk_rows_min) = (4, 100);
    for (group, rows) in case.groups.iter_mut().zip([1000, 250, 99]) {
        group.prefix_rows = rows;
        group.forward = StageShare { linear_ns: rows, pairs_ns: 0 };
        group.backward = StageShare { linear_ns: 2 * rows, pairs_ns: 0 };
    }
    let stages = case.plan().unwrap();
    let ends = |number| {
        let of_group = |op: &&StageOp| op.kind == StageOpKind::PrefixForward && op.group == number;
        stages.stages[0].ops.iter().filter(of_group).map(|op| op.rows.end).collect::<Vec<_>>()
    };
    assert_eq!(ends(0), [250, 500, 750, 1000]);
    assert_eq!(ends(1), [125, 250]);
    assert_eq!(ends(2), [99]);
}

/// A model of twelve layers.
pub(crate) fn small_model() -> ModelShape {
    ModelShape {
        layers: 12,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        dtype_bytes: 2,
        layer_linear_weights: 100_000,
        kv_linear_weights: 10_000,
        last_layer_prefix_weights: 13_000,
        head_weights: 70_000,
        saved_bytes_per_token_layer: 640,
    }
}

/// Thousandths scale each part's ops: a dead last layer, a head.
#[test]
fn parts_may_differ() {
    let mut case = uniform(2, 1, 1, 1, 1);
    (case.prefix_permille, case.microbatch_permille) = (vec![1000, 500], vec![1000, 1250]);
    let stages = case.plan().unwrap();
    assert_eq!(stages.op_ns(&case).unwrap(), [[100, 100, 200, 200], [50, 125, 250, 100]]);
    assert_eq!(stages.report.ideal_ns, 600);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// The stages of a pipeline made from plans together do the predicted work.
    #[test]
    fn a_pipeline_of_plans_does_their_work(
        prompts in prop::collection::vec((2u64..400, 1usize..9), 1..4),
        stages in 1u32..4,
        virtual_stages in 1u32..3,
        dead in any::<bool>(),
    ) {
        let plan = |(prompt, responses): (u64, usize)| {
            let responses = vec![(7, 1.0); responses];
            let options = PlanOptions {
                vocab: 50,
                microbatch_rows: 16,
                device_bytes: 1 << 40,
                last_layer_dead: dead,
                model: small_model(),
                machine: Some(Machine {
                    flops_per_s: 1_000_000_000,
                    prefix_attention_flops_per_s: 300_000_000,
                    causal_attention_flops_per_s: 100_000_000,
                    ..Machine::default()
                }),
                ..PlanOptions::default()
            };
            FlatGroup { prompt, responses, options }.plan().unwrap()
        };
        let plans: Vec<Plan> = prompts.into_iter().map(plan).collect();
        let mut case = Pipeline::of_plans(&plans, stages, virtual_stages).unwrap();
        case.chunks = 1;
        let stages = case.plan().unwrap();
        let seen: u64 = stages.op_ns(&case).unwrap().iter().flatten().sum();
        let wanted: f64 =
            plans.iter().map(|plan| plan.predict().seconds_shared.unwrap() * 1e9).sum();
        prop_assert!((seen as f64 - wanted).abs() < 1e-3 * wanted + 100.0, "{} {}", seen, wanted);
        // The bytes of a row of all parts are those of all layers.
        let parts = u64::from(case.stages * case.virtual_stages);
        prop_assert_eq!(case.row_bytes.prefix_saved * parts, 640 * 12);
        prop_assert_eq!(case.row_bytes.boundary * parts, 2 * 2 * 8 * (2 + 4) * 12);
        prop_assert_eq!(case.row_bytes.activation, 4 * 8 * 2);
        prop_assert_eq!(case.stage_room_bytes, vec![1 << 40; case.stages as usize]);
    }
}

#[test]
fn refuses_plans_without_flops_per_s() {
    let options = PlanOptions {
        vocab: 9,
        microbatch_rows: 8,
        model: ModelShape {
            layers: 2,
            heads: 1,
            kv_heads: 1,
            head_dim: 1,
            dtype_bytes: 2,
            layer_linear_weights: 1,
            ..ModelShape::default()
        },
        ..PlanOptions::default()
    };
    let group = FlatGroup { prompt: 4, responses: vec![(2, 1.0)], options };
    let plans = [group.plan().unwrap()];
    let refused = |plans: &[Plan]| Pipeline::of_plans(plans, 2, 1).unwrap_err().to_string();
    assert!(refused(&plans).contains("flops_per_s is 0; accepted: 1 to"));
    assert!(refused(&[]).contains("plans of flat groups is 0; accepted: 1 to"));
    // A tree of two levels is no flat group.
    let parents = [NO_PARENT, 0, 1, 1];
    let forest = Forest::from_nodes(&parents, &[4, 2, 2, 2]).unwrap();
    let tree = Plan::new(&forest, &vec![Scoring::default(); 2], &options).unwrap();
    assert!(refused(&[tree]).contains("plans of flat groups is 0; accepted: 1 to"));
}

/// Lists may come from outside: unknown indices are refused, and no memory is allocated for them.
#[test]
fn refuses_lists_that_do_not_match_the_pipeline() {
    let case = Pipeline {
        stages: 2,
        virtual_stages: 1,
        groups: vec![PipelineGroup {
            prefix_rows: 8,
            microbatches: vec![PipelineMicrobatch { rows: 4, forward_ns: 1, backward_ns: 2 }],
            ..PipelineGroup::default()
        }],
        ..Pipeline::default()
    };
    let stages = case.plan().unwrap();
    let refused = |change: &dyn Fn(&mut Stages)| {
        let mut changed = stages.clone();
        change(&mut changed);
        assert_eq!(changed.op_ns(&case).unwrap_err(), changed.check(&case).unwrap_err());
        changed.check(&case).unwrap_err().to_string()
    };
    let error = refused(&|it| it.report.chunks = u32::MAX);
    assert!(error.contains("chunks of the report"), "{error}");
    let error = refused(&|it| {
        let sends = it.stages[0].ops.iter_mut().find_map(|op| op.sends.as_mut());
        sends.unwrap().peer = 7;
    });
    assert!(error.contains("peer of a transfer is 7"), "{error}");
    let error =
        refused(&|it| it.stages[0].ops[0].rows = dormouse_schedule::Span { begin: 3, end: 2 });
    assert!(error.contains("first row of an op"), "{error}");
    // An op without its receive would run before its input exists.
    let error = refused(&|it| {
        for stage in &mut it.stages {
            stage.steps.retain(|step| step.kind == StageStepKind::Compute);
            stage.ops.iter_mut().for_each(|op| (op.receives, op.sends) = (None, None));
        }
    });
    assert!(error.contains("differs from the pipeline in rows or transfers"), "{error}");
    let changes: [&dyn Fn(&mut StageOp); 5] = [
        &|op| op.rows.end += 1,
        &|op| op.virtual_stage += 1,
        &|op| op.receives.iter_mut().for_each(|it| it.rows += 1),
        &|op| op.sends.iter_mut().for_each(|it| it.bytes += 1),
        &|op| op.sends.iter_mut().for_each(|it| it.shape = TransferShape::Prefix),
    ];
    for change in changes {
        let error = refused(&|it| it.stages.iter_mut().flat_map(|s| &mut s.ops).for_each(change));
        assert!(error.contains("differs from the pipeline in rows or transfers"), "{error}");
    }
}
