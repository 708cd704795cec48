//! Facts and the settings that follow from them.

use proptest::prelude::*;

use super::*;
use crate::WindowedWake;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;
const MS: u64 = 1_000_000;
const UNLIMITED: u64 = u64::MAX;

fn disk(free_bytes: u64, total_bytes: u64, file_bytes_max: u64) -> Disk {
    Disk { free_bytes, total_bytes, file_bytes_max, io: DiskIo::Uring }
}

#[test]
fn a_file_begins_small_and_may_take_what_is_free() {
    for (free, total, ulimit, start, limit, why) in [
        (
            900 * GIB,
            TIB,
            UNLIMITED,
            4 * GIB,
            836 * GIB,
            "grows from 4 GiB on demand; the disk of 1 TiB",
        ),
        (4 * GIB, 64 * GIB, UNLIMITED, 4 * GIB, 4 * GIB, "the disk of 64 GiB has 4 GiB free"),
        (3 * GIB, 4 * GIB, UNLIMITED, 1536 * MIB, 4 * GIB, "half of the 3 GiB that the disk"),
        // Most of it is free again when the file grows.
        (300 * MIB, 600 * GIB, UNLIMITED, 150 * MIB, 600 * GIB, "grows from 150 MiB on demand"),
        (0, 0, UNLIMITED, MIB, MIB, "half of the 0 B"),
        (900 * GIB, TIB, 8 * MIB, 8 * MIB, 8 * MIB, "ulimit -f allows files of 8 MiB"),
        (900 * GIB, TIB, 8 * GIB, 4 * GIB, 8 * GIB, "grows from 4 GiB on demand; ulimit -f"),
        (90 * TIB, 100 * TIB, UNLIMITED, 4 * GIB, 8 * TIB, "grows from 4 GiB on demand"),
    ] {
        let size = file_bytes(&disk(free, total, ulimit));
        let row = format!("{free} {total} {ulimit}: {size:?}");
        assert_eq!((size.start_bytes, size.limit.value), (start, limit), "{row}");
        assert!(size.limit.reason.contains(why), "{row}");
    }
}

#[test]
fn a_file_that_was_refused_is_tried_with_half_of_it_or_of_what_is_free() {
    assert_eq!(less_file_bytes(4 * GIB, 3 * GIB), 1536 * MIB);
    assert_eq!(less_file_bytes(4 * GIB, 100 * GIB), 2 * GIB);
    assert_eq!(less_file_bytes(GIB, 4 * MIB + 4097), 2 * MIB);
    assert_eq!(less_file_bytes(GIB, 0), MIB);
}

#[test]
fn the_host_tier_takes_half_of_what_is_available() {
    for (memory, available, used, value, why) in [
        (64 * GIB, Some(50 * GIB), 0, 25 * GIB, "half of the 50 GiB of memory that is available"),
        (64 * GIB, Some(2 * GIB), 0, GIB, "half of the 2 GiB"),
        (64 * GIB, Some(0), 0, 0, "half of the 0 B"),
        (64 * GIB, Some(20 * GIB), 20 * GIB, 30 * GIB, "20 GiB held, and half of the 20 GiB"),
        (64 * GIB, Some(10 * GIB), 22 * GIB, 24 * GIB, "three quarters of the 32 GiB of memory"),
        (64 * GIB, Some(2 * GIB), 22 * GIB, 22 * GIB, "22 GiB held, and no more while 2 GiB are"),
        (64 * GIB, None, 3, 16 * GIB, "a quarter of 64 GiB of memory; how much"),
    ] {
        let chosen = host_bytes(memory, available, used);
        assert_eq!(chosen.value, value, "{chosen:?}");
        assert!(chosen.reason.contains(why), "{chosen:?}");
    }
}

#[test]
fn threads_make_up_for_a_missing_io_uring() {
    let refused = DiskIo::Threads("io_uring_setup: Operation not permitted".to_owned());
    for (cpus, io, value, why) in [
        (16, Some(&refused), 8, "CPUs: 16; one request per thread: io_uring_setup"),
        (128, Some(&refused), IO_THREADS_MAX, "CPUs: 128"),
        (6, Some(&refused), 3, "CPUs: 6"),
        (1, Some(&refused), 2, "CPUs: 1"),
        (16, Some(&DiskIo::Uring), 2, "io_uring"),
        (16, None, 2, "no file tier"),
    ] {
        let chosen = io_threads(cpus, io);
        assert_eq!(chosen.value, value, "{chosen:?}");
        assert!(chosen.reason.contains(why), "{chosen:?}");
    }
}

