//! Why compute waited: for each wait, the copy it waited for, and what that copy spent the time on.
//!
//! ```text
//!                due                                   over
//!   compute      │◄──────────────── wait ───────────────►│
//!   copy      asked ── room ── queued ── queue ── start ─ copy ─ end
//! ```
//! The copy is the last one of the layer, or of the layer below, which its backward reads too, that ended in the
//! wait. The cause is the longest part of its life within the wait; that of a region which comes from the file by
//! way of host memory has both copies in it. A wait without such a copy has the cause that its name says.

use crate::event::{Event, Lane, Slice};
use crate::snapshot::Snapshot;
use std::collections::HashMap;

/// The end of a copy on a GPU is read from another clock: it may lie this much behind the wait for it.
const CLOCK_ERROR_NS: u64 = 100_000;

/// The cause of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The copy was asked for after compute was due.
    AskedLate,
    /// No device memory to wake into.
    Room,
    /// Other copies were ahead.
    Queue,
    /// The read from the file was not over.
    LateRead,
    /// The copy from host memory was not over.
    Link,
    /// Not known: no copy of the layer ended in the wait.
    Unknown,
}

impl Cause {
    /// Returns the title shown in dumps.
    pub fn title(self) -> &'static str {
        match self {
            Self::AskedLate => "asked late",
            Self::Room => "room",
            Self::Queue => "queue",
            Self::LateRead => "late read",
            Self::Link => "link",
            Self::Unknown => "unknown",
        }
    }

    /// Returns what it means.
    pub fn meaning(self) -> &'static str {
        match self {
            Self::AskedLate => "the copy was asked for when compute was already due",
            Self::Room => "no device memory was free to wake into",
            Self::Queue => "other copies were ahead of it",
            Self::LateRead => "the read from the file was not over",
            Self::Link => "the copy from host memory was not over",
            Self::Unknown => "no copy of the layer ended in the wait",
        }
    }
}

/// A wait of compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stall {
    /// The wait.
    pub wait: Slice,
    /// Its cause.
    pub cause: Cause,
    /// The copy waited for, if one is known.
    pub copy: Option<Slice>,
    /// What the link alone would have made of it: all bytes that had come by then, at the best rate of their
    /// link, from the moment the first of them was asked for. `None` without a copy.
    pub bound_ns: Option<u64>,
}

/// Returns the waits of `snapshot`, in order of time.
pub fn stalls(snapshot: &Snapshot) -> Vec<Stall> {
    let copies = Inbound::of(snapshot);
    let waits = snapshot.slices(Lane::Stall).into_iter();
    let mut stalls: Vec<Stall> = waits.map(|wait| explain(snapshot, &copies, wait)).collect();
    for lane in [Lane::NvmeRead, Lane::HostToDevice] {
        bound(snapshot, &copies, lane, &mut stalls);
    }
    stalls
}

/// The copies towards the device.
struct Inbound {
    /// By layer, by end.
    by_layer: HashMap<u32, Vec<Slice>>,
}

impl Inbound {
    fn of(snapshot: &Snapshot) -> Self {
        let mut by_layer = HashMap::<u32, Vec<Slice>>::new();
        for event in &snapshot.events {
            if let Event::Slice(slice) = *event
                && slice.lane.is_copy()
                && !slice.lane.is_outbound()
                && let Some(layer) = slice.layer
            {
                by_layer.entry(layer).or_default().push(slice);
            }
        }
        by_layer.values_mut().for_each(|copies| copies.sort_by_key(|copy| copy.end_ns));
        Self { by_layer }
    }

    /// Returns the copies of the region that came last in a wait for `layer`, by end.
    fn awaited(&self, layer: u32, wait: &Slice) -> Vec<Slice> {
        let ended_in = |layer| {
            let copies = self.by_layer.get(&layer).map(Vec::as_slice).unwrap_or_default();
            let from = copies.partition_point(|copy| copy.end_ns <= wait.start_ns);
            let to = copies.partition_point(|copy| copy.end_ns <= wait.end_ns + CLOCK_ERROR_NS);
            &copies[from..to.max(from)]
        };
        let below = layer.checked_sub(1).map(ended_in).unwrap_or_default();
        let latest = [ended_in(layer), below].into_iter().max_by_key(|copies| {
            // Of equal ones the last: that of the layer itself has to win.
            (copies.last().map(|copy| copy.end_ns), copies.last().map(|copy| copy.layer))
        });
        let copies = latest.unwrap_or_default();
        let Some(last) = copies.last() else { return Vec::new() };
        let of_region = |copy: &&Slice| copy.flow == last.flow && last.flow != 0 || *copy == last;
        copies.iter().filter(of_region).copied().collect()
    }
}

