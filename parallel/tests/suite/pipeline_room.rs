//! Pipelines whose stages have limited room: lists, replicas and sleep, against every assignment and bound.

use crate::batch::FlatGroup;
use crate::pipeline_properties::{link_rate, pipeline, small_model, stage_bytes};
use dormouse_parallel::pipeline::*;
use dormouse_parallel::simulate::World;
use dormouse_schedule::forest::Forest;
use dormouse_schedule::{Loss, Machine, Plan, PlanOptions, Scoring, Span};
use proptest::prelude::*;

fn peaks(stages: &Stages) -> Vec<u64> {
    stages.stages.iter().map(|stage| stage.peak.bytes).collect()
}

/// Lists with one group and one microbatch in flight.
fn least(case: &Pipeline) -> Stages {
    let bounds = MemoryBounds { live_groups_max: 1, in_flight_max: 1 };
    Pipeline { bounds, stage_room_bytes: Vec::new(), ..case.clone() }.plan().unwrap()
}

/// Sets rooms between the least and the free peaks of each stage.
fn limit_room(case: &mut Pipeline, thousandths: u64) {
    let free = peaks(&case.plan().unwrap());
    let rooms = peaks(&least(case)).into_iter().zip(free);
    case.stage_room_bytes = rooms
        .map(|(least, free)| least + free.saturating_sub(least) * thousandths / 1000)
        .collect();
}

fn end_ns(case: &Pipeline, stages: &Stages) -> u64 {
    World::of_stages(case, stages).unwrap().run().unwrap().total_ns
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    /// Lists fit every stage's room if one group and one microbatch at a time do. With one byte less they do not
    /// if that is all a stage can do.
    #[test]
    fn lists_fit_the_room(mut case in pipeline(), own in stage_bytes(), thousandths in 0u64..=1000) {
        case.stage_bytes = own.into_iter().take(case.stages as usize).collect();
        limit_room(&mut case, thousandths);
        let stages = case.plan().unwrap();
        stages.check(&case).unwrap();
        for (peak, room) in peaks(&stages).iter().zip(&case.stage_room_bytes) {
            prop_assert!(peak <= room, "{} of {}", peak, room);
        }
        // One part a stage has one order of ops.
        let needed = peaks(&least(&case));
        for (stage, needed_bytes) in (0..).zip(needed) {
            if case.virtual_stages > 1 || needed_bytes == 0 {
                continue;
            }
            let room_bytes = needed_bytes - 1;
            case.stage_room_bytes = vec![u64::MAX; case.stages as usize];
            case.stage_room_bytes[stage as usize] = room_bytes;
            let refused = PipelineError::Room { stage, needed_bytes, room_bytes };
            prop_assert_eq!(case.plan().unwrap_err(), refused);
        }
    }

    /// With the room of the free plan, lists are those of the free plan.
    #[test]
    fn room_enough_changes_nothing(mut case in pipeline(), own in stage_bytes()) {
        case.stage_bytes = own.into_iter().take(case.stages as usize).collect();
        let free = case.plan().unwrap();
        case.stage_room_bytes = peaks(&free);
        prop_assert_eq!(case.plan().unwrap().stages, free.stages);
    }

    /// Asleep or awake, whichever the simulator ends sooner; asleep where only that has room.
    #[test]
    fn sleep_is_chosen_by_the_simulated_end(
        mut case in pipeline(),
        own in stage_bytes(),
        thousandths in 0u64..=1000,
        (sleep_bytes_per_s, wake_bytes_per_s) in (link_rate(), link_rate()),
    ) {
        case.blocking = false;
        case.stage_bytes = own.into_iter().take(case.stages as usize).collect();
        limit_room(&mut case, thousandths);
        let without_rates = case.clone().plan_with_sleep(PrefixSleep::Chosen).unwrap();
        prop_assert_eq!(&without_rates, &(case.clone(), case.plan().unwrap()));
        case.rates = PipelineRates { sleep_bytes_per_s, wake_bytes_per_s, ..case.rates };
        let mut asleep = case.clone();
        for own in &mut asleep.stage_bytes {
            (own.prefix_asleep, own.prefix_saved) = (own.prefix_asleep + own.prefix_saved, 0);
        }
        let (mut ends, mut ways) = (Vec::new(), Vec::new());
        for (way, sleep) in [(&case, PrefixSleep::Never), (&asleep, PrefixSleep::Always)] {
            let planned = way.plan().map(|mut stages| {
                stages.report.prefix_saved_asleep = sleep == PrefixSleep::Always;
                (way.clone(), stages)
            });
            prop_assert_eq!(&case.clone().plan_with_sleep(sleep), &planned);
            if let Ok((_, stages)) = &planned {
                ends.push(end_ns(way, stages));
            }
            ways.extend(planned);
        }
        let (chosen, stages) = case.clone().plan_with_sleep(PrefixSleep::Chosen).unwrap();
        prop_assert_eq!(Some(end_ns(&chosen, &stages)), ends.iter().min().copied());
        prop_assert!(ways.contains(&(chosen, stages)));
        // Too little for the prefix awake.
        let awake_bytes = peaks(&least(&case));
        let asleep_bytes = peaks(&least(&asleep));
        case.stage_room_bytes.clone_from(&asleep_bytes);
        if case.virtual_stages == 1 && awake_bytes.iter().zip(&asleep_bytes).any(|(awake, room)| awake > room) {
            let (chosen, stages) = case.plan_with_sleep(PrefixSleep::Chosen).unwrap();
            prop_assert_eq!(chosen.stage_bytes, asleep.stage_bytes);
            prop_assert!(stages.report.prefix_saved_asleep);
        }
    }
}

