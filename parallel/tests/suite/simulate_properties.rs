//! Compares the simulator with closed forms, bounds and a tick-by-tick replay.

use crate::batch::FlatGroup;
use dormouse_parallel::simulate::*;
use dormouse_schedule::{Machine, ModelShape, Plan, PlanOptions};
use proptest::prelude::*;

/// Every link carries a byte per nanosecond.
fn machine() -> Machine {
    let rate = 1_000_000_000;
    Machine {
        sleep_bytes_per_s: rate,
        wake_bytes_per_s: rate,
        nvme_write_bytes_per_s: rate,
        nvme_read_bytes_per_s: rate,
        ..Machine::default()
    }
}

fn alone(rank: SimulatedRank) -> Result<RankTimeline, SimulateError> {
    let world = World { ranks: vec![rank], ..World::default() };
    world.run().map(|mut timeline| timeline.ranks.remove(0))
}

/// Waits for room and for blocks to wake.
pub(crate) fn stall_ns(rank: &RankTimeline) -> u64 {
    rank.waits.room_ns + rank.waits.wakes_ns
}

fn sleep(block: u32) -> BlockSleep {
    BlockSleep { block, tier: Tier::Host }
}

/// Layers fall asleep; after a lead their backwards run in order. A window or the device's bytes bound the
/// awake layers.
fn wake(
    load: &[u64],
    compute: &[u64],
    lead: u64,
    window: usize,
    device_bytes: u64,
) -> SimulatedRank {
    let count = load.len() as u32;
    let all: Vec<u32> = (0..count).collect();
    let mut steps = vec![
        // Layers are allocated one after another, so that a small device suffices, and sleep early.
        SimulatedStep::default(),
    ];
    steps.extend(all.iter().map(|block| SimulatedStep {
        allocates: vec![*block],
        sleeps: vec![sleep(*block)],
        ..SimulatedStep::default()
    }));
    steps.push(SimulatedStep { compute_ns: 1 << 40, ..SimulatedStep::default() });
    let first = all.iter().copied().take(window).collect();
    steps.push(SimulatedStep { compute_ns: lead, wakes: first, ..SimulatedStep::default() });
    for (index, compute_ns) in compute.iter().enumerate() {
        let next = index + window - 1;
        let wakes = if index > 0 && next < load.len() { vec![next as u32] } else { Vec::new() };
        steps.push(SimulatedStep {
            compute_ns: *compute_ns,
            needs: vec![index as u32],
            frees: vec![index as u32],
            wakes,
            ..SimulatedStep::default()
        });
    }
    let machine = Machine { device_bytes, ..machine() };
    SimulatedRank { machine, block_bytes: load.to_vec(), steps }
}

