//! Budgets just above what is live: no request is refused while whole free pages and the budget suffice.
//!
//! The committed traces and random workloads run on the device of numbers, at caps from 1.002 to 1.2 times the
//! most live bytes. The account here knows blocks only. A refusal is wrong if the pages that blocks have a part
//! in, and as many whole pages as the request needs, fit the budget: all other pages are cached, and can leave.

use crate::common::random::Random;
use crate::common::{PAGE, key, pages_of, uncounted};
use dormouse_alloc::{AllocError, Config, Freed, Margin, Request};
use lzma_rust2::XzReader;
use std::collections::HashMap;
use std::io::{BufReader, Read as _};
use std::path::PathBuf;

/// Sizes of traces are divided by this: their 2 MiB pages are the 4 KiB pages of the device.
const SCALE: u64 = 512;
const SEGMENT_PAGES: usize = 32;
/// Pages of a large page: 16 MiB of a trace.
const LARGE_PAGES: usize = 8;
/// Addresses, in pages per page of the budget.
const SPACE_FACTOR: usize = 8;
/// Caps above the most live bytes, in thousandths: the first, the last, the step of a complete run.
const CAPS: (u64, u64, usize) = (2, 200, 2);
/// One cap in this many is tested unless `DORMOUSE_ALL_CAPS` is set.
const SAMPLE: usize = 12;
const RANDOM_RUNS: u64 = 24;
const RANDOM_EVENTS: usize = 3000;
const WAVE_EVENTS: u64 = 400;
/// Sizes are below two to this power: 512 pages.
const SIZE_LOG_MAX: usize = 21;

/// A call of a workload. Blocks have names.
#[derive(Clone, Copy)]
pub(crate) enum Call {
    Allocate { name: u64, bytes: u64, stream: u64 },
    Free { name: u64, stream: u64 },
}

/// Reads a committed trace.
fn read(path: &PathBuf) -> Vec<Call> {
    let file = std::fs::File::open(path).unwrap();
    let mut text = String::new();
    XzReader::new(BufReader::new(file), true).read_to_string(&mut text).unwrap();
    let lines = text.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_digit()));
    let call = |line: &str| {
        let fields: Vec<&str> = line.split(',').collect();
        let name = u64::from_str_radix(&fields[3][2..], 16).unwrap();
        let (bytes, stream): (u64, u64) = (fields[4].parse().unwrap(), fields[5].parse().unwrap());
        match fields[2] {
            "allocate" => Some(Call::Allocate { name, bytes: bytes.div_ceil(SCALE), stream }),
            "free" => Some(Call::Free { name, stream }),
            _ => None,
        }
    };
    lines.filter_map(call).collect()
}

/// Blocks of all sizes that come and go, in waves.
fn random(seed: u64) -> Vec<Call> {
    let mut random = Random(seed);
    let (mut live, mut calls) = (Vec::new(), Vec::new());
    let most = 20 + random.below(300);
    for name in 0..RANDOM_EVENTS as u64 {
        let is_falling = name / WAVE_EVENTS % 2 == 1;
        let frees_of_ten = if is_falling { 7 } else { 3 };
        if live.len() >= most || (!live.is_empty() && random.below(10) < frees_of_ten) {
            let (name, stream) = live.swap_remove(random.below(live.len()));
            calls.push(Call::Free { name, stream });
        } else {
            let bytes_max = 1 << random.below(SIZE_LOG_MAX);
            let (bytes, stream) = (1 + random.below(bytes_max) as u64, random.below(3) as u64);
            live.push((name, stream));
            calls.push(Call::Allocate { name, bytes, stream });
        }
    }
    calls
}

pub(crate) fn live_bytes_max(calls: &[Call]) -> u64 {
    let (mut sizes, mut live, mut most) = (HashMap::new(), 0, 0);
    for call in calls {
        match *call {
            Call::Allocate { name, bytes, .. } => {
                sizes.insert(name, bytes);
                live += bytes;
            }
            Call::Free { name, .. } => live -= sizes.remove(&name).unwrap(),
        }
        most = most.max(live);
    }
    most
}

/// Kind of the device, and settings.
#[derive(Clone, Copy, Debug)]
struct Setting {
    streams: usize,
    moves_pages: bool,
    margin: Margin,
    thread_cache: bool,
    /// Every block has work queued on its stream. It is done when it is waited for, or when this number of blocks
    /// came after it.
    run_ahead: Option<u64>,
}