/// The end of the last of `replicas` replicas if each group, those with most work first, is on the one with least.
fn longest_first_ns(case: &Pipeline, replicas: u32) -> u64 {
    let work = |group: &PipelineGroup| {
        let ns = |share: StageShare| share.linear_ns + share.pairs_ns;
        let microbatches = group.microbatches.iter().map(|it| it.forward_ns + it.backward_ns);
        ns(group.forward) + ns(group.backward) + microbatches.sum::<u64>()
    };
    let mut order = Vec::from_iter(0..case.groups.len() as u32);
    order.sort_by_key(|group| std::cmp::Reverse(work(&case.groups[*group as usize])));
    let mut all = vec![(0, Vec::new()); replicas as usize];
    for group in order {
        let (ns, groups) = all.iter_mut().min_by_key(|(ns, groups)| (*ns, groups.len())).unwrap();
        *ns += work(&case.groups[group as usize]);
        groups.push(group);
        groups.sort_unstable();
    }
    let ends = all.iter().map(|(_, groups)| case.of_groups(groups).plan().unwrap());
    ends.map(|stages| stages.report.makespan_ns).max().unwrap()
}

/// The end of the last of `replicas` replicas, the soonest of all assignments.
fn soonest_ns(case: &Pipeline, replicas: u32) -> u64 {
    let groups = case.groups.len() as u32;
    // Ends of a replica by the set of its groups, as bits.
    let own = |set: u32| Vec::from_iter((0..groups).filter(|group| set >> group & 1 == 1));
    let end_ns = |set| case.of_groups(&own(set)).plan().unwrap().report.makespan_ns;
    let ends: Vec<Option<u64>> =
        (0..1 << groups).map(|set| (set > 0).then(|| end_ns(set))).collect();
    let last_ns = |code: u32| {
        let mut sets = vec![0_usize; replicas as usize];
        for group in 0..groups {
            sets[(code / replicas.pow(group) % replicas) as usize] |= 1 << group;
        }
        sets.into_iter().map(|set| ends[set]).collect::<Option<Vec<u64>>>()?.into_iter().max()
    };
    (0..replicas.pow(groups)).filter_map(last_ns).min().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Every group is on one replica, whose lists are valid and fit; the last replica ends no sooner than the
    /// bound and the best of all assignments, and no later than by longest first.
    #[test]
    fn replicas_have_every_group_once(
        mut case in pipeline(),
        more in pipeline(),
        own in stage_bytes(),
        thousandths in 0u64..=1000,
        replicas in 1u32..4,
    ) {
        case.groups.extend(more.groups.into_iter().take(2));
        case.stage_bytes = own.into_iter().take(case.stages as usize).collect();
        limit_room(&mut case, thousandths);
        let replicas = replicas.min(case.groups.len() as u32);
        let found = case.plan_replicas(replicas).unwrap();
        let mut groups: Vec<u32> = Vec::new();
        for replica in &found.replicas {
            prop_assert!(replica.groups.is_sorted());
            replica.stages.check(&case.of_groups(&replica.groups)).unwrap();
            groups.extend(&replica.groups);
        }
        groups.sort_unstable();
        prop_assert_eq!(groups, Vec::from_iter(0..case.groups.len() as u32));
        let ends = found.replicas.iter().map(|replica| replica.stages.report.makespan_ns);
        prop_assert_eq!(Some(found.makespan_ns), ends.max());
        prop_assert!(found.bound_ns <= found.makespan_ns);
        let best_ns = soonest_ns(&case, replicas);
        prop_assert!(found.bound_ns <= best_ns && best_ns <= found.makespan_ns);
        prop_assert!(found.makespan_ns <= longest_first_ns(&case, replicas));
        prop_assert_eq!(case.plan_replicas(replicas).unwrap(), found);
    }
}

