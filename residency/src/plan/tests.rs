//! Plans of small steps against arithmetic done by hand.

use super::*;
use crate::testing::{Optimum, optimum};
use crate::{LinkRates, Tier};

/// A byte a nanosecond.
const GB: u64 = 1_000_000_000;

/// A prefix as a prefix plays it: forward, microbatches, backward.
struct Prefix {
    layers: usize,
    microbatches: usize,
    bytes: u64,
    forward_ns: u64,
    microbatch_ns: u64,
    backward_ns: u64,
    /// In A and C, in B.
    room: [u64; 2],
}

impl Prefix {
    fn work(&self) -> StepWork {
        let &Self { layers, microbatches, .. } = self;
        let op = |compute_ns, room_bytes| StepOperation { compute_ns, room_bytes };
        let mut operations = vec![op(self.forward_ns, self.room[0]); layers];
        operations.extend(vec![op(self.microbatch_ns, self.room[1]); microbatches]);
        operations.extend(vec![op(self.backward_ns, self.room[0]); layers]);
        let top = layers - 1;
        let backward = |layer: usize| layers + microbatches + top - layer;
        let groups = (0..layers).map(|layer| DormantGroup {
            bytes: self.bytes,
            made: layer,
            leaves: (layer + 1).min(top),
            needed: backward((layer + 1).min(top)),
            freed: backward(layer),
        });
        StepWork {
            operations,
            groups: groups.collect(),
            links: LinkRates {
                device_to_host_bytes_per_s: GB,
                host_to_device_bytes_per_s: GB,
                device_to_nvme_bytes_per_s: GB,
                nvme_to_device_bytes_per_s: GB,
            },
            host_bytes: 1 << 40,
            nvme_bytes: 1 << 40,
            is_direct: false,
        }
    }
}

const SMALL: Prefix = Prefix {
    layers: 4,
    microbatches: 2,
    bytes: 10,
    forward_ns: 10,
    microbatch_ns: 100,
    backward_ns: 20,
    room: [40, 40],
};

fn choices(plan: &ResidencyPlan) -> Vec<Tier> {
    plan.groups.iter().map(|group| group.choice).collect()
}

/// When the first of those that sleep may wake.
fn wake_from(plan: &ResidencyPlan) -> usize {
    let asleep = plan.groups.iter().filter(|group| group.choice != Tier::Device);
    asleep.map(|group| group.wake_from).min().unwrap()
}

#[test]
fn where_all_fits_nothing_sleeps() {
    let (plan, outcome) = choose(&SMALL.work()).unwrap();
    assert_eq!(choices(&plan), [Tier::Device; 4]);
    assert_eq!(outcome, ReplayOutcome { total_ns: 40 + 200 + 80, ..ReplayOutcome::default() });
}

#[test]
fn layers_needed_last_sleep_and_wake_late() {
    // Two layers' room in B: the two lowest sleep. Layer 1 is needed when layer 2's backward
    // begins, 20 after C has begun; room for it is there from C on, when B's own memory has gone.
    let work = Prefix { room: [40, 20], ..SMALL }.work();
    let (plan, outcome) = choose(&work).unwrap();
    use crate::Tier::{Device as Keep, Host};
    assert_eq!(choices(&plan), [Host, Host, Keep, Keep]);
    assert_eq!(outcome.stall_ns, 0);
    assert_eq!(outcome.slept_bytes, 20);
    assert_eq!(wake_from(&plan), 6, "C's first backward of 20 hides the copy of layer 1");
}

#[test]
fn the_lead_a_slow_link_needs_is_taken_from_the_microbatches() {
    // Room for all, but asleep by order: 30 of 10 ns each must be back 20 apart.
    let mut work = SMALL.work();
    work.links.host_to_device_bytes_per_s = GB / 10; // 100 a layer
    for op in &mut work.operations[4..6] {
        op.room_bytes = 10;
    }
    // The last microbatch has room for three.
    work.operations[5].room_bytes = 30;
    let (plan, outcome) = choose(&work).unwrap();
    // 3 asleep. Wakes begin with the last microbatch (100): layer 2 is there as C begins, layer 1
    // 100 later, where it is needed after 20; layer 0 another 100 later, after 40 of compute.
    assert_eq!(choices(&plan)[3], Tier::Device);
    assert_eq!(wake_from(&plan), 5);
    // And B's first microbatch waits for the copy out of layer 2.
    assert_eq!(outcome.stall_ns, 80 + 80 + 10);
}

