//! `dormouse metrics` on pages of this process: the page, the file, and the server.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{Folder, dormouse};
use dormouse_timeline::live::{DumpFigures, Figures, LivePage, SettingFigure, TagFigures};
use dormouse_timeline::{Process, now_ns};

/// How long a file or an answer may take on a loaded machine.
const WAIT_MAX: Duration = Duration::from_secs(60);

fn page(path: &Path, rank: u32) -> LivePage {
    let figures = Figures {
        updated_ns: now_ns(),
        tier_used_bytes: [1 << 30, 0, 5],
        tier_peak_bytes: [3 << 30, 0, 6],
        tier_budget_bytes: [8 << 30, 0, 7],
        link_copied_bytes: [0, 0, 123, 0],
        link_bytes_per_s: [0, 0, 456, 0],
        asleep_bytes: 5,
        cached_bytes: 9,
        stall_ns: 1_500_000_000,
        alloc_failures: 2,
        tag_count: 9,
        tags: vec![TagFigures { name: "a \"b\"".to_owned(), resident_bytes: 11, asleep_bytes: 12 }],
        last_dump: Some(DumpFigures {
            written_unix_ns: 1_700_000_000_500_000_000,
            reason: "oom".to_owned(),
            path: "/dumps/x.html".to_owned(),
        }),
        settings: std::array::from_fn(|at| SettingFigure {
            value: at as u64,
            is_automatic: at != 3,
        }),
    };
    LivePage::create(path, &Process::current("a \"quoted\" one", rank), &figures).unwrap()
}

/// A program that is killed at the end of its test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn start(here: &Folder, arguments: &[&str]) -> Running {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dormouse"));
    command.current_dir(here.path()).arg("metrics").args(arguments).stdout(Stdio::piped());
    Running(command.spawn().unwrap())
}

#[test]
fn every_figure_of_a_process_is_a_sample_of_its_family() {
    let here = Folder::new();
    let _page = page(&here.path().join("page"), 3);
    let output = dormouse(here.path(), &["metrics", "page"]);
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    let process =
        format!("process=\"a \\\"quoted\\\" one\",rank=\"3\",pid=\"{}\"", std::process::id());
    for (family, kind, sample, labels, value) in [
        ("dormouse_up", "gauge", "dormouse_up", "", "1"),
        (
            "dormouse_tier_used_bytes",
            "gauge",
            "dormouse_tier_used_bytes",
            ",tier=\"device\"",
            "1073741824",
        ),
        ("dormouse_tier_peak_bytes", "gauge", "dormouse_tier_peak_bytes", ",tier=\"nvme\"", "6"),
        (
            "dormouse_tier_budget_bytes",
            "gauge",
            "dormouse_tier_budget_bytes",
            ",tier=\"host\"",
            "0",
        ),
        ("dormouse_asleep_bytes", "gauge", "dormouse_asleep_bytes", "", "5"),
        ("dormouse_cached_bytes", "gauge", "dormouse_cached_bytes", "", "9"),
        (
            "dormouse_link_copied_bytes",
            "counter",
            "dormouse_link_copied_bytes_total",
            ",link=\"nvme_write\"",
            "123",
        ),
        (
            "dormouse_link_rate_bytes_per_second",
            "gauge",
            "dormouse_link_rate_bytes_per_second",
            ",link=\"nvme_write\"",
            "456",
        ),
        ("dormouse_stall_seconds", "counter", "dormouse_stall_seconds_total", "", "1.5"),
        ("dormouse_alloc_failures", "counter", "dormouse_alloc_failures_total", "", "2"),
        ("dormouse_tags", "gauge", "dormouse_tags", "", "9"),
        (
            "dormouse_tag_resident_bytes",
            "gauge",
            "dormouse_tag_resident_bytes",
            ",tag=\"a \\\"b\\\"\"",
            "11",
        ),
        (
            "dormouse_tag_asleep_bytes",
            "gauge",
            "dormouse_tag_asleep_bytes",
            ",tag=\"a \\\"b\\\"\"",
            "12",
        ),
        (
            "dormouse_last_dump_timestamp_seconds",
            "gauge",
            "dormouse_last_dump_timestamp_seconds",
            ",reason=\"oom\"",
            "1700000000.5",
        ),
        (
            "dormouse_setting",
            "gauge",
            "dormouse_setting",
            ",setting=\"DORMOUSE_OFFLOAD_WINDOW_LAYERS\",source=\"automatic\"",
            "5",
        ),
        (
            "dormouse_setting",
            "gauge",
            "dormouse_setting",
            ",setting=\"DORMOUSE_OFFLOAD_IO_THREADS\",source=\"set\"",
            "3",
        ),
    ] {
        assert!(text.contains(&format!("# TYPE {family} {kind}\n")), "{family}: {text}");
        let line = format!("\n{sample}{{{process}{labels}}} {value}\n");
        assert!(text.contains(&line), "{line}: {text}");
    }
    assert!(text.ends_with("# EOF\n"));
}