#[test]
fn replicas_are_one_to_the_number_of_groups() {
    let group = PipelineGroup {
        prefix_rows: 1,
        microbatches: vec![PipelineMicrobatch { rows: 1, ..PipelineMicrobatch::default() }],
        ..PipelineGroup::default()
    };
    let groups = vec![group; 3];
    let case = Pipeline { stages: 1, virtual_stages: 1, groups, ..Pipeline::default() };
    for replicas in [0, 4] {
        assert_eq!(
            case.plan_replicas(replicas).unwrap_err().to_string(),
            format!("replicas is {replicas}; accepted: 1 to 3")
        );
    }
    assert_eq!(case.plan_replicas(3).unwrap().replicas.len(), 3);
}

/// Options of a small model whose logits, log-softmax and gradient of a row have 300 bytes.
fn options(device_bytes: u64) -> PlanOptions {
    PlanOptions {
        vocab: 50,
        microbatch_rows: 14,
        device_bytes,
        last_layer_dead: true,
        model: small_model(),
        machine: Some(Machine { flops_per_s: 1_000_000_000, ..Machine::default() }),
        ..PlanOptions::default()
    }
}

const LOGITS_ROW_BYTES: u64 = 3 * 2 * 50;

/// On one device a plan counts logits; so does the stage of the last part, as often as a microbatch is in flight there.
#[test]
fn the_stage_of_the_last_part_holds_the_logits() {
    let group = FlatGroup { prompt: 100, responses: vec![(7, 1.0); 2], options: options(0) };
    let plan = group.plan().unwrap();
    assert_eq!(plan.device_peak().unwrap().logits_bytes, 14 * LOGITS_ROW_BYTES);
    for virtual_stages in 1..3 {
        let case = Pipeline::of_plans(std::slice::from_ref(&plan), 3, virtual_stages).unwrap();
        let found = peaks(&case.plan().unwrap());
        assert_eq!(found[0], found[1], "{virtual_stages}");
        assert_eq!(found[2], found[0] + 14 * LOGITS_ROW_BYTES, "{virtual_stages}");
    }
    // Rows that nothing scores have no logits: a microbatch of three scored rows.
    let spans = |begin| Scoring { loss: Loss::Spans(vec![Span { begin, end: 107 }]), weight: 1.0 };
    let forest = Forest::group(100, &[7, 7]).unwrap();
    let plan = Plan::new(&forest, &[spans(106), spans(105)], &options(0)).unwrap();
    let case = Pipeline::of_plans(&[plan], 3, 1).unwrap();
    let row_bytes = (3 * LOGITS_ROW_BYTES).div_ceil(14);
    assert_eq!(case.stage_bytes.last().unwrap().microbatch_logits, row_bytes);
}

/// As many microbatches are in flight as the last stage has room for with their logits.
#[test]
fn lists_with_logits_fit_the_device() {
    let of = |device_bytes| {
        let options = options(device_bytes);
        let group = FlatGroup { prompt: 30, responses: vec![(7, 1.0); 12], options };
        let plans = vec![group.plan().unwrap(); 3];
        let mut case = Pipeline::of_plans(&plans, 2, 1).unwrap();
        case.order = PipelineOrder::Stream;
        case
    };
    let needed = peaks(&least(&of(1 << 40)));
    assert!(needed[1] > needed[0], "{needed:?}");
    let case = of(needed[1]);
    assert_eq!(case.stage_room_bytes, [needed[1]; 2]);
    assert!(peaks(&case.plan().unwrap()).iter().all(|peak| *peak <= needed[1]));
    let tight = Pipeline { stage_room_bytes: vec![needed[1] - 1; 2], ..case };
    let (needed_bytes, room_bytes) = (needed[1], needed[1] - 1);
    let refused = PipelineError::Room { stage: 1, needed_bytes, room_bytes };
    assert_eq!(tight.plan().unwrap_err(), refused);
}

