//! `dormouse replay` of small traces.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::fs::File;
use std::io::{Read as _, pipe};
use std::path::Path;
use std::process::Stdio;

use common::{Folder, dormouse, program};
use lzma_rust2::XzReader;
use serde_json::Value;

/// 1 MiB, 4 MiB freed again, 1 MiB.
const TRACE: &str = "Thread,Time,Action,Pointer,Size,Stream
0,0,allocate,0x1,1048576,0
0,1,allocate,0x2,4194304,0
0,2,free,0x2,4194304,0
0,3,allocate,0x3,1048576,0
";

/// The exit status and the figures.
fn replay(here: &Folder, arguments: &[&str]) -> (Option<i32>, Value) {
    let all: Vec<&str> =
        ["replay", "--json"].into_iter().chain(arguments.iter().copied()).collect();
    let output = dormouse(here.path(), &all);
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap())
}

#[test]
fn peaks_are_those_of_the_trace_in_pages() {
    let here = Folder::new();
    here.put("trace.csv", TRACE);
    let (code, seen) = replay(&here, &["trace.csv", "--page-kib=4"]);
    assert_eq!((code, &seen["calls"], &seen["failures"]), (Some(0), &4.into(), &0.into()));
    assert_eq!(seen["requested_peak_bytes"], 5 << 20);
    assert_eq!(seen["mapped_peak_bytes"], 5 << 20, "whole pages");
    let (_, seen) = replay(&here, &["trace.csv"]);
    assert_eq!(seen["mapped_peak_bytes"], 6 << 20, "pages of 2 MiB");
}

#[test]
fn an_allocation_beyond_the_budget_fails_and_the_rest_goes_on() {
    let here = Folder::new();
    here.put("trace.csv", TRACE);
    let (code, seen) = replay(&here, &["trace.csv", "--page-kib=4", "--budget-mib=2"]);
    assert_eq!((code, &seen["failures"]), (Some(1), &1.into()));
    assert_eq!(seen["mapped_peak_bytes"], 2 << 20);
}

/// A script that pipes the table into `head` still learns that allocations failed.
#[test]
fn a_closed_pipe_does_not_hide_failures() {
    let here = Folder::new();
    here.put("trace.csv", TRACE);
    for (budget, code) in [("--budget-mib=2", 1), ("--budget-mib=64", 0)] {
        let (reader, writer) = pipe().unwrap();
        drop(reader);
        let mut child = program(here.path());
        child.args(["replay", "trace.csv", "--page-kib=4", budget]);
        let output = child.stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{budget}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{budget}");
    }
}

#[test]
fn compressed_traces_and_standard_input_are_the_same() {
    let here = Folder::new();
    let traces = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/traces");
    let trace = traces.join("stream_rotation.csv.xz");
    let (code, from_xz) = replay(&here, &[trace.to_str().unwrap()]);
    assert_eq!((code, &from_xz["calls"]), (Some(0), &2689.into()));
    // docs/traces.md: 6,146.2 MiB.
    assert_eq!(from_xz["requested_peak_bytes"].as_u64().unwrap() >> 20, 6146);
    let mut text = Vec::new();
    XzReader::new(File::open(&trace).unwrap(), true).read_to_end(&mut text).unwrap();
    let input = File::open(here.put("trace.csv", &text)).unwrap();
    let output =
        program(here.path()).args(["replay", "-", "--json"]).stdin(input).output().unwrap();
    let from_input: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(from_input["mapped_peak_bytes"], from_xz["mapped_peak_bytes"]);
}