proptest! {
    /// docs/method.md §5, equal layers and room for at least two: the stall is the minimum, to the
    /// nanosecond, under a window of layers and under a limit of bytes.
    #[test]
    fn the_stall_is_the_closed_forms(
        layers in 1u64..20,
        window in 2u64..8,
        load in 1u64..50,
        compute in 0u64..50,
        lead in 0u64..300,
    ) {
        let wanted = [
            load.saturating_sub(lead),
            (layers * load).saturating_sub(lead + (layers - 1) * compute),
            (layers.saturating_sub(window) * load).saturating_sub((layers.max(2) - 2) * compute),
        ];
        let wanted = wanted.into_iter().max().unwrap();
        let (loads, computes) = (vec![load; layers as usize], vec![compute; layers as usize]);
        let by_window = alone(wake(&loads, &computes, lead, window as usize, 0)).unwrap();
        prop_assert_eq!(by_window.waits, Waits { wakes_ns: wanted, ..Waits::default() });
        let by_bytes = alone(wake(&loads, &computes, lead, layers as usize, window * load)).unwrap();
        prop_assert_eq!(by_bytes.waits.wakes_ns, wanted);
        prop_assert!(by_bytes.peak.device_bytes <= window * load);
        prop_assert_eq!(by_window.demand_wakes, 0);
    }

    /// docs/method.md §5, unequal layers: no stall is below the bound in bytes.
    #[test]
    fn the_stall_obeys_the_bound_in_bytes(
        layers in prop::collection::vec((1u64..30, 0u64..30), 1..12),
        lead in 0u64..60,
        spare in 0u64..60,
    ) {
        let (load, compute): (Vec<u64>, Vec<u64>) = layers.into_iter().unzip();
        let room = load.iter().max().unwrap() + spare;
        let seen = alone(wake(&load, &compute, lead, load.len(), room)).unwrap();
        prop_assert!(seen.peak.device_bytes <= room);
        prop_assert!(seen.waits.wakes_ns as i64 >= stall_bound(&load, &compute, lead, room));
    }

    /// Writes of phase A obey the time-reversed bound: producing sleeping layers takes exactly as long as
    /// waking and consuming them in reverse order.
    #[test]
    fn sleeping_is_waking_backwards(
        layers in prop::collection::vec((1u64..30, 0u64..30), 1..12),
        spare in 0u64..60,
    ) {
        let (load, compute): (Vec<u64>, Vec<u64>) = layers.into_iter().unzip();
        let device_bytes = load.iter().max().unwrap() + spare;
        let asleep = |(block, compute_ns): (usize, &u64)| SimulatedStep {
            compute_ns: *compute_ns,
            allocates: vec![block as u32],
            sleeps: vec![sleep(block as u32)],
            ..SimulatedStep::default()
        };
        let steps = compute.iter().enumerate().map(asleep).collect();
        let machine = Machine { device_bytes, ..machine() };
        let down = alone(SimulatedRank { machine, block_bytes: load.clone(), steps }).unwrap();
        let slept_ns = down.copies.last().unwrap().end_ns;
        let reversed = |of: &[u64]| of.iter().rev().copied().collect::<Vec<_>>();
        let (load, compute) = (reversed(&load), reversed(&compute));
        let up = alone(wake(&load, &compute, 0, load.len(), device_bytes)).unwrap();
        let begin = up.steps[load.len() + 2].start_ns;
        prop_assert_eq!(slept_ns, up.end_ns - begin);
    }
}

/// `s_k ≥ max(f_{k−1}, B_k/BW − L, max_{i<k} f_i + (B_k − B_{i−1} − M)/BW)`, in signed nanoseconds;
/// the stall is at least `f_n − Σc`.
fn stall_bound(load: &[u64], compute: &[u64], lead: u64, room: u64) -> i64 {
    let mut sums = vec![0_i64];
    for bytes in load {
        sums.push(sums.last().unwrap() + *bytes as i64);
    }
    let mut ends = vec![0_i64];
    for k in 1..=load.len() {
        let mut start = ends[k - 1].max(sums[k] - lead as i64);
        for i in 1..k {
            start = start.max(ends[i] + sums[k] - sums[i - 1] - room as i64);
        }
        ends.push(start + compute[k - 1] as i64);
    }
    ends.last().unwrap() - compute.iter().sum::<u64>() as i64
}

