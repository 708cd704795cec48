//! `dormouse top` on pages of this process: what it prints, hostile pages, and a terminal.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Folder, dormouse};
use dormouse_timeline::live::{DEFAULT_DIR, Figures, LivePage, default_prefix};
use dormouse_timeline::{Process, now_ns};
use serde_json::Value;

fn figures(used_bytes: u64) -> Figures {
    Figures {
        updated_ns: now_ns(),
        tier_used_bytes: [used_bytes, 0, 0],
        tier_peak_bytes: [used_bytes, 0, 0],
        tier_budget_bytes: [8 << 30, 0, 0],
        ..Figures::default()
    }
}

fn page(path: &Path, rank: u32, used_bytes: u64) -> LivePage {
    LivePage::create(path, &Process::current("trainer", rank), &figures(used_bytes)).unwrap()
}

/// Exit status, standard output, and standard error, which is empty unless the arguments are refused.
fn top(here: &Folder, arguments: &[&str]) -> (Option<i32>, String) {
    let all: Vec<&str> =
        ["top", "--interval-ms=100"].into_iter().chain(arguments.iter().copied()).collect();
    let output = dormouse(here.path(), &all);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

#[test]
fn ranks_are_shown_in_the_order_asked_for() {
    let here = Folder::new();
    let _pages = [(0, 1 << 30), (1, 3 << 30), (2, 2 << 30)]
        .map(|(rank, used)| page(&here.path().join(format!("{rank}.page")), rank, used));
    here.put("notes.txt", "another file of the directory");
    let ranks = |arguments: &[&str]| {
        let (code, text) = top(&here, arguments);
        assert_eq!(code, Some(0), "{text}");
        let lines = text.lines().filter_map(|line| line.strip_prefix("rank "));
        lines.map(|line| line[..1].to_owned()).collect::<Vec<_>>().concat()
    };
    assert_eq!(ranks(&["."]), "012");
    assert_eq!(ranks(&[".", "--once", "--sort=device"]), "120");
    assert_eq!(ranks(&["2.page", "0.page"]), "02");
}

/// A path is bytes, JSON is Unicode.
#[test]
fn names_that_are_no_unicode_are_shown() {
    let here = Folder::new();
    let names = [&b"page-\xff"[..], b"none-\xfe"].map(OsStr::from_bytes);
    let _page = page(&here.path().join(names[0]), 0, 1);
    let words = ["top", "--interval-ms=100", "--json"].map(OsStr::new);
    let output = dormouse(here.path(), &[&words[..], &names].concat());
    assert_eq!((output.status.code(), &output.stderr[..]), (Some(1), &b""[..]));
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(seen["processes"][0]["page"], "page-\u{fffd}");
    assert_eq!(seen["unreadable"][0]["page"], "none-\u{fffd}");
}

#[test]
fn json_has_rates_between_two_updates() {
    let here = Folder::new();
    let path = here.path().join("page");
    let mut page = page(&path, 5, 1 << 30);
    let mut copied_bytes = 0;
    let mut publish = move || {
        copied_bytes += 1 << 20;
        let now = now_ns();
        // Half of the time is a stall.
        let figures = Figures {
            link_copied_bytes: [0, 0, 0, copied_bytes],
            stall_ns: now / 2,
            updated_ns: now,
            ..figures(7)
        };
        assert!(page.publish(&figures));
    };
    publish();
    let is_over = AtomicBool::new(false);
    let state: Value = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(10));
                publish();
            }
        });
        let (code, text) = top(&here, &["page", "--json"]);
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(code, Some(0), "{text}");
        serde_json::from_str(&text).unwrap()
    });
    let state = &state["processes"][0];
    assert_eq!((&state["rank"], &state["status"]), (&Value::from(5), &Value::from("running")));
    assert_eq!(state["pid"], std::process::id());
    assert!((state["stall_share"].as_f64().unwrap() - 0.5).abs() < 1e-3, "{state}");
    assert!(state["links"]["nvme_read"]["bytes_per_s"].as_f64().unwrap() > 0.0);
    assert_eq!(state["links"]["nvme_write"]["bytes_per_s"], 0.0);
}

