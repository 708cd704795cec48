//! `dormouse doctor` without a library: what it asks of Python, the disk and the system.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use common::Folder;
use serde_json::Value;

/// A file of this name that a shell runs.
fn script(here: &Folder, name: &str, text: &str) -> String {
    let path = here.put(name, format!("#!/bin/sh\n{text}\n"));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    path.to_str().unwrap().to_owned()
}

/// The exit status and the checks, with these variables.
fn doctor(here: &Folder, python: &str, variables: &[(&str, &str)]) -> (Option<i32>, Vec<Value>) {
    let mut command = common::program(here.path());
    command
        .args(["doctor", "--json", "--python", python])
        .env("DORMOUSE_LIB", "/nowhere/libdormouse.so");
    command.env_remove("DORMOUSE_NVME_DIR").envs(variables.iter().copied());
    let output = command.output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    (output.status.code(), serde_json::from_slice(&output.stdout).unwrap())
}

/// Verdict and what was seen.
fn check<'a>(checks: &'a [Value], what: &str) -> (&'a str, &'a str) {
    let check = checks.iter().find(|check| check["what"] == what).unwrap();
    let [verdict, seen] = ["verdict", "seen"].map(|field| check[field].as_str().unwrap());
    assert_eq!(verdict == "ok", check["advice"] == "", "{check}");
    (verdict, seen)
}

#[test]
fn a_library_that_is_not_there_is_broken() {
    let here = Folder::new();
    let (code, checks) = doctor(&here, "/nowhere/python", &[]);
    assert_eq!(code, Some(1));
    let (verdict, seen) = check(&checks, "library");
    assert!(verdict == "broken" && seen.contains("/nowhere/libdormouse.so"), "{seen}");
}

#[test]
fn python_is_asked_and_what_it_says_is_judged() {
    let here = Folder::new();
    let answer = |torch: &str| {
        format!(
            "echo '{{\"python\": \"3.12.1\", \"executable\": \"/p\", \"torch\": {torch}, \
             \"dormouse\": \"9.9\", \"package\": \"/p/dormouse\"}}'"
        )
    };
    let of = |torch: &str| {
        let python = script(&here, "python", &answer(torch));
        let (_, checks) = doctor(&here, &python, &[]);
        assert_eq!(check(&checks, "python"), ("ok", "3.12.1 at /p"));
        assert_eq!(check(&checks, "dormouse package").0, "advice", "another version");
        check(&checks, "torch").0.to_owned()
    };
    assert_eq!(of("\"2.15.0+cpu\""), "ok");
    assert_eq!(of("\"2.8.0\""), "broken");
    assert_eq!(of("null"), "advice");
    for text in ["exit 3", "echo hello", "echo '{}'"] {
        let python = script(&here, "python", text);
        let (_, checks) = doctor(&here, &python, &[]);
        assert_eq!(check(&checks, "python").0, "broken", "{text}");
    }
    assert_eq!(check(&doctor(&here, "/nowhere/python", &[]).1, "python").0, "broken");
}

#[test]
fn the_disk_is_used_and_measured() {
    let here = Folder::new();
    let of = |dir: &str| doctor(&here, "/bin/true", &[("DORMOUSE_NVME_DIR", dir)]).1;
    let checks = of(here.path().to_str().unwrap());
    let (verdict, seen) = check(&checks, "disk");
    assert!(
        verdict != "broken" && seen.contains("writes ") && seen.contains("room for 64 MiB"),
        "{seen}"
    );
    assert!(!seen.contains("writes 0 B"), "{seen}");
    assert_eq!(fs::read_dir(here.path()).unwrap().count(), 0, "no file is left");
    assert_eq!(check(&doctor(&here, "/bin/true", &[]).1, "disk").0, "advice");
    let checks = of("/dev/shm");
    let (verdict, seen) = check(&checks, "disk");
    assert!(verdict == "broken" && seen.contains("which is memory"), "{seen}");
    assert_eq!(check(&of("/nowhere"), "disk").0, "broken");
}

#[test]
fn a_limit_of_addresses_below_the_reservation_is_broken() {
    let here = Folder::new();
    let program = Path::new(env!("CARGO_BIN_EXE_dormouse"));
    let line =
        format!("ulimit -v 104857600; exec {} doctor --json --python /bin/true", program.display());
    let of = |reserve: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", &line]).current_dir(here.path());
        command.env("DORMOUSE_LIB", "/nowhere").env("DORMOUSE_HEAP_RESERVE_BYTES", reserve);
        let checks: Vec<Value> = serde_json::from_slice(&command.output().unwrap().stdout).unwrap();
        check(&checks, "address space").0.to_owned()
    };
    assert_eq!(of("274877906944"), "broken");
    assert_eq!(of("1073741824"), "ok");
}
