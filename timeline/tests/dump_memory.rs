//! The memory that a dump takes.
//!
//! A binary of its own: it replaces the global allocator.

#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use dormouse_timeline::{
    DUMP_BYTES_PER_EVENT_MAX, Gauge, Lane, Process, Slice, Snapshot, Timeline, html, pftrace,
};

/// The system allocator, counting the bytes in use and their peak.
struct Counting;

static USED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on to the system allocator as it came; counting touches atomics alone. `realloc` is that of
// the trait: both blocks are in use while bytes are moved.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let used = USED.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(used, Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Fills both rings. The marks are slices of these lanes in turn, and a phase that has not ended.
fn full(capacity_events: usize, lanes: &[Lane]) -> Timeline {
    let timeline = Timeline::new(capacity_events);
    let names: Vec<_> = (0..64).map(|i| timeline.intern(&format!("the name of tag {i}"))).collect();
    let begin_ns = dormouse_timeline::now_ns();
    for at in 0..timeline.capacity_events() as u64 {
        let (name, lane) = (names[at as usize % names.len()], lanes[at as usize % lanes.len()]);
        let start_ns = begin_ns + at * 1_000_003;
        timeline.slice(Slice {
            layer: Some(at as u32 % 500),
            asked_ns: start_ns - 5_000_000,
            queued_ns: start_ns - 2_000_000,
            bytes: (1 << 36) + at,
            flow: (1 << 40) + at,
            ..Slice::new(lane, name, start_ns, start_ns + 900_003)
        });
        match at % 3 {
            0 => timeline.tag_gauge(name, (1 << 36) + at),
            1 => timeline.gauge(Gauge::DeviceAwake, (1 << 36) + at),
            _ => timeline.gauge(Gauge::DeviceDormant, (1 << 36) + at),
        }
    }
    timeline.instant(Lane::Phase, timeline.intern("B: suffixes"), 0);
    timeline
}

type Writer = fn(&Snapshot, &Process, &mut dyn io::Write) -> io::Result<()>;

/// Returns the most bytes in use for each event of the capacity while a dump is written.
fn peak_bytes_per_event(timeline: &Timeline, write: Writer) -> usize {
    let process = Process::current("a process", 0);
    let before = USED.load(Relaxed);
    PEAK.store(before, Relaxed);
    write(&timeline.snapshot(), &process, &mut io::sink()).unwrap();
    (PEAK.load(Relaxed) - before) / timeline.capacity_events()
}

#[test]
fn a_dump_takes_no_more_memory_than_is_stated() {
    let each = Lane::ALL.iter().map(std::slice::from_ref);
    let most = each.chain([&Lane::ALL[..]]).flat_map(|lanes| {
        // Tables and texts double as they grow.
        [8 << 10, 10 << 10, 12 << 10, 14 << 10].map(|capacity_events| {
            let timeline = full(capacity_events, lanes);
            let html = peak_bytes_per_event(&timeline, html::write);
            html.max(peak_bytes_per_event(&timeline, pftrace::write))
        })
    });
    let most = most.max().unwrap();
    assert!((DUMP_BYTES_PER_EVENT_MAX / 2..=DUMP_BYTES_PER_EVENT_MAX).contains(&most), "{most}");
}