prop_compose! {
    /// Valid programs: blocks are allocated, used while they exist, and freed or kept.
    fn program()(
        sizes in prop::collection::vec(0u64..12, 1..7),
        times in prop::collection::vec(0u64..9, 3..14),
        picks in prop::collection::vec((0usize..14, 0usize..5, 0u32..7), 0..40),
        (device_bytes, host_bytes) in (0u64..30, 0u64..24),
        rates in prop::array::uniform4(1u64..4),
    ) -> SimulatedRank {
        let mut steps: Vec<SimulatedStep> =
            times.iter().map(|ns| SimulatedStep { compute_ns: *ns, ..SimulatedStep::default() }).collect();
        let last = steps.len() - 1;
        // Each block lives over a run of steps.
        let lives: Vec<(usize, usize)> = (0..sizes.len())
            .map(|block| (block % (last + 1), last - (block * 3) % (last + 1)))
            .map(|(a, b)| (a.min(b), a.max(b)))
            .collect();
        for (block, (begin, end)) in (0..).zip(&lives) {
            steps[*begin].allocates.push(block);
            if (begin + end) % 3 > 0 {
                steps[*end].frees.push(block);
            }
        }
        for (at, what, block) in picks {
            let (at, block) = (at % (last + 1), block % sizes.len() as u32);
            let (begin, end) = lives[block as usize];
            if at <= begin || at >= end {
                continue;
            }
            let tier = if what == 3 { Tier::Nvme } else { Tier::Host };
            match what {
                0 => steps[at].needs.push(block),
                1 => steps[at].wakes.push(block),
                _ => steps[at].sleeps.push(BlockSleep { block, tier }),
            }
        }
        let [sleep, wake, write, read] = rates.map(|rate| rate * 500_000_000);
        let machine = Machine {
            device_bytes,
            host_bytes,
            sleep_bytes_per_s: sleep,
            wake_bytes_per_s: wake,
            nvme_write_bytes_per_s: write,
            nvme_read_bytes_per_s: read,
            ..Machine::default()
        };
        SimulatedRank { machine, block_bytes: sizes, steps }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, ..ProptestConfig::default() })]

    /// The tick-by-tick replay gives the same steps, copies, bytes and deadlocks.
    #[test]
    fn a_rank_matches_the_naive_simulation(rank in program()) {
        let seen = match alone(rank.clone()) {
            Err(SimulateError::TooLarge { .. }) => return Ok(()),
            Err(SimulateError::Stuck { step, .. }) => Err(step),
            Ok(timeline) => Ok(timeline),
            Err(other) => panic!("{other}"),
        };
        let wanted = crate::naive_tiers::run(&rank);
        match (seen, wanted) {
            (Err(step), Err(wanted)) => prop_assert_eq!(step, wanted),
            (Ok(seen), Ok(wanted)) => {
                let steps: Vec<[u64; 3]> =
                    seen.steps.iter().map(|s| [s.reached_ns, s.start_ns, s.end_ns]).collect();
                prop_assert_eq!(steps, wanted.steps);
                let mut copies: Vec<_> =
                    seen.copies.iter().map(|c| (c.link, c.block, c.start_ns, c.end_ns)).collect();
                copies.sort_unstable();
                prop_assert_eq!(copies, wanted.copies);
                let peak = [seen.peak.device_bytes, seen.peak.host_bytes, seen.peak.nvme_bytes];
                prop_assert_eq!(peak, wanted.peak);
                let waits = seen.waits;
                prop_assert_eq!(waits.exchanges_ns, 0);
                prop_assert_eq!(seen.compute_ns + waits.room_ns + waits.wakes_ns, seen.end_ns);
            }
            (seen, wanted) => panic!("{seen:?} against {wanted:?}"),
        }
    }

    /// Every sample is within the bounds of the tiers, and consecutive samples differ.
    #[test]
    fn tiers_never_exceed_their_capacity(rank in program()) {
        let Ok(seen) = alone(rank.clone()) else { return Ok(()) };
        let within = |bytes: u64, most: u64| most == 0 || bytes <= most;
        for pair in seen.bytes.windows(2) {
            prop_assert!(pair[0].ns < pair[1].ns);
            prop_assert_ne!(MemorySample { ns: 0, ..pair[0] }, MemorySample { ns: 0, ..pair[1] });
        }
        for sample in &seen.bytes {
            prop_assert!(within(sample.device_bytes, rank.machine.device_bytes));
            prop_assert!(within(sample.host_bytes, rank.machine.host_bytes));
            prop_assert!(sample.device_bytes <= seen.peak.device_bytes);
        }
        for link in LinkDirection::ALL {
            let busy: u64 = seen
                .copies
                .iter()
                .filter(|copy| copy.link == link)
                .map(|copy| copy.end_ns - copy.start_ns)
                .sum();
            prop_assert_eq!(busy, seen.link_busy_ns[link as usize]);
        }
    }
}

