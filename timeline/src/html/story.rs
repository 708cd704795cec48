//! What the page tells: a snapshot, and what follows from it.

use crate::event::{Event, Lane, Slice};
use crate::levels::Levels;
use crate::peak::Peak;
use crate::snapshot::Snapshot;
use crate::stalls::{Stall, stalls};
use crate::totals::Totals;
use std::borrow::Cow;

/// A snapshot, and what follows from it.
pub(super) struct Story<'a> {
    pub(super) snapshot: Cow<'a, Snapshot>,
    pub(super) levels: Levels,
    pub(super) totals: Totals,
    pub(super) peak: Option<Peak>,
    pub(super) stalls: Vec<Stall>,
}

impl<'a> Story<'a> {
    pub(super) fn of(snapshot: &'a Snapshot) -> Self {
        let snapshot = with_open(snapshot);
        let levels = Levels::of(&snapshot);
        let totals = Totals::with(&snapshot, &levels);
        let peak = Peak::with(&snapshot, &levels);
        let stalls = stalls(&snapshot);
        Self { snapshot, levels, totals, peak, stalls }
    }
}

/// Adds the phase and the microbatch that have begun and not ended: until the end of the window.
fn with_open(snapshot: &Snapshot) -> Cow<'_, Snapshot> {
    let (_, window_end_ns) = snapshot.window_ns();
    let open: Vec<Event> = [Lane::Phase, Lane::Microbatch]
        .into_iter()
        .filter_map(|lane| open_slice(snapshot, lane, window_end_ns))
        .map(Event::Slice)
        .collect();
    if open.is_empty() {
        return Cow::Borrowed(snapshot);
    }
    let mut snapshot = snapshot.clone();
    // They end last, so the order holds.
    snapshot.events.extend(open);
    Cow::Owned(snapshot)
}

/// Returns the last begin of `lane` as a slice, unless a slice of the lane ended after it.
fn open_slice(snapshot: &Snapshot, lane: Lane, end_ns: u64) -> Option<Slice> {
    let mut open = None;
    for event in &snapshot.events {
        match *event {
            Event::Instant { lane: its, name, at_ns, value } if its == lane => {
                let number = u32::try_from(value).ok().filter(|_| lane == Lane::Microbatch);
                open = Some(Slice { layer: number, ..Slice::new(lane, name, at_ns, end_ns) });
            }
            Event::Slice(slice) if slice.lane == lane => open = None,
            _ => {}
        }
    }
    open
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Gauge, NameId, Timeline};

    #[test]
    fn what_has_begun_and_not_ended_lasts_until_the_end() {
        let timeline = Timeline::new(0);
        let [a, b] = ["A", "B"].map(|name| timeline.intern(name));
        let mut snapshot = timeline.snapshot();
        let begin = |lane, name, at_ns, value| Event::Instant { lane, name, at_ns, value };
        let (gauge, tag) = (Gauge::DeviceAwake, NameId::OTHER);
        snapshot.events = vec![
            begin(Lane::Phase, a, 10, 0),
            Event::Slice(Slice::new(Lane::Phase, a, 10, 20)),
            begin(Lane::Phase, b, 20, 0),
            begin(Lane::Microbatch, b, 30, 2),
            Event::Gauge { gauge, tag, at_ns: 90, value_bytes: 5, previous_bytes: 0 },
        ];
        let told = with_open(&snapshot);
        let open = told.slices(Lane::Phase)[1];
        assert_eq!((open.name, open.start_ns, open.end_ns, open.layer), (b, 20, 90, None));
        assert_eq!(told.slices(Lane::Microbatch)[0].layer, Some(2));
        snapshot.events.push(Event::Slice(Slice::new(Lane::Phase, b, 20, 95)));
        assert_eq!(with_open(&snapshot).slices(Lane::Phase).len(), 2, "B is over");
    }
}
