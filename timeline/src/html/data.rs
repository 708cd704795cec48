//! The events as JSON, by column: compact and quick to parse.

use crate::NameId;
use crate::event::{Event, Gauge, Lane};
use crate::lanes::{self, SUBTRACKS_MAX};
use crate::snapshot::{Process, Slice, Snapshot};
use crate::totals::Totals;
use serde::Serialize;
use std::collections::HashMap;
use std::hash::Hash;
use std::io;

/// Version of the format below, for programs that extract it from a page.
const VERSION: u32 = 1;

#[derive(Serialize)]
struct Data<'a> {
    version: u32,
    pid: u32,
    rank: u32,
    begin_unix_ms: u64,
    window_ns: u64,
    dropped: u64,
    process: &'a str,
    gauges: Vec<GaugeData>,
    lanes: Vec<LaneData>,
    names: Vec<&'a str>,
    /// Region ids as text: they may use all 64 bits, and JavaScript numbers hold 53.
    regions: Vec<String>,
    totals: &'a Totals,
}

#[derive(Serialize)]
struct GaugeData {
    title: &'static str,
    at_ns: Vec<u64>,
    bytes: Vec<u64>,
}

#[derive(Serialize)]
struct LaneData {
    title: &'static str,
    copy: bool,
    outbound: bool,
    rows: usize,
    crowded: bool,
    start_ns: Vec<u64>,
    duration_ns: Vec<u64>,
    bytes: Vec<u64>,
    name: Vec<u64>,
    region: Vec<u64>,
    /// Row of each slice; slices without a sub-track share one row below the others.
    row: Vec<usize>,
    instants: InstantData,
}

#[derive(Default, Serialize)]
struct InstantData {
    count: usize,
    at_ns: Vec<u64>,
    name: Vec<u64>,
    value: Vec<u64>,
}

/// Numbers distinct values in the order in which they are first seen.
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

/// Returns the JSON object of the page. No text in it can end the `<script>` element it is embedded in.
pub(super) fn json(snapshot: &Snapshot, process: &Process, totals: &Totals) -> io::Result<String> {
    let (begin_ns, end_ns) = snapshot.window_ns();
    let mut names = Numbering::new();
    let mut regions = Numbering::new();
    // Region 0 means none.
    regions.number(0);
    let gauge = |gauge: Gauge| {
        let (at_ns, bytes) =
            snapshot.steps(gauge).into_iter().map(|(at, bytes)| (at - begin_ns, bytes)).unzip();
        GaugeData { title: gauge.title(), at_ns, bytes }
    };
    let lanes = Lane::ALL.map(|lane| lane_data(snapshot, lane, begin_ns, &mut names, &mut regions));
    let data = Data {
        version: VERSION,
        pid: process.pid,
        rank: process.rank,
        begin_unix_ms: snapshot.taken.unix_ns(begin_ns) / 1_000_000,
        window_ns: end_ns.saturating_sub(begin_ns),
        dropped: snapshot.dropped,
        process: &process.name,
        gauges: Gauge::ALL.map(gauge).into(),
        lanes: lanes.into(),
        names: names.values.iter().map(|id| snapshot.names.get(*id)).collect(),
        regions: regions.values.iter().map(u64::to_string).collect(),
        totals,
    };
    let json = serde_json::to_string(&data)?;
    // Outside strings JSON has none of these characters.
    Ok(json.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026"))
}

fn lane_data(
    snapshot: &Snapshot,
    lane: Lane,
    begin_ns: u64,
    names: &mut Numbering<NameId>,
    regions: &mut Numbering<u64>,
) -> LaneData {
    let slices = snapshot.slices(lane);
    let (tracks, rows) = lanes::place(&slices);
    let crowded = tracks.contains(&None);
    let slice_names = slices.iter().map(|slice| names.number(slice.name)).collect();
    let mut instants = InstantData::default();
    for event in &snapshot.events {
        if let Event::Instant { lane: its, name, at_ns, value } = *event
            && its == lane
        {
            instants.count += 1;
            instants.at_ns.push(at_ns - begin_ns);
            instants.name.push(names.number(name));
            instants.value.push(value);
        }
    }
    LaneData {
        title: lane.title(),
        copy: lane.is_copy(),
        outbound: lane.is_outbound(),
        rows: rows + usize::from(crowded),
        crowded,
        start_ns: slices.iter().map(|slice| slice.start_ns - begin_ns).collect(),
        duration_ns: slices.iter().map(Slice::duration_ns).collect(),
        bytes: slices.iter().map(|slice| slice.bytes).collect(),
        name: slice_names,
        region: slices.iter().map(|slice| regions.number(slice.flow)).collect(),
        row: tracks.iter().map(|track| track.unwrap_or(SUBTRACKS_MAX)).collect(),
        instants,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_name_is_read_back_and_cannot_end_the_script(name in any::<String>()) {
            let snapshot = crate::Timeline::new(0).snapshot();
            for name in [name, "</script>&\u{2028}".to_owned()] {
                let process = Process::current(name.clone(), 0);
                let json = json(&snapshot, &process, &Totals::of(&snapshot)).unwrap();
                prop_assert!(!json.contains(['<', '>', '&']));
                let read: serde_json::Value = serde_json::from_str(&json).unwrap();
                prop_assert_eq!(&read["process"], &name);
            }
        }
    }
}
