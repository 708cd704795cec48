//! Reads the page's data back with another parser, and checks its markup.

use crate::common::{NAMES, drawn, events, named, process, snapshot};
use dormouse_timeline::{
    Event, Gauge, Lane, LiveBlock, NameId, Slice, Snapshot, Timeline, html, now_ns,
};
use proptest::prelude::*;
use serde_json::Value;

const DATA_BEGIN: &str = "<script type=\"application/json\" id=\"data\">";

fn page(snapshot: &Snapshot) -> String {
    let mut bytes = Vec::new();
    html::write(snapshot, &process(), &mut bytes).unwrap();
    String::from_utf8(bytes).unwrap()
}

/// The JSON of a page, cut out as a browser would: up to the first end of a script.
fn data(page: &str) -> Value {
    let start = page.find(DATA_BEGIN).unwrap() + DATA_BEGIN.len();
    let end = start + page[start..].find("</script").unwrap();
    serde_json::from_str(&page[start..end]).unwrap()
}

fn numbers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|number| number.as_i64().unwrap()).collect()
}

/// A column of differences, as the values.
fn running(value: &Value) -> Vec<u64> {
    let mut total = 0i64;
    let next = |by: i64| {
        total += by;
        u64::try_from(total).unwrap()
    };
    numbers(value).into_iter().map(next).collect()
}

/// A column of a lane; one of zeros is empty in the page.
fn column(lane: &Value, key: &str) -> Vec<u64> {
    let count = lane["start_ns"].as_array().unwrap().len();
    let values = lane[key].as_array().unwrap();
    if values.is_empty() {
        return vec![0; count];
    }
    values.iter().map(|number| number.as_u64().unwrap()).collect()
}

fn sum(lane: &Value, key: &str) -> u64 {
    column(lane, key).iter().sum()
}

fn moved(data: &Value, lane: &Value) -> u64 {
    column(lane, "size").into_iter().map(|at| data["sizes"][at as usize].as_u64().unwrap()).sum()
}

/// The cells of the first row of the page whose first cell is `name`.
fn table_row(page: &str, name: &str) -> Vec<String> {
    let start = page.find(&format!("<tr><td>{name}</td>")).unwrap();
    let row = &page[start..start + page[start..].find("</tr>").unwrap()];
    let cell = |cell: &str| cell.split("</td>").next().unwrap().to_owned();
    row.split("<td>").skip(1).map(cell).collect()
}

#[test]
fn an_empty_snapshot_is_a_whole_page() {
    let page = page(&Timeline::new(0).snapshot());
    let data = data(&page);
    assert_eq!(data["window_ns"], 0);
    assert_eq!(data["lanes"].as_array().unwrap().len(), Lane::ALL.len());
    assert_eq!(data["levels"].as_array().unwrap().len(), Gauge::ALL.len() - 1, "and no tag");
    assert!(data["peak"].is_null());
    assert!(page.starts_with("<!doctype html>"));
    assert!(page.trim_end().ends_with("</html>"));
}

#[test]
fn the_page_fetches_nothing_and_says_so() {
    let page = page(&Timeline::new(0).snapshot());
    assert!(page.contains("default-src 'none'"));
    for reach in
        ["http:", "https:", "//cdn", "src=", "href=", "@import", "url(", "fetch(", "import("]
    {
        assert!(!page.contains(reach), "the page holds {reach:?}");
    }
}