#[test]
fn with_little_host_memory_the_layer_needed_last_goes_to_the_file() {
    let work = StepWork { host_bytes: 20, ..Prefix { room: [40, 10], ..SMALL }.work() };
    let (plan, outcome) = choose(&work).unwrap();
    use crate::Tier::{Device as Keep, Host, Nvme};
    assert_eq!(choices(&plan), [Nvme, Host, Host, Keep]);
    assert_eq!(outcome.written_bytes, 10);
    // B waits for layer 2's copy out, and C for its copy in: there is no room for it before.
    assert_eq!(outcome.stall_ns, 10 + 10);
}

#[test]
fn a_step_without_room_has_no_plan() {
    let mut work = SMALL.work();
    work.operations[0].room_bytes = 9;
    assert_eq!(choose(&work), None);
    // Nor without a link out.
    let mut work = Prefix { room: [40, 20], ..SMALL }.work();
    work.links.device_to_host_bytes_per_s = 0;
    assert_eq!(choose(&work), None);
}

#[test]
fn more_than_can_be_added_up_is_refused() {
    let said = |work: &StepWork| work.validate().unwrap_err().to_string();
    let mut work = SMALL.work();
    work.groups[0].bytes = BYTES_MAX - 30;
    assert!(work.validate().is_ok());
    work.groups[1].bytes = 11;
    assert_eq!(
        said(&work),
        "bytes of all groups is 4611686018427387905; accepted: at most 4611686018427387904"
    );
    assert_eq!(choose(&work), None);
    work.groups.iter_mut().for_each(|group| group.bytes = 1 << 63);
    assert!(said(&work).contains("is 36893488147419103232;"));
    let mut work = SMALL.work();
    work.operations[0].compute_ns = COMPUTE_MAX_NS;
    assert_eq!(
        said(&work),
        "ns of all operations is 4611686018427388214; accepted: at most 4611686018427387904"
    );
    let plan = ResidencyPlan::new(&work, &[Tier::Device; 4], 0);
    assert_eq!((choose(&work), replay(&work, &plan)), (None, None));
    assert_eq!(optimum(&work, None, 1), Optimum::Never);
}

#[test]
fn the_most_that_is_accepted_is_added_up() {
    let quarter = BYTES_MAX / 4;
    let mut work = Prefix { bytes: quarter, room: [BYTES_MAX, 2 * quarter], ..SMALL }.work();
    work.operations.iter_mut().for_each(|op| op.compute_ns = COMPUTE_MAX_NS / 10);
    work.host_bytes = BYTES_MAX;
    let (plan, outcome) = choose(&work).unwrap();
    assert_eq!(outcome.slept_bytes, 2 * quarter);
    assert_eq!(replay(&work, &plan), Some(outcome));
    // The end of a copy of 500 years is not representable.
    work.links.host_to_device_bytes_per_s = 1;
    assert_eq!(choose(&work), None);
    assert!(!matches!(optimum(&work, None, 100), Optimum::Exact(_)));
}

/// What an operation makes is counted once while it runs: beside it there is room to wake.
#[test]
fn one_wakes_while_another_is_made() {
    let group = |made, needed| DormantGroup { bytes: 10, made, leaves: made, needed, freed: 2 };
    let operations = [5, 100, 5].map(|compute_ns| StepOperation { compute_ns, room_bytes: 20 });
    let work = StepWork {
        operations: operations.to_vec(),
        groups: vec![group(0, 2), group(1, 2)],
        ..SMALL.work()
    };
    let mut plan = ResidencyPlan::new(&work, &[Tier::Host, Tier::Device], 1);
    let outcome = ReplayOutcome { total_ns: 110, slept_bytes: 10, ..ReplayOutcome::default() };
    assert_eq!(replay(&work, &plan), Some(outcome), "5..15 out, 15..25 in");
    plan.groups[0].wake_from = 2;
    let outcome = ReplayOutcome { total_ns: 120, stall_ns: 10, ..outcome };
    assert_eq!(replay(&work, &plan), Some(outcome), "105..115 in");
}

mod properties {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::replay_model_tests as model;
    use crate::testing::arbitrary::{FINE, TINY, any_work, arbitrary_work};

    const STATES_MAX: usize = 1 << 18;

