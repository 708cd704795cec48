use super::*;
use crate::{Event, NameId, Timeline};

const MIB: u64 = 1 << 20;

fn copy(lane: Lane, layer: u32, [asked_ns, queued_ns, start_ns, end_ns]: [u64; 4]) -> Slice {
    let slice = Slice::new(lane, NameId::OTHER, start_ns, end_ns);
    Slice { layer: Some(layer), asked_ns, queued_ns, bytes: MIB, ..slice }
}

fn wait(layer: u32, start_ns: u64, end_ns: u64) -> Slice {
    Slice { layer: Some(layer), ..Slice::new(Lane::Stall, NameId::OTHER, start_ns, end_ns) }
}

fn told(slices: &[Slice]) -> Snapshot {
    let mut snapshot = Timeline::new(0).snapshot();
    snapshot.events = slices.iter().copied().map(Event::Slice).collect();
    snapshot.events.sort_by_key(Event::end_ns);
    snapshot
}

/// Milliseconds, so that the clocks' error is small beside them.
const MS: u64 = 1_000_000;

fn at(ms: [u64; 4]) -> [u64; 4] {
    ms.map(|ms| ms * MS)
}

#[test]
fn the_cause_is_the_longest_part_of_the_copy_within_the_wait() {
    let cases = [
        (Lane::NvmeRead, at([10, 11, 12, 190]), Cause::LateRead),
        (Lane::HostToDevice, at([10, 11, 12, 190]), Cause::Link),
        (Lane::NvmeRead, at([10, 11, 170, 190]), Cause::Queue),
        (Lane::NvmeRead, at([10, 170, 180, 190]), Cause::Room),
        (Lane::NvmeRead, at([160, 161, 162, 190]), Cause::AskedLate),
    ];
    for (lane, times, cause) in cases {
        let wait = wait(7, 100 * MS, 200 * MS);
        let other = copy(lane, 9, at([0, 0, 0, 195]));
        let stalls = stalls(&told(&[copy(lane, 7, times), other, wait]));
        assert_eq!((stalls.len(), stalls[0].cause), (1, cause), "{times:?}");
        assert_eq!(stalls[0].copy.unwrap().layer, Some(7));
    }
}

#[test]
fn a_wait_for_the_layer_below_has_its_copy() {
    let own = copy(Lane::NvmeRead, 7, at([10, 11, 12, 150]));
    let below = copy(Lane::NvmeRead, 6, at([10, 11, 150, 190]));
    let found = stalls(&told(&[own, below, wait(7, 100 * MS, 200 * MS)]));
    assert_eq!(found[0].copy.unwrap().layer, Some(6));
    assert_eq!(found[0].cause, Cause::Queue, "the read above was ahead");
}

/// A region comes from the file by way of host memory: the read took most of the wait.
#[test]
fn both_copies_of_a_region_count() {
    let read = Slice { flow: 9, ..copy(Lane::NvmeRead, 7, at([90, 91, 92, 180])) };
    let copy_in = Slice { flow: 9, ..copy(Lane::HostToDevice, 7, at([180, 181, 182, 195])) };
    let found = stalls(&told(&[read, copy_in, wait(7, 100 * MS, 200 * MS)]));
    assert_eq!((found[0].cause, found[0].copy.unwrap().lane), (Cause::LateRead, Lane::NvmeRead));
}

#[test]
fn a_copy_that_was_over_before_the_wait_is_not_its_cause() {
    let early = copy(Lane::NvmeRead, 7, at([10, 11, 12, 90]));
    let found = stalls(&told(&[early, wait(7, 100 * MS, 200 * MS)]));
    assert_eq!((found[0].cause, found[0].copy, found[0].bound_ns), (Cause::Unknown, None, None));
}

#[test]
fn a_wait_for_room_says_so_by_its_name() {
    let timeline = Timeline::new(0);
    let mut snapshot = timeline.snapshot();
    let name = timeline.intern("wait for room");
    snapshot.events = vec![Event::Slice(Slice::new(Lane::Stall, name, 0, 5))];
    snapshot.names = timeline.snapshot().names;
    assert_eq!(stalls(&snapshot)[0].cause, Cause::Room);
}

/// Two layers of 1 MiB each, at a rate of 1 MiB in 10 ms, asked for at 0. Compute is due at 5 ms and works 4 ms on
/// the first: the first must wait 5 ms, both together 20 - 9 = 11 ms.
#[test]
fn the_bound_is_what_the_link_alone_would_have_made_of_it() {
    let phase =
        |start_ms, end_ms| Slice::new(Lane::Phase, NameId::OTHER, start_ms * MS, end_ms * MS);
    let step = |from_ms: u64| {
        let later = |ms: [u64; 4]| at(ms.map(|ms| from_ms + ms));
        let wait = |layer, from, to| wait(layer, (from_ms + from) * MS, (from_ms + to) * MS);
        [
            phase(from_ms, from_ms + 60),
            copy(Lane::NvmeRead, 1, later([0, 0, 0, 25])),
            copy(Lane::NvmeRead, 0, later([0, 0, 25, 50])),
            wait(1, 5, 25),
            wait(0, 29, 50),
        ]
    };
    // A second step begins anew.
    let mut snapshot = told(&[step(0), step(1000)].concat());
    snapshot.facts.bytes_per_s[Lane::NvmeRead as usize] = 100 * MIB;
    let bounds: Vec<u64> =
        stalls(&snapshot).iter().map(|stall| stall.bound_ns.unwrap() / MS).collect();
    assert_eq!(bounds, [5, 6, 5, 6]);
}

#[test]
fn without_a_measured_rate_the_best_single_copy_counts() {
    let snapshot = told(&[copy(Lane::NvmeRead, 1, at([0, 0, 0, 25])), wait(1, 5 * MS, 25 * MS)]);
    assert_eq!(stalls(&snapshot)[0].bound_ns, Some(20 * MS), "all of it");
}
