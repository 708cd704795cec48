//! The report as sections of labelled figures and pictures, for a terminal and for a page.

use std::fmt::Write as _;

use dormouse_parallel::draw::{bytes, percent};
use dormouse_schedule::{Prediction, Verdict};

use super::bars::{self, Bar};
use super::report::{
    BatchReport, PipelineReport, PlanReport, RankReport, RanksReport, Report, RolloutWorkerReport,
    RolloutsReport,
};
use crate::text::{count, operations, seconds, things, wrapped};

/// Width of the report in columns.
pub(super) const WIDTH: usize = 80;
/// Column of the values.
const INDENT: usize = 18;
/// Legend of bars.
const OF_RANKS: &str = "█ works  ░ waits for other ranks";
const OF_WORK: &str = "█ work  ░ less than the rank with the most";
const OF_ROLLOUTS: &str = "█ first step  ▒ second  ░ idle";
const OF_STAGES: &str = "█ works  ░ idle";
const NANOSECONDS: f64 = 1e9;

/// Label and value.
pub(super) type Figure = (String, String);

/// Figures under one title, and a picture below them.
#[derive(Debug)]
pub(super) struct Section {
    pub(super) title: &'static str,
    pub(super) figures: Vec<Figure>,
    pub(super) picture: Vec<String>,
}

/// Formats the report for a terminal. `trees`: the picture of the trees.
pub(super) fn table(report: &Report, trees: &[String]) -> String {
    let mut text = String::new();
    for section in sections(report, trees) {
        let gap = if text.is_empty() { "" } else { "\n" };
        let _ = writeln!(text, "{gap}{}", section.title);
        for (label, value) in section.figures {
            let lines = wrapped(&value, WIDTH - 2 - INDENT);
            for (number, line) in lines.iter().enumerate() {
                let label = if number == 0 { &*label } else { "" };
                let _ = writeln!(text, "  {label:INDENT$}{line}");
            }
        }
        for line in section.picture {
            let _ = writeln!(text, "  {}", line.trim_end());
        }
    }
    text
}

/// Returns the sections of the report that have figures.
pub(super) fn sections(report: &Report, trees: &[String]) -> Vec<Section> {
    let section = |title, figures, picture| Section { title, figures, picture };
    let mut sections = vec![section("Batch", batch(&report.batch), trees.to_vec())];
    if let Some(plan) = &report.plan {
        sections.push(section("Sharing", sharing(plan, report), Vec::new()));
        sections.push(section("Memory", memory(plan, report), Vec::new()));
        sections.push(section("Time", time(&plan.prediction), Vec::new()));
    }
    if let Some(it) = &report.ranks {
        sections.push(section("Ranks", ranks(it), rank_bars(it)));
    }
    if let Some(it) = &report.pipeline {
        sections.push(section("Pipeline", pipeline(it), stage_bars(it)));
    }
    if let Some(it) = &report.rollouts {
        sections.push(section("Rollouts", rollouts(it), rollout_bars(it)));
    }
    sections
}

fn figure(label: &str, value: impl Into<String>) -> Figure {
    (label.to_owned(), value.into())
}

fn batch(it: &BatchReport) -> Vec<Figure> {
    let named = match it.groups {
        0 => String::new(),
        groups => format!(" in {}", things(groups, "group", "groups")),
    };
    let longest = things(it.longest_tokens, "token", "tokens");
    vec![
        figure("sequences", format!("{}{named}, at most {longest}", count(it.sequences))),
        figure(
            "tokens",
            format!(
                "{} of sequences, {} of trees: {:.3} to 1",
                count(it.dense_tokens),
                count(it.tree_tokens),
                it.compression
            ),
        ),
        figure(
            "trees",
            format!(
                "{}, with {}, {} of them leaves, at most {} deep",
                count(it.trees),
                things(it.nodes, "node", "nodes"),
                count(it.leaves),
                count(it.depth)
            ),
        ),
    ]
}