const TIGHT: Setting = Setting {
    streams: 0,
    moves_pages: true,
    margin: Margin::TIGHT,
    thread_cache: true,
    run_ahead: None,
};
/// As the host's heap has it: at these budgets a quarter more than the most in use is always too much.
const LOOSE: Margin = Margin { divisor: 4, bytes_min: 64 * PAGE as u64 };
const NEVER: u64 = u64::MAX / 2;
const SETTINGS: [Setting; 6] = [
    TIGHT,
    Setting { moves_pages: false, thread_cache: false, ..TIGHT },
    Setting { margin: LOOSE, thread_cache: false, ..TIGHT },
    Setting { streams: 4, ..TIGHT },
    Setting { streams: 4, run_ahead: Some(20), ..TIGHT },
    Setting { streams: 4, run_ahead: Some(NEVER), ..TIGHT },
];

/// Runs a workload at a budget. Returns the number of refusals, all of them right.
fn run(name: &str, calls: &[Call], budget_pages: usize, setting: Setting) -> usize {
    let config = Config {
        granule_bytes: 1,
        budget_bytes: (budget_pages * PAGE) as u64,
        segment_bytes: SEGMENT_PAGES * PAGE,
        moves_pages: setting.moves_pages,
        margin: setting.margin,
        run_ahead: None,
        thread_cache: setting.thread_cache,
    };
    let pages = SPACE_FACTOR * budget_pages + SEGMENT_PAGES;
    let (device, allocator) = uncounted(pages, config, setting.streams, LARGE_PAGES);
    if let Some(launches) = setting.run_ahead {
        device.gpu().set_run_ahead(launches);
    }
    let key_of = |stream: u64| match setting.streams {
        0 => 0,
        count => key(stream as usize % count),
    };
    let (mut blocks, mut users, mut held, mut refused) = (HashMap::new(), vec![0_u32; pages], 0, 0);
    for call in calls {
        match *call {
            Call::Allocate { name: block, bytes, stream } => {
                let request = Request { stream: key_of(stream), ..Request::new(bytes as usize) };
                match allocator.allocate(&request) {
                    Ok(found) => {
                        for page in pages_of(found.range) {
                            held += usize::from(users[page] == 0);
                            users[page] += 1;
                        }
                        if setting.run_ahead.is_some() {
                            let stream = stream as usize % setting.streams;
                            device.gpu().launch(stream, found.range);
                        }
                        blocks.insert(block, found.range);
                    }
                    Err(AllocError::OutOfMemory(report)) => {
                        let needed = (bytes as usize).div_ceil(PAGE);
                        assert!(
                            held + needed > budget_pages,
                            "{name}, {setting:?}: {bytes} bytes refused; {held} pages of \
                             {budget_pages} are in use\n{report}"
                        );
                        refused += 1;
                    }
                    Err(error) => panic!("{name}: {error}"),
                }
            }
            Call::Free { name: block, stream } => {
                let Some(range) = blocks.remove(&block) else { continue };
                let _: Freed = allocator.free(range.start, key_of(stream)).unwrap();
                for page in pages_of(range) {
                    users[page] -= 1;
                    held -= usize::from(users[page] == 0);
                }
            }
        }
    }
    assert!(held <= budget_pages);
    refused
}

/// Runs a workload at all caps, or at a sample of them.
fn run_caps(name: &str, calls: &[Call]) {
    let live = live_bytes_max(calls);
    let step = CAPS.2 * if std::env::var_os("DORMOUSE_ALL_CAPS").is_some() { 1 } else { SAMPLE };
    for setting in SETTINGS {
        for thousandths in (CAPS.0..=CAPS.1).step_by(step) {
            let budget_pages = (live * (1000 + thousandths) / 1000).div_ceil(PAGE as u64) as usize;
            run(&format!("{name} at 1.{thousandths:03}"), calls, budget_pages, setting);
        }
    }
}

/// All committed traces, with their names.
pub(crate) fn traces() -> Vec<(String, Vec<Call>)> {
    let traces = concat!(env!("CARGO_MANIFEST_DIR"), "/../benches/traces");
    let mut paths: Vec<_> =
        std::fs::read_dir(traces).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "xz"));
    paths.sort();
    assert_eq!(paths.len(), 7, "the committed traces");
    let name = |path: &PathBuf| path.file_stem().unwrap().to_str().unwrap().to_owned();
    paths.iter().map(|path| (name(path), read(path))).collect()
}

#[test]
fn traces_are_served_at_tight_budgets() {
    for (name, calls) in traces() {
        run_caps(&name, &calls);
    }
}

#[test]
fn random_workloads_are_served_at_tight_budgets() {
    for seed in 0..RANDOM_RUNS {
        run_caps(&format!("seed {seed}"), &random(seed));
    }
}
