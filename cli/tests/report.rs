//! `dormouse report` of a page as this release writes it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::{Folder, dormouse};
use dormouse_timeline::{Gauge, Lane, Process, Timeline, html};
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
