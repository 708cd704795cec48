//! A picture of the timeline at one moment: plain data, for the writers and for tests.

use crate::clock::ClockAnchor;
use crate::event::{EVENT_WORDS, Event, GAUGES, Gauge, Lane};
use crate::names::Names;
use crate::ring::Reading;

/// Everything the timeline still held when it was taken.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Whole events by the time they ended, oldest first; equal times in the order recorded.
    pub events: Vec<Event>,
    /// Events recorded since the beginning that are not here: overwritten by newer ones, or being
    /// written at that moment.
    pub dropped: u64,
    /// The level of each gauge, in the order of [`Gauge::ALL`].
    pub gauges_now: [u64; GAUGES],
    /// What the events' names stand for.
    pub names: Names,
    /// The clocks when the timeline was made.
    pub started: ClockAnchor,
    /// The clocks when the snapshot was taken.
    pub taken: ClockAnchor,
}

/// Whose timeline a dump shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// The process id.
    pub pid: u32,
    /// What the process is called.
    pub name: String,
    /// Its rank among the processes of the job; 0 where there is one.
    pub rank: u32,
}

impl Process {
    /// This process.
    pub fn current(name: impl Into<String>, rank: u32) -> Self {
        Self { pid: std::process::id(), name: name.into(), rank }
    }

    /// One line naming it.
    pub fn title(&self) -> String {
        format!("{} · rank {} · pid {}", self.name, self.rank, self.pid)
    }
}

/// One slice, taken out of its event.
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

    /// From the first moment of any event to the last; empty where there is none.
    pub fn window_ns(&self) -> (u64, u64) {
        let begin = self.events.iter().map(Event::start_ns).min();
        let end = self.events.iter().map(Event::end_ns).max();
        match (begin, end) {
            (Some(begin), Some(end)) => (begin, end),
            _ => (self.taken.monotonic_ns, self.taken.monotonic_ns),
        }
    }

    /// The slices of `lane`, by the time they began.
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

    /// The steps of `gauge` as (from when, bytes), from the beginning of the window on.
    ///
    /// The first step is the level before the first change seen, or, where it never changed in
    /// the window, the level now.
    pub(crate) fn steps(&self, gauge: Gauge) -> Vec<(u64, u64)> {
        let (begin_ns, _) = self.window_ns();
        let mut steps = Vec::new();
        for event in &self.events {
            let Event::Gauge { gauge: its, at_ns, value_bytes, previous_bytes } = *event else {
                continue;
            };
            if its != gauge {
                continue;
            }
            if steps.is_empty() && at_ns > begin_ns {
                steps.push((begin_ns, previous_bytes));
            }
            steps.push((at_ns, value_bytes));
        }
        if steps.is_empty() {
            steps.push((begin_ns, self.gauges_now.get(gauge as usize).copied().unwrap_or(0)));
        }
        steps
    }
}