fn sharing(it: &PlanReport, report: &Report) -> Vec<Figure> {
    let (ops, at, prediction) = (it.ops, it.residency, &it.prediction);
    let mut figures = Vec::new();
    if let Some(model) = &report.model {
        figures.push(figure("model", model.described()));
    }
    let saving = things(report.batch.trees, "tree", "trees");
    figures.extend([
        figure("verdict", verdict(prediction)),
        figure(
            "work",
            format!(
                "{} dense, {} planned: {:.3} to 1",
                operations(prediction.flops_dense),
                operations(prediction.flops_shared),
                prediction.speedup
            ),
        ),
        figure("rows", format!("{:.3} to 1", prediction.token_ratio)),
        figure("work saved in", format!("{} of {saving}", count(it.trees_paying))),
        figure(
            "microbatches",
            format!(
                "{} of at most {} rows",
                count(ops.microbatches),
                count(it.microbatch_rows.into())
            ),
        ),
        figure(
            "ops",
            format!(
                "{}, {}, {}, {}",
                things(ops.prefix_forwards, "prefix forward", "prefix forwards"),
                things(ops.microbatches, "microbatch", "microbatches"),
                things(ops.forwards_again, "forward again", "forwards again"),
                things(ops.node_backwards, "node backward", "node backwards")
            ),
        ),
        figure(
            "shared nodes",
            format!(
                "{} kept, {} asleep, {} recomputed",
                count(at.keep),
                count(at.sleep),
                count(at.recompute)
            ),
        ),
    ]);
    figures
}

/// What holds device memory at the peak, and what a budget does not count.
fn memory(it: &PlanReport, report: &Report) -> Vec<Figure> {
    let machine = report.machine.unwrap_or_default();
    let of =
        |budget: u64| if budget > 0 { format!(" of {}", bytes(budget)) } else { String::new() };
    let mut figures = Vec::new();
    if let Some(peak) = &it.device_peak {
        let phase = it.peak_phase.map_or_else(String::new, |phase| format!(", in phase {phase}"));
        let parts = [
            ("K/V and their gradients", peak.boundary_bytes),
            ("activations", peak.saved_bytes),
            ("logits", peak.logits_bytes),
        ];
        let parts = parts.map(|(name, size)| format!("{name} {}", bytes(size))).join(", ");
        let used = format!("{}{}", bytes(peak.bytes()), of(machine.device_bytes));
        figures.push(figure("device", format!("{used} used at the peak{phase}: {parts}")));
    }
    if let Some(model) = &report.model {
        let size = bytes(model.weight_bytes());
        let note = "not in these budgets, nor are gradients and optimizer state";
        figures.push(figure("weights", format!("{size}, {note}")));
    }
    figures.push(phases("device by phase", it.prediction.device_bytes));
    let host = it.prediction.host_bytes;
    if host.iter().any(|size| *size > 0) || machine.host_bytes > 0 {
        let most = host.into_iter().max().unwrap_or(0);
        figures.push(figure("host", format!("{}{} asleep", bytes(most), of(machine.host_bytes))));
    }
    figures
}

fn time(it: &Prediction) -> Vec<Figure> {
    let (Some(dense), Some(planned)) = (it.seconds_dense, it.seconds_shared) else {
        return vec![figure("one device", "unknown without the machine's flops_per_s")];
    };
    let ratio = format!(
        "{} planned, {} dense: {:.3} to 1",
        seconds(planned),
        seconds(dense),
        dense / planned
    );
    let stall = |stall: Option<f64>| stall.map_or_else(|| "unknown".to_owned(), seconds);
    let stalls = format!(
        "of that {} falling asleep, {} waking",
        stall(it.sleep_stall_s),
        stall(it.wake_stall_s)
    );
    vec![figure("one device", ratio), figure("stalls", stalls)]
}

fn phases(label: &str, [a, b, c]: [u64; 3]) -> Figure {
    figure(label, format!("{} in A, {} in B, {} in C", bytes(a), bytes(b), bytes(c)))
}

fn verdict(it: &Prediction) -> String {
    let word = if it.verdict == Verdict::Pays { "pays" } else { "does not pay" };
    format!("{word}: {}", it.verdict.reason(it.speedup))
}

fn ranks(it: &RanksReport) -> Vec<Figure> {
    let mut figures = Vec::new();
    if let (Some(uncut), Some(largest)) = (it.uncut_s, it.largest_s) {
        let ratio = format!(
            "{} on one, {} on {}: {:.3} to 1",
            seconds(uncut),
            seconds(largest),
            it.ranks.len(),
            uncut / largest
        );
        figures.push(figure("time", ratio));
    }
    figures.push(figure(
        "work",
        format!("{:.4} of an even part on one rank; at least {:.4}", it.imbalance, it.limit),
    ));
    if it.exchanges > 0 {
        figures.push(figure("exchanged", things(it.exchanges, "node", "nodes")));
    }
    figures
}

