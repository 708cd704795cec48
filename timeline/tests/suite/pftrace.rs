//! Reads Perfetto traces back with an independent reader.

use crate::common::proto::{Kind, Trace, TrackEvent, trace};
use crate::common::{NAMES, drawn, events, named, process, snapshot};
use dormouse_timeline::{Event, Gauge, Lane, Slice, Snapshot, Timeline, pftrace};
use proptest::prelude::*;
use std::collections::{HashMap, HashSet};

fn written(snapshot: &Snapshot) -> Trace {
    let mut bytes = Vec::new();
    pftrace::write(snapshot, &process(), &mut bytes).unwrap();
    trace(&bytes)
}

/// The name of a track without the number of its sub-track.
fn base_name(trace: &Trace, uuid: u64) -> &str {
    let name = &trace.tracks[&uuid].name;
    name.split(" (").next().unwrap()
}

fn parent_name(trace: &Trace, uuid: u64) -> &str {
    &trace.tracks[&trace.tracks[&uuid].parent.unwrap()].name
}

fn check_tracks(trace: &Trace) {
    let roots: Vec<_> = trace.tracks.values().filter(|track| track.parent.is_none()).collect();
    assert_eq!(roots.len(), 1, "one process");
    assert_eq!(roots[0].pid, Some(4242));
    assert_eq!(roots[0].name, "trainer <b>&\"'</b> · rank 3 · pid 4242");
    let mut siblings = HashSet::new();
    for (uuid, track) in &trace.tracks {
        let mut above = track.parent;
        for _ in 0..3 {
            let Some(parent) = above else { break };
            assert_ne!(parent, *uuid);
            above = trace.tracks[&parent].parent;
        }
        assert_eq!(above, None, "{} hangs under the process", track.name);
        assert!(siblings.insert((track.parent, &track.name)), "siblings of one name are merged");
        assert_eq!(track.counter_unit.is_some(), parent_is(trace, *uuid, "memory"));
        assert!(track.counter_unit.is_none_or(|unit| unit == 3), "counters are in bytes");
    }
}

fn parent_is(trace: &Trace, uuid: u64, name: &str) -> bool {
    trace.tracks[&uuid].parent.is_some_and(|parent| trace.tracks[&parent].name == name)
}

/// Begins and ends pair up on each track without nesting; hands back the slices as (begin, end).
fn check_balance(trace: &Trace) -> Vec<(&TrackEvent, u64)> {
    let mut open: HashMap<u64, &TrackEvent> = HashMap::new();
    let mut slices = Vec::new();
    let mut now_ns = 0;
    for event in &trace.events {
        assert!(event.at_ns >= now_ns, "events are in order of time");
        now_ns = event.at_ns;
        match event.kind {
            Kind::Begin => {
                assert!(open.insert(event.track, event).is_none(), "slices of one track overlap");
            }
            Kind::End => {
                let begin = open.remove(&event.track).expect("an end has its begin");
                slices.push((begin, event.at_ns));
            }
            Kind::Instant | Kind::Counter(_) => {}
        }
    }
    assert!(open.is_empty(), "every begin has its end");
    slices
}

/// Checks that each flow joins at least two events in order and that no event follows its end until it
/// starts again.
fn check_flows(trace: &Trace) {
    let mut under_way: HashMap<u64, usize> = HashMap::new();
    for event in &trace.events {
        assert!(event.flows.len() <= 1 && (event.flows.is_empty() || event.last_flows.is_empty()));
        for flow in &event.flows {
            *under_way.entry(*flow).or_default() += 1;
        }
        for flow in &event.last_flows {
            assert!(under_way.remove(flow).is_some_and(|steps| steps >= 1), "an end joins nothing");
        }
    }
    assert!(under_way.is_empty(), "every flow ends");
}

#[test]
fn an_empty_snapshot_is_a_whole_trace() {
    let trace = written(&Timeline::new(0).snapshot());
    check_tracks(&trace);
    assert!(!trace.packets_lost);
    let counters: Vec<_> = trace.events.iter().map(|event| event.kind).collect();
    let expected = vec![Kind::Counter(0); 2 * (Gauge::ALL.len() - 1)];
    assert_eq!(counters, expected, "each gauge at its beginning and its end; there is no tag");
}

#[test]
fn clocks_are_those_of_the_snapshot() {
    let mut snapshot = Timeline::new(0).snapshot();
    snapshot.dropped = 7;
    let trace = written(&snapshot);
    assert!(trace.packets_lost, "a ring that forgot says so");
    let expected = [snapshot.started, snapshot.taken].map(|anchor| {
        HashMap::from([(1, anchor.realtime_ns), (3, anchor.monotonic_ns), (6, anchor.boottime_ns)])
    });
    assert_eq!(trace.clocks, expected);
}

