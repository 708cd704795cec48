//! House rules that a reader relies on: where unsafe may stand, how long a file may grow.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

mod members;

use members::{packages, root};

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

/// The folders of the workspace members, as paths relative to the root.
fn rooms() -> Vec<PathBuf> {
    let manifests = packages();
    let folder = |package: &serde_json::Value| {
        let manifest = Path::new(package["manifest_path"].as_str().unwrap());
        manifest.parent().unwrap().strip_prefix(root()).unwrap().to_path_buf()
    };
    manifests.iter().map(folder).collect()
}

/// Rust sources of the rooms, as paths relative to the root.
fn sources() -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    // A room may be in another one.
    let mut folders: Vec<PathBuf> = rooms().iter().map(|room| root().join(room)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                if !path.ends_with("target") {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|e| e == "rs") {
                found.insert(path.strip_prefix(root()).unwrap().to_path_buf());
            }
        }
    }
    for room in rooms() {
        let has_sources = found.iter().any(|path| path.starts_with(&room));
        assert!(has_sources, "no sources in {}: the walk is broken", room.display());
    }
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

/// Of a room without unsafe code the compiler says so; tests apart.
#[test]
fn rooms_without_unsafe_code_forbid_it() {
    let mut forbidding = 0;
    for room in rooms().iter().filter(|room| !is_test(room)) {
        let source = room.join("src");
        let shown = source.to_string_lossy().replace('\\', "/") + "/";
        if UNSAFE_ROOMS.iter().any(|part| part.starts_with(&shown) || shown.starts_with(part)) {
            continue;
        }
        let text = fs::read_to_string(root().join(&source).join("lib.rs")).unwrap();
        let forbids = text.lines().any(|line| line == "#![forbid(unsafe_code)]");
        assert!(forbids, "{shown}lib.rs has no #![forbid(unsafe_code)]");
        forbidding += 1;
    }
    assert!(forbidding > 3, "only {forbidding} rooms found: the walk is broken");
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
