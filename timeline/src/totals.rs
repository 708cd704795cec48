//! Totals of a snapshot by lane, phase and gauge.

use crate::event::{GAUGES, Gauge, LANES, Lane, Slice};
use crate::levels::Levels;
use crate::snapshot::Snapshot;
use crate::spans::{self, Span};
use serde::Serialize;

/// Totals of the slices of one lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LaneTotals {
    /// Number of slices.
    pub count: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// Sum of the durations; overlapping slices count separately.
    pub total_ns: u64,
    /// Time in which at least one slice was active.
    pub busy_ns: u64,
    /// Sum of the times between being asked for and queued.
    pub room_ns: u64,
    /// Sum of the times between being queued and the start.
    pub queue_ns: u64,
}

impl LaneTotals {
    /// Returns bytes moved per second of busy time; 0 if the busy time is 0.
    pub fn bytes_per_s(&self) -> u64 {
        rate_bytes_per_s(self.bytes, self.busy_ns)
    }
}

/// Totals of the slices of [`Lane::Phase`] with the same name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PhaseTotals {
    /// Name of the phase.
    pub name: String,
    /// Number of runs.
    pub count: u64,
    /// Duration; overlapping runs count once.
    pub busy_ns: u64,
    /// Stall time during the phase.
    pub stall_ns: u64,
    /// Peak of each gauge during the phase, in the order of [`Gauge::ALL`]; `None` if its levels are not recorded.
    pub peak_bytes: [Option<u64>; GAUGES],
}

/// Totals of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Totals {
    /// By lane, in the order of [`Lane::ALL`].
    pub lanes: [LaneTotals; LANES],
    /// Peak of each gauge in the window as far as it is recorded, in the order of [`Gauge::ALL`].
    pub peak_bytes: [u64; GAUGES],
    /// By phase, in the order of their first start.
    pub phases: Vec<PhaseTotals>,
}

impl Totals {
    /// Computes the totals of a snapshot.
    pub fn of(snapshot: &Snapshot) -> Self {
        Self::with(snapshot, &Levels::of(snapshot))
    }

    pub(crate) fn with(snapshot: &Snapshot, levels: &Levels) -> Self {
        let steps = Gauge::ALL.map(|gauge| levels.gauge(gauge));
        let stalls = spans::merge(snapshot.slices(Lane::Stall).iter().map(span).collect());
        let phases = by_name(snapshot).into_iter().map(|(name, slices)| {
            let spans = spans::merge(slices.iter().map(span).collect());
            PhaseTotals {
                name,
                count: slices.len() as u64,
                busy_ns: spans::length_ns(&spans),
                stall_ns: spans::overlap_ns(&spans, &stalls),
                peak_bytes: steps.map(|steps| peak_within(steps, &spans)),
            }
        });
        Self {
            phases: phases.collect(),
            lanes: Lane::ALL.map(|lane| lane_totals(&snapshot.slices(lane))),
            peak_bytes: steps.map(|steps| steps.iter().map(|step| step.1).max().unwrap_or(0)),
        }
    }

    /// Returns the totals of `lane`.
    pub fn lane(&self, lane: Lane) -> LaneTotals {
        self.lanes[lane as usize]
    }
}

/// Returns `bytes` per second over `duration_ns`; 0 if the duration is 0.
#[must_use]
pub fn rate_bytes_per_s(bytes: u64, duration_ns: u64) -> u64 {
    let rate = (u128::from(bytes) * 1_000_000_000).checked_div(u128::from(duration_ns));
    u64::try_from(rate.unwrap_or(0)).unwrap_or(u64::MAX)
}

fn span(slice: &Slice) -> Span {
    (slice.start_ns, slice.end_ns)
}

fn lane_totals(slices: &[Slice]) -> LaneTotals {
    let mut totals = LaneTotals::default();
    for slice in slices {
        totals.count += 1;
        totals.bytes = totals.bytes.saturating_add(slice.bytes);
        totals.total_ns = totals.total_ns.saturating_add(slice.duration_ns());
        let room_ns = slice.queued_ns.saturating_sub(slice.asked_ns);
        totals.room_ns = totals.room_ns.saturating_add(room_ns);
        let queue_ns = slice.start_ns.saturating_sub(slice.queued_ns);
        totals.queue_ns = totals.queue_ns.saturating_add(queue_ns);
    }
    totals.busy_ns = spans::length_ns(&spans::merge(slices.iter().map(span).collect()));
    totals
}

/// Returns phase slices by name, names in the order of their first start.
fn by_name(snapshot: &Snapshot) -> Vec<(String, Vec<Slice>)> {
    let mut groups: Vec<(crate::NameId, Vec<Slice>)> = Vec::new();
    for slice in snapshot.slices(Lane::Phase) {
        match groups.iter_mut().find(|(name, _)| *name == slice.name) {
            Some((_, slices)) => slices.push(slice),
            None => groups.push((slice.name, vec![slice])),
        }
    }
    let named = |(name, slices)| (snapshot.names.get(name).to_owned(), slices);
    groups.into_iter().map(named).collect()
}

/// Returns the peak of `steps` within disjoint `spans`, both ordered by time. `None` if all spans end before the steps.
fn peak_within(steps: &[(u64, u64)], spans: &[Span]) -> Option<u64> {
    let mut peak_bytes = None;
    let mut ends = steps.iter().skip(1).map(|(from_ns, _)| *from_ns);
    let mut spans = spans.iter().peekable();
    for (from_ns, bytes) in steps {
        let to_ns = ends.next().unwrap_or(u64::MAX);
        while spans.next_if(|span| span.1 < *from_ns).is_some() {}
        let Some(span) = spans.peek() else { break };
        // A level that was replaced at the same nanosecond still counts.
        if span.0 < to_ns.max(from_ns.saturating_add(1)) {
            peak_bytes = peak_bytes.max(Some(*bytes));
        }
    }
    peak_bytes
}

#[cfg(all(test, not(loom)))]
#[path = "totals_tests.rs"]
mod tests;
