//! Reads the page's data back with another parser, and checks its markup.

use crate::common::{NAMES, drawn, events, named, process, snapshot};
use dormouse_timeline::{Event, Gauge, Lane, Snapshot, Timeline, html};
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

fn column(value: &Value, key: &str) -> Vec<u64> {
    value[key].as_array().unwrap().iter().map(|number| number.as_u64().unwrap()).collect()
}

fn sum(value: &Value, key: &str) -> u64 {
    column(value, key).iter().sum()
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
    assert_eq!(data["gauges"].as_array().unwrap().len(), Gauge::ALL.len());
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
    let phase = |(at, name): (usize, &dormouse_timeline::NameId)| Event::Slice {
        lane: Lane::Phase,
        name: *name,
        start_ns: at as u64 * 10,
        end_ns: at as u64 * 10 + 5,
        bytes: 0,
        flow: 0,
    };
    let page = page(&snapshot(&timeline, names.iter().enumerate().map(phase).collect()));
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
    let slice = |lane, start_ns, end_ns, bytes, flow| Event::Slice {
        lane,
        name,
        start_ns,
        end_ns,
        bytes,
        flow,
    };
    let level = |at_ns, value_bytes| Event::Gauge {
        gauge: Gauge::NvmeUsed,
        at_ns,
        value_bytes,
        previous_bytes: 0,
    };
    const MS: u64 = 1_000_000;
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
        ["nvme write", "2", "100 MiB", "100 ms", "0.98 GiB/s"]
    );
    let phase = ["forward 3", "1", "100 ms", "10.0 ms (10.0 %)", "0 B", "0 B", "0 B", "100 MiB"];
    assert_eq!(table_row(&page, "forward 3"), phase);
    assert_eq!(table_row(&page, "nvme used")[..2], ["nvme used", "100 MiB"]);
    assert!(page.contains("10.0 % of the phases"));
    assert!(page.contains("12 older events are not shown"));
}

#[test]
fn a_hundred_thousand_events_make_a_page_of_a_few_megabytes() {
    const EVENTS: u64 = 100_000;
    const FROM_NS: u64 = 1 << 50;
    let (timeline, names) = named();
    let copy = |i: u64| Event::Slice {
        lane: if i.is_multiple_of(2) { Lane::NvmeWrite } else { Lane::NvmeRead },
        name: names[0],
        start_ns: FROM_NS + i * 10_000,
        end_ns: FROM_NS + i * 10_000 + 25_000,
        bytes: 4 << 20,
        flow: u64::MAX - i / 2,
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
        let snapshot = snapshot(&timeline, events(&drawn, &names));
        let data = data(&page(&snapshot));
        let (begin_ns, end_ns) = snapshot.window_ns();
        prop_assert_eq!(data["window_ns"].as_u64().unwrap(), end_ns - begin_ns);
        for lane in Lane::ALL {
            let told = &data["lanes"][lane as usize];
            let totals = &data["totals"]["lanes"][lane as usize];
            let of_lane: Vec<&Event> = snapshot.events.iter()
                .filter(|event| matches!(event, Event::Slice { lane: its, .. } if *its == lane)).collect();
            let durations = || of_lane.iter().map(|event| event.end_ns() - event.start_ns());
            prop_assert_eq!(&told["title"], lane.title());
            prop_assert_eq!(totals["count"].as_u64().unwrap(), of_lane.len() as u64);
            prop_assert_eq!(totals["total_ns"].as_u64().unwrap(), durations().sum::<u64>());
            prop_assert_eq!(sum(told, "duration_ns"), durations().sum::<u64>());
            prop_assert_eq!(totals["bytes"].as_u64().unwrap(), sum(told, "bytes"));
            let starts = column(told, "start_ns");
            prop_assert!(starts.is_sorted());
            for key in ["duration_ns", "bytes", "name", "region", "row"] {
                prop_assert_eq!(column(told, key).len(), starts.len());
            }
            prop_assert!(column(told, "row").iter().all(|row| *row < told["rows"].as_u64().unwrap()));
            let names = data["names"].as_array().unwrap().len() as u64;
            prop_assert!(column(told, "name").iter().all(|name| *name < names));
            let regions = data["regions"].as_array().unwrap().len() as u64;
            prop_assert!(column(told, "region").iter().all(|region| *region < regions));
            prop_assert_eq!(told["instants"]["count"].as_u64().unwrap(), column(&told["instants"], "value").len() as u64);
        }
        for gauge in Gauge::ALL {
            let told = &data["gauges"][gauge as usize];
            let at_ns = column(told, "at_ns");
            prop_assert_eq!(at_ns[0], 0);
            prop_assert!(at_ns.is_sorted());
            let peak = column(told, "bytes").into_iter().max().unwrap();
            prop_assert_eq!(data["totals"]["peak_bytes"][gauge as usize].as_u64().unwrap(), peak);
        }
    }
}
