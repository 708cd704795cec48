//! The events as JSON, by column: small, and quick to parse.

use crate::event::{Event, Gauge, Lane};
use crate::json;
use crate::lanes::{self, Place, SUBTRACKS_MAX};
use crate::snapshot::{Process, Slice, Snapshot};
use crate::totals::Totals;
use crate::{NameId, Names};
use std::collections::HashMap;
use std::hash::Hash;
use std::io::{self, Write};

/// Version of the shape below, for whoever reads it out of a page.
const VERSION: u32 = 1;

/// Gives each different value a small number, in the order they are first seen.
struct Numbering<T> {
    values: Vec<T>,
    numbers: HashMap<T, u64>,
}

impl<T: Copy + Eq + Hash> Numbering<T> {
    fn new() -> Self {
        Self { values: Vec::new(), numbers: HashMap::new() }
    }

    fn number(&mut self, value: T) -> u64 {
        *self.numbers.entry(value).or_insert_with(|| {
            self.values.push(value);
            self.values.len() as u64 - 1
        })
    }
}

/// Writes the one JSON object of the page.
pub(super) fn write(
    snapshot: &Snapshot,
    process: &Process,
    totals: &Totals,
    out: &mut dyn Write,
) -> io::Result<()> {
    let (begin_ns, end_ns) = snapshot.window_ns();
    let mut names = Numbering::new();
    let mut regions = Numbering::new();
    // Region 0 is none.
    regions.number(0);
    write!(
        out,
        "{{\"version\":{VERSION},\"pid\":{},\"rank\":{},\"begin_unix_ms\":{},\"window_ns\":{},\
         \"dropped\":{},\"process\":",
        process.pid,
        process.rank,
        snapshot.taken.unix_ns(begin_ns) / 1_000_000,
        end_ns.saturating_sub(begin_ns),
        snapshot.dropped,
    )?;
    json::string(&process.name, out)?;
    out.write_all(b",\n\"gauges\":")?;
    json::list(Gauge::ALL.into_iter(), out, |gauge, out| {
        let steps = snapshot.steps(gauge);
        out.write_all(b"\n{\"title\":")?;
        json::string(gauge.title(), out)?;
        out.write_all(b",\"at_ns\":")?;
        json::numbers(steps.iter().map(|(at, _)| at.saturating_sub(begin_ns)), out)?;
        out.write_all(b",\"bytes\":")?;
        json::numbers(steps.iter().map(|(_, bytes)| *bytes), out)?;
        out.write_all(b"}")
    })?;
    out.write_all(b",\n\"lanes\":")?;
    json::list(Lane::ALL.into_iter(), out, |lane, out| {
        write_lane(snapshot, lane, begin_ns, &mut names, &mut regions, out)
    })?;
    // Last, as only now every name and region has its number.
    out.write_all(b",\n\"names\":")?;
    write_names(&names, &snapshot.names, out)?;
    out.write_all(b",\n\"regions\":")?;
    // As text: a region's id may use all 64 bits.
    json::list(regions.values.iter(), out, |region, out| write!(out, "\"{region}\""))?;
    out.write_all(b",\n\"totals\":")?;
    write_totals(totals, out)?;
    out.write_all(b"}\n")
}

fn write_lane(
    snapshot: &Snapshot,
    lane: Lane,
    begin_ns: u64,
    names: &mut Numbering<NameId>,
    regions: &mut Numbering<u64>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let slices = snapshot.slices(lane);
    let (places, rows) = lanes::place(&slices);
    let crowded = places.iter().any(|place| place.crowded);
    out.write_all(b"\n{\"title\":")?;
    json::string(lane.title(), out)?;
    write!(out, ",\"copy\":{},\"outbound\":{}", lane.is_copy(), lane.is_outbound())?;
    write!(out, ",\"rows\":{},\"crowded\":{crowded}", rows + usize::from(crowded))?;
    column(out, "start_ns", &slices, |slice| slice.start_ns.saturating_sub(begin_ns))?;
    column(out, "duration_ns", &slices, Slice::duration_ns)?;
    column(out, "bytes", &slices, |slice| slice.bytes)?;
    column(out, "name", &slices, |slice| names.number(slice.name))?;
    column(out, "region", &slices, |slice| regions.number(slice.flow))?;
    column(out, "row", &places, row)?;
    let instants: Vec<(NameId, u64, u64)> = snapshot
        .events
        .iter()
        .filter_map(|event| match *event {
            Event::Instant { lane: its, name, at_ns, value } if its == lane => {
                Some((name, at_ns, value))
            }
            _ => None,
        })
        .collect();
    write!(out, ",\"instants\":{{\"count\":{}", instants.len())?;
    column(out, "at_ns", &instants, |(_, at_ns, _)| at_ns.saturating_sub(begin_ns))?;
    column(out, "name", &instants, |(name, _, _)| names.number(*name))?;
    column(out, "value", &instants, |(_, _, value)| *value)?;
    out.write_all(b"}}")
}

/// The row a slice is drawn in; what found no row has one of its own, below the others.
fn row(place: &Place) -> u64 {
    if place.crowded { SUBTRACKS_MAX as u64 } else { place.track as u64 }
}

fn column<T>(
    out: &mut dyn Write,
    key: &str,
    values: &[T],
    number: impl FnMut(&T) -> u64,
) -> io::Result<()> {
    write!(out, ",\"{key}\":")?;
    json::numbers(values.iter().map(number), out)
}

fn write_names(ids: &Numbering<NameId>, names: &Names, out: &mut dyn Write) -> io::Result<()> {
    json::list(ids.values.iter(), out, |id, out| json::string(names.get(*id), out))
}

fn write_totals(totals: &Totals, out: &mut dyn Write) -> io::Result<()> {
    out.write_all(b"{\"peak_bytes\":")?;
    json::numbers(totals.peak_bytes.into_iter(), out)?;
    out.write_all(b",\"lanes\":")?;
    json::list(totals.lanes.iter(), out, |lane, out| {
        write!(
            out,
            "{{\"count\":{},\"bytes\":{},\"total_ns\":{},\"busy_ns\":{}}}",
            lane.count, lane.bytes, lane.total_ns, lane.busy_ns
        )
    })?;
    out.write_all(b",\"phases\":")?;
    json::list(totals.phases.iter(), out, |phase, out| {
        out.write_all(b"{\"name\":")?;
        json::string(&phase.name, out)?;
        write!(
            out,
            ",\"count\":{},\"busy_ns\":{},\"stall_ns\":{},\"peak_bytes\":",
            phase.count, phase.busy_ns, phase.stall_ns
        )?;
        json::numbers(phase.peak_bytes.into_iter(), out)?;
        out.write_all(b"}")
    })?;
    out.write_all(b"}")
}
