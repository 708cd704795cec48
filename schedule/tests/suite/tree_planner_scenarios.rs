//! Scenarios of prefix trees: `tests/testdata/tree_planner/*.txt`, each a batch and its plan.
//!
//! `UPDATE=1 cargo test -p dormouse-schedule` rewrites the expectations; read the diff.

use std::fmt::Write as _;

use crate::batch::Batch;
use dormouse_schedule::*;

/// Labels: `all`, `from 3`, `2..4,6..8` or `none`.
fn loss(text: &str) -> Loss {
    let span = |text: &str| {
        let (begin, end) = text.split_once("..").unwrap();
        Span { begin: begin.parse().unwrap(), end: end.parse().unwrap() }
    };
    match text.split_once(' ') {
        Some(("from", first)) => Loss::From(first.parse().unwrap()),
        _ if text == "all" => Loss::AllButFirst,
        _ if text == "none" => Loss::Spans(Vec::new()),
        _ => Loss::Spans(text.split(',').map(span).collect()),
    }
}

fn parse(text: &str) -> Batch {
    let mut batch = Batch {
        options: PlanOptions {
            vocab: 1,
            microbatch_rows: 100,
            wake_window_layers: 2,
            model: ModelShape {
                saved_bytes_per_token_layer: 100,
                ..crate::tree_planner_support::model()
            },
            ..PlanOptions::default()
        },
        ..Batch::default()
    };
    let mut machine = Machine::default();
    let mut sequences: Vec<Vec<u32>> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (key, value) = line.split_once(' ').unwrap();
        let number = || value.parse::<u64>().unwrap();
        match key {
            "sequence" => {
                let (tokens, scored) = value.split_once(" scores ").unwrap();
                let (labels, weight) = scored.split_once(" weight ").unwrap();
                sequences.push(tokens.chars().map(u32::from).collect());
                batch.scoring.push(Scoring { loss: loss(labels), weight: weight.parse().unwrap() });
            }
            "microbatch_rows" => batch.microbatch_rows = number() as u32,
            "block_rows" => batch.block_rows = number(),
            "layers" => batch.model.layers = number() as u32,
            "window" => batch.wake_window_layers = number() as u32,
            "device_bytes" => batch.device_bytes = number(),
            "host_bytes" => batch.host_bytes = number(),
            "last_layer" => batch.last_layer_dead = value == "dead",
            "flops_per_s" => machine.flops_per_s = number(),
            "op_overhead_ns" => machine.op_overhead_ns = number(),
            "link_bytes_per_s" => {
                machine.sleep_bytes_per_s = number();
                machine.wake_bytes_per_s = number();
            }
            other => panic!("unknown line {other:?}"),
        }
    }
    batch.forest = crate::tree_planner_support::forest(&sequences);
    batch.machine = (machine != Machine::default()).then_some(machine);
    batch
}

fn op_line(op: &Op) -> String {
    let span = |span: &Span| format!("{}..{}", span.begin, span.end);
    let mut text = format!("{} ", op.id.0);
    match &op.kind {
        OpKind::PrefixForward { node, tokens } => {
            let how = match op.residency.unwrap() {
                Residency::Keep => "kept",
                Residency::Sleep => "falling asleep",
                _ => "without a graph",
            };
            write!(text, "forward node {}, rows {}, {how}", node.0, span(tokens)).unwrap();
        }
        OpKind::Microbatch { members, microbatches_left, .. } => {
            let of = |m: &Member| {
                format!("leaf {} rows {} at {}", m.node.0, span(&m.rows), m.first_position)
            };
            let members: Vec<String> = members.iter().map(of).collect();
            write!(
                text,
                "microbatch: {}{}",
                members.join(", "),
                if *microbatches_left == 0 { "; the last" } else { "" }
            )
            .unwrap();
        }
        OpKind::ForwardAgain { node, tokens } => {
            write!(text, "forward again node {}, rows {}", node.0, span(tokens)).unwrap();
        }
        OpKind::PrefixBackward { node, wake_window_layers } => {
            write!(text, "backward node {}", node.0).unwrap();
            if *wake_window_layers > 0 {
                write!(text, ", {wake_window_layers} layers awake").unwrap();
            }
        }
        other => panic!("unknown op {other:?}"),
    }
    for (what, node) in [("reads", op.reads), ("asleep after it:", op.asleep), ("wakes", op.waking)]
    {
        if let Some(node) = node {
            write!(text, "; {what} {}", node.0).unwrap();
        }
    }
    writeln!(text, " [{} bytes, {} asleep]", op.device_bytes, op.host_bytes).unwrap();
    for score in &op.scores {
        let (rows, first) = (span(&score.rows), score.first_label);
        let (sequence, weight) = (score.sequence, score.weight);
        writeln!(
            text,
            "    rows {rows}: labels of sequence {sequence} from {first}, weight {weight}"
        )
        .unwrap();
    }
    text
}