/// A group with simple saved bytes and times per layer.
fn group(layers: u32, prompt: u64, responses: usize, machine: Machine) -> FlatGroup {
    let options = PlanOptions {
        vocab: 50,
        microbatch_rows: 8,
        wake_window_layers: 2,
        last_layer_dead: false,
        model: ModelShape {
            layers,
            heads: 4,
            kv_heads: 2,
            head_dim: 8,
            dtype_bytes: 4,
            layer_linear_weights: 1_000,
            kv_linear_weights: 100,
            last_layer_prefix_weights: 130,
            head_weights: 700,
            saved_bytes_per_token_layer: 64,
        },
        machine: Some(machine),
        ..PlanOptions::default()
    };
    FlatGroup { prompt, responses: vec![(4, 1.0); responses], options }
}

proptest! {
    /// The predicted stall of a plan equals that of its steps, within a nanosecond per step of rounding.
    #[test]
    fn a_flat_group_stalls_as_predicted(
        layers in 1u32..12,
        prompt in 2u64..200,
        // With several microbatches, all layers are asleep before the last one.
        responses in 3usize..9,
        wake_bytes_per_s in 1u64..1 << 24,
    ) {
        let machine = Machine {
            flops_per_s: 1_000_000_000,
            wake_bytes_per_s,
            // Layers sleep long before the last microbatch, because the closed form omits sleeping.
            sleep_bytes_per_s: u64::MAX,
            ..Machine::default()
        };
        let plan = group(layers, prompt, responses, machine).plan().unwrap();
        let rank = SimulatedRank::of_plan(&plan, Tier::Host).unwrap();
        let seen = alone(rank).unwrap();
        let predicted = plan.predict();
        let wanted_ns = predicted.wake_stall_s.unwrap() * 1e9;
        let rounding = 4.0 * f64::from(layers) + wanted_ns * 1e-9;
        let stall = seen.waits.wakes_ns as f64;
        prop_assert!((stall - wanted_ns).abs() <= rounding, "{} {}", stall, wanted_ns);
        prop_assert_eq!(seen.waits.room_ns, 0);
    }

    /// A plan without sleep has the predicted peak and compute time.
    #[test]
    fn a_flat_group_awake_peaks_as_predicted(
        layers in 1u32..12,
        prompt in 2u64..200,
        responses in 1usize..9,
        dead in any::<bool>(),
    ) {
        let machine = Machine { flops_per_s: 1_000_000_000, ..Machine::default() };
        let mut group = group(layers, prompt, responses, machine);
        group.last_layer_dead = dead;
        let plan = group.awake().unwrap();
        let predicted = plan.predict();
        let seen = alone(SimulatedRank::of_plan(&plan, Tier::Host).unwrap()).unwrap();
        prop_assert_eq!(stall_ns(&seen), 0);
        prop_assert_eq!(seen.peak.device_bytes, predicted.sleep_bytes + predicted.peak_bytes_b);
        let rounding = seen.steps.len() as f64 + predicted.flops_shared * 1e-9;
        prop_assert!((seen.compute_ns as f64 - predicted.flops_shared).abs() <= rounding);
    }
}

/// Phases A and C hold a window of layers, not the whole prefix.
#[test]
fn sleeping_layer_by_layer_lowers_the_peak() {
    let machine = Machine {
        flops_per_s: 1_000_000_000,
        sleep_bytes_per_s: 1_000_000_000,
        wake_bytes_per_s: 1_000_000_000,
        nvme_write_bytes_per_s: 500_000_000,
        nvme_read_bytes_per_s: 500_000_000,
        ..Machine::default()
    };
    let group = |machine| group(8, 101, 8, machine);
    let layer = 100 * 64;
    let run = |plan: Plan, tier| alone(SimulatedRank::of_plan(&plan, tier).unwrap()).unwrap();
    let never = run(group(machine).awake().unwrap(), Tier::Host);
    let host = run(group(machine).plan().unwrap(), Tier::Host);
    let file = run(group(machine).plan().unwrap(), Tier::Nvme);
    assert_eq!(
        never.peak.device_bytes - host.peak.device_bytes,
        6 * layer,
        "a window of 2 wakes in B"
    );
    assert_eq!([host.peak.host_bytes, host.peak.nvme_bytes], [8 * layer, 0]);
    assert_eq!(file.peak.nvme_bytes, 8 * layer);
    assert!(file.peak.host_bytes <= 3 * layer, "{}", file.peak.host_bytes);
    assert_eq!([stall_ns(&host), stall_ns(&file)], [0, 0]);
    assert_eq!(host.end_ns, never.end_ns);
    assert_eq!(host.link_busy_ns[LinkDirection::Sleep as usize], 8 * layer);
    assert_eq!(host.link_busy_ns[LinkDirection::Wake as usize], 8 * layer);
    // A layer leaves when the next one, which reads its output, is done. Block 0 is the boundary, block l + 1
    // is layer l.
    for copy in host.copies.iter().filter(|copy| copy.link == LinkDirection::Sleep) {
        let next = (copy.block as usize).min(7);
        assert!(copy.start_ns >= host.steps[next].end_ns, "{copy:?}");
    }
    let unknown = Machine { flops_per_s: 0, ..machine };
    let plan = group(unknown).awake().unwrap();
    let error = SimulatedRank::of_plan(&plan, Tier::Host).unwrap_err();
    assert!(error.to_string().starts_with("flops_per_s is 0; accepted: 1 to "));
}

