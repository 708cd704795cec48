//! Progress: drawn on a terminal where a command takes long, and nowhere else.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use common::{Folder, program};

/// Looks for progress, a tenth of a second apart.
const LOOKS_MAX: u32 = 600;
const LINE: &[u8] = b"{\"ids\": [1, 2, 3]}\n";

fn fifo(here: &Folder, name: &str) -> PathBuf {
    let path = here.path().join(name);
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    path
}

/// Waits until a file has some text.
fn appears(path: &Path, text: &str) -> bool {
    (0..LOOKS_MAX).any(|_| {
        thread::sleep(Duration::from_millis(100));
        fs::read(path).is_ok_and(|seen| String::from_utf8_lossy(&seen).contains(text))
    })
}

/// Inputs that do not end hold up a command in a pipe and one with `--json`, both begun first, and one on a
/// terminal, which `script` makes.
#[test]
fn progress_is_drawn_on_a_terminal_alone() {
    let here = Folder::new();
    let [piped, json, shown] = ["piped", "json", "shown"].map(|name| fifo(&here, name));
    let held = |path: &Path| {
        let mut input = File::options().write(true).open(path).unwrap();
        input.write_all(LINE).unwrap();
        input
    };
    let on_terminal = |command: String, seen: &Path| {
        let quoted = format!("stty rows 30 cols 90; {} {command}", env!("CARGO_BIN_EXE_dormouse"));
        Command::new("script")
            .args(["-qfec", &quoted])
            .arg(seen)
            .current_dir(here.path())
            .env("TERM", "xterm")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    };
    let in_pipe = program(here.path())
        .args(["plan", "piped"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut inputs = vec![held(&piped)];
    let [seen, seen_json] = ["typescript", "typescript-json"].map(|name| here.path().join(name));
    let mut children = vec![on_terminal("plan --json json".to_owned(), &seen_json)];
    inputs.push(held(&json));
    children.push(on_terminal("plan shown".to_owned(), &seen));
    inputs.push(held(&shown));
    assert!(appears(&seen, "reading"), "{}", fs::read_to_string(&seen).unwrap());
    drop(inputs);
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let output = in_pipe.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "nothing is drawn into a pipe");
    assert!(String::from_utf8_lossy(&output.stdout).starts_with("Batch\n"));
    let text = |path: &Path| String::from_utf8_lossy(&fs::read(path).unwrap()).into_owned();
    assert!(!text(&seen_json).contains("reading"), "{}", text(&seen_json));
    let last = text(&seen);
    let (_, after) = last.rsplit_once("reading").unwrap();
    assert!(after.contains("Batch"), "the report follows what was drawn: {last}");
}
