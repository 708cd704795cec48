//! `dormouse report` of pages and traces as this release writes them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{Folder, dormouse};
use dormouse_timeline::{Event, Gauge, Lane, Process, Slice, Snapshot, Timeline, html, pftrace};
use serde_json::Value;

fn page(here: &Folder, name: &str, peak_bytes: u64) {
    let timeline = Timeline::new(64);
    for bytes in [peak_bytes / 2, peak_bytes, 0] {
        timeline.gauge(Gauge::DeviceAwake, bytes);
    }
    timeline.instant(Lane::Notice, timeline.intern("</script>"), 1);
    let mut bytes = Vec::new();
    html::write(&timeline.snapshot(), &Process::current("trainer", 3), &mut bytes).unwrap();
    here.put(name, bytes);
}

#[test]
fn a_page_of_this_release_is_read() {
    let here = Folder::new();
    page(&here, "page.html", 3 << 30);
    let output = dormouse(here.path(), &["report", "page.html", "--json"]);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&seen["process"], &seen["rank"]), (&"trainer".into(), &3.into()));
    assert_eq!(seen["peak_bytes"], 3_u64 << 30);
    page(&here, "other.html", 2 << 30);
    let output = dormouse(here.path(), &["diff", "page.html", "other.html"]);
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|line| line.starts_with("peak awake")).unwrap();
    assert!(
        line.contains("3 GiB") && line.contains("2 GiB") && line.ends_with("-33.3 %"),
        "{text}"
    );
}

#[test]
fn a_page_that_is_cut_is_refused_in_one_line() {
    let here = Folder::new();
    page(&here, "page.html", 1 << 30);
    let whole = std::fs::read(here.path().join("page.html")).unwrap();
    let end = "</script>".as_bytes();
    let data_end = whole.windows(end.len()).position(|bytes| bytes == end).unwrap();
    for cut in (0..whole.len()).step_by(whole.len() / 40) {
        here.put("cut.html", &whole[..cut]);
        let output = dormouse(here.path(), &["report", "cut.html"]);
        let said = String::from_utf8(output.stderr).unwrap();
        if output.status.code() == Some(1) {
            assert!(
                said.starts_with("dormouse: cut.html: ") && said.lines().count() == 1,
                "{said}"
            );
        } else {
            // The script behind the data is not needed.
            assert!(cut > data_end && output.status.success(), "{cut} of {data_end}: {said}");
        }
    }
}

/// A step with everything that a report shows: phases, layers, a microbatch, copies that waited, stalls, tags, an open
/// phase, and more copies at once than a lane has tracks.
fn step() -> Snapshot {
    let timeline = Timeline::new(1 << 10);
    let [a, b, forward, read, copy_in, wait, microbatch, weights] =
        ["A", "B", "forward", "read", "copy in", "wait for wake", "microbatch", "weights"]
            .map(|name| timeline.intern(name));
    let start_ns = timeline.now_ns();
    let at = |us: u64| start_ns + us * 1000;
    let of =
        |lane, name, from, to, layer| Slice { layer, ..Slice::new(lane, name, at(from), at(to)) };
    timeline.tag_gauge(weights, 1 << 20);
    for bytes in [1 << 20, 9 << 20, 5 << 20] {
        timeline.gauge(Gauge::DeviceMapped, bytes + 4096);
        timeline.gauge(Gauge::DeviceAwake, bytes);
        timeline.gauge(Gauge::DeviceDormant, bytes / 4);
    }
    timeline.slice(of(Lane::Layer, forward, 10, 20, Some(0)));
    timeline.slice(of(Lane::Layer, forward, 20, 40, Some(1)));
    timeline.slice(of(Lane::Phase, a, 0, 100, None));
    for layer in 0..20 {
        let copy = of(Lane::HostToDevice, copy_in, 100 + u64::from(layer), 200, Some(layer));
        let (asked_ns, queued_ns) = (at(50), at(70));
        timeline.slice(Slice {
            bytes: 1 << 16,
            flow: 7 + u64::from(layer),
            asked_ns,
            queued_ns,
            ..copy
        });
    }
    let file = of(Lane::NvmeRead, read, 150, 290, Some(3));
    timeline.slice(Slice { bytes: 1 << 22, flow: 99, asked_ns: at(140), ..file });
    timeline.slice(of(Lane::Stall, wait, 160, 210, Some(5)));
    timeline.slice(of(Lane::Stall, wait, 220, 300, Some(3)));
    timeline.slice(of(Lane::Stall, wait, 310, 320, None));
    timeline.slice(of(Lane::Microbatch, microbatch, 300, 350, Some(1)));
    timeline.instant(Lane::Notice, timeline.intern("disk full"), 5);
    timeline.tag_gauge(weights, 3 << 20);
    let mut snapshot = timeline.snapshot();
    let begin = |name, us| Event::Instant { lane: Lane::Phase, name, at_ns: at(us), value: 0 };
    snapshot.events.extend([begin(a, 0), begin(b, 300)]);
    snapshot.events.sort_by_key(Event::end_ns);
    snapshot
}