/// One rank computes K and V, sends them and waits for gradients; the end is that of the slowest rank and the
/// ring.
#[test]
fn a_step_ends_with_the_slowest_rank_and_the_collective() {
    let rank = |steps| SimulatedRank { steps, ..SimulatedRank::default() };
    let world = World {
        ranks: vec![
            rank(vec![
                SimulatedStep { compute_ns: 10, sends: vec![0], ..SimulatedStep::default() },
                SimulatedStep { compute_ns: 5, ..SimulatedStep::default() },
                SimulatedStep { compute_ns: 7, receives: vec![1], ..SimulatedStep::default() },
            ]),
            rank(vec![
                SimulatedStep { compute_ns: 3, ..SimulatedStep::default() },
                SimulatedStep {
                    compute_ns: 20,
                    receives: vec![0],
                    sends: vec![1],
                    ..SimulatedStep::default()
                },
            ]),
        ],
        exchanges: vec![
            StepExchange { from: 0, to: 1, bytes: 4 },
            StepExchange { from: 1, to: 0, bytes: 8 },
        ],
        link_bytes_per_s: 1_000_000_000,
        link_latency_ns: 2,
        collective_bytes: 100,
    };
    let timeline = world.run().unwrap();
    let run = |start_ns, end_ns| TimeSpan { start_ns, end_ns };
    assert_eq!(timeline.exchanges, [run(10, 16), run(36, 46)]);
    assert_eq!([timeline.ranks[0].end_ns, timeline.ranks[1].end_ns], [53, 36]);
    assert_eq!(timeline.ranks[0].waits.exchanges_ns, 46 - 15);
    assert_eq!(timeline.ranks[1].waits.exchanges_ns, 16 - 3);
    // Two rounds of half the bytes each.
    assert_eq!(timeline.collective, run(53, 53 + 100 + 2 * 2));
    assert_eq!(timeline.total_ns, 157);
}

#[test]
fn exchanges_of_a_pair_run_one_at_a_time() {
    let send = SimulatedStep { compute_ns: 1, sends: vec![0, 1], ..SimulatedStep::default() };
    let world = World {
        ranks: vec![
            SimulatedRank { steps: vec![send], ..SimulatedRank::default() },
            SimulatedRank {
                steps: vec![SimulatedStep { receives: vec![1, 0], ..SimulatedStep::default() }],
                ..SimulatedRank::default()
            },
        ],
        exchanges: vec![StepExchange { from: 0, to: 1, bytes: 4 }; 2],
        link_bytes_per_s: 1_000_000_000,
        ..World::default()
    };
    let timeline = world.run().unwrap();
    assert_eq!(timeline.exchanges.iter().map(|run| run.end_ns).collect::<Vec<_>>(), [5, 9]);
    assert_eq!(timeline.ranks[1].end_ns, 9);
}

