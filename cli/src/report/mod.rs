//! `dormouse report` and `dormouse diff`: what dumps say, in text.

mod diff;
mod page;
mod trace;

use std::path::Path;

use dormouse_parallel::draw::{bytes, percent};
use serde::Serialize;

use crate::args::{DiffArgs, ReportArgs};
use crate::text::{as_json, seconds, things};
use crate::{Error, Output};
pub use page::DumpError;
use page::Page;

/// Waits shown one by one.
const WAITS_MAX: usize = 10;
const NS_PER_S: f64 = 1e9;

/// What a dump says.
#[derive(Debug, Serialize)]
struct Report {
    process: String,
    rank: u32,
    pid: u32,
    window_s: f64,
    /// Older events that the dump lacks.
    dropped: u64,
    /// From when on levels are recorded: peaks are those of that time.
    levels_from_s: f64,
    /// What a trace does not say; empty for a page, which says all.
    not_in_file: Vec<&'static str>,
    budget_bytes: u64,
    peak_bytes: u64,
    /// Where the trainer was, and whose bytes; `None` in dumps of older releases.
    peak: Option<PeakReport>,
    phases: Vec<PhaseReport>,
    copies: Vec<CopyReport>,
    stall_s: f64,
    causes: Vec<CauseReport>,
    /// The longest, at most [`WAITS_MAX`].
    waits: Vec<WaitReport>,
}

#[derive(Debug, Serialize)]
struct PeakReport {
    at_s: f64,
    place: String,
    /// Mapped beside the peak.
    beside_bytes: u64,
    owners: Vec<OwnerReport>,
}

