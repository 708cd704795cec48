//! The recorder through its public interface.

use dormouse_timeline::{
    CAPACITY_EVENTS_MIN, Event, Gauge, Lane, NameId, Process, Slice, Timeline, html, now_ns,
    pftrace,
};
use std::sync::Arc;
use std::thread;

#[test]
fn events_are_read_back_oldest_first() {
    let timeline = Timeline::new(100);
    let (sleep, full) = (timeline.intern("sleep"), timeline.intern("disk full"));
    let before_ns = now_ns();
    timeline.gauge(Gauge::NvmeUsed, 10);
    timeline.instant(Lane::Notice, full, 28);
    timeline.gauge(Gauge::NvmeUsed, 4);
    let after_ns = timeline.now_ns();
    let (start_ns, end_ns) = (before_ns - 50, before_ns - 10);
    let moved = Slice {
        layer: Some(0),
        asked_ns: start_ns - 9,
        queued_ns: start_ns - 4,
        bytes: 4096,
        flow: 7,
        ..Slice::new(Lane::NvmeWrite, sleep, start_ns, end_ns)
    };
    timeline.slice(moved);
    let back = Slice::new(Lane::Stall, sleep, before_ns - 20, before_ns - 30);
    timeline.slice(Slice { asked_ns: before_ns, queued_ns: before_ns + 5, ..back });

    let snapshot = timeline.snapshot();
    assert_eq!(snapshot.dropped, 0);
    assert_eq!(snapshot.gauges_now, [0, 0, 0, 4, 0, 0, 0, 0]);
    assert_eq!(snapshot.names.get(sleep), "sleep");
    let [stall, write, first, notice, second] = snapshot.events[..] else {
        panic!("five events, not {:?}", snapshot.events);
    };
    assert_eq!(write, Event::Slice(moved));
    let at_ns = before_ns - 20;
    let in_order = Slice::new(Lane::Stall, sleep, at_ns, at_ns);
    assert_eq!(stall, Event::Slice(in_order), "no time runs back");
    assert!(matches!(notice, Event::Instant { lane: Lane::Notice, value: 28, .. }));
    assert!(matches!(first, Event::Gauge { value_bytes: 10, previous_bytes: 0, .. }));
    assert!(matches!(second, Event::Gauge { value_bytes: 4, previous_bytes: 10, .. }));
    for event in [first, notice, second] {
        assert!((before_ns..=after_ns).contains(&event.start_ns()));
    }
    // Times of events are up to 2 µs behind those of anchors.
    assert!(snapshot.started.monotonic_ns <= before_ns + 2_000);
    assert!(snapshot.taken.monotonic_ns >= after_ns);
}

#[test]
fn marks_and_gauges_do_not_evict_each_other() {
    let timeline = Timeline::new(0);
    let name = timeline.intern("A");
    timeline.slice(Slice::new(Lane::Phase, name, 1, 2));
    for bytes in 0..10_000 {
        timeline.gauge(Gauge::DeviceAwake, bytes);
    }
    let snapshot = timeline.snapshot();
    assert!(matches!(snapshot.events[0], Event::Slice(Slice { lane: Lane::Phase, .. })));
    assert_eq!(snapshot.events.len(), 1 + CAPACITY_EVENTS_MIN);
    assert_eq!(snapshot.dropped, 10_000 - CAPACITY_EVENTS_MIN as u64);
    let Event::Gauge { previous_bytes, value_bytes, .. } = snapshot.events[1] else { panic!() };
    assert_eq!(previous_bytes + 1, value_bytes, "the oldest change kept knows the level before it");
}

#[test]
fn each_tag_has_a_level_of_its_own() {
    let timeline = Timeline::new(0);
    let [weights, cache] = ["weights", "KV cache"].map(|tag| timeline.intern(tag));
    timeline.tag_gauge(weights, 10);
    timeline.tag_gauge(cache, 7);
    timeline.tag_gauge(weights, 4);
    timeline.tag_gauge(cache, 0);
    let snapshot = timeline.snapshot();
    assert_eq!(snapshot.tags_now, [(weights, 4)]);
    assert_eq!(snapshot.gauges_now[Gauge::DeviceTagged as usize], 4);
    let changes = snapshot.events.iter().map(|event| match *event {
        Event::Gauge { gauge: Gauge::DeviceTagged, tag, previous_bytes, value_bytes, .. } => {
            (tag, previous_bytes, value_bytes)
        }
        other => panic!("{other:?}"),
    });
    let expected = [(weights, 0, 10), (cache, 0, 7), (weights, 10, 4), (cache, 7, 0)];
    assert_eq!(changes.collect::<Vec<_>>(), expected);
}

#[test]
fn threads_record_during_snapshots_and_dumps() {
    const THREADS: u64 = 3;
    const WRITES: u64 = 3_000;
    let timeline = Arc::new(Timeline::new(256));
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let timeline = Arc::clone(&timeline);
            thread::spawn(move || {
                for count in 0..WRITES {
                    let name = timeline.intern(["sleep", "wake", "wait"][(count % 3) as usize]);
                    let start_ns = timeline.now_ns();
                    let slice = Slice::new(Lane::NvmeRead, name, start_ns, start_ns + count);
                    timeline.slice(Slice { bytes: count, flow: thread + 1, ..slice });
                    timeline.gauge(Gauge::DeviceAwake, count * THREADS + thread);
                }
            })
        })
        .collect();
    let process = Process::current("test", 0);
    for _ in 0..20 {
        let snapshot = timeline.snapshot();
        for event in &snapshot.events {
            if let Event::Slice(slice) = *event {
                let Slice { name, start_ns, end_ns, bytes, flow, .. } = slice;
                assert_eq!(end_ns - start_ns, bytes, "a whole event");
                assert!((1..=THREADS).contains(&flow));
                assert_ne!(name, NameId::OTHER);
            }
        }
        html::write(&snapshot, &process, &mut Vec::new()).unwrap();
        pftrace::write(&snapshot, &process, &mut Vec::new()).unwrap();
    }
    for thread in threads {
        thread.join().unwrap();
    }
    let snapshot = timeline.snapshot();
    assert_eq!(snapshot.events.len() as u64 + snapshot.dropped, THREADS * WRITES * 2);
}
