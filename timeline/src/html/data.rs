//! The events as JSON, by column: compact and quick to parse.
//!
//! Times and levels are differences from the one before. A column of zeros is empty. Sizes, names and regions
//! are numbers into lists.

use super::story::Story;
use crate::event::{Event, Gauge, LANES, Lane, Slice};
use crate::lanes::{self, SUBTRACKS_MAX};
use crate::levels::Steps;
use crate::snapshot::{Process, Snapshot};
use crate::totals::Totals;
use crate::{NameId, Stall};
use serde::Serialize;
use std::collections::HashMap;
use std::hash::Hash;
use std::io;

/// Version of the format below, for programs that extract it from a page.
pub(super) const VERSION: u32 = 2;

#[derive(Serialize)]
struct Data<'a> {
    version: u32,
    pid: u32,
    rank: u32,
    process: &'a str,
    begin_unix_ms: u64,
    window_ns: u64,
    dropped: u64,
    /// From when on levels are recorded.
    levels_from_ns: u64,
    budget_bytes: u64,
    /// The best rate by lane; 0 if unknown.
    bytes_per_s: [u64; LANES],
    levels: Vec<LevelData>,
    lanes: Vec<LaneData>,
    names: Vec<&'a str>,
    sizes: Vec<u64>,
    /// Region ids as text: they may use all 64 bits, and JavaScript numbers hold 53.
    regions: Vec<String>,
    peak: Option<PeakData>,
    stalls: Vec<StallData>,
    totals: &'a Totals,
}

#[derive(Serialize)]
struct LevelData {
    /// `awake`, `mapped`, `host` and `nvme` are tiers; a `role` or `tag` is a part of `awake`.
    kind: &'static str,
    title: String,
    at_ns: Vec<u64>,
    bytes: Vec<i64>,
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
    /// Time between being asked for and queued.
    room_ns: Vec<u64>,
    /// Time between being queued and the start.
    queue_ns: Vec<u64>,
    size: Vec<u64>,
    name: Vec<u64>,
    /// The layer plus one; 0 is none. Of a microbatch, its number plus one.
    layer: Vec<u64>,
    region: Vec<u64>,
    /// Row of each slice; slices without a sub-track share one row below the others.
    row: Vec<u64>,
    instants: InstantData,
}

#[derive(Default, Serialize)]
struct InstantData {
    count: usize,
    at_ns: Vec<u64>,
    name: Vec<u64>,
    value: Vec<u64>,
}

#[derive(Serialize)]
struct PeakData {
    at_ns: u64,
    bytes: u64,
    beside_bytes: u64,
    place: String,
    owners: Vec<OwnerData>,
}

#[derive(Serialize)]
struct OwnerData {
    title: String,
    bytes: u64,
}

#[derive(Serialize)]
struct StallData {
    from_ns: u64,
    to_ns: u64,
    cause: &'static str,
    bound_ns: Option<u64>,
}

/// Numbers distinct values in the order in which they are first seen.
struct Numbering<T> {
    values: Vec<T>,
    numbers: HashMap<T, u64>,
}

impl<T: Copy + Eq + Hash> Numbering<T> {
    /// `first` is number 0.
    fn new(first: Option<T>) -> Self {
        let mut numbering = Self { values: Vec::new(), numbers: HashMap::new() };
        first.into_iter().for_each(|value| {
            numbering.number(value);
        });
        numbering
    }

    fn number(&mut self, value: T) -> u64 {
        *self.numbers.entry(value).or_insert_with(|| {
            self.values.push(value);
            self.values.len() as u64 - 1
        })
    }
}

struct Lists {
    names: Numbering<NameId>,
    /// Number 0 is 0 bytes.
    sizes: Numbering<u64>,
    /// Number 0 is none.
    regions: Numbering<u64>,
}

