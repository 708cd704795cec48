//! The contents of a timeline at one moment, as plain data.

use crate::clock::ClockAnchor;
use crate::event::{EVENT_WORDS, Event, GAUGES, Gauge, Lane};
use crate::names::Names;
use crate::ring::Reading;

/// The contents of a timeline at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Complete events by end time; equal times in recording order.
    pub events: Vec<Event>,
    /// Events recorded since creation that are missing: overwritten, or being written at that moment.
    pub dropped: u64,
    /// Current value of each gauge, in the order of [`Gauge::ALL`].
    pub gauges_now: [u64; GAUGES],
    /// Names by id.
    pub names: Names,
    /// Clocks at the creation of the timeline.
    pub started: ClockAnchor,
    /// Clocks at the time of the snapshot.
    pub taken: ClockAnchor,
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

/// The fields of an [`Event::Slice`] without its lane.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slice {
    pub(crate) name: crate::NameId,
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
    pub(crate) bytes: u64,
    pub(crate) flow: u64,
}

impl Slice {
    pub(crate) fn duration_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.start_ns)
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
        let words = marks.events.into_iter().chain(gauges.events);
        let mut events: Vec<Event> = words.filter_map(Event::unpack).collect();
        events.sort_by_key(Event::end_ns);
        Self { events, dropped, gauges_now, names, started, taken: ClockAnchor::now() }
    }

    /// Returns the earliest start and the latest end of all events; both are the time of the snapshot if there
    /// are none.
    pub fn window_ns(&self) -> (u64, u64) {
        let begin = self.events.iter().map(Event::start_ns).min();
        let end = self.events.iter().map(Event::end_ns).max();
        begin.zip(end).unwrap_or((self.taken.monotonic_ns, self.taken.monotonic_ns))
    }

    /// Returns the slices of `lane`, by start time.
    pub(crate) fn slices(&self, lane: Lane) -> Vec<Slice> {
        let of_lane = |event: &Event| match *event {
            Event::Slice { lane: its, name, start_ns, end_ns, bytes, flow } if its == lane => {
                Some(Slice { name, start_ns, end_ns, bytes, flow })
            }
            _ => None,
        };
        let mut slices: Vec<Slice> = self.events.iter().filter_map(of_lane).collect();
        slices.sort_by_key(|slice| (slice.start_ns, slice.end_ns));
        slices
    }

    /// Returns the values of `gauge` in the window as (start time, bytes). The first is the value before the
    /// first change, or the current value if there is no change.
    pub(crate) fn steps(&self, gauge: Gauge) -> Vec<(u64, u64)> {
        let (begin_ns, _) = self.window_ns();
        let mut steps = Vec::new();
        for event in &self.events {
            if let Event::Gauge { gauge: its, at_ns, value_bytes, previous_bytes } = *event
                && its == gauge
            {
                if steps.is_empty() && at_ns > begin_ns {
                    steps.push((begin_ns, previous_bytes));
                }
                steps.push((at_ns, value_bytes));
            }
        }
        if steps.is_empty() {
            steps.push((begin_ns, self.gauges_now[gauge as usize]));
        }
        steps
    }
}