#[test]
fn names_the_rank_in_a_deadlock() {
    let step = |receives, sends| SimulatedStep { receives, sends, ..SimulatedStep::default() };
    let rank = |step| SimulatedRank { steps: vec![step], ..SimulatedRank::default() };
    let world = World {
        ranks: vec![rank(step(vec![1], vec![0])), rank(step(vec![0], vec![1]))],
        exchanges: vec![
            StepExchange { from: 0, to: 1, bytes: 0 },
            StepExchange { from: 1, to: 0, bytes: 0 },
        ],
        ..World::default()
    };
    assert_eq!(
        world.run().unwrap_err().to_string(),
        "deadlock: rank 0 waits for exchanges before step 0 with 0 bytes on the device and 0 on the host"
    );
    let full = SimulatedRank {
        machine: Machine { device_bytes: 10, ..machine() },
        block_bytes: vec![6, 6],
        steps: vec![
            SimulatedStep { allocates: vec![0], ..SimulatedStep::default() },
            SimulatedStep { allocates: vec![1], ..SimulatedStep::default() },
        ],
    };
    assert_eq!(
        alone(full).unwrap_err().to_string(),
        "deadlock: rank 0 waits for room before step 1 with 6 bytes on the device and 0 on the host"
    );
}

#[test]
fn refuses_an_invalid_world() {
    let refused = |change: fn(&mut SimulatedRank)| {
        let mut rank = SimulatedRank { machine: machine(), block_bytes: vec![4, 4], steps: vec![] };
        rank.steps = vec![
            SimulatedStep { allocates: vec![0], ..SimulatedStep::default() },
            SimulatedStep { needs: vec![0], frees: vec![0], ..SimulatedStep::default() },
        ];
        assert!(alone(rank.clone()).is_ok());
        change(&mut rank);
        alone(rank).unwrap_err().to_string()
    };
    let cases = [
        (
            refused(|r| r.steps[0].needs = vec![0]),
            "rank 0, step 0: block 0 is needed but does not exist",
        ),
        (refused(|r| r.steps[1].allocates = vec![0]), "step 1: block 0 is allocated twice"),
        (refused(|r| r.steps[1].allocates = vec![2]), "step 1: block 2 has no size"),
        (refused(|r| r.steps[1].frees = vec![1]), "step 1: block 1 is freed but does not exist"),
        (refused(|r| r.steps[1].wakes = vec![1]), "step 1: block 1 is woken but does not exist"),
        (
            refused(|r| r.steps[1].sleeps = vec![sleep(0)]),
            "block 0 falls asleep but does not exist",
        ),
        (
            refused(|r| {
                r.machine.wake_bytes_per_s = 0;
                r.steps[0].sleeps = vec![sleep(0)];
            }),
            "rank 0: the Wake link has rate 0; accepted: 1 byte/s",
        ),
        (
            refused(|r| r.machine.device_bytes = 3),
            "rank 0: block 0 has 4 bytes; accepted: at most 3, the capacity of Device",
        ),
        (refused(|r| r.steps[0].sends = vec![0]), "exchange 0 does not exist"),
    ];
    for (seen, wanted) in cases {
        assert!(seen.contains(wanted), "{seen:?} does not say {wanted:?}");
    }
    let lost = World {
        ranks: vec![SimulatedRank::default(); 2],
        exchanges: vec![StepExchange { from: 0, to: 1, bytes: 1 }],
        ..World::default()
    };
    let error = lost.run().unwrap_err().to_string();
    assert_eq!(error, "exchange 0 is not sent once and received once");
    let mut unread = lost.clone();
    unread.ranks[0].steps = vec![SimulatedStep { sends: vec![0], ..SimulatedStep::default() }];
    assert_eq!(unread.run().unwrap_err().to_string(), error);
    unread.ranks[1].steps =
        vec![SimulatedStep { receives: vec![0, 0], ..SimulatedStep::default() }];
    assert_eq!(unread.run().unwrap_err().to_string(), error);
    let mut stolen = lost;
    stolen.ranks[1].steps = vec![SimulatedStep { sends: vec![0], ..SimulatedStep::default() }];
    assert_eq!(stolen.run().unwrap_err().to_string(), "exchange 0 belongs to another rank");
}
