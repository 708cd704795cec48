//! Streams that are never idle: the host runs ahead of the GPU by a number of launches.

use crate::caps::{Call, live_bytes_max, traces};
use crate::common::{PAGE, key, uncounted};
use dormouse_alloc::{Block, Config, Freed, Margin, Request, Stats};
use std::collections::{HashMap, VecDeque};

const STREAMS: usize = 16;

/// Runs a workload with a kernel on each block when it is allocated and another before it is freed. The GPU is
/// `run_ahead` launches behind; `None`: it is always done.
fn run(calls: &[Call], run_ahead: Option<u64>) -> Stats {
    // Far more than is needed: nothing but the most in use limits what is held.
    let pages = 20 * (live_bytes_max(calls) as usize).div_ceil(PAGE);
    let config = Config {
        granule_bytes: 1,
        segment_bytes: 32 * PAGE,
        moves_pages: true,
        thread_cache: true,
        ..Config::new(1, (pages / 2 * PAGE) as u64)
    };
    let (device, allocator) = uncounted(pages, config, STREAMS, 1);
    if let Some(launches) = run_ahead {
        device.gpu().set_run_ahead(launches);
    }
    let launch = |stream, range| {
        let mut gpu = device.gpu();
        gpu.launch(stream, range);
        if run_ahead.is_none() {
            gpu.drain();
        }
    };
    let mut blocks = HashMap::new();
    for call in calls {
        match *call {
            Call::Allocate { name, bytes, stream } => {
                let stream = stream as usize % STREAMS;
                let request = Request { stream: key(stream), ..Request::new(bytes as usize) };
                let block = allocator.allocate(&request).unwrap();
                device.gpu().must_suit(block.range, stream);
                launch(stream, block.range);
                blocks.insert(name, block.range);
            }
            Call::Free { name, stream } => {
                let Some(range) = blocks.remove(&name) else { continue };
                let stream = stream as usize % STREAMS;
                launch(stream, range);
                let _: Freed = allocator.free(range.start, key(stream)).unwrap();
            }
        }
    }
    allocator.stats()
}

/// A trace of which each stream has a part of the memory in turn.
const ROTATION: &str = "stream_rotation";
/// Run-aheads that are tested, in launches: the last is what a driver queues at most.
const RUN_AHEADS: [u64; 4] = [1, 16, 64, 1024];

/// The host waits as far as it has to, also for other streams: no more is held than without a run-ahead.
#[test]
fn a_run_ahead_takes_no_more_memory() {
    for (name, calls) in traces() {
        if name.starts_with(ROTATION) {
            continue;
        }
        let (done, live_bytes) = (run(&calls, None), live_bytes_max(&calls));
        assert_eq!(done.stream_waits, 0);
        for run_ahead in RUN_AHEADS {
            let behind = run(&calls, Some(run_ahead));
            let (least_bytes, most_bytes) = (done.mapped_bytes.peak, behind.mapped_bytes.peak);
            assert!(
                most_bytes - live_bytes <= 2 * (least_bytes - live_bytes),
                "{name}, {run_ahead} ahead: {most_bytes} bytes, {least_bytes} if done at once"
            );
            // A wait for one page is a wait too many.
            assert!(behind.stream_waits < behind.maps, "{name}, {run_ahead} ahead: {behind:?}");
        }
    }
}

/// Where many streams take turns, a request does not wait for other streams. It reuses their pages once these are
/// quiet.
#[test]
fn what_other_streams_freed_serves_once_it_is_quiet() {
    let (_, calls) = traces().into_iter().find(|(name, _)| name.starts_with(ROTATION)).unwrap();
    let peak_bytes = |run_ahead| run(&calls, Some(run_ahead)).mapped_bytes.peak;
    let all_bytes = peak_bytes(u64::MAX / 2);
    assert!(peak_bytes(16) < all_bytes / 4);
    assert!(peak_bytes(64) < all_bytes / 2);
}

/// Layers that are allocated, used and fall asleep once the GPU is through with them.
const LAYERS: usize = 400;
const LAYER_PAGES: usize = 2;
/// What stays awake.
const AWAKE_PAGES: usize = 640;
const AHEAD: usize = 64;
/// The least work of the GPU counts from this layer on.
const SETTLED: usize = 100;

