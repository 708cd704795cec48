//! Streams that are never idle: the host runs ahead of the GPU by a number of launches.

use crate::caps::{Call, live_bytes_max, traces};
use crate::common::{PAGE, key, uncounted};
use dormouse_alloc::{Config, Freed, Request, Stats};
use std::collections::HashMap;

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

/// Traces with much of their memory on several streams.
const SPREAD: [&str; 2] = ["stream_rotation", "expert_parallel"];
/// Run-aheads that are tested, in launches: the last is what a driver queues at most.
const RUN_AHEADS: [u64; 4] = [1, 16, 64, 1024];

/// Where one stream does the work, the host waits as far as it has to: no more is held than without a run-ahead.
#[test]
fn a_run_ahead_of_one_stream_takes_no_more_memory() {
    for (name, calls) in traces() {
        if SPREAD.iter().any(|spread| name.starts_with(spread)) {
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
    let (_, calls) =
        traces().into_iter().find(|(name, _)| name.starts_with("stream_rotation")).unwrap();
    let peak_bytes = |run_ahead| run(&calls, Some(run_ahead)).mapped_bytes.peak;
    let all_bytes = peak_bytes(u64::MAX / 2);
    assert!(peak_bytes(16) < all_bytes / 4);
    assert!(peak_bytes(64) < all_bytes / 2);
}
