//! The figures of a snapshot in a few numbers: what the summary tables say.

use crate::event::{GAUGES, Gauge, LANES, Lane};
use crate::snapshot::{Slice, Snapshot};
use crate::spans::{self, Span};

/// What the slices of one lane add up to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneTotals {
    /// Number of slices.
    pub count: u64,
    /// Bytes they moved.
    pub bytes: u64,
    /// Their durations added up; longer than the clock where they overlap.
    pub total_ns: u64,
    /// How long at least one of them was going on.
    pub busy_ns: u64,
}

impl LaneTotals {
    /// Bytes moved per second of busy time; 0 where nothing took any time.
    pub fn bytes_per_s(&self) -> u64 {
        rate_bytes_per_s(self.bytes, self.busy_ns)
    }
}

/// What happened during the slices of [`Lane::Phase`] that share a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhaseTotals {
    /// The phase.
    pub name: String,
    /// How often it ran.
    pub count: u64,
    /// How long, where two overlap counted once.
    pub busy_ns: u64,
    /// How long compute was stalled in it.
    pub stall_ns: u64,
    /// Highest level of each gauge in it, in the order of [`Gauge::ALL`].
    pub peak_bytes: [u64; GAUGES],
}

/// Everything the summary tables say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Totals {
    /// By lane, in the order of [`Lane::ALL`].
    pub lanes: [LaneTotals; LANES],
    /// Highest level of each gauge in the window, in the order of [`Gauge::ALL`].
    pub peak_bytes: [u64; GAUGES],
    /// By phase, in the order they first began.
    pub phases: Vec<PhaseTotals>,
}

impl Totals {
    /// Adds a snapshot up.
    pub fn of(snapshot: &Snapshot) -> Self {
        let steps = Gauge::ALL.map(|gauge| snapshot.steps(gauge));
        let stalls = spans::merge(snapshot.slices(Lane::Stall).iter().map(span).collect());
        let phases = by_name(snapshot).into_iter().map(|(name, slices)| {
            let spans = spans::merge(slices.iter().map(span).collect());
            PhaseTotals {
                name,
                count: slices.len() as u64,
                busy_ns: spans::length_ns(&spans),
                stall_ns: spans::overlap_ns(&spans, &stalls),
                peak_bytes: std::array::from_fn(|at| match steps.get(at) {
                    Some(steps) => peak_within(steps, &spans),
                    None => 0,
                }),
            }
        });
        Self {
            phases: phases.collect(),
            lanes: Lane::ALL.map(|lane| lane_totals(&snapshot.slices(lane))),
            peak_bytes: std::array::from_fn(|at| match steps.get(at) {
                Some(steps) => steps.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0),
                None => 0,
            }),
        }
    }

    /// What the slices of `lane` add up to.
    pub fn lane(&self, lane: Lane) -> LaneTotals {
        self.lanes.get(lane as usize).copied().unwrap_or_default()
    }
}

/// `bytes` over `duration_ns` as bytes per second; 0 where it took no time.
pub(crate) fn rate_bytes_per_s(bytes: u64, duration_ns: u64) -> u64 {
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
    }
    totals.busy_ns = spans::length_ns(&spans::merge(slices.iter().map(span).collect()));
    totals
}

/// Phase slices by name, names in the order they first began.
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

/// The highest level `steps` reach within disjoint `spans`, both in order of time.
fn peak_within(steps: &[(u64, u64)], spans: &[Span]) -> u64 {
    let mut peak_bytes = 0;
    let mut ends = steps.iter().skip(1).map(|(from_ns, _)| *from_ns);
    let mut spans = spans.iter().peekable();
    for (from_ns, bytes) in steps {
        let to_ns = ends.next().unwrap_or(u64::MAX);
        while spans.next_if(|span| span.1 < *from_ns).is_some() {}
        let Some(span) = spans.peek() else { break };
        // A step that was replaced at once was still reached.
        if span.0 < to_ns.max(from_ns.saturating_add(1)) {
            peak_bytes = peak_bytes.max(*bytes);
        }
    }
    peak_bytes
}

#[cfg(all(test, not(loom)))]
#[path = "totals_tests.rs"]
mod tests;