#[derive(Debug, Serialize)]
struct OwnerReport {
    title: String,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct PhaseReport {
    name: String,
    runs: u64,
    busy_s: f64,
    stall_s: f64,
    /// `None`: not recorded.
    peak_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct CopyReport {
    title: String,
    count: u64,
    bytes: u64,
    busy_s: f64,
    bytes_per_s: f64,
}

#[derive(Debug, Serialize)]
struct CauseReport {
    title: String,
    count: u64,
    stall_s: f64,
}

#[derive(Debug, Serialize)]
struct WaitReport {
    at_s: f64,
    stall_s: f64,
    cause: String,
    layer: Option<u64>,
    bound_s: Option<f64>,
}

/// Prints what a dump says.
pub(crate) fn run(args: &ReportArgs) -> Result<Output, Error> {
    let report = Report::of(&Page::read(&args.file)?);
    let text = if args.json { as_json(&report)? } else { table(&report, &args.file) };
    Ok(Output::of(text))
}

/// Prints what differs between two dumps.
pub(crate) fn run_diff(args: &DiffArgs) -> Result<Output, Error> {
    let [before, after] = [&args.before, &args.after].map(|file| Page::read(file));
    let changes = diff::changes(&Report::of(&before?), &Report::of(&after?));
    let text = if args.json { as_json(&changes)? } else { diff::table(&changes) };
    Ok(Output::of(text))
}

fn s(ns: u64) -> f64 {
    ns as f64 / NS_PER_S
}

impl Report {
    fn of(page: &Page) -> Self {
        let copies = page.lanes().filter(|(lane, totals)| lane.copy && totals.count > 0);
        let copies = copies.map(|(lane, totals)| CopyReport {
            title: lane.title.clone(),
            count: totals.count,
            bytes: totals.bytes,
            busy_s: s(totals.busy_ns),
            bytes_per_s: totals.bytes as f64 / s(totals.busy_ns.max(1)),
        });
        let phases = page.totals.phases.iter().map(|phase| PhaseReport {
            name: phase.name.clone(),
            runs: phase.count,
            busy_s: s(phase.busy_ns),
            stall_s: s(phase.stall_ns),
            peak_bytes: phase.peak_bytes.first().copied().flatten(),
        });
        let peak = page.peak.as_ref().map(|peak| PeakReport {
            at_s: s(peak.at_ns),
            place: peak.place.clone(),
            beside_bytes: peak.beside_bytes,
            owners: peak
                .owners
                .iter()
                .map(|owner| OwnerReport { title: owner.title.clone(), bytes: owner.bytes })
                .collect(),
        });
        Self {
            process: page.process.clone(),
            rank: page.rank,
            pid: page.pid,
            window_s: s(page.window_ns),
            dropped: page.dropped,
            levels_from_s: s(page.levels_from_ns),
            not_in_file: page.lacks.clone(),
            budget_bytes: page.budget_bytes,
            peak_bytes: page.peak.as_ref().map_or(page.peak_bytes(), |peak| peak.bytes),
            peak,
            phases: phases.collect(),
            copies: copies.collect(),
            stall_s: s(page.waits().busy_ns),
            causes: causes(page),
            waits: waits(page),
        }
    }
}

/// The causes of waits, the longest in all first.
fn causes(page: &Page) -> Vec<CauseReport> {
    let mut causes: Vec<CauseReport> = Vec::new();
    for stall in &page.stalls {
        let stall_s = s(stall.to_ns.saturating_sub(stall.from_ns));
        match causes.iter_mut().find(|cause| cause.title == stall.cause) {
            Some(cause) => {
                (cause.count, cause.stall_s) = (cause.count + 1, cause.stall_s + stall_s)
            }
            None => causes.push(CauseReport { title: stall.cause.clone(), count: 1, stall_s }),
        }
    }
    causes.sort_by(|a, b| b.stall_s.total_cmp(&a.stall_s));
    causes
}

fn waits(page: &Page) -> Vec<WaitReport> {
    let mut stalls: Vec<_> = page.stalls.iter().collect();
    stalls.sort_by_key(|stall| std::cmp::Reverse(stall.to_ns.saturating_sub(stall.from_ns)));
    let wait = |stall: &&page::Stall| WaitReport {
        at_s: s(stall.from_ns),
        stall_s: s(stall.to_ns.saturating_sub(stall.from_ns)),
        cause: stall.cause.clone(),
        layer: page.layer_of(stall.from_ns),
        bound_s: stall.bound_ns.map(s),
    };
    stalls.iter().take(WAITS_MAX).map(wait).collect()
}

fn table(report: &Report, file: &Path) -> String {
    let mut lines = vec![format!("{} · rank {} · pid {}", report.process, report.rank, report.pid)];
    let lost = match report.dropped {
        0 => String::new(),
        dropped => format!("; {} are lost", things(dropped, "older event", "older events")),
    };
    lines.push(format!("{} shown{lost}", seconds(report.window_s)));
    if report.levels_from_s > 0.0 {
        let from = seconds(report.levels_from_s);
        lines.push(format!("levels and peaks are recorded from {from} on; earlier ones are lost"));
    }
    if !report.not_in_file.is_empty() {
        lines.push(format!("not in a trace: {}", report.not_in_file.join("; ")));
    }
    lines.extend(peak(report));
    if !report.phases.is_empty() {
        lines.push("\nphases".to_owned());
    }
    lines.extend(report.phases.iter().map(|phase| {
        format!(
            "  {:12} {} in {}, stalled {} ({}), peak {}",
            phase.name,
            seconds(phase.busy_s),
            things(phase.runs, "run", "runs"),
            seconds(phase.stall_s),
            percent(phase.stall_s / phase.busy_s.max(f64::MIN_POSITIVE)),
            phase.peak_bytes.map_or("not recorded".to_owned(), bytes)
        )
    }));
    if !report.copies.is_empty() {
        lines.push("\ncopies".to_owned());
    }
    lines.extend(report.copies.iter().map(|copy| {
        let rate = bytes(copy.bytes_per_s as u64);
        let (number, moved) = (things(copy.count, "copy", "copies"), bytes(copy.bytes));
        format!("  {:14} {moved} in {number}, {rate}/s while copying", copy.title)
    }));
    lines.push(format!("\nstalled {}", seconds(report.stall_s)));
    lines.extend(report.causes.iter().map(|cause| {
        format!(
            "  {:12} {} in {}",
            cause.title,
            seconds(cause.stall_s),
            things(cause.count, "wait", "waits")
        )
    }));
    lines.extend(report.waits.iter().map(|wait| {
        let layer = wait.layer.map_or(String::new(), |layer| format!(", layer {layer}"));
        let bound =
            wait.bound_s.map_or(String::new(), |bound| format!(", at least {}", seconds(bound)));
        format!(
            "  at {}{layer}: {} for {}{bound}",
            seconds(wait.at_s),
            seconds(wait.stall_s),
            wait.cause
        )
    }));
    let viewer =
        if report.not_in_file.is_empty() { "a browser" } else { "https://ui.perfetto.dev" };
    lines.push(format!("\nnext: open {0} in {viewer}; dormouse diff {0} OTHER", file.display()));
    lines.join("\n") + "\n"
}

fn peak(report: &Report) -> Vec<String> {
    let budget = match report.budget_bytes {
        0 => String::new(),
        budget => format!(" of {}", bytes(budget)),
    };
    let mut lines = vec![format!("\npeak {}{budget} awake", bytes(report.peak_bytes))];
    let Some(peak) = &report.peak else { return lines };
    lines[0] += &format!(" at {}: {}", seconds(peak.at_s), peak.place);
    let share = |bytes: u64| percent(bytes as f64 / report.peak_bytes.max(1) as f64);
    let owners = peak.owners.iter();
    lines.extend(
        owners.map(|it| format!("  {:24} {} ({})", it.title, bytes(it.bytes), share(it.bytes))),
    );
    lines.push(format!("  mapped beside it         {}", bytes(peak.beside_bytes)));
    lines
}
