//! The recorder through its public interface.

use dormouse_timeline::{
    CAPACITY_EVENTS_MIN, Event, Gauge, Lane, NameId, Process, Timeline, html, now_ns, pftrace,
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
    timeline.slice(Lane::NvmeWrite, sleep, before_ns - 50, before_ns - 10, 4096, 7);
    timeline.slice(Lane::Stall, sleep, before_ns - 20, before_ns - 30, 0, 0);

    let snapshot = timeline.snapshot();
    assert_eq!(snapshot.dropped, 0);
    assert_eq!(snapshot.gauges_now, [0, 0, 0, 4]);
    assert_eq!(snapshot.names.get(sleep), "sleep");
    let [stall, write, first, notice, second] = snapshot.events[..] else {
        panic!("five events, not {:?}", snapshot.events);
    };
    let (lane, name) = (Lane::NvmeWrite, sleep);
    let (start_ns, end_ns) = (before_ns - 50, before_ns - 10);
    assert_eq!(write, Event::Slice { lane, name, start_ns, end_ns, bytes: 4096, flow: 7 });
    assert_eq!(
        (stall.start_ns(), stall.end_ns()),
        (before_ns - 20, before_ns - 20),
        "no time runs back"
    );
    assert!(matches!(notice, Event::Instant { lane: Lane::Notice, value: 28, .. }));
    assert!(matches!(first, Event::Gauge { value_bytes: 10, previous_bytes: 0, .. }));
    assert!(matches!(second, Event::Gauge { value_bytes: 4, previous_bytes: 10, .. }));
    for event in [first, notice, second] {
        assert!((before_ns..=after_ns).contains(&event.start_ns()));
    }
    assert!(snapshot.started.monotonic_ns <= before_ns);
    assert!(snapshot.taken.monotonic_ns >= after_ns);
}

#[test]
fn marks_and_gauges_do_not_evict_each_other() {
    let timeline = Timeline::new(0);
    let name = timeline.intern("A");
    timeline.slice(Lane::Phase, name, 1, 2, 0, 0);
    for bytes in 0..10_000 {
        timeline.gauge(Gauge::DeviceAwake, bytes);
    }
    let snapshot = timeline.snapshot();
    assert!(matches!(snapshot.events[0], Event::Slice { lane: Lane::Phase, .. }));
    assert_eq!(snapshot.events.len(), 1 + CAPACITY_EVENTS_MIN);
    assert_eq!(snapshot.dropped, 10_000 - CAPACITY_EVENTS_MIN as u64);
    let Event::Gauge { previous_bytes, value_bytes, .. } = snapshot.events[1] else { panic!() };
    assert_eq!(previous_bytes + 1, value_bytes, "the oldest change kept knows the level before it");
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
                    timeline.slice(
                        Lane::NvmeRead,
                        name,
                        start_ns,
                        start_ns + count,
                        count,
                        thread + 1,
                    );
                    timeline.gauge(Gauge::DeviceAwake, count * THREADS + thread);
                }
            })
        })
        .collect();
    let process = Process::current("test", 0);
    for _ in 0..20 {
        let snapshot = timeline.snapshot();
        for event in &snapshot.events {
            if let Event::Slice { name, start_ns, end_ns, bytes, flow, .. } = *event {
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