/// A page that holds a series twice is refused as a whole.
#[test]
fn no_series_is_there_twice() {
    let here = Folder::new();
    let dir = here.path().join("pages");
    fs::create_dir(&dir).unwrap();
    // As two containers with equal pids have them. The second is named three times.
    let _pages = [page(&dir.join("one"), 3), page(&dir.join("two"), 3)];
    let output = dormouse(here.path(), &["metrics", "pages", "pages/two", "pages/../pages/two"]);
    let text = String::from_utf8(output.stdout).unwrap();
    let series = text.lines().filter(|line| !line.starts_with('#'));
    let mut series: Vec<_> = series.map(|line| line.rsplit_once(' ').unwrap().0).collect();
    let count = series.len();
    series.sort_unstable();
    series.dedup();
    assert_eq!(series.len(), count, "{text}");
    let up: Vec<_> = text.lines().filter(|line| line.starts_with("dormouse_up{")).collect();
    assert_eq!(up.len(), 2, "{text}");
    for name in ["one", "two"] {
        assert!(text.contains(&format!(",page=\"pages/{name}\"}} 1\n")), "{name}: {text}");
    }
}

#[test]
fn a_file_is_replaced_whole_and_private() {
    let here = Folder::new();
    let _page = page(&here.path().join("page"), 0);
    let _running = start(&here, &["page", "--out=metrics.txt", "--interval-ms=100"]);
    let file = here.path().join("metrics.txt");
    let deadline = Instant::now() + WAIT_MAX;
    for _ in 0..2 {
        while !file.exists() {
            assert!(Instant::now() < deadline, "no file");
            sleep(Duration::from_millis(10));
        }
        assert!(fs::read_to_string(&file).unwrap().ends_with("# EOF\n"));
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        fs::remove_file(&file).unwrap();
    }
}

#[test]
fn a_client_gets_the_page_and_nothing_else() {
    let here = Folder::new();
    let _page = page(&here.path().join("page"), 0);
    let mut running = start(&here, &["page", "--listen=127.0.0.1:0"]);
    let mut line = String::new();
    BufReader::new(running.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.trim().strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap();
    let ask = |request: &[u8]| {
        let mut client = TcpStream::connect(address).unwrap();
        client.set_read_timeout(Some(WAIT_MAX)).unwrap();
        client.write_all(request).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        answer
    };
    let answer = ask(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("application/openmetrics-text; version=1.0.0; charset=utf-8"));
    assert!(head.contains(&format!("Content-Length: {}", body.len())));
    assert!(body.contains("dormouse_up{") && body.ends_with("# EOF\n"));
    // A client that leaves at once, and one that sends nothing: the next is served.
    drop(TcpStream::connect(address).unwrap());
    let silent = TcpStream::connect(address).unwrap();
    assert!(ask(b"GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
    drop(silent);
    // One that never ends its request: its connection is closed, and the next is served.
    let mut trickling = TcpStream::connect(address).unwrap();
    let deadline = Instant::now() + WAIT_MAX;
    while trickling.write_all(b"G").is_ok() {
        assert!(Instant::now() < deadline, "it still holds the server");
        sleep(Duration::from_millis(100));
    }
    assert!(ask(b"POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
}

#[test]
fn addresses_that_other_machines_reach_are_refused() {
    let here = Folder::new();
    for address in ["0.0.0.0:9464", "10.0.0.1:9464", "[::]:9464", "9464", "localhost:9464"] {
        let output = dormouse(here.path(), &["metrics", &format!("--listen={address}")]);
        assert_eq!(output.status.code(), Some(2), "{address}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains("accepted: an address and port of this machine"), "{error}");
    }
}
