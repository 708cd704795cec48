//! `dormouse merge`: the archive, and the times in it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;

use common::{Folder, dormouse};
use dormouse_timeline::{Lane, Process, Timeline, pftrace};
use serde_json::{Value, json};

const NS_PER_S: i128 = 1_000_000_000;

/// A dump of one event. Returns its Unix time.
fn dump(here: &Folder) -> i128 {
    let timeline = Timeline::new(64);
    timeline.instant(Lane::Phase, timeline.intern("A"), 0);
    let snapshot = timeline.snapshot();
    let mut bytes = Vec::new();
    pftrace::write(&snapshot, &Process::current("trainer", 0), &mut bytes).unwrap();
    here.put("ours.pftrace", bytes);
    snapshot.taken.unix_ns(snapshot.events[0].end_ns()).into()
}

fn kineto(base_ns: i128, at_unix_ns: i128) -> String {
    let ts = (at_unix_ns - base_ns) as f64 / 1000.0;
    json!({"baseTimeNanoseconds": base_ns as u64, "traceEvents": [
        {"ph": "M", "name": "process_name", "ts": 0},
        {"ph": "X", "name": "mm", "ts": ts, "dur": 10.0},
    ]})
    .to_string()
}

fn merged(here: &Folder, files: &[&str]) -> (Option<i32>, Value) {
    let all = [&["merge", "-o", "out.zip", "--json"], files].concat();
    let output = dormouse(here.path(), &all);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap())
}

fn entry(here: &Folder, name: &str) -> Vec<u8> {
    let mut archive =
        zip::ZipArchive::new(File::open(here.path().join("out.zip")).unwrap()).unwrap();
    let mut bytes = Vec::new();
    archive.by_name(name).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn an_archive_does_not_replace_a_trace() {
    let here = Folder::new();
    dump(&here);
    std::os::unix::fs::symlink("ours.pftrace", here.path().join("link")).unwrap();
    let before = std::fs::read(here.path().join("ours.pftrace")).unwrap();
    for out in ["ours.pftrace", "./ours.pftrace", "link"] {
        let output = dormouse(here.path(), &["merge", "ours.pftrace", "-o", out]);
        let said = String::from_utf8(output.stderr).unwrap();
        let wanted =
            format!("dormouse: --out {out} is the trace ours.pftrace; accepted: another file\n");
        assert_eq!((output.status.code(), said), (Some(1), wanted));
    }
    assert_eq!(std::fs::read(here.path().join("ours.pftrace")).unwrap(), before);
}

/// A path is bytes, JSON is Unicode.
#[test]
fn names_that_are_no_unicode_are_shown() {
    let here = Folder::new();
    dump(&here);
    let name = OsStr::from_bytes(b"ours-\xff.pftrace");
    std::fs::rename(here.path().join("ours.pftrace"), here.path().join(name)).unwrap();
    let out = OsStr::from_bytes(b"out-\xfe.zip");
    let words = ["merge", "--json", "-o"].map(OsStr::new);
    let output = dormouse(here.path(), &[&words[..], &[out, name]].concat());
    assert_eq!((output.status.code(), &output.stderr[..]), (Some(0), &b""[..]));
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(seen["out"], "out-\u{fffd}.zip");
    assert_eq!(seen["traces"][0]["file"], "ours-\u{fffd}.pftrace");
    assert!(here.path().join(out).is_file());
}

#[test]
fn both_traces_have_the_same_unix_time() {
    let here = Folder::new();
    let end_ns = dump(&here);
    // Kineto's base is months before the events.
    let base_ns = end_ns - 90 * 86_400 * NS_PER_S;
    let text = kineto(base_ns, end_ns);
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    here.put("torch.json.gz", gzip.finish().unwrap());
    let (code, seen) = merged(&here, &["ours.pftrace", "torch.json.gz"]);
    assert_eq!((code, &seen["overlap"]), (Some(0), &true.into()), "{seen}");
    let time = |at: usize, which: &str| i128::from(seen["traces"][at][which].as_u64().unwrap());
    // The clocks are read one after the other, and JSON numbers of microseconds have 53 bits.
    assert!((time(0, "last_unix_ns") - end_ns).abs() < 1_000_000, "{seen}");
    assert!((time(1, "first_unix_ns") - end_ns).abs() < 2_000, "{seen}");
    assert!((time(1, "last_unix_ns") - end_ns - 10_000).abs() < 2_000, "{seen}");

    let manifest: Value = serde_json::from_slice(&entry(&here, "perfetto_manifest.json")).unwrap();
    let wanted = json!({"perfetto_manifest": {
        "version": 1,
        "trace_time": {"clock": "REALTIME"},
        "files": [
            {"path": "0-ours.pftrace"},
            {"path": "1-torch.json", "clocks": {
                "sync_to": {"file": "0-ours.pftrace", "clock": "REALTIME"},
                "offset_ns": base_ns as u64,
            }},
        ],
    }});
    assert_eq!(manifest, wanted);
    assert_eq!(entry(&here, "1-torch.json"), text.as_bytes());
    assert_eq!(
        entry(&here, "0-ours.pftrace"),
        std::fs::read(here.path().join("ours.pftrace")).unwrap()
    );
    assert_eq!(std::fs::read_dir(here.path()).unwrap().count(), 3, "no other file is left");
}

#[test]
fn traces_of_other_times_are_merged_and_reported() {
    let here = Folder::new();
    let end_ns = dump(&here);
    here.put("torch.json", kineto(end_ns - NS_PER_S, end_ns - NS_PER_S / 2));
    let (code, seen) = merged(&here, &["torch.json", "ours.pftrace"]);
    assert_eq!((code, &seen["overlap"]), (Some(1), &false.into()));
}

#[test]
fn a_dump_that_is_cut_is_refused_and_nothing_is_written() {
    let here = Folder::new();
    dump(&here);
    let whole = std::fs::read(here.path().join("ours.pftrace")).unwrap();
    // Also between two packets: before the last, the second clock snapshot.
    for cut in (1..whole.len()).step_by(7).chain(whole.len() - 90..whole.len()) {
        here.put("cut.pftrace", &whole[..cut]);
        let output = dormouse(here.path(), &["merge", "cut.pftrace", "-o", "out.zip"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{cut}: {said}");
        assert!(said.starts_with("dormouse: cut.pftrace: ") && said.lines().count() == 1, "{said}");
        assert!(!here.path().join("out.zip").exists());
    }
}

#[test]
fn the_archive_is_not_written_over_a_trace_that_cannot_be_read() {
    let here = Folder::new();
    dump(&here);
    here.put("out.zip", "kept");
    let output = dormouse(here.path(), &["merge", "ours.pftrace", "absent.json", "-o", "out.zip"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(std::fs::read(here.path().join("out.zip")).unwrap(), b"kept");
    let output = dormouse(here.path(), &["merge", "ours.pftrace", "-o", "no/out.zip"]);
    assert_eq!(output.status.code(), Some(1));
}
