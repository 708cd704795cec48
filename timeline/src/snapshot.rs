//! The contents of a timeline at one moment, as plain data.

use crate::clock::ClockAnchor;
use crate::event::{EVENT_WORDS, Event, GAUGES, Lane, Slice};
use crate::facts::Facts;
use crate::names::{NameId, Names};
use crate::ring::Reading;

/// Times that are farther out of order are those of changes that raced.
const OUT_OF_ORDER_NS_MAX: u64 = 1_000_000;

/// The contents of a timeline at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Complete events by end time; equal times in recording order.
    pub events: Vec<Event>,
    /// Events recorded since creation that are missing: overwritten, or being written at that moment.
    pub dropped: u64,
    /// The time from which all changes of gauges are here; 0: since the creation of the timeline.
    pub levels_from_ns: u64,
    /// Current value of each gauge, in the order of [`crate::Gauge::ALL`].
    pub gauges_now: [u64; GAUGES],
    /// Current device bytes by tag, without those of 0 bytes.
    pub tags_now: Vec<(NameId, u64)>,
    /// Names by id.
    pub names: Names,
    /// Clocks at the creation of the timeline.
    pub started: ClockAnchor,
    /// Clocks at the time of the snapshot.
    pub taken: ClockAnchor,
    /// What the owner of the memory adds; empty unless it does.
    pub facts: Facts,
}

/// The process that a dump belongs to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// The process id.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// Its rank in the job; 0 for a single process.
    pub rank: u32,
}

impl Process {
    /// Describes the current process.
    pub fn current(name: impl Into<String>, rank: u32) -> Self {
        Self { pid: std::process::id(), name: name.into(), rank }
    }

    /// Returns name, rank and process id in one line.
    pub fn title(&self) -> String {
        format!("{} · rank {} · pid {}", self.name, self.rank, self.pid)
    }
}

impl Snapshot {
    pub(crate) fn assemble(
        marks: Reading<EVENT_WORDS>,
        gauges: Reading<EVENT_WORDS>,
        gauges_now: [u64; GAUGES],
        names: Names,
        started: ClockAnchor,
    ) -> Self {
        let dropped = marks.dropped.saturating_add(gauges.dropped);
        let taken = ClockAnchor::now();
        let mut changes: Vec<Event> = gauges.events.into_iter().filter_map(Event::unpack).collect();
        put_levels_in_order(&mut changes);
        let oldest_ns = changes.iter().map(Event::end_ns).min().unwrap_or(taken.monotonic_ns);
        let levels_from_ns = if gauges.dropped > 0 { oldest_ns } else { 0 };
        let marks = marks.events.into_iter().filter_map(Event::unpack);
        let mut events: Vec<Event> = marks.chain(changes).collect();
        events.sort_by_key(Event::end_ns);
        Self {
            events,
            dropped,
            levels_from_ns,
            gauges_now,
            tags_now: Vec::new(),
            names,
            started,
            taken,
            facts: Facts::default(),
        }
    }

    /// Returns the earliest start and the latest end of all events; both are the time of the snapshot if there
    /// are none.
    pub fn window_ns(&self) -> (u64, u64) {
        let begin = self.events.iter().map(Event::start_ns).min();
        let end = self.events.iter().map(Event::end_ns).max();
        begin.zip(end).unwrap_or((self.taken.monotonic_ns, self.taken.monotonic_ns))
    }

    /// Returns the time from which levels are known: the window's begin, or later if older changes of gauges are lost.
    pub fn levels_begin_ns(&self) -> u64 {
        self.levels_from_ns.max(self.window_ns().0)
    }

    /// Returns the slices of `lane`, by start time.
    pub(crate) fn slices(&self, lane: Lane) -> Vec<Slice> {
        let of_lane = |event: &Event| match *event {
            Event::Slice(slice) if slice.lane == lane => Some(slice),
            _ => None,
        };
        let mut slices: Vec<Slice> = self.events.iter().filter_map(of_lane).collect();
        slices.sort_by_key(|slice| (slice.start_ns, slice.end_ns));
        slices
    }
}

/// Raises the time of each change of a gauge to that of the one recorded before it, where another thread read a time that is
/// a little earlier ([`now_ns`](crate::now_ns)): changes are shown in the order in which their owner recorded them. `changes`: in
/// the order of their ring.
fn put_levels_in_order(changes: &mut [Event]) {
    let mut latest_ns = [0_u64; GAUGES];
    for event in changes {
        if let Event::Gauge { gauge, at_ns, .. } = event {
            let latest_ns = &mut latest_ns[*gauge as usize];
            if latest_ns.saturating_sub(*at_ns) <= OUT_OF_ORDER_NS_MAX {
                *at_ns = (*at_ns).max(*latest_ns);
            }
            *latest_ns = *at_ns;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::event::Gauge;

    fn change(gauge: Gauge, at_ns: u64, value_bytes: u64) -> [u64; EVENT_WORDS] {
        let tag = NameId::OTHER;
        Event::Gauge { gauge, tag, at_ns, value_bytes, previous_bytes: 0 }.pack()
    }

    #[test]
    fn changes_of_a_level_are_shown_in_the_order_of_their_recording() {
        let events = vec![
            change(Gauge::HostUsed, 500, 1),
            change(Gauge::NvmeUsed, 300, 2),
            change(Gauge::HostUsed, 400, 3),
            change(Gauge::HostUsed, 450, 4),
            change(Gauge::HostUsed, 600, 5),
            change(Gauge::DeviceTagged, 2_000_900, 6),
            change(Gauge::DeviceTagged, 700, 7),
        ];
        let (none, all) = (Reading { events: vec![], dropped: 0 }, Reading { events, dropped: 0 });
        let names = crate::names::NameTable::new().read();
        let snapshot = Snapshot::assemble(none, all, [0; GAUGES], names, ClockAnchor::default());
        assert_eq!(snapshot.levels_from_ns, 0);
        let shown = |event: &Event| match *event {
            Event::Gauge { at_ns, value_bytes, .. } => (at_ns, value_bytes),
            _ => panic!("{event:?}"),
        };
        let shown: Vec<(u64, u64)> = snapshot.events.iter().map(shown).collect();
        assert_eq!(
            shown,
            [(300, 2), (500, 1), (500, 3), (500, 4), (600, 5), (700, 7), (2_000_900, 6)]
        );
    }

    #[test]
    fn levels_begin_with_the_oldest_change_if_older_ones_are_lost() {
        let mark = Event::Slice(Slice::new(Lane::Phase, NameId::OTHER, 10, 20)).pack();
        let assembled = |dropped: [u64; 2], events| {
            let marks = Reading { events: vec![mark], dropped: dropped[0] };
            let gauges = Reading { events, dropped: dropped[1] };
            let names = crate::names::NameTable::new().read();
            Snapshot::assemble(marks, gauges, [0; GAUGES], names, ClockAnchor::default())
        };
        let changes = || vec![change(Gauge::HostUsed, 30, 1), change(Gauge::NvmeUsed, 40, 2)];
        let begin_ns = |dropped| assembled(dropped, changes()).levels_begin_ns();
        assert_eq!([[0, 0], [9, 0], [0, 9]].map(begin_ns), [10, 10, 30]);
        let none_left = assembled([0, 9], vec![]);
        assert_eq!(none_left.levels_begin_ns(), none_left.taken.monotonic_ns);
    }
}