#[test]
fn names_cannot_inject_markup() {
    let (timeline, names) = named();
    let phase = |(at, name): (usize, &NameId)| {
        Event::Slice(Slice::new(Lane::Phase, *name, at as u64 * 10, at as u64 * 10 + 5))
    };
    let mut snapshot = snapshot(&timeline, names.iter().enumerate().map(phase).collect());
    let markup = "<img src=x onerror=alert(1)>".to_owned();
    snapshot.facts.reason = markup.clone();
    snapshot.facts.blocks =
        vec![LiveBlock { role: markup.clone(), tag: markup, ..LiveBlock::default() }];
    let page = page(&snapshot);
    assert_eq!(page.matches("<script").count(), 2, "only the data and the script");
    assert!(!page.contains("<img"));
    assert!(page.contains("&lt;img src=x onerror=alert(1)&gt;&amp;amp;"), "shown in the table");
    assert!(page.contains("trainer &lt;b&gt;&amp;&quot;&#39;&lt;/b&gt;"));
    let data = data(&page);
    let read: Vec<&str> =
        data["names"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert_eq!(read, NAMES);
    assert_eq!(data["process"], "trainer <b>&\"'</b>");
}

#[test]
fn the_tables_show_counts_bytes_and_times() {
    let (timeline, names) = named();
    let name = names[0];
    let slice = |lane, start_ns, end_ns, bytes, flow| {
        Event::Slice(Slice { bytes, flow, ..Slice::new(lane, name, start_ns, end_ns) })
    };
    let level = |at_ns, value_bytes| Event::Gauge {
        gauge: Gauge::NvmeUsed,
        tag: NameId::OTHER,
        at_ns,
        value_bytes,
        previous_bytes: 0,
    };
    let mut snapshot = snapshot(
        &timeline,
        vec![
            slice(Lane::Phase, 0, 100 * MS, 0, 0),
            slice(Lane::NvmeWrite, 0, 50 * MS, 64 << 20, 1),
            slice(Lane::NvmeWrite, 0, 100 * MS, 36 << 20, 2),
            slice(Lane::Stall, 90 * MS, 100 * MS, 0, 1),
            level(50 * MS, 64 << 20),
            level(100 * MS, 100 << 20),
        ],
    );
    snapshot.dropped = 12;
    let page = page(&snapshot);
    assert_eq!(
        table_row(&page, "nvme write"),
        ["nvme write", "2", "100 MiB", "100 ms", "0.98 GiB/s", "–", "0 s", "0 s", "75.0 ms"]
    );
    let phase = ["forward 3", "1", "100 ms", "10.0 ms (10.0 %)", "0 B", "0 B", "0 B", "100 MiB"];
    assert_eq!(table_row(&page, "forward 3"), phase);
    assert_eq!(table_row(&page, "nvme used")[..2], ["nvme used", "100 MiB"]);
    assert!(page.contains("10.0 % of the phases"));
    assert!(page.contains("12 older events are not shown"));
}

/// The ring of gauges wraps before that of marks.
#[test]
fn levels_that_are_lost_are_not_recorded() {
    let timeline = Timeline::new(0);
    let [early, late] = ["A early", "B late"].map(|name| timeline.intern(name));
    let phase = |name, from_ns| timeline.slice(Slice::new(Lane::Phase, name, from_ns, now_ns()));
    let began_ns = now_ns();
    timeline.gauge(Gauge::DeviceAwake, 900 * MIB);
    phase(early, began_ns);
    for level in (0..200).chain([0]) {
        timeline.gauge(Gauge::DeviceAwake, level * MIB);
    }
    let began_ns = now_ns();
    timeline.gauge(Gauge::DeviceAwake, 50 * MIB);
    phase(late, began_ns);
    let mut snapshot = timeline.snapshot();
    snapshot.facts.peak_bytes = 900 * MIB;
    let page = page(&snapshot);
    let data = data(&page);
    let peaks = |at: usize| data["totals"]["phases"][at]["peak_bytes"][0].as_u64();
    assert_eq!([peaks(0), peaks(1)], [None, Some(50 * MIB)]);
    assert_eq!(data["peak"]["bytes"], 199 * MIB);
    let from_ns = snapshot.levels_begin_ns() - snapshot.window_ns().0;
    assert!(from_ns > 0);
    assert_eq!(data["levels_from_ns"], from_ns);
    for level in data["levels"].as_array().unwrap() {
        assert_eq!(running(&level["at_ns"])[0], from_ns, "{}", level["title"]);
    }
    assert!(page.contains("Levels of memory are recorded from"));
    assert!(page.contains("The most so far, 900 MiB, was before that."));
    assert_eq!(table_row(&page, "A early")[4], "not recorded");
}

const MIB: u64 = 1 << 20;
const MS: u64 = 1_000_000;

/// A step whose phase B has begun and not ended: its memory ran out.
fn out_of_memory() -> Snapshot {
    let timeline = Timeline::new(64);
    let [a, b, microbatch, gradient, read, wait, weights] = [
        "A: prefix forward",
        "B: suffixes",
        "microbatch",
        "gradient",
        "read",
        "wait for wake",
        "weights",
    ]
    .map(|name| timeline.intern(name));
    let begin = |lane, name, at_ms, value| Event::Instant { lane, name, at_ns: at_ms * MS, value };
    let level = |gauge, tag, at_ms, mib| Event::Gauge {
        gauge,
        tag,
        at_ns: at_ms * MS,
        value_bytes: mib * MIB,
        previous_bytes: 0,
    };
    let none = NameId::OTHER;
    let copy = Slice {
        layer: Some(11),
        asked_ns: 100 * MS,
        queued_ns: 110 * MS,
        bytes: 64 * MIB,
        ..Slice::new(Lane::NvmeRead, read, 130 * MS, 330 * MS)
    };
    let mut snapshot = snapshot(
        &timeline,
        vec![
            Event::Slice(Slice::new(Lane::Phase, a, 0, 100 * MS)),
            level(Gauge::DeviceTagged, weights, 1, 300),
            level(Gauge::DeviceAwake, none, 2, 400),
            begin(Lane::Phase, b, 100, 0),
            Event::Slice(copy),
            Event::Slice(Slice {
                layer: Some(11),
                ..Slice::new(Lane::Stall, wait, 250 * MS, 340 * MS)
            }),
            begin(Lane::Microbatch, microbatch, 350, 2),
            begin(Lane::Layer, gradient, 360, 11),
            level(Gauge::DeviceBoundary, none, 361, 100),
            level(Gauge::DeviceDormant, none, 362, 400),
            level(Gauge::DeviceAwake, none, 400, 1000),
            level(Gauge::DeviceMapped, none, 400, 1024),
        ],
    );
    snapshot.names = timeline.snapshot().names;
    snapshot.facts.reason = "out of memory: 64.0 MiB requested".to_owned();
    snapshot.facts.budget_bytes = 1024 * MIB;
    snapshot.facts.bytes_per_s[Lane::NvmeRead as usize] = 400 * MIB;
    snapshot.facts.blocks_at_ns = 400 * MS;
    snapshot.facts.blocks_total = (12, 1000 * MIB);
    snapshot.facts.blocks = vec![LiveBlock {
        address: 0x7f00_0000_0000,
        bytes: 300 * MIB,
        role: "tagged".to_owned(),
        tag: "weights".to_owned(),
        layer: Some(3),
        stream: 0x7e00,
    }];
    snapshot
}

#[test]
fn the_page_says_what_set_the_peak_and_whose_it_was() {
    let page = page(&out_of_memory());
    let peak = "<b>Peak 0.98 GiB</b> in phase B: suffixes, microbatch 2, layer 11, 400 ms after the first \
                event: saved activations 400 MiB (40.0 %), tag weights 300 MiB (30.0 %), other 200 MiB (20.0 %).";
    let answer = page.find("<ul class=\"answer\">").unwrap();
    assert!(page.contains(peak), "{}", &page[answer..answer + 600]);
    assert!(page.contains("<p class=\"notice reason\">out of memory: 64.0 MiB requested</p>"));
    assert_eq!(table_row(&page, "K and V")[..3], ["K and V", "100 MiB", "10.0 %"]);
    assert_eq!(
        table_row(&page, "tagged"),
        ["tagged", "weights", "3", "0x7e00", "300 MiB", "0x7f0000000000"]
    );
    assert!(page.contains(
        "of 12 blocks that were alive 400 ms after the first event, together 0.98 GiB, 100.0 % of"
    ));
    let data = data(&page);
    assert_eq!(data["peak"]["bytes"], 1000 * MIB);
    assert_eq!(data["peak"]["place"], "phase B: suffixes, microbatch 2, layer 11");
    assert_eq!(data["budget_bytes"], 1024 * MIB);
    let tag =
        data["levels"].as_array().unwrap().iter().find(|level| level["kind"] == "tag").unwrap();
    assert_eq!(
        (&tag["title"], numbers(&tag["bytes"])),
        (&Value::from("tag weights"), vec![0, 300 << 20])
    );
}

#[test]
fn each_wait_has_its_cause_its_bound_and_its_copy() {
    let page = page(&out_of_memory());
    // 64 MiB at 400 MiB/s from 100 ms on are there at 260 ms, 10 ms after compute was due.
    assert!(page.contains("<b>Compute waited 90.0 ms</b>"));
    assert!(page.contains("longest 90.0 ms for layer 11: late read"));
    assert!(page.contains("late read 90.0 ms in 1 wait. A row leads to its copy"));
    let start =
        page.find("data-lane=\"6\" data-start=\"130000000\" data-title=\"L11 read\"").unwrap();
    let row = &page[start..start + page[start..].find("</tr>").unwrap()];
    for cell in [
        "layer 11",
        "90.0 ms",
        "10.0 ms",
        "L11 read (64.0 MiB)",
        "20.0 ms",
        "200 ms",
        "320 MiB/s of 400 MiB/s",
    ] {
        assert!(row.contains(&format!("<td>{cell}</td>")), "{cell} in {row}");
    }
    let data = data(&page);
    let stall = &data["stalls"][0];
    assert_eq!((&stall["cause"], &stall["bound_ns"]), (&"late read".into(), &(10 * MS).into()));
}

#[test]
fn a_hundred_thousand_events_make_a_page_of_a_few_megabytes() {
    const EVENTS: u64 = 100_000;
    const FROM_NS: u64 = 1 << 50;
    let (timeline, names) = named();
    let copy = |i: u64| {
        let lane = if i.is_multiple_of(2) { Lane::NvmeWrite } else { Lane::NvmeRead };
        let start_ns = FROM_NS + i * 10_000;
        let slice = Slice::new(lane, names[0], start_ns, start_ns + 25_000);
        Event::Slice(Slice { bytes: 4 << 20, flow: u64::MAX - i / 2, ..slice })
    };
    let page = page(&snapshot(&timeline, (0..EVENTS).map(copy).collect()));
    assert!(page.len() < 8 << 20, "{} bytes", page.len());
    let data = data(&page);
    let totals = &data["totals"]["lanes"];
    let bytes = |lane: Lane| totals[lane as usize]["bytes"].as_u64().unwrap();
    assert_eq!(bytes(Lane::NvmeWrite) + bytes(Lane::NvmeRead), EVENTS * (4 << 20));
    assert_eq!(data["regions"][1], u64::MAX.to_string(), "ids beyond 2^53 are kept whole");
}

proptest! {
    #[test]
    fn data_and_totals_agree_with_the_events(drawn in proptest::collection::vec(drawn(), 0..120)) {
        let (timeline, names) = named();
        let mut events = events(&drawn, &names);
        // What begins and does not end is drawn until the end of the window.
        events.retain(|event| !matches!(
            event, Event::Instant { lane: Lane::Phase | Lane::Microbatch, .. }
        ));
        let snapshot = snapshot(&timeline, events);
        let data = data(&page(&snapshot));
        let (begin_ns, end_ns) = snapshot.window_ns();
        prop_assert_eq!(data["window_ns"].as_u64().unwrap(), end_ns - begin_ns);
        for lane in Lane::ALL {
            let told = &data["lanes"][lane as usize];
            let totals = &data["totals"]["lanes"][lane as usize];
            let of_lane: Vec<&Event> = snapshot.events.iter()
                .filter(|event| matches!(event, Event::Slice(slice) if slice.lane == lane)).collect();
            let durations = || of_lane.iter().map(|event| event.end_ns() - event.start_ns());
            prop_assert_eq!(&told["title"], lane.title());
            prop_assert_eq!(totals["count"].as_u64().unwrap(), of_lane.len() as u64);
            prop_assert_eq!(totals["total_ns"].as_u64().unwrap(), durations().sum::<u64>());
            prop_assert_eq!(sum(told, "duration_ns"), durations().sum::<u64>());
            prop_assert_eq!(totals["bytes"].as_u64().unwrap(), moved(&data, told));
            let starts = running(&told["start_ns"]);
            prop_assert!(starts.is_sorted());
            for key in ["duration_ns", "size", "name", "region", "row", "layer", "room_ns", "queue_ns"] {
                prop_assert_eq!(column(told, key).len(), starts.len());
            }
            for key in ["room_ns", "queue_ns"] {
                prop_assert_eq!(totals[key].as_u64().unwrap(), sum(told, key));
            }
            prop_assert!(column(told, "row").iter().all(|row| *row < told["rows"].as_u64().unwrap()));
            let names = data["names"].as_array().unwrap().len() as u64;
            prop_assert!(column(told, "name").iter().all(|name| *name < names));
            let regions = data["regions"].as_array().unwrap().len() as u64;
            prop_assert!(column(told, "region").iter().all(|region| *region < regions));
            prop_assert_eq!(told["instants"]["count"].as_u64().unwrap(), numbers(&told["instants"]["value"]).len() as u64);
        }
        let levels = data["levels"].as_array().unwrap();
        for gauge in Gauge::ALL.into_iter().filter(|gauge| *gauge != Gauge::DeviceTagged) {
            let told = levels.iter().find(|level| level["title"] == gauge.title()).unwrap();
            let at_ns = running(&told["at_ns"]);
            prop_assert_eq!(at_ns[0], 0);
            prop_assert!(at_ns.is_sorted());
            let peak = running(&told["bytes"]).into_iter().max().unwrap();
            prop_assert_eq!(data["totals"]["peak_bytes"][gauge as usize].as_u64().unwrap(), peak);
            if gauge == Gauge::DeviceAwake && peak > 0 {
                prop_assert_eq!(data["peak"]["bytes"].as_u64().unwrap(), peak);
            }
        }
    }
}
