//! The arrows between rooms run one way (docs/design.md §2).
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

/// Each room and the rooms it may import. A room missing here fails the test, and so does an
/// arrow missing here.
const ALLOWED: &[(&str, &[&str])] = &[
    ("dormouse-timeline", &[]),
    ("dormouse-device", &["dormouse-timeline"]),
    ("dormouse-alloc", &["dormouse-device", "dormouse-timeline"]),
    ("dormouse-kernels", &["dormouse-device"]),
    ("dormouse-residency", &[]),
    (
        "dormouse-offload",
        &[
            "dormouse-alloc",
            "dormouse-device",
            "dormouse-kernels",
            "dormouse-residency",
            "dormouse-timeline",
        ],
    ),
    ("dormouse-schedule", &["dormouse-residency"]),
    ("dormouse-parallel", &["dormouse-schedule"]),
    ("dormouse-cli", &["dormouse-parallel", "dormouse-schedule"]),
    (
        "dormouse",
        &[
            "dormouse-alloc",
            "dormouse-device",
            "dormouse-kernels",
            "dormouse-offload",
            "dormouse-parallel",
            "dormouse-schedule",
            "dormouse-timeline",
        ],
    ),
    // Two cdylibs carry two copies of Rust statics: the shim may link none of our crates.
    ("dormouse-preload", &[]),
    ("dormouse-tests", &[]),
    // Tools of tests: the stand-in driver, its control, and what runs where there is a GPU.
    ("dormouse-standin", &[]),
    ("dormouse-standin-cuda", &["dormouse-device"]),
    (
        "dormouse-gpu-check",
        &[
            "dormouse-alloc",
            "dormouse-device",
            "dormouse-kernels",
            "dormouse-offload",
            "dormouse-timeline",
        ],
    ),
];

/// Normal and build dependencies of each workspace member that are members themselves.
fn arrows() -> BTreeMap<String, BTreeSet<String>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let members: BTreeSet<&str> = packages.iter().map(|p| p["name"].as_str().unwrap()).collect();
    packages
        .iter()
        .map(|package| {
            let imports = package["dependencies"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|d| d["kind"].as_str() != Some("dev"))
                .map(|d| d["name"].as_str().unwrap())
                .filter(|name| members.contains(name))
                .map(str::to_owned)
                .collect();
            (package["name"].as_str().unwrap().to_owned(), imports)
        })
        .collect()
}

#[test]
fn every_room_is_known_and_no_arrow_runs_back() {
    let allowed: BTreeMap<&str, BTreeSet<&str>> =
        ALLOWED.iter().map(|(room, imports)| (*room, imports.iter().copied().collect())).collect();
    let arrows = arrows();
    let rooms: BTreeSet<&str> = arrows.keys().map(String::as_str).collect();
    assert_eq!(rooms, allowed.keys().copied().collect(), "rooms named here and in the workspace");
    for (room, imports) in &arrows {
        for import in imports {
            assert!(
                allowed[room.as_str()].contains(import.as_str()),
                "{room} imports {import}; it may import {:?}",
                allowed[room.as_str()]
            );
        }
    }
}

#[test]
fn the_allowed_arrows_themselves_hold_no_cycle() {
    let mut done: BTreeSet<&str> = BTreeSet::new();
    while done.len() < ALLOWED.len() {
        let ready: Vec<&str> = ALLOWED
            .iter()
            .filter(|(room, imports)| {
                !done.contains(room) && imports.iter().all(|i| done.contains(i))
            })
            .map(|(room, _)| *room)
            .collect();
        assert!(!ready.is_empty(), "a cycle among the rooms not in {done:?}");
        done.extend(ready);
    }
}
