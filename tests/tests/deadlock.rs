//! Deadlock-free by rule: every cell of `tests/deadlock/matrix.txt` is somebody's to run.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Who runs cells, and the file that does.
const SUITES: &[(&str, &str)] = &[
    ("engine-host", "offload/src/engine/tests/both/deadlock/mod.rs"),
    ("engine-cuda", "offload/src/engine/tests/both/deadlock/mod.rs"),
    ("python", "python/tests/test_deadlock.py"),
    ("python-gpu", "python/tests_gpu/test_deadlock.py"),
];

/// The words after `key:`, one line's.
fn words<'a>(matrix: &'a str, key: &str) -> Vec<&'a str> {
    let lines = matrix.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let [line] = lines.collect::<Vec<_>>()[..] else { panic!("not one line {key:?}") };
    line.split_whitespace().collect()
}

#[test]
fn every_interface_is_run_with_every_caller() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let matrix = fs::read_to_string(root.join("tests/deadlock/matrix.txt")).unwrap();
    let mut run = BTreeSet::new();
    for (suite, file) in SUITES {
        let source = fs::read_to_string(root.join(file)).unwrap();
        assert!(source.contains(&format!("\"{suite}\"")), "{file} does not run {suite}");
        let cells = words(&matrix, &format!("run {suite}"));
        let mut halves = cells.split(|&word| word == "/");
        let (interfaces, callers) = (halves.next().unwrap(), halves.next().unwrap());
        for interface in interfaces {
            run.extend(callers.iter().map(|caller| (*interface, *caller)));
        }
    }
    let mut all = BTreeSet::new();
    for interface in words(&matrix, "interface") {
        all.extend(words(&matrix, "caller").into_iter().map(|caller| (interface, caller)));
    }
    assert_eq!(run, all);
}