/// Pages at the peak, layers that the GPU had left at least, and waits.
fn sleep_late(scope: u64, run_ahead: Option<Margin>) -> (usize, usize, u64) {
    let config = Config {
        segment_bytes: 32 * PAGE,
        moves_pages: true,
        run_ahead,
        ..Config::new(PAGE / 8, (8 * AWAKE_PAGES * PAGE) as u64)
    };
    let (device, allocator) = uncounted(16 * AWAKE_PAGES, config, 1, 1);
    device.gpu().set_run_ahead(AHEAD as u64);
    let request = Request { stream: key(0), scope, whole_pages: true, ..Request::new(0) };
    allocator.allocate(&Request { bytes: AWAKE_PAGES * PAGE, ..request }).unwrap();
    let (mut falling, mut least_left) = (VecDeque::new(), usize::MAX);
    for layer in 0..LAYERS {
        let block = allocator.allocate(&Request { bytes: LAYER_PAGES * PAGE, ..request }).unwrap();
        if layer >= SETTLED {
            least_left = least_left.min(device.gpu().queued(0));
        }
        device.gpu().launch(0, block.range);
        falling.push_back((block, device.gpu().end(0)));
        while let Some(&(block, end)) = falling.front()
            && device.gpu().is_complete(end)
        {
            falling.pop_front();
            let info = allocator.claim(block.range.start, 1).unwrap();
            device.take_pages(info.pages);
            allocator.set_asleep(block.id).unwrap();
        }
        allocator.check().unwrap();
    }
    assert_eq!(device.violations(), Vec::<String>::new());
    let stats = allocator.stats();
    (stats.mapped_bytes.peak as usize / PAGE, least_left, stats.stream_waits)
}

/// What the host is ahead by cannot sleep yet. It is limited, and the GPU keeps work.
#[test]
fn what_is_to_sleep_is_allocated_no_farther_ahead_than_the_limit() {
    let (peak_pages, least_left, waits) = sleep_late(1, None);
    assert_eq!((peak_pages, waits), (AWAKE_PAGES + (AHEAD + 1) * LAYER_PAGES, 0));
    assert_eq!(least_left, AHEAD);
    // 12 to 13 pages: a quarter of it is two layers. Five quarters are ahead, and the layer that waits.
    let limit = Some(Margin { divisor: 50, bytes_min: 0 });
    let (peak_pages, least_left, waits) = sleep_late(1, limit);
    assert_eq!(peak_pages, AWAKE_PAGES + (5 * 2 + 1) * LAYER_PAGES);
    assert!(least_left >= 3 * 2, "{least_left} layers left");
    assert!(waits > 0 && waits <= (LAYERS / 2) as u64, "{waits} waits");
    // Nothing is to sleep: the host is not held up.
    assert_eq!(sleep_late(0, limit), sleep_late(0, None));
}

#[test]
fn only_requests_of_the_trainer_near_the_maximum_are_held_up() {
    let config = Config {
        segment_bytes: 32 * PAGE,
        moves_pages: true,
        run_ahead: Some(Margin { divisor: 50, bytes_min: 0 }),
        ..Config::new(PAGE / 8, (8 * AWAKE_PAGES * PAGE) as u64)
    };
    let (device, allocator) = uncounted(16 * AWAKE_PAGES, config, 1, 1);
    let allocate_at = |pages: usize, align: usize| {
        let request = Request { stream: key(0), scope: 1, align, ..Request::new(pages * PAGE) };
        let block = allocator.allocate(&request).unwrap();
        device.gpu().launch(0, block.range);
        block
    };
    let free = |block: Block| {
        let _: Freed = allocator.free(block.range.start, key(0)).unwrap();
    };
    let allocate = |pages| allocate_at(pages, 1);
    let churn = || (0..AHEAD).for_each(|_| free(allocate(LAYER_PAGES)));
    let waits = || allocator.stats().stream_waits;
    let most = allocate(AWAKE_PAGES);
    // The use is noted when the next block is asked for.
    allocate(1);
    free(most);
    // Aligned ones are looked for in another way.
    for align in [1, PAGE] {
        (0..AHEAD).for_each(|_| free(allocate_at(LAYER_PAGES, align)));
        assert_eq!(waits(), 0, "far below the maximum");
    }
    allocate(AWAKE_PAGES);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            dormouse_device::register_runtime_thread();
            churn();
        });
    });
    assert_eq!(waits(), 0);
    churn();
    let before = waits();
    assert!(before > 0);
    // A stream under capture takes no event.
    device.gpu().set_captured(0, true);
    churn();
    assert_eq!(waits(), before);
}
