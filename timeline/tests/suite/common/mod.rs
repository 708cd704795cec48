//! Synthetic snapshots for the writers' tests, and an independent reader of the trace format.

#![allow(dead_code, unreachable_pub, reason = "shared by test files, each of which uses its part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test helpers")]

pub mod proto;

use dormouse_timeline::{Event, Gauge, Lane, NameId, Process, Slice, Snapshot, Timeline};
use proptest::prelude::*;

/// Names that try to break out of whatever they are written into.
pub const NAMES: [&str; 6] = [
    "forward 3",
    "</script><script>alert(1)</script>",
    "quote \" back \\ slash",
    "größe \u{2028} \u{1f400}",
    "",
    "<img src=x onerror=alert(1)>&amp;",
];

pub fn process() -> Process {
    Process { pid: 4242, name: "trainer <b>&\"'</b>".into(), rank: 3 }
}

/// A timeline that knows [`NAMES`], and their ids.
pub fn named() -> (Timeline, Vec<NameId>) {
    let timeline = Timeline::new(64);
    let ids = NAMES.iter().map(|name| timeline.intern(name)).collect();
    (timeline, ids)
}

/// A snapshot of `events`, put in order as a real one is.
pub fn snapshot(timeline: &Timeline, mut events: Vec<Event>) -> Snapshot {
    let mut snapshot = timeline.snapshot();
    events.sort_by_key(Event::end_ns);
    snapshot.events = events;
    snapshot
}

/// One event drawn at random, times relative to nothing in particular.
#[derive(Clone, Copy, Debug)]
pub struct Drawn {
    kind: u8,
    lane: usize,
    name: usize,
    start_ns: u64,
    length_ns: u64,
    bytes: u64,
    flow: u64,
    layer: Option<u32>,
    waited_ns: (u64, u64),
}

prop_compose! {
    pub fn drawn()(
        kind in 0u8..6, lane in 0..Lane::ALL.len(), name in 0..NAMES.len(), start_ns in 1_000u64..2_000,
        length_ns in 0u64..60, bytes in 0u64..1 << 40, flow in 0u64..5,
        layer in proptest::option::of(0u32..3), waited_ns in (0u64..20, 0u64..20)
    ) -> Drawn {
        Drawn { kind, lane, name, start_ns, length_ns, bytes, flow, layer, waited_ns }
    }
}

/// Mostly slices, some instants and gauge changes, with `names` to call them by.
pub fn events(drawn: &[Drawn], names: &[NameId]) -> Vec<Event> {
    let event = |drawn: &Drawn| {
        let (lane, name) = (Lane::ALL[drawn.lane], names[drawn.name]);
        let at_ns = drawn.start_ns;
        match drawn.kind {
            0 => Event::Instant { lane, name, at_ns, value: drawn.bytes },
            1 => Event::Gauge {
                gauge: Gauge::ALL[drawn.lane % Gauge::ALL.len()],
                tag: name,
                at_ns,
                value_bytes: drawn.bytes,
                previous_bytes: drawn.flow,
            },
            _ => Event::Slice(Slice {
                lane,
                name,
                layer: drawn.layer,
                asked_ns: at_ns - drawn.waited_ns.0 - drawn.waited_ns.1,
                queued_ns: at_ns - drawn.waited_ns.1,
                start_ns: at_ns,
                end_ns: at_ns + drawn.length_ns,
                bytes: drawn.bytes,
                flow: drawn.flow,
            }),
        }
    };
    drawn.iter().map(event).collect()
}