#[test]
fn a_flow_follows_a_region_through_two_sleeps() {
    let (timeline, names) = named();
    let name = names[0];
    let legs = [
        (Lane::DeviceToHost, 10, 20),
        (Lane::NvmeWrite, 20, 40),
        (Lane::NvmeRead, 70, 80),
        (Lane::HostToDevice, 80, 85),
        (Lane::Layer, 90, 95),
        (Lane::NvmeWrite, 110, 120),
        (Lane::NvmeRead, 130, 140),
    ];
    let slices = legs.map(|(lane, start_ns, end_ns)| {
        Event::Slice(Slice { bytes: 1 << 20, flow: 9, ..Slice::new(lane, name, start_ns, end_ns) })
    });
    let trace = written(&snapshot(&timeline, slices.to_vec()));
    check_flows(&trace);
    let begins: Vec<_> = trace.events.iter().filter(|event| event.kind == Kind::Begin).collect();
    let last: Vec<bool> = begins.iter().map(|event| !event.last_flows.is_empty()).collect();
    assert_eq!(last, [false, false, false, false, true, false, true]);
    let tracks: Vec<_> = begins.iter().map(|event| base_name(&trace, event.track)).collect();
    let expected = [
        "device → host",
        "nvme write",
        "nvme read",
        "host → device",
        "layers",
        "nvme write",
        "nvme read",
    ];
    assert_eq!(tracks, expected);
    assert_eq!(begins[0].notes["bytes"], 1 << 20);
    assert_eq!(begins[0].notes["region"], 9);
    assert_eq!(begins[0].notes["bytes_per_s"], (1 << 20) * 100_000_000);
}

/// A flow has a third leg, the backward that uses what has woken. Several may end at one backward.
#[test]
fn a_flow_ends_at_the_backward_that_uses_it() {
    let timeline = Timeline::new(64);
    let [read, backward, forward] = ["read", "backward", "forward"].map(|it| timeline.intern(it));
    let of_layer = |lane, name, layer, start_ns, end_ns, flow| {
        let layer = Some(layer);
        Event::Slice(Slice { layer, flow, ..Slice::new(lane, name, start_ns, end_ns) })
    };
    let mut snapshot = snapshot(
        &timeline,
        vec![
            of_layer(Lane::NvmeWrite, read, 3, 1, 5, 7),
            of_layer(Lane::NvmeRead, read, 3, 10, 20, 7),
            of_layer(Lane::NvmeRead, read, 3, 12, 22, 8),
            of_layer(Lane::NvmeRead, read, 4, 12, 22, 9),
            of_layer(Lane::Layer, forward, 3, 23, 24, 0),
            of_layer(Lane::Layer, backward, 3, 25, 30, 0),
            of_layer(Lane::Layer, backward, 3, 45, 50, 0),
        ],
    );
    snapshot.names = timeline.snapshot().names;
    let trace = written(&snapshot);
    check_flows(&trace);
    let begins: Vec<_> = trace.events.iter().filter(|event| event.kind == Kind::Begin).collect();
    let ends: Vec<usize> = begins.iter().map(|event| event.last_flows.len()).collect();
    let joins: Vec<usize> = begins.iter().map(|event| event.flows.len()).collect();
    assert_eq!((ends, joins), (vec![0, 0, 0, 0, 0, 2, 0], vec![1, 1, 1, 0, 0, 0, 0]));
    assert_eq!(begins[1].name.as_deref(), Some("L3 read"));
    assert_eq!(begins[1].notes["layer"], 3);
}

#[test]
fn ids_of_two_ranks_differ() {
    let (timeline, names) = named();
    let leg = |lane, start_ns| {
        Event::Slice(Slice { flow: 1, ..Slice::new(lane, names[0], start_ns, start_ns + 1) })
    };
    let snapshot = snapshot(&timeline, vec![leg(Lane::NvmeWrite, 1), leg(Lane::NvmeRead, 5)]);
    let of_rank = |rank| {
        let mut bytes = Vec::new();
        let process = dormouse_timeline::Process { rank, ..process() };
        pftrace::write(&snapshot, &process, &mut bytes).unwrap();
        let trace = trace(&bytes);
        let ids: Vec<u64> = trace.tracks.keys().copied().collect();
        let flows = trace.events.iter().flat_map(|event| event.flows.clone());
        ids.into_iter().chain(flows).collect::<HashSet<u64>>()
    };
    assert!(of_rank(0).is_disjoint(&of_rank(1)));
}