fn put_both(here: &Folder, snapshot: &Snapshot) {
    let process = Process::current("a · rank 7 · pid 1", 3);
    let (mut page, mut trace) = (Vec::new(), Vec::new());
    html::write(snapshot, &process, &mut page).unwrap();
    pftrace::write(snapshot, &process, &mut trace).unwrap();
    here.put("page.html", page);
    here.put("step.pftrace", trace);
}

fn json(here: &Folder, file: &str) -> Value {
    let output = dormouse(here.path(), &["report", file, "--json"]);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_trace_says_what_the_page_of_the_same_timeline_says() {
    let here = Folder::new();
    put_both(&here, &step());
    let (mut of_page, mut of_trace) = (json(&here, "page.html"), json(&here, "step.pftrace"));
    assert_eq!(of_page["waits"].as_array().unwrap().len(), 3);
    assert!(of_page["causes"].as_array().unwrap().len() > 1, "{of_page}");
    assert_eq!(of_page["peak"]["owners"].as_array().unwrap().len(), 3, "{of_page}");
    assert_eq!(of_page["phases"].as_array().unwrap().len(), 2);
    let lacks = [&mut of_page, &mut of_trace].map(|report| report["not_in_file"].take());
    assert_eq!(lacks.map(|lacks| lacks.as_array().unwrap().len()), [0, 2]);
    assert_eq!(of_page, of_trace);
    let output = dormouse(here.path(), &["report", "step.pftrace"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\nnot in a trace: the budget; the rates of links"), "{text}");
    assert!(text.contains("open step.pftrace in https://ui.perfetto.dev"), "{text}");
    let output = dormouse(here.path(), &["diff", "page.html", "step.pftrace"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().skip(1).all(|line| line.ends_with('=')), "{text}");
}

#[test]
fn lost_levels_are_said_by_a_page_and_by_a_trace() {
    let here = Folder::new();
    let mut snapshot = step();
    // The first changes are lost: 1 MiB and what was before.
    let changes = snapshot.events.iter().filter(|event| matches!(event, Event::Gauge { .. }));
    let from_ns = changes.map(Event::end_ns).nth(3).unwrap();
    snapshot
        .events
        .retain(|event| !matches!(event, Event::Gauge { at_ns, .. } if *at_ns < from_ns));
    (snapshot.levels_from_ns, snapshot.dropped) = (from_ns, 3);
    put_both(&here, &snapshot);
    let (mut of_page, mut of_trace) = (json(&here, "page.html"), json(&here, "step.pftrace"));
    assert!(of_page["levels_from_s"].as_f64().unwrap() > 0.0);
    for report in [&mut of_page, &mut of_trace] {
        (report["not_in_file"], report["dropped"]) = (Value::Null, Value::Null);
    }
    assert_eq!(of_page, of_trace);
    let output = dormouse(here.path(), &["report", "page.html"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\nlevels and peaks are recorded from "), "{text}");
}

#[test]
fn a_trace_with_lost_events_says_so() {
    let here = Folder::new();
    put_both(&here, &Snapshot { dropped: 5, ..step() });
    let report = json(&here, "step.pftrace");
    assert_eq!(report["dropped"], 0);
    assert_eq!(report["not_in_file"][2], "how many older events are lost");
}

#[test]
fn a_trace_that_is_cut_is_refused_in_one_line_at_every_length() {
    let here = Folder::new();
    put_both(&here, &step());
    let whole = std::fs::read(here.path().join("step.pftrace")).unwrap();
    // Every packet's end in the last half, where a reader could take the rest for whole, and places between.
    let mut ends = vec![0];
    while let Some(packet) = whole.get(ends[ends.len() - 1]..).filter(|rest| !rest.is_empty()) {
        let (length, bytes) = match packet[1] {
            low if low < 0x80 => (usize::from(low), 2),
            low => (usize::from(low & 0x7f) | usize::from(packet[2]) << 7, 3),
        };
        ends.push(ends[ends.len() - 1] + bytes + length);
    }
    assert_eq!(ends.pop(), Some(whole.len()));
    let late = ends.len() / 2;
    let cuts = ends[late..].iter().step_by(7).copied().chain(ends.last().map(|end| end + 1));
    for cut in cuts.chain([1, 2, 100, whole.len() - 1]).chain(ends.last().copied()) {
        here.put("cut.pftrace", &whole[..cut]);
        refused(&here, "cut.pftrace", "");
    }
}

#[track_caller]
fn refused(here: &Folder, file: &str, reason: &str) {
    let output = dormouse(here.path(), &["report", file]);
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.starts_with(&format!("dormouse: {file}: ")) && said.contains(reason), "{said}");
}

#[test]
fn traces_of_other_programs_and_damage_are_refused() {
    let here = Folder::new();
    // A process and a thread, as other programs describe them.
    let track = |name: &str, process: bool| {
        let mut body = vec![0x08, 0x05, 0x12, name.len() as u8];
        body.extend_from_slice(name.as_bytes());
        body.extend_from_slice(if process { &[0x1a, 0x02, 0x08, 0x07] } else { &[] });
        let mut packet = vec![0xe2, 0x03, body.len() as u8];
        packet.extend(body);
        [&[0x0a, packet.len() as u8][..], &packet].concat()
    };
    here.put("other.pftrace", track("chrome", true));
    refused(
        &here,
        "other.pftrace",
        "a trace of another program (chrome); accepted: the .html page or the .pftrace",
    );
    here.put("thread.pftrace", track("thread", false));
    refused(&here, "thread.pftrace", "a trace of another program");
    here.put("named.pftrace", track("x · rank 1 · pid 2", true));
    refused(&here, "named.pftrace", "a trace of another program");
    here.put("kineto.json", "{\"traceEvents\": []}");
    refused(&here, "kineto.json", "no data of dormouse");
    put_both(&here, &step());
    let whole = std::fs::read(here.path().join("step.pftrace")).unwrap();
    let mut refusals = 0;
    for at in (0..whole.len()).step_by(whole.len() / 60) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x55;
        here.put("damaged.pftrace", damaged);
        let output = dormouse(here.path(), &["report", "damaged.pftrace"]);
        let said = String::from_utf8(output.stderr).unwrap();
        let is_refused = output.status.code() == Some(1) && said.lines().count() == 1;
        assert!(is_refused || output.status.success(), "byte {at}: {:?} {said}", output.status);
        refusals += u32::from(is_refused);
    }
    assert!(refusals > 20, "{refusals} of 60 were seen");
}
