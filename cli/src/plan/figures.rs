//! The report as labelled figures and as a table.

use std::fmt::Write as _;

use dormouse_parallel::draw::{bytes, percent};
use dormouse_schedule::{Prediction, Verdict};

use super::report::{BatchReport, PipelineReport, PlanReport, RanksReport, Report};
use crate::text::{count, operations, seconds, things};

/// Maximum ranks or stages shown in a table; JSON has all.
const LINES_MAX: usize = 16;
/// Column of the values.
const INDENT: usize = 19;

/// Label and value.
pub(super) type Figure = (String, String);

/// Figures under one title.
#[derive(Debug)]
pub(super) struct Section {
    pub(super) title: &'static str,
    pub(super) figures: Vec<Figure>,
}

/// Formats the report as a table for a terminal.
pub(super) fn table(report: &Report) -> String {
    let mut text = String::new();
    for section in sections(report) {
        let _ = writeln!(text, "{}", section.title);
        for (label, value) in section.figures {
            let _ = writeln!(text, "  {label:INDENT$}{value}");
        }
    }
    text
}

/// Returns the sections of the report that have figures.
pub(super) fn sections(report: &Report) -> Vec<Section> {
    let mut sections = vec![Section { title: "batch", figures: batch(&report.batch) }];
    if let Some(plan) = &report.plan {
        let mut figures = vec![];
        if let Some(model) = &report.model {
            figures.push(figure("model", &model.name));
        }
        figures.extend(planned(plan, report.batch.trees));
        sections.push(Section { title: "plan", figures });
    }
    if let Some(it) = &report.ranks {
        sections.push(Section { title: "ranks", figures: ranks(it) });
    }
    if let Some(it) = &report.pipeline {
        sections.push(Section { title: "pipeline", figures: pipeline(it) });
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
    vec![
        figure("sequences", format!("{}{named}", count(it.sequences))),
        figure(
            "forest",
            format!(
                "{}, {} with {}, at most {} deep",
                things(it.trees, "tree", "trees"),
                things(it.nodes, "node", "nodes"),
                things(it.leaves, "leaf", "leaves"),
                count(it.depth)
            ),
        ),
        figure("longest", things(it.longest_tokens, "token", "tokens")),
        figure("dense tokens", count(it.dense_tokens)),
        figure("tree tokens", count(it.tree_tokens)),
        figure("compression", format!("{:.3}", it.compression)),
    ]
}

fn planned(it: &PlanReport, trees: u64) -> Vec<Figure> {
    let (ops, at, it_is) = (it.ops, it.residency, &it.prediction);
    let mut figures = vec![
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
        figure(
            "work",
            format!(
                "{} dense, {} planned: {:.3} to 1",
                operations(it_is.flops_dense),
                operations(it_is.flops_shared),
                it_is.speedup
            ),
        ),
        figure("rows", format!("{:.3} to 1", it_is.token_ratio)),
    ];
    figures.extend(timed(it_is));
    figures.push(phases("device at most", it_is.device_bytes));
    figures.push(phases("host at most", it_is.host_bytes));
    figures.push(figure("verdict", verdict(it_is)));
    let saving = format!("{} of {}", count(it.trees_paying), things(trees, "tree", "trees"));
    figures.push(figure("work saved in", saving));
    figures
}

fn timed(it: &Prediction) -> Vec<Figure> {
    let (Some(dense), Some(planned)) = (it.seconds_dense, it.seconds_shared) else {
        return vec![figure("time", "unknown without the machine's flops_per_s")];
    };
    let speedup = dense / planned;
    let ratio =
        format!("{} dense, {} planned: {speedup:.3} to 1", seconds(dense), seconds(planned));
    let stall = |stall: Option<f64>| stall.map_or_else(|| "unknown".to_owned(), seconds);
    let stalls =
        format!("{} falling asleep, {} waking", stall(it.sleep_stall_s), stall(it.wake_stall_s));
    vec![figure("time", ratio), figure("stall", stalls)]
}

fn phases(label: &str, [a, b, c]: [u64; 3]) -> Figure {
    figure(label, format!("{} in A, {} in B, {} in C", bytes(a), bytes(b), bytes(c)))
}

fn verdict(it: &Prediction) -> String {
    let word = if it.verdict == Verdict::Pays { "pays" } else { "does not pay" };
    format!("{word}: {}", it.verdict.reason(it.speedup))
}

fn ranks(it: &RanksReport) -> Vec<Figure> {
    let mut figures = vec![figure(
        "imbalance",
        format!("{:.4} of an even part; at least {:.4}", it.imbalance, it.limit),
    )];
    if let (Some(uncut), Some(largest)) = (it.uncut_s, it.largest_s) {
        let speedup = uncut / largest;
        figures.push(figure(
            "time",
            format!(
                "{} on one, {} on {}: {speedup:.3} to 1",
                seconds(uncut),
                seconds(largest),
                it.ranks.len()
            ),
        ));
    }
    if it.exchanges > 0 {
        figures.push(figure("exchanged", things(it.exchanges, "node", "nodes")));
    }
    let line = |(number, rank): (usize, &super::report::RankReport)| {
        let mut text = format!(
            "{}, {}, {:.4} of even",
            things(rank.sequences, "sequence", "sequences"),
            things(rank.rows, "row", "rows"),
            rank.of_even
        );
        if let Some(finish_s) = rank.finish_s {
            let _ = write!(text, ", {}", seconds(finish_s));
        }
        if rank.dummy_ops > 0 {
            let _ = write!(text, ", {}", things(rank.dummy_ops, "dummy op", "dummy ops"));
        }
        figure(&format!("rank {number}"), text)
    };
    figures.extend(it.ranks.iter().enumerate().take(LINES_MAX).map(line));
    figures.extend(more(it.ranks.len(), "ranks"));
    figures
}

fn pipeline(it: &PipelineReport) -> Vec<Figure> {
    const NANOSECONDS: f64 = 1e9;
    let report = &it.report;
    let time = |ns: u64| seconds(ns as f64 / NANOSECONDS);
    let parts = match it.virtual_stages {
        1 => String::new(),
        parts => format!(" of {parts} parts"),
    };
    let mut figures = vec![
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
            "bubble",
            format!("{}; at least {}", percent(report.bubble), percent(report.bubble_bound)),
        ),
        figure(
            "time",
            format!(
                "{}; {} of work on the busiest stage",
                time(report.makespan_ns),
                time(report.ideal_ns)
            ),
        ),
    ];
    let line = |(number, peak): (usize, &dormouse_parallel::pipeline::StagePeak)| {
        let text = format!(
            "at most {}, {} in flight, {}",
            things(peak.live_groups.into(), "group", "groups"),
            things(peak.in_flight.into(), "microbatch", "microbatches"),
            bytes(peak.bytes)
        );
        figure(&format!("stage {number}"), text)
    };
    figures.extend(it.peaks.iter().enumerate().take(LINES_MAX).map(line));
    figures.extend(more(it.peaks.len(), "stages"));
    figures
}

fn more(lines: usize, of: &str) -> Option<Figure> {
    let left = lines.checked_sub(LINES_MAX).filter(|left| *left > 0)?;
    Some(figure("…", format!("{left} more {of}; --json lists all")))
}