#[test]
fn queues_hold_what_a_disk_moves_while_it_answers() {
    let request = 4 * MIB;
    for (threads, rate, latency_ns, depth) in [
        // A local disk: 0.7 MB on the way.
        (2, 7_000_000_000, 100_000, QUEUE_DEPTH_MIN),
        // Over a network: 20 MB on the way, twice that in ten requests of two threads.
        (2, 4_000_000_000, 5 * MS, 5),
        (1, 4_000_000_000, 5 * MS, 10),
        (2, 40_000_000_000, 20 * MS, QUEUE_DEPTH_MAX),
        (2, 0, 5 * MS, QUEUE_DEPTH_MIN),
        (2, 4_000_000_000, 0, QUEUE_DEPTH_MIN),
    ] {
        let chosen = queue_depth(threads, request, rate, latency_ns);
        assert_eq!(chosen.value, depth, "{chosen:?}");
    }
    assert_eq!(queue_depth(2, request, 0, 5).reason, "the disk was not measured");
    assert_eq!(queue_depth(2, request, 4 * GIB, 5 * MS).reason, "4 GiB/s at a latency of 5 ms");
}

#[test]
fn bytes_in_flight_fill_the_links() {
    for (rate, queues, available, value, why) in [
        (0, 32 * MIB, Some(64 * GIB), 256 * MIB, "no link was measured yet"),
        (3 * GIB, 32 * MIB, None, 256 * MIB, "enough for 3 GiB/s and queues of 32 MiB"),
        (200_000_000_000, 32 * MIB, None, 1_000_000_000, "/s until a finished copy starts"),
        (3 * GIB, 512 * MIB, None, GIB, "two fills of queues of 512 MiB"),
        (3 * GIB, 32 * MIB, Some(GIB), 128 * MIB, "an eighth of the 1 GiB of memory"),
        (3 * GIB, 32 * MIB, Some(0), 16 * MIB, "an eighth of the 0 B"),
        (u64::MAX, u64::MAX, None, INFLIGHT_BYTES_MAX, "a finished copy"),
    ] {
        let chosen = inflight_bytes(rate, queues, available);
        assert_eq!(chosen.value, value, "{chosen:?}");
        assert!(chosen.reason.contains(why), "{chosen:?}");
    }
}

/// 32 layers of 100 MiB and 10 ms each.
fn step(bytes_per_s: u64, lead_ns: u64, layers_of_room: u64) -> Step {
    Step {
        layers: 32,
        bytes: 3200 * MIB,
        largest_bytes: 100 * MIB,
        bytes_per_s,
        compute_ns: 320 * MS,
        lead_ns,
        peak_bytes: 1700 * MIB + layers_of_room * 100 * MIB,
        beside_bytes: 1600 * MIB,
    }
}

#[test]
fn a_window_is_as_long_as_the_lead_of_its_wakes() {
    for (rate, lead_ms, room, value, why) in [
        // Loads in 5 ms, less than a backward: two layers and one to spare.
        (20_000 * MIB, 0, 30, 3, "a layer loads in 5 ms, its backward takes 10 ms, 0 ns before"),
        (20_000 * MIB, 500, 30, 3, "500 ms before the first"),
        // Loads in 20 ms. Without a lead the link is busy from the first wake on, whatever the window.
        (5_000 * MIB, 0, 30, 3, "loads in 20 ms"),
        // 100 ms ahead: (100 + 10) / 20 layers, and one to spare.
        (5_000 * MIB, 100, 30, 7, "100 ms before the first"),
        // The same with room for 5, and for none.
        (5_000 * MIB, 100, 5, 5, "more would need more memory than the 2.15 GiB in use before"),
        (5_000 * MIB, 100, 0, 3, "more would need more memory"),
        // A lead in which all could load.
        (5_000 * MIB, 640, 60, 18, "640 ms before"),
    ] {
        let chosen = window_layers(&step(rate, lead_ms * MS, room)).unwrap();
        assert_eq!(chosen.value, value, "{rate} {lead_ms} {room}: {chosen:?}");
        assert!(chosen.reason.contains(why), "{chosen:?}");
    }
    for nothing in [
        Step::default(),
        step(0, 0, 30),
        Step { bytes: 0, ..step(GIB, 0, 3) },
        Step { largest_bytes: 0, ..step(GIB, 0, 3) },
    ] {
        assert_eq!(window_layers(&nothing), None, "{nothing:?}");
    }
}