fn rank_bars(it: &RanksReport) -> Vec<String> {
    let is_timed = it.ranks.iter().all(|rank| rank.busy_s.is_some());
    let has_dummies = it.ranks.iter().any(|rank| rank.dummy_ops > 0);
    let mut heads = vec![if is_timed { "time" } else { "of even" }, "sequences", "rows"];
    heads.extend(has_dummies.then_some("dummy ops"));
    let bar = |rank: &RankReport| {
        let of_even = format!("{:.4}", rank.of_even);
        let mut cells = vec![
            rank.finish_s.filter(|_| is_timed).map_or(of_even, seconds),
            count(rank.sequences),
            count(rank.rows),
        ];
        cells.extend(has_dummies.then(|| count(rank.dummy_ops)));
        Bar { used: rank.busy_s.unwrap_or(rank.of_even), cells, ..Bar::default() }
    };
    let whole = it.largest_s.filter(|_| is_timed).unwrap_or(it.imbalance);
    let bars: Vec<Bar> = it.ranks.iter().map(bar).collect();
    let mut lines = bars::table("rank", "ranks", &heads, &bars, whole);
    lines.push((if is_timed { OF_RANKS } else { OF_WORK }).to_owned());
    lines
}

fn pipeline(it: &PipelineReport) -> Vec<Figure> {
    let report = &it.report;
    let time = |ns: u64| seconds(ns as f64 / NANOSECONDS);
    let parts = match it.virtual_stages {
        1 => String::new(),
        parts => format!(" of {parts} parts"),
    };
    let copies = if it.end_ns > report.makespan_ns {
        format!(", {} of it for copies of what sleeps", time(it.end_ns - report.makespan_ns))
    } else {
        String::new()
    };
    vec![
        figure(
            "stages",
            format!(
                "{}{parts}, {} in {} each",
                it.peaks.len(),
                things(it.groups, "group", "groups"),
                things(report.chunks.into(), "chunk", "chunks")
            ),
        ),
        figure(
            "time",
            format!(
                "{} on {}{copies}; {} of work on the busiest",
                time(it.end_ns),
                things(it.peaks.len() as u64, "stage", "stages"),
                time(report.ideal_ns)
            ),
        ),
        figure(
            "bubble",
            format!("{}; at least {}", percent(it.bubble), percent(report.bubble_bound)),
        ),
    ]
}

fn stage_bars(it: &PipelineReport) -> Vec<String> {
    let bar = |(peak, busy_ns): (&dormouse_parallel::pipeline::StagePeak, &u64)| Bar {
        used: *busy_ns as f64,
        cells: vec![
            seconds(*busy_ns as f64 / NANOSECONDS),
            count(peak.live_groups.into()),
            count(peak.in_flight.into()),
            bytes(peak.bytes),
        ],
        ..Bar::default()
    };
    let bars: Vec<Bar> = it.peaks.iter().zip(&it.busy_ns).map(bar).collect();
    let heads = ["busy", "groups", "microbatches", "device"];
    let mut lines = bars::table("stage", "stages", &heads, &bars, it.end_ns as f64);
    lines.push(format!("{OF_STAGES}; groups and microbatches: at most at a time"));
    lines
}

fn rollouts(it: &RolloutsReport) -> Vec<Figure> {
    let idle = |tokens: u64| {
        let busy: u64 = it.workers.iter().flat_map(|worker| worker.tokens).sum();
        percent(1.0 - busy as f64 / (tokens.max(1) * it.workers.len().max(1) as u64) as f64)
    };
    let time =
        |tokens: u64| format!("{}, {} idle", things(tokens, "token", "tokens"), idle(tokens));
    vec![
        figure(
            "each step",
            format!(
                "{} to {} in {}",
                things(it.responses, "response", "responses"),
                things(it.prompts, "prompt", "prompts"),
                things(it.groups, "group", "groups")
            ),
        ),
        figure("predicted from", things(it.earlier_steps, "earlier step", "earlier steps")),
        figure("two steps", time(it.tokens)),
        figure("in one order", time(it.same_order_tokens)),
    ]
}

/// The first of two steps and, for the worker that is free first, the longest share of the second.
fn rollout_bars(it: &RolloutsReport) -> Vec<String> {
    let both = |[one, other]: [String; 2]| format!("{one}, {other}");
    let bar = |worker: &RolloutWorkerReport| Bar {
        used: worker.tokens[0] as f64,
        then: worker.tokens[1] as f64,
        cells: vec![both(worker.groups.map(|it| it.to_string())), both(worker.tokens.map(count))],
    };
    let bars: Vec<Bar> = it.workers.iter().map(bar).collect();
    let heads = ["groups", "longest tokens"];
    let mut lines = bars::table("worker", "workers", &heads, &bars, it.tokens as f64);
    lines.push(format!("{OF_ROLLOUTS}; the first free worker takes the longest share"));
    lines
}
