//! Scenarios of flat groups: `tests/testdata/flat/*.txt`, each a spec and the expected plan.
//!
//! `UPDATE=1 cargo test -p dormouse-schedule` rewrites the expectations; read the diff.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::batch::FlatGroup;
use dormouse_schedule::*;

fn parse(text: &str) -> FlatGroup {
    let options = PlanOptions {
        vocab: 1000,
        model: ModelShape {
            layers: 2,
            heads: 2,
            kv_heads: 1,
            head_dim: 4,
            dtype_bytes: 4,
            layer_linear_weights: 100,
            kv_linear_weights: 20,
            last_layer_prefix_weights: 25,
            head_weights: 50,
            saved_bytes_per_token_layer: 16,
        },
        ..PlanOptions::default()
    };
    let mut group = FlatGroup { options, ..FlatGroup::default() };
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (key, value) = line.split_once(' ').unwrap();
        match key {
            "prompt" => group.prompt = value.parse().unwrap(),
            "microbatch_rows" => group.microbatch_rows = value.parse().unwrap(),
            "window" => group.wake_window_layers = value.parse().unwrap(),
            "last_layer" => group.last_layer_dead = value == "dead",
            "dtype_bytes" => group.model.dtype_bytes = value.parse().unwrap(),
            "device_bytes" => machine(&mut group).device_bytes = value.parse().unwrap(),
            "flops_per_s" => machine(&mut group).flops_per_s = value.parse().unwrap(),
            "wake_bytes_per_s" => machine(&mut group).wake_bytes_per_s = value.parse().unwrap(),
            "response" => {
                let (length, weight) = value.split_once(" weight ").unwrap();
                group.responses.push((length.parse().unwrap(), weight.parse().unwrap()));
            }
            other => panic!("unknown line {other:?}"),
        }
    }
    group
}

fn machine(group: &mut FlatGroup) -> &mut Machine {
    group.machine.get_or_insert_default()
}

fn print(group: &FlatGroup) -> String {
    let plan = match group.plan() {
        Ok(plan) => plan,
        Err(error) => return format!("refused: {error}\n"),
    };
    let mut text = String::new();
    for op in plan.ops() {
        write!(text, "{} ", op.id.0).unwrap();
        match &op.kind {
            OpKind::PrefixForward { tokens, .. } => {
                writeln!(text, "prefix forward, tokens {}..{}", tokens.begin, tokens.end).unwrap();
            }
            OpKind::Microbatch { members, microbatches_left, .. } => {
                writeln!(
                    text,
                    "microbatch{}",
                    if *microbatches_left == 0 { ", the last" } else { "" }
                )
                .unwrap();
                for m in members {
                    writeln!(
                        text,
                        "    response {} rows {}..{} from position {} weight {}",
                        m.sequence, m.rows.begin, m.rows.end, m.first_position, m.weight
                    )
                    .unwrap();
                }
            }
            OpKind::PrefixBackward { wake_window_layers, .. } => {
                writeln!(text, "node backward, waking {wake_window_layers} layers ahead").unwrap();
            }
            OpKind::Done => writeln!(text, "done").unwrap(),
            other => panic!("unknown op {other:?}"),
        }
    }
    let p = plan.predict();
    writeln!(
        text,
        "flops {} dense, {} shared; tokens {:.3}; bytes A {} B {} C {}, may sleep {}; {}",
        p.flops_dense,
        p.flops_shared,
        p.token_ratio,
        p.peak_bytes_a,
        p.peak_bytes_b,
        p.peak_bytes_c,
        p.sleep_bytes,
        p.verdict.reason(p.speedup)
    )
    .unwrap();
    if let Some(stall_s) = p.wake_stall_s {
        writeln!(text, "phase C waits for at least {stall_s:.4} s").unwrap();
    }
    text
}

#[test]
fn scenarios() {
    crate::scenario_files::scenarios("flat", 10, |input| print(&parse(input)));
}

/// JSON matches the recording `tests/testdata/plan.json`; `UPDATE=1` rewrites it.
#[test]
fn json_is_as_recorded() {
    let input = "prompt 4\nmicrobatch_rows 2\nflops_per_s 1000\nwake_bytes_per_s 10\n\
                 response 2 weight 0.5\nresponse 1 weight -1\n";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testdata/plan.json");
    let got = parse(input).plan().unwrap().to_json() + "\n";
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, &got).unwrap();
    }
    assert_eq!(got, fs::read_to_string(&path).unwrap(), "{}", path.display());
}

#[test]
fn json_reads_back() {
    let plan = parse("prompt 4\nmicrobatch_rows 8\nresponse 2 weight 1\n").plan().unwrap();
    let json: serde_json::Value = serde_json::from_str(&plan.to_json()).unwrap();
    assert_eq!(json["version"], PLAN_VERSION);
    let kinds: Vec<&str> =
        json["ops"].as_array().unwrap().iter().map(|op| op["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["prefix_forward", "microbatch", "prefix_backward", "done"]);
    let ops: Vec<Op> = serde_json::from_value(json["ops"].clone()).unwrap();
    assert_eq!(ops, plan.ops());
    let prediction: Prediction = serde_json::from_value(json["prediction"].clone()).unwrap();
    assert_eq!(prediction, plan.predict());
}
