//! House rules that a reader relies on: where unsafe may stand, how long a file may grow.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

/// Places where unsafe code may stand (docs/design.md §10); everything else forbids it.
const UNSAFE_ROOMS: &[&str] = &[
    "cli/src/doctor/gpu.rs", // copies over the link
    "cli/src/library.rs",    // a C library
    "device/src/cuda/",
    "device/src/host/",
    "device/src/page_states.rs", // a mapping read as words
    "device/src/pinned.rs",
    "device/src/priority.rs", // memory freed by its owner
    "device/src/signals.rs",  // the mask of a thread
    "device/src/sync.rs",     // a futex word (decision 0014)
    "timeline/src/clock.rs",
    "timeline/src/live/file.rs", // a mapping read as words
    "timeline/src/processor.rs", // the time-stamp counter
    "timeline/src/ring",
    "kernels/src/",
    "offload/src/",
    "storage/src/",
    "offload/examples/",  // a benchmark: memory shared with the program beside it
    "storage/examples/",  // a benchmark: memory that I/O fills
    "schedule/examples/", // a benchmark: an allocator that counts
    "ffi/",
];

/// Hard limit of a file's length; tables and tests apart.
const LINES_MAX: usize = 700;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Rust sources of the rooms, as paths relative to the root.
fn sources() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let rooms = [
        "timeline",
        "device",
        "alloc",
        "kernels",
        "residency",
        "offload",
        "storage",
        "schedule",
        "parallel",
        "cli",
        "ffi",
        "tests",
    ];
    let mut folders: Vec<PathBuf> = rooms.iter().map(|room| root().join(room)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if !path.ends_with("target") {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.push(path.strip_prefix(root()).unwrap().to_path_buf());
            }
        }
    }
    assert!(found.len() > 20, "only {} sources found: the walk is broken", found.len());
    found
}

fn is_test(path: &Path) -> bool {
    path.components().any(|c| matches!(c.as_os_str().to_str(), Some("tests" | "testing")))
        || path.file_name().is_some_and(|n| n.to_string_lossy().contains("test"))
}

/// Whether a line of code (comments apart) uses the keyword.
fn uses_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern", "unsafe("]
        .iter()
        .any(|form| code.contains(form))
}

#[test]
fn unsafe_stands_only_in_the_rims() {
    for path in sources() {
        let shown = path.to_string_lossy().replace('\\', "/");
        if is_test(&path) || UNSAFE_ROOMS.iter().any(|room| shown.starts_with(room)) {
            continue;
        }
        let text = fs::read_to_string(root().join(&path)).unwrap();
        for (number, line) in text.lines().enumerate() {
            let declares =
                shown == "device/src/lib.rs" && line.trim_start().starts_with("unsafe fn");
            assert!(
                declares || !uses_unsafe(line),
                "{shown}:{} uses unsafe; allowed only in {UNSAFE_ROOMS:?}",
                number + 1
            );
        }
    }
}

#[test]
fn files_stay_readable() {
    for path in sources().iter().filter(|path| !is_test(path)) {
        let lines = fs::read_to_string(root().join(path)).unwrap().lines().count();
        assert!(
            lines <= LINES_MAX,
            "{} has {lines} lines; the limit is {LINES_MAX}",
            path.display()
        );
    }
}
