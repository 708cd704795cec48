use super::*;
use crate::{Event, NameId, Peak, Timeline};
use proptest::prelude::*;

/// A snapshot of `events`, with two names to call phases by.
fn snapshot(mut events: Vec<Event>) -> Snapshot {
    let mut snapshot = Timeline::new(0).snapshot();
    events.sort_by_key(Event::end_ns);
    snapshot.events = events;
    snapshot
}

fn slice(lane: Lane, name: u16, start_ns: u64, end_ns: u64, bytes: u64) -> Event {
    let name = NameId::from_index(name);
    Event::Slice(Slice { bytes, ..Slice::new(lane, name, start_ns, end_ns) })
}

/// Changes of one gauge as (after how long, new level), told as events. The first comes after
/// moment 0, so that the level before it has held.
fn changes(gauge: Gauge, from_bytes: u64, steps: &[(u64, u64)]) -> Vec<Event> {
    let (mut at_ns, mut previous_bytes) = (1, from_bytes);
    let change = |&(later_ns, value_bytes): &(u64, u64)| {
        at_ns += later_ns;
        let before = std::mem::replace(&mut previous_bytes, value_bytes);
        let tag = NameId::OTHER;
        Event::Gauge { gauge, tag, at_ns, value_bytes, previous_bytes: before }
    };
    steps.iter().map(change).collect()
}

#[test]
fn an_unchanged_gauge_is_its_own_peak() {
    let mut snapshot = snapshot(vec![slice(Lane::Phase, 1, 10, 20, 0)]);
    let now = [0, 0, 0, 77, 0, 0, 0, 0];
    snapshot.gauges_now = now;
    let totals = Totals::of(&snapshot);
    assert_eq!(totals.peak_bytes, now);
    assert_eq!(totals.phases[0].peak_bytes, now.map(Some));
}

#[test]
fn a_level_before_its_first_change_is_the_previous_value_if_no_change_is_lost() {
    let mut events = changes(Gauge::DeviceAwake, 500, &[(30, 100), (50, 200)]);
    events.push(slice(Lane::Phase, 1, 0, 10, 0));
    events.push(slice(Lane::Phase, 2, 40, 50, 0));
    let mut snapshot = snapshot(events);
    let peaks = |snapshot: &Snapshot| {
        let totals = Totals::of(snapshot);
        let phases: Vec<_> = totals.phases.iter().map(|phase| phase.peak_bytes[0]).collect();
        (phases, totals.peak_bytes[0], Peak::of(snapshot).unwrap().bytes)
    };
    assert_eq!(peaks(&snapshot), (vec![Some(500), Some(100)], 500, 500));
    // What the level was at 0 is not known: changes before that at 31 are lost.
    snapshot.levels_from_ns = 31;
    assert_eq!(peaks(&snapshot), (vec![None, Some(100)], 200, 200));
}

#[test]
fn rates_of_nothing_and_of_no_time_are_zero_and_large_ones_do_not_overflow() {
    assert_eq!(rate_bytes_per_s(5, 0), 0);
    assert_eq!(rate_bytes_per_s(1 << 30, 500_000_000), 2 << 30);
    assert_eq!(rate_bytes_per_s(u64::MAX, 1), u64::MAX);
}

proptest! {
    #[test]
    fn agrees_with_looking_at_every_moment(
        phases in proptest::collection::vec((1u16..3, 0u64..50, 0u64..20), 0..6),
        stalls in proptest::collection::vec((0u64..50, 0u64..9), 0..6),
        steps in proptest::collection::vec((0u64..9, 0u64..100), 1..20),
        from_bytes in 0u64..100,
    ) {
        let mut events = changes(Gauge::HostUsed, from_bytes, &steps);
        let step_events = events.clone();
        for (name, start, length) in &phases {
            events.push(slice(Lane::Phase, *name, *start, start + length, 0));
        }
        for (start, length) in &stalls {
            events.push(slice(Lane::Stall, 0, *start, start + length, *length));
        }
        let totals = Totals::of(&snapshot(events));

        let stalled = |ns: u64| stalls.iter().any(|(from, length)| (*from..from + length).contains(&ns));
        prop_assert_eq!(totals.lane(Lane::Stall).busy_ns, (0..100).filter(|ns| stalled(*ns)).count() as u64);
        prop_assert_eq!(totals.lane(Lane::Stall).bytes, stalls.iter().map(|(_, length)| length).sum::<u64>());
        prop_assert_eq!(totals.lane(Lane::Stall).count, stalls.len() as u64);

        prop_assert_eq!(totals.phases.iter().map(|phase| phase.count).sum::<u64>(), phases.len() as u64);
        let mut names: Vec<u16> = Vec::new();
        let mut by_start = phases.clone();
        by_start.sort_by_key(|(_, start, length)| (*start, start + length));
        for (name, ..) in by_start {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        for (phase, name) in totals.phases.iter().zip(names) {
            let within = |ns: u64, closed: u64| phases.iter().any(|(its, from, length)| {
                *its == name && (*from..from + length + closed).contains(&ns)
            });
            prop_assert_eq!(phase.busy_ns, (0..100).filter(|ns| within(*ns, 0)).count() as u64);
            prop_assert_eq!(phase.stall_ns, (0..100).filter(|ns| within(*ns, 0) && stalled(*ns)).count() as u64);
            // Every level that held at a moment of the phase, its last moment included.
            let mut peak = 0;
            let mut level = from_bytes;
            let mut begun = 0;
            for event in step_events.iter().chain([&slice(Lane::Stall, 0, 0, 200, 0)]) {
                let until = event.end_ns();
                if (begun..until.max(begun + 1)).any(|ns| within(ns, 1)) {
                    peak = peak.max(level);
                }
                if let Event::Gauge { value_bytes, .. } = event {
                    (level, begun) = (*value_bytes, until);
                }
            }
            prop_assert_eq!(phase.peak_bytes[Gauge::HostUsed as usize], Some(peak));
        }
    }
}