#[test]
fn a_value_rises_at_once_and_falls_after_eight_steps() {
    let mut window = Steady::new(3);
    assert!(window.follow(7) && window.value() == 7);
    for low in [3, 4, 3, 5, 3, 3, 3] {
        assert!(!window.follow(low), "too early");
    }
    assert!(window.follow(3));
    assert_eq!(window.value(), 5, "the most of those eight");
    let mut bytes = Steady::new(800);
    for noise in [900, 701, 700, 899, 800] {
        assert!(!bytes.follow(noise), "{noise} is noise");
    }
    assert!(bytes.follow(901));
}

fn any_step() -> impl Strategy<Value = Step> {
    let figures = (0_u32..200, 0..TIB, 0..TIB, 0..TIB);
    let times = (0..10_000 * MS, 0..10_000 * MS, 0..TIB, 0..TIB);
    (figures, times).prop_map(|(figures, times)| {
        let (layers, bytes, largest_bytes, bytes_per_s) = figures;
        let (compute_ns, lead_ns, peak_bytes, beside_bytes) = times;
        let largest_bytes = largest_bytes.min(bytes);
        let largest_bytes = largest_bytes.max(bytes.checked_div(layers.into()).unwrap_or(0));
        Step {
            layers,
            bytes,
            largest_bytes,
            bytes_per_s,
            compute_ns,
            lead_ns,
            peak_bytes,
            beside_bytes,
        }
    })
}