fn explain(snapshot: &Snapshot, copies: &Inbound, wait: Slice) -> Stall {
    let legs = wait.layer.map(|layer| copies.awaited(layer, &wait)).unwrap_or_default();
    let copy = legs.last().copied();
    let cause = match copy {
        Some(_) => cause(&wait, &legs),
        None if snapshot.names.get(wait.name).ends_with("room") => Cause::Room,
        None => Cause::Unknown,
    };
    // The read is what a region that comes from the file waits for longest.
    let copy = match cause {
        Cause::LateRead => legs.iter().find(|leg| leg.lane == Lane::NvmeRead).copied(),
        _ => copy,
    };
    Stall { wait, cause, copy, bound_ns: None }
}

/// Returns the longest part of the copies' life within the wait.
fn cause(wait: &Slice, legs: &[Slice]) -> Cause {
    let within = |from_ns: u64, to_ns: u64| {
        to_ns.min(wait.end_ns).saturating_sub(from_ns.max(wait.start_ns))
    };
    let asked_ns = legs.iter().map(|leg| leg.asked_ns).min().unwrap_or(wait.end_ns);
    let mut parts = [
        (Cause::AskedLate, within(0, asked_ns)),
        (Cause::Room, 0),
        (Cause::Queue, 0),
        (Cause::Link, 0),
        (Cause::LateRead, 0),
    ];
    for leg in legs {
        let is_read = leg.lane == Lane::NvmeRead;
        parts[1].1 += within(leg.asked_ns, leg.queued_ns);
        parts[2].1 += within(leg.queued_ns, leg.start_ns);
        parts[3 + usize::from(is_read)].1 += within(leg.start_ns, leg.end_ns);
    }
    // The last of equal ones: the copy itself, where nothing else is known.
    parts.into_iter().max_by_key(|(_, ns)| *ns).map_or(Cause::Unknown, |(cause, _)| cause)
}

/// Raises the bounds of `stalls` to those of one link.
///
/// A run ends with the phase that waited in it. With rate *r*, bytes *b* of the run that had come by the end of a
/// wait, the first of them asked for at *t*, and compute due at *d* without the earlier waits of the run, all
/// waits up to this one take at least `t + b / r - d`.
fn bound(snapshot: &Snapshot, copies: &Inbound, lane: Lane, stalls: &mut [Stall]) {
    let mut inbound: Vec<Slice> =
        copies.by_layer.values().flatten().filter(|copy| copy.lane == lane).copied().collect();
    inbound.sort_by_key(|copy| copy.end_ns);
    let rate = snapshot.facts.rate(lane).unwrap_or_else(|| best_rate(&inbound));
    if rate == 0 {
        return;
    }
    let waits = |phase: &Slice| {
        let after = stalls.partition_point(|stall| stall.wait.start_ns < phase.start_ns);
        stalls.get(after).is_some_and(|stall| stall.wait.start_ns <= phase.end_ns)
    };
    let phases = snapshot.slices(Lane::Phase).into_iter().filter(waits);
    let mut run_ends: Vec<u64> = phases.map(|phase| phase.end_ns).collect();
    run_ends.sort_unstable();
    let run_of = |at_ns: u64| run_ends.partition_point(|end_ns| *end_ns < at_ns);
    let (mut next, mut run, mut begun_ns, mut bytes) = (0, usize::MAX, u64::MAX, 0u64);
    let (mut waited_ns, mut bound_ns) = (0u64, 0u64);
    for stall in &mut *stalls {
        let wait = stall.wait;
        if run_of(wait.end_ns) != run {
            (run, begun_ns, bytes, waited_ns, bound_ns) = (run_of(wait.end_ns), u64::MAX, 0, 0, 0);
            next += inbound[next..].partition_point(|copy| run_of(copy.end_ns) < run);
        }
        while let Some(copy) =
            inbound.get(next).filter(|c| c.end_ns <= wait.end_ns + CLOCK_ERROR_NS)
        {
            begun_ns = begun_ns.min(copy.asked_ns);
            bytes = bytes.saturating_add(copy.bytes);
            next += 1;
        }
        let due_ns = wait.start_ns.saturating_sub(waited_ns);
        waited_ns = waited_ns.saturating_add(wait.duration_ns());
        if stall.copy.is_none_or(|copy| copy.lane != lane) {
            continue;
        }
        let took_ns = u64::try_from(u128::from(bytes) * 1_000_000_000 / u128::from(rate));
        let there_ns = begun_ns.saturating_add(took_ns.unwrap_or(u64::MAX));
        let least_ns = there_ns.saturating_sub(due_ns);
        let more_ns = least_ns.saturating_sub(bound_ns);
        bound_ns = bound_ns.max(least_ns);
        stall.bound_ns = Some(stall.bound_ns.unwrap_or(0).max(more_ns));
    }
}

/// Returns the best rate of single copies; 0 without one that took time.
fn best_rate(copies: &[Slice]) -> u64 {
    let rates = copies.iter().map(|copy| crate::rate_bytes_per_s(copy.bytes, copy.duration_ns()));
    rates.max().unwrap_or(0)
}

#[cfg(all(test, not(loom)))]
#[path = "stalls_tests.rs"]
mod tests;