#[test]
fn copies_beyond_the_sub_tracks_are_still_written() {
    let (timeline, names) = named();
    let copy = |i: u64| {
        Event::Slice(Slice { bytes: 10, ..Slice::new(Lane::NvmeRead, names[0], 100 + i, 1_000) })
    };
    let trace = written(&snapshot(&timeline, (0..50).map(copy).collect()));
    let slices = check_balance(&trace);
    let crowded: Vec<_> = trace.events.iter().filter(|event| event.kind == Kind::Instant).collect();
    assert_eq!((slices.len(), crowded.len()), (32, 18));
    assert_eq!(crowded[0].notes["duration_ns"], 1_000 - 132);
    assert_eq!(crowded[0].notes["bytes"], 10);
}

#[test]
fn output_errors_are_returned() {
    struct Full(usize);
    impl std::io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(std::io::ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let snapshot = Timeline::new(0).snapshot();
    let error = pftrace::write(&snapshot, &process(), &mut Full(300)).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
}

proptest! {
    #[test]
    fn any_snapshot_is_a_well_formed_trace_with_everything_in_it(
        drawn in proptest::collection::vec(drawn(), 0..120)
    ) {
        let (timeline, names) = named();
        let snapshot = snapshot(&timeline, events(&drawn, &names));
        let trace = written(&snapshot);
        check_tracks(&trace);
        check_flows(&trace);
        let slices = check_balance(&trace);

        // Every slice and instant is there once, with its own times, name and bytes.
        let mut seen: Vec<(String, String, u64, u64, u64)> = Vec::new();
        for (begin, end_ns) in &slices {
            let bytes = begin.notes.get("bytes").copied().unwrap_or(0);
            let lane = base_name(&trace, begin.track).to_owned();
            seen.push((lane, begin.name.clone().unwrap(), begin.at_ns, *end_ns, bytes));
        }
        for event in trace.events.iter().filter(|event| event.kind == Kind::Instant) {
            let lane = base_name(&trace, event.track).to_owned();
            seen.push((lane, event.name.clone().unwrap(), event.at_ns, event.at_ns, event.notes["value"]));
        }
        let mut expected: Vec<(String, String, u64, u64, u64)> = Vec::new();
        for event in &snapshot.events {
            let (lane, name, number) = match *event {
                Event::Slice(slice) => (slice.lane, (slice.name, slice.layer), slice.bytes),
                Event::Instant { lane, name, value, .. } => (lane, (name, None), value),
                Event::Gauge { .. } => continue,
            };
            let (name, layer) = name;
            let name = NAMES[names.iter().position(|id| *id == name).unwrap()];
            let name = match (layer, lane) {
                (None, _) => name.to_owned(),
                (Some(number), Lane::Microbatch) => format!("{name} {number}"),
                (Some(layer), _) => format!("L{layer} {name}"),
            };
            expected.push((lane.title().to_owned(), name, event.start_ns(), event.end_ns(), number));
        }
        seen.sort();
        expected.sort();
        prop_assert_eq!(seen, expected);

        // Every level of every gauge and tag, in order, between one more at each end.
        let gauges = Gauge::ALL.map(|gauge| (gauge, None)).into_iter();
        let tags = names.iter().map(|tag| (Gauge::DeviceTagged, Some(*tag)));
        for (gauge, tag) in gauges.filter(|(gauge, _)| *gauge != Gauge::DeviceTagged).chain(tags) {
            let title = match tag {
                Some(tag) => format!("tag {}", snapshot.names.get(tag)),
                None => gauge.title().to_owned(),
            };
            let counter = trace.events.iter().filter_map(|event| match event.kind {
                Kind::Counter(bytes) if trace.tracks[&event.track].name == title => {
                    Some((event.at_ns, bytes))
                }
                _ => None,
            });
            let counter: Vec<(u64, u64)> = counter.collect();
            let changes = snapshot.events.iter().filter_map(|event| match *event {
                Event::Gauge { gauge: its, tag: of, at_ns, value_bytes, .. }
                    if its == gauge && tag.is_none_or(|tag| tag == of) =>
                {
                    Some((at_ns, value_bytes))
                }
                _ => None,
            });
            let changes: Vec<(u64, u64)> = changes.collect();
            if tag.is_some() && changes.is_empty() {
                prop_assert!(counter.is_empty());
                continue;
            }
            let (begin_ns, end_ns) = snapshot.window_ns();
            prop_assert_eq!(counter[0].0, begin_ns);
            prop_assert_eq!(counter[counter.len() - 1], (end_ns, counter[counter.len() - 2].1));
            prop_assert!(counter[..counter.len() - 1].ends_with(&changes));
        }
        for (uuid, track) in &trace.tracks {
            let name = base_name(&trace, *uuid);
            let lane = Lane::ALL.into_iter().find(|lane| lane.title() == name);
            if let Some(lane) = lane && lane.is_copy() {
                prop_assert_eq!(parent_name(&trace, *uuid), "transfers", "{}", track.name);
            }
        }
    }
}