proptest! {
    #[test]
    fn files_lie_between_their_bounds_and_grow_with_the_disk(
        free in any::<u64>(), used in any::<u64>(), more in any::<u64>(), ulimit in any::<u64>()
    ) {
        let size_of = |free: u64| file_bytes(&disk(free, free.saturating_add(used), ulimit));
        let size = size_of(free);
        prop_assert!(MIB <= size.start_bytes && size.start_bytes <= size.limit.value);
        prop_assert!(size.limit.value <= (8 * TIB).min(ulimit.max(MIB)));
        prop_assert!(size.start_bytes <= free.max(MIB), "more than is free");
        prop_assert!(size.limit.value <= free.saturating_add(used).max(MIB), "more than there is");
        let larger = size_of(free.saturating_add(more));
        prop_assert!(larger.start_bytes >= size.start_bytes && larger.limit.value >= size.limit.value);
        // Where the file of 4 GiB that was the fixed size fits, it is there.
        prop_assert!(free < 4 * GIB || ulimit < 4 * GIB || size.start_bytes == 4 * GIB);
    }

    /// However often it is full and asks again, a quarter of the memory is left.
    #[test]
    fn the_host_tier_leaves_a_quarter(available in 0..TIB, request in 1..GIB) {
        let mut held = 0;
        while let limit = host_bytes(0, Some(available - held), held).value
            && limit >= held + request
        {
            held = limit;
        }
        prop_assert!(available - held >= available / 4, "{held}");
        prop_assert!(held + request + GIB > available / 4 * 3, "{held}");
    }

    #[test]
    fn the_host_tier_never_counts_memory_that_is_not_available(
        memory in any::<u64>(), available in any::<u64>(), more in any::<u64>(), used in 0..TIB
    ) {
        let chosen = host_bytes(memory, Some(available), used).value;
        prop_assert!(chosen <= used.saturating_add(available));
        prop_assert!(host_bytes(memory, Some(available.saturating_add(more)), used).value >= chosen);
    }

    #[test]
    fn threads_and_queues_lie_between_their_bounds_and_grow(
        cpus in any::<u64>(), more in any::<u64>(), threads in 1..65_u64,
        rate in any::<u64>(), faster in any::<u64>(), latency in any::<u64>()
    ) {
        let io = DiskIo::Threads(String::new());
        let few = io_threads(cpus, Some(&io)).value;
        prop_assert!((IO_THREADS_MIN..=IO_THREADS_MAX).contains(&few));
        prop_assert!(io_threads(cpus.saturating_add(more), Some(&io)).value >= few);
        let depth = |rate| queue_depth(threads, 4 * MIB, rate, latency).value;
        prop_assert!((QUEUE_DEPTH_MIN..=QUEUE_DEPTH_MAX).contains(&depth(rate)));
        prop_assert!(depth(rate.saturating_add(faster)) >= depth(rate));
    }

    #[test]
    fn bytes_in_flight_lie_between_their_bounds_and_grow_with_the_rate(
        rate in any::<u64>(), faster in any::<u64>(), queues in 0..TIB, available in any::<Option<u64>>()
    ) {
        let slow = inflight_bytes(rate, queues, available).value;
        prop_assert!((16 * MIB..=INFLIGHT_BYTES_MAX).contains(&slow));
        prop_assert!(slow <= available.map_or(u64::MAX, |bytes| (bytes / 8).max(16 * MIB)));
        prop_assert!(inflight_bytes(rate.saturating_add(faster), queues, available).value >= slow);
    }

    #[test]
    fn a_window_never_needs_more_memory_than_the_step_has_used(step in any_step()) {
        let Some(chosen) = window_layers(&step) else { return Ok(()) };
        prop_assert!((WINDOW_LAYERS_START..=WINDOW_LAYERS_MAX).contains(&chosen.value));
        let needs = u128::from(chosen.value) * u128::from(step.largest_bytes) + u128::from(step.beside_bytes);
        prop_assert!(chosen.value == WINDOW_LAYERS_START || needs <= u128::from(step.peak_bytes));
    }

    /// Against the stall of each window, one by one.
    #[test]
    fn a_window_with_room_waits_no_longer_than_any_other(step in any_step()) {
        let step = Step { peak_bytes: u64::MAX, ..step };
        let Some(chosen) = window_layers(&step) else { return Ok(()) };
        let layers = u64::from(step.layers);
        let load_s = (step.bytes / layers) as f64 / step.bytes_per_s as f64;
        let compute_s = (step.compute_ns / layers) as f64 / 1e9;
        let stall = |window: u64| WindowedWake {
            layers: step.layers, window: window as u32, load_s, compute_s, lead_s: step.lead_ns as f64 / 1e9,
        }.stall_s();
        let noise_s = 1e-6 * (1.0 + load_s * f64::from(step.layers)) + step.compute_ns as f64 / 1e11;
        for window in 1..=WINDOW_LAYERS_MAX {
            prop_assert!(stall(chosen.value) <= stall(window) + noise_s, "{chosen:?} against {window}");
        }
        // One layer fewer, beside the spare one, would wait longer.
        let all = WINDOW_LAYERS_MAX.min(layers);
        prop_assert!(chosen.value == WINDOW_LAYERS_START || stall(chosen.value - 2) > stall(all));
    }

    /// Steps that repeat within the limit settle on one value, whatever came before.
    #[test]
    fn a_value_never_goes_back_and_forth(
        before in prop::collection::vec(1..10_000_u64, 0..20),
        round in prop::collection::vec(1..10_000_u64, 1..=FALL_STEPS as usize),
        start in 1..10_000_u64
    ) {
        let mut value = Steady::new(start);
        before.iter().for_each(|&need| { value.follow(need); });
        for _ in 0..2 * FALL_STEPS {
            round.iter().for_each(|&need| { value.follow(need); });
        }
        let settled = value.value();
        for &need in round.iter().cycle().take(100) {
            prop_assert!(!value.follow(need), "{round:?} moved {settled} to {}", value.value());
        }
        let most = round.iter().max().copied().unwrap_or_default();
        prop_assert!(settled + settled / 8 >= most, "{settled} is less than {most}");
    }
}