/// The last stage has one microbatch in flight at a time, whose logits are most of what it holds. It lacks room for
/// the prefix of a second group: fewer microbatches in flight would free nothing there and cost the overlap.
#[test]
fn one_microbatch_in_flight_is_not_halved() {
    let microbatch = PipelineMicrobatch { rows: 10, forward_ns: 1_000, backward_ns: 2_000 };
    let linear = |linear_ns| StageShare { linear_ns, ..StageShare::default() };
    let group = PipelineGroup {
        prefix_rows: 10,
        forward: linear(100),
        backward: linear(200),
        microbatches: vec![microbatch; 8],
    };
    let first = StageBytes { prefix_saved: 1, microbatch_saved: 1, ..StageBytes::default() };
    let last = StageBytes { microbatch_logits: 100, ..first };
    let case = Pipeline {
        stages: 2,
        virtual_stages: 1,
        chunks: 1,
        groups: vec![group; 2],
        rates: PipelineRates { transfer_latency_ns: 5_000, ..PipelineRates::default() },
        stage_bytes: vec![first, last],
        stage_room_bytes: vec![60, 1_020],
        ..Pipeline::default()
    };
    let bounds = MemoryBounds { live_groups_max: 1, in_flight_max: 0 };
    let one_group = Pipeline { bounds, ..case.clone() }.plan().unwrap();
    let found = case.plan().unwrap();
    assert_eq!(peaks(&found), peaks(&one_group));
    assert!(found.report.makespan_ns <= one_group.report.makespan_ns, "{:?}", found.report);
}

/// Groups of a prefix whose chunk is nearly all that a stage holds, as it is awake during its own ops alone.
fn asleep_groups(groups: usize) -> Pipeline {
    let linear = |linear_ns| StageShare { linear_ns, ..StageShare::default() };
    let group = PipelineGroup {
        prefix_rows: 4_096,
        forward: linear(4_096_000),
        backward: linear(8_192_000),
        microbatches: vec![
            PipelineMicrobatch { rows: 8, forward_ns: 10_000, backward_ns: 20_000 };
            4
        ],
    };
    let bytes = StageBytes { prefix_asleep: 1_000, microbatch_saved: 1, ..StageBytes::default() };
    Pipeline {
        stages: 8,
        virtual_stages: 1,
        groups: vec![group; groups],
        stage_bytes: vec![bytes; 8],
        ..Pipeline::default()
    }
}

/// Lists of many ops are tried with few rules, but with every number of chunks until one has room.
#[test]
fn as_many_chunks_as_have_room_are_chosen() {
    let mut case = asleep_groups(32);
    let of_chunks = |chunks| peaks(&Pipeline { chunks, ..case.clone() }.plan().unwrap());
    for (most, chunks) in [(32, of_chunks(32)), (256, of_chunks(256))] {
        case.stage_room_bytes = chunks;
        let found = case.plan().unwrap();
        found.check(&case).unwrap();
        assert_eq!(found.report.chunks, most);
    }
}

/// Two replicas end sooner only if one gives the other a group of 8 microbatches for a group of 3. The replica that
/// takes it then has so many ops that the search tries few numbers of chunks.
#[test]
fn replicas_have_as_many_chunks_as_have_room() {
    let mut case = asleep_groups(54);
    for (number, group) in case.groups.iter_mut().enumerate() {
        let (more, microbatches) = match number {
            0 => (11, 3),
            1..12 => (1, 8),
            _ => (0, 3),
        };
        group.microbatches.resize(microbatches, group.microbatches[0]);
        group.forward.linear_ns += more * 100_000 + (8 - microbatches as u64) * 30_000;
    }
    let half = case.of_groups(&Vec::from_iter(0..27));
    case.stage_room_bytes = peaks(&Pipeline { chunks: 24, ..half }.plan().unwrap());
    let found = case.plan_replicas(2).unwrap();
    assert!(found.tried > 0);
    for replica in &found.replicas {
        replica.stages.check(&case.of_groups(&replica.groups)).unwrap();
    }
}