    /// Steps of a real prefix: layers alike, each phase with a room of its own.
    fn prefixes() -> impl Strategy<Value = StepWork> {
        let times = (1..100_u64, 1..400_u64, 1..200_u64);
        let rates = prop::array::uniform4(prop::sample::select(vec![1, 2, 5, 10, 30]));
        let sizes = (2..=7_usize, 1..=3_usize, 10..200_u64, 2..=6_u64, 1..=6_u64, 1..=6_u64);
        (sizes, times, rates, any::<bool>()).prop_map(|(sizes, times, rates, is_direct)| {
            let (layers, microbatches, bytes, rooms, in_microbatches, in_host) = sizes;
            let (forward_ns, microbatch_ns, backward_ns) = times;
            let room = [rooms, in_microbatches.min(rooms)].map(|layers| layers * bytes);
            let prefix = Prefix {
                layers,
                microbatches,
                bytes,
                forward_ns,
                microbatch_ns,
                backward_ns,
                room,
            };
            let [
                device_to_host_bytes_per_s,
                host_to_device_bytes_per_s,
                device_to_nvme_bytes_per_s,
                nvme_to_device_bytes_per_s,
            ] = rates.map(|rate| rate * GB / 10);
            let links = LinkRates {
                device_to_host_bytes_per_s,
                host_to_device_bytes_per_s,
                device_to_nvme_bytes_per_s,
                nvme_to_device_bytes_per_s,
            };
            // Memory that does its own I/O is host memory: sleeping there would free none.
            let host_bytes = if is_direct { 0 } else { in_host * bytes };
            StepWork { links, host_bytes, is_direct, ..prefix.work() }
        })
    }

    /// The least stall of any schedule; `None` where the search did not come to its end. It looks
    /// for nothing longer than the outcome: where there is none as short, it says one more.
    fn least_stall_ns(work: &StepWork, outcome: &ReplayOutcome) -> Option<u64> {
        match optimum(work, Some(outcome.total_ns + 1), STATES_MAX) {
            Optimum::Exact(total_ns) => Some(total_ns - work.compute_ns()),
            Optimum::AtLeast(_) | Optimum::Never => None,
        }
    }

    /// A plan of any kind for it.
    fn any_plan(work: StepWork) -> impl Strategy<Value = (StepWork, ResidencyPlan)> {
        let count = work.operations.len();
        let choice = prop::sample::select(vec![Tier::Device, Tier::Host, Tier::Nvme]);
        let placing = (choice, 0..count, 0..=count);
        let placings = prop::collection::vec(placing, work.groups.len());
        placings.prop_map(move |placings| {
            let groups = placings.into_iter().map(|(choice, sleep_after, wake_from)| GroupPlan {
                choice,
                sleep_after,
                wake_from,
            });
            (work.clone(), ResidencyPlan { groups: groups.collect() })
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        #[test]
        fn replays_of_anything_are_the_models(
            (work, plan) in any_work(1..=6, 2..=9, TINY).prop_flat_map(any_plan),
        ) {
            prop_assert_eq!(replay(&work, &plan), model::play(&work, &plan));
        }

        #[test]
        fn replays_of_prefixes_are_the_models(
            (work, plan) in arbitrary_work(2..=8, 1..=4, FINE).prop_flat_map(any_plan),
        ) {
            prop_assert_eq!(replay(&work, &plan), model::play(&work, &plan));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// A replay obeys the rules: nothing is faster than the fastest there is.
        #[test]
        fn no_plan_beats_the_optimum(work in arbitrary_work(2..=4, 1..=3, FINE)) {
            if let Some((plan, outcome)) = choose(&work) {
                prop_assert_eq!(replay(&work, &plan), Some(outcome));
                if let Some(least_ns) = least_stall_ns(&work, &outcome) {
                    prop_assert!(outcome.stall_ns >= least_ns, "{outcome:?} {least_ns}");
                }
            }
        }

        /// The bar of a run, held by its plan.
        #[test]
        fn plans_of_prefixes_are_within_a_twentieth_of_the_optimum(work in prefixes()) {
            let Some((plan, outcome)) = choose(&work) else {
                prop_assert_eq!(optimum(&work, None, STATES_MAX), Optimum::Never);
                return Ok(());
            };
            if let Some(least_ns) = least_stall_ns(&work, &outcome) {
                let bar_ns = least_ns as f64 * 1.05 + outcome.total_ns as f64 / 100.0;
                let stall_ns = outcome.stall_ns;
                prop_assert!(stall_ns as f64 <= bar_ns, "{stall_ns} of {bar_ns}: {plan:?}");
            }
        }
    }
}