fn print(batch: &Batch) -> String {
    let plan = match batch.plan() {
        Ok(plan) => plan,
        Err(error) => return format!("refused: {error}\n"),
    };
    let ops = plan.ops().iter().filter(|op| op.kind != OpKind::Done);
    let mut text: String = ops.map(op_line).collect();
    for tree in plan.trees() {
        let (dense, shared) = (tree.flops_dense, tree.flops_shared);
        let reason = tree.verdict.reason(if dense == shared { 1.0 } else { dense / shared });
        writeln!(text, "tree {}, {} sequences: {reason}", tree.root.0, tree.sequences).unwrap();
    }
    let p = plan.predict();
    writeln!(
        text,
        "flops {} dense, {} shared; tokens {:.3}",
        p.flops_dense, p.flops_shared, p.token_ratio
    )
    .unwrap();
    if let Verdict::Overhead = p.verdict {
        writeln!(text, "all in all, {}", p.verdict.reason(p.speedup)).unwrap();
    }
    if batch.microbatch_rows == 0 {
        writeln!(text, "microbatches of {} rows", plan.microbatch_rows()).unwrap();
    }
    if let Some((dense, shared)) = p.seconds_dense.zip(p.seconds_shared) {
        let [sleep, wake] = [p.sleep_stall_s, p.wake_stall_s].map(Option::unwrap_or_default);
        writeln!(
            text,
            "seconds {dense:.4} dense, {shared:.4} shared; waits {sleep:.4} and {wake:.4}"
        )
        .unwrap();
    }
    text
}

#[test]
fn scenarios() {
    crate::scenario_files::scenarios("tree_planner", 14, |input| print(&parse(input)));
}

/// Ops, nodes, trees and prediction of a batch read back as they were.
#[test]
fn json_reads_back() {
    let text = "sequence abcdefgh scores all weight 0.5\nsequence abcdxy scores 2..3,4..6 weight -1\n\
                sequence ab scores all weight 1\nmicrobatch_rows 3\nblock_rows 2\nwindow 2\ndevice_bytes 2500\n";
    let plan = parse(text).plan().unwrap();
    let json: serde_json::Value = serde_json::from_str(&plan.to_json()).unwrap();
    assert_eq!(json["version"], PLAN_VERSION);
    let read = |key: &str| json[key].clone();
    assert_eq!(serde_json::from_value::<Vec<Op>>(read("ops")).unwrap(), plan.ops());
    assert_eq!(serde_json::from_value::<Vec<PlanNode>>(read("nodes")).unwrap(), plan.nodes());
    assert_eq!(serde_json::from_value::<Vec<TreeVerdict>>(read("trees")).unwrap(), plan.trees());
    assert_eq!(serde_json::from_value::<Prediction>(read("prediction")).unwrap(), plan.predict());
    assert!(plan.ops().iter().any(|op| op.residency != Some(Residency::Keep)), "{text}");
}