/// Returns the JSON object of the page. No text in it can end the `<script>` element it is embedded in.
pub(super) fn json(story: &Story, process: &Process) -> io::Result<String> {
    let snapshot = &*story.snapshot;
    let (begin_ns, end_ns) = snapshot.window_ns();
    let mut lists = Lists {
        names: Numbering::new(None),
        sizes: Numbering::new(Some(0)),
        regions: Numbering::new(Some(0)),
    };
    let mut instants: [InstantData; LANES] = std::array::from_fn(|_| InstantData::default());
    for event in &snapshot.events {
        if let Event::Instant { lane, name, at_ns, value } = *event {
            let of_lane = &mut instants[lane as usize];
            of_lane.count += 1;
            of_lane.at_ns.push(at_ns - begin_ns);
            of_lane.name.push(lists.names.number(name));
            of_lane.value.push(value);
        }
    }
    let lanes = Lane::ALL.into_iter().zip(instants);
    let lanes = lanes.map(|(lane, mut instants)| {
        instants.at_ns = differences(instants.at_ns);
        lane_data(snapshot, lane, begin_ns, instants, &mut lists)
    });
    let lanes = lanes.collect();
    let data = Data {
        version: VERSION,
        pid: process.pid,
        rank: process.rank,
        process: &process.name,
        begin_unix_ms: snapshot.taken.unix_ns(begin_ns) / 1_000_000,
        window_ns: end_ns.saturating_sub(begin_ns),
        dropped: snapshot.dropped,
        levels_from_ns: snapshot.levels_begin_ns() - begin_ns,
        budget_bytes: snapshot.facts.budget_bytes,
        bytes_per_s: snapshot.facts.bytes_per_s,
        levels: levels(story, begin_ns),
        lanes,
        names: lists.names.values.iter().map(|id| snapshot.names.get(*id)).collect(),
        sizes: lists.sizes.values,
        regions: lists.regions.values.iter().map(u64::to_string).collect(),
        peak: peak(story, begin_ns),
        stalls: story.stalls.iter().map(|stall| stall_data(stall, begin_ns)).collect(),
        totals: &story.totals,
    };
    let json = serde_json::to_string(&data)?;
    // Outside strings JSON has none of these characters.
    Ok(json.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026"))
}

fn levels(story: &Story, begin_ns: u64) -> Vec<LevelData> {
    let levels = &story.levels;
    let gauges = Gauge::ALL.into_iter().filter(|gauge| *gauge != Gauge::DeviceTagged);
    let gauges = gauges.map(|gauge| {
        let kind = match gauge {
            Gauge::DeviceAwake => "awake",
            Gauge::DeviceMapped => "mapped",
            Gauge::HostUsed => "host",
            Gauge::NvmeUsed => "nvme",
            _ => "role",
        };
        (kind, gauge.title().to_owned(), levels.gauge(gauge))
    });
    let names = &story.snapshot.names;
    let tags = levels.tags().iter();
    let tags = tags.map(|(tag, steps)| ("tag", format!("tag {}", names.get(*tag)), steps));
    gauges.chain(tags).map(|(kind, title, steps)| level(kind, title, steps, begin_ns)).collect()
}

fn level(kind: &'static str, title: String, steps: &Steps, begin_ns: u64) -> LevelData {
    let at_ns = differences(steps.iter().map(|(at_ns, _)| at_ns - begin_ns).collect());
    let mut before = 0;
    let bytes = steps.iter().map(|(_, value_bytes)| {
        // No level reaches 8 EiB.
        let value = (*value_bytes).min(i64::MAX as u64) as i64;
        value - std::mem::replace(&mut before, value)
    });
    LevelData { kind, title, at_ns, bytes: bytes.collect() }
}

fn lane_data(
    snapshot: &Snapshot,
    lane: Lane,
    begin_ns: u64,
    instants: InstantData,
    lists: &mut Lists,
) -> LaneData {
    let slices = snapshot.slices(lane);
    let (tracks, rows) = lanes::place(&slices);
    let crowded = tracks.contains(&None);
    let column = |of: &dyn Fn(&Slice) -> u64| unless_zero(slices.iter().map(of).collect());
    let row = tracks.iter().map(|track| track.unwrap_or(SUBTRACKS_MAX) as u64).collect();
    LaneData {
        title: lane.title(),
        copy: lane.is_copy(),
        outbound: lane.is_outbound(),
        rows: rows + usize::from(crowded),
        crowded,
        start_ns: differences(slices.iter().map(|slice| slice.start_ns - begin_ns).collect()),
        duration_ns: column(&Slice::duration_ns),
        room_ns: column(&|slice| slice.queued_ns.saturating_sub(slice.asked_ns)),
        queue_ns: column(&|slice| slice.start_ns.saturating_sub(slice.queued_ns)),
        layer: column(&|slice| slice.layer.map_or(0, |layer| u64::from(layer) + 1)),
        size: unless_zero(slices.iter().map(|slice| lists.sizes.number(slice.bytes)).collect()),
        name: unless_zero(slices.iter().map(|slice| lists.names.number(slice.name)).collect()),
        region: unless_zero(slices.iter().map(|slice| lists.regions.number(slice.flow)).collect()),
        row: unless_zero(row),
        instants,
    }
}

fn peak(story: &Story, begin_ns: u64) -> Option<PeakData> {
    let (snapshot, peak) = (&*story.snapshot, story.peak.as_ref()?);
    let owner =
        |&(owner, bytes): &(crate::Owner, u64)| OwnerData { title: owner.title(snapshot), bytes };
    Some(PeakData {
        at_ns: peak.moment.at_ns.saturating_sub(begin_ns),
        bytes: peak.bytes,
        beside_bytes: peak.beside_bytes,
        place: peak.moment.place(snapshot),
        owners: peak.owners.iter().map(owner).collect(),
    })
}

fn stall_data(stall: &Stall, begin_ns: u64) -> StallData {
    StallData {
        from_ns: stall.wait.start_ns.saturating_sub(begin_ns),
        to_ns: stall.wait.end_ns.saturating_sub(begin_ns),
        cause: stall.cause.title(),
        bound_ns: stall.bound_ns,
    }
}

/// Returns each value less the one before.
fn differences(mut ascending: Vec<u64>) -> Vec<u64> {
    let mut before = 0;
    for value in &mut ascending {
        *value -= std::mem::replace(&mut before, *value);
    }
    ascending
}

fn unless_zero(column: Vec<u64>) -> Vec<u64> {
    if column.iter().all(|value| *value == 0) { Vec::new() } else { column }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn differences_sum_to_the_values() {
        assert_eq!(differences(vec![3, 3, 10]), [3, 0, 7]);
        assert!(unless_zero(vec![0, 0]).is_empty() && unless_zero(vec![0, 1]).len() == 2);
    }

    proptest! {
        #[test]
        fn any_name_is_read_back_and_cannot_end_the_script(name in any::<String>()) {
            let snapshot = crate::Timeline::new(0).snapshot();
            let story = Story::of(&snapshot);
            for name in [name, "</script>&\u{2028}".to_owned()] {
                let process = Process::current(name.clone(), 0);
                let json = json(&story, &process).unwrap();
                prop_assert!(!json.contains(['<', '>', '&']));
                let read: serde_json::Value = serde_json::from_str(&json).unwrap();
                prop_assert_eq!(&read["process"], &name);
            }
        }
    }
}