#[test]
fn a_killed_process_is_shown_as_ended() {
    let here = Folder::new();
    let path = here.path().join("page");
    let _page = page(&path, 0, 1 << 30);
    // A copy has no writer, as the page of a killed process.
    fs::copy(&path, here.path().join("killed")).unwrap();
    let (code, text) = top(&here, &["killed"]);
    assert_eq!(code, Some(0));
    assert!(text.contains("ended without removing its page"), "{text}");
    assert!(!top(&here, &["page"]).1.contains("ended"));
}

#[test]
fn pages_that_cannot_be_read_are_named_with_the_reason() {
    let here = Folder::new();
    let path = here.path().join("page");
    let _page = page(&path, 0, 1 << 30);
    let bytes = fs::read(&path).unwrap();
    let cases = [
        ("short", bytes[..100].to_vec(), "the page has 100 bytes"),
        ("empty", Vec::new(), "the page has 0 bytes"),
        ("version", [&bytes[..8], &[2], &bytes[9..]].concat(), "layout version 2, that of another"),
        ("magic", [&[0], &bytes[1..]].concat(), "the file begins with"),
        ("torn", [&bytes[..64], &[1], &bytes[65..]].concat(), "no complete update"),
    ];
    for (name, bytes, reason) in cases {
        here.put(name, bytes);
        let (code, text) = top(&here, &[name, "page"]);
        assert_eq!(code, Some(1), "{name}");
        assert!(text.contains(&format!("{name}: ")) && text.contains(reason), "{name}: {text}");
        assert!(text.contains("1 trainer,"), "the others are shown: {text}");
    }
    std::os::unix::fs::symlink("page", here.path().join("link")).unwrap();
    assert!(Command::new("mkfifo").arg(here.path().join("fifo")).status().unwrap().success());
    for (name, reason) in [("link", "symbolic link"), ("fifo", "FIFO"), ("absent", "No such file")]
    {
        let (code, text) = top(&here, &[name]);
        assert_eq!(code, Some(1), "{name}");
        assert!(text.contains(reason), "{name}: {text}");
    }
}

#[test]
fn without_arguments_the_pages_of_the_user_are_found() {
    let here = Folder::new();
    let name = format!("{}{}", default_prefix().unwrap(), std::process::id());
    let _page = page(&Path::new(DEFAULT_DIR).join(name), 0, 1 << 30);
    let (code, text) = top(&here, &["--once"]);
    assert_eq!(code, Some(0));
    assert!(text.contains(&format!("pid {}", std::process::id())), "{text}");
}

#[test]
fn nothing_found_is_status_1_and_says_what_to_do() {
    let here = Folder::new();
    let (code, text) = top(&here, &["."]);
    assert_eq!(code, Some(1));
    assert!(text.starts_with("no trainer found; next: "), "{text}");
}

/// Keys on a pseudo-terminal, which `script` makes.
#[test]
fn keys_sort_and_quit_on_a_terminal() {
    let here = Folder::new();
    let _page = page(&here.path().join("page"), 0, 1 << 30);
    let command = format!("stty rows 30 cols 90; {} top page", env!("CARGO_BIN_EXE_dormouse"));
    let seen = here.path().join("typescript");
    let mut child = Command::new("script")
        .args(["-qefc", &command])
        .arg(&seen)
        .current_dir(here.path())
        .env("TERM", "xterm")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut keys = child.stdin.take().unwrap();
    let shows = |text: &str| {
        for _ in 0..500 {
            let all = File::open(&seen).and_then(std::io::read_to_string).unwrap_or_default();
            if all.contains(text) {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("{text:?} is not shown: {:?}", fs::read_to_string(&seen));
    };
    shows("sorted by rank");
    keys.write_all(b"s").unwrap();
    shows("sorted by stall");
    keys.write_all(b"q").unwrap();
    assert!(child.wait().unwrap().success());
    // The screen is left as it was.
    shows("\u{1b}[?1049l");
}
