//! Replays plans row by row and compares tokens, positions and visible keys with the dense run. Costs are
//! counted from these rows.

use std::collections::HashMap;

use crate::batch::{FlatGroup, from_slices};
use dormouse_schedule::*;
use proptest::prelude::*;

/// A token and its position. All tokens of a case have different ids.
type Key = (i64, u64);

/// One row of one layer's attention.
#[derive(Clone, Debug, PartialEq)]
struct Row {
    query: Key,
    /// Unmasked keys, in order.
    keys: Vec<Key>,
    /// The label of the row's logits and its weight, if it has one.
    label: Option<(i64, f64)>,
}

fn model() -> ModelShape {
    ModelShape {
        layers: 3,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        dtype_bytes: 2,
        layer_linear_weights: 1_000,
        kv_linear_weights: 100,
        last_layer_prefix_weights: 130,
        head_weights: 700,
        saved_bytes_per_token_layer: 64,
    }
}

/// A group whose tokens all have different ids.
#[derive(Clone)]
struct Case {
    prompt: Vec<i64>,
    responses: Vec<Vec<i64>>,
    group: FlatGroup,
}

fn case(prompt: usize, lengths: &[usize], microbatch_rows: u32, dead: bool) -> Case {
    let mut next = 0..;
    let mut ids = |count: usize| next.by_ref().take(count).collect::<Vec<i64>>();
    let weight = |index: usize| index as f64 * 0.25 - 1.0;
    let options = PlanOptions {
        vocab: 10_000,
        microbatch_rows,
        last_layer_dead: dead,
        model: model(),
        ..PlanOptions::default()
    };
    let responses = lengths.iter().enumerate().map(|(at, count)| (*count as u64, weight(at)));
    let group = FlatGroup { prompt: prompt as u64, responses: responses.collect(), options };
    Case {
        prompt: ids(prompt),
        responses: lengths.iter().map(|count| ids(*count)).collect(),
        group,
    }
}

fn at_positions(tokens: &[i64], first: u64) -> Vec<Key> {
    tokens.iter().copied().zip(first..).collect()
}

/// `rows` after `before`: each sees all keys of `before` and its own earlier rows.
fn causal(rows: &[Key], before: &[Key]) -> Vec<Row> {
    (0..rows.len())
        .map(|index| Row {
            query: rows[index],
            keys: before.iter().chain(&rows[..=index]).copied().collect(),
            label: None,
        })
        .collect()
}

/// The dense run's rows of one response: the prompt and all of the response but its last token.
fn dense(case: &Case, sequence: usize) -> Vec<Row> {
    let (prompt, response) = (&case.prompt, &case.responses[sequence]);
    let all = [&prompt[..], &response[..]].concat();
    let mut rows = causal(&at_positions(&all[..all.len() - 1], 0), &[]);
    for (row, label) in rows[prompt.len() - 1..].iter_mut().zip(response) {
        row.label = Some((*label, case.group.responses[sequence].1));
    }
    rows
}

/// The rows a plan runs: the node's, and each response's.
struct Replayed {
    prefix: Vec<Row>,
    suffixes: HashMap<u32, Vec<Row>>,
    largest_microbatch: u64,
}

fn replay(plan: &mut Plan, case: &Case) -> Replayed {
    let prompt = &case.prompt;
    let mut boundary = Vec::new();
    let mut done = Replayed { prefix: Vec::new(), suffixes: HashMap::new(), largest_microbatch: 0 };
    let (mut saw_last, mut saw_backward) = (false, false);
    loop {
        let Op { id, kind, .. } = plan.next_op().clone();
        match kind {
            OpKind::PrefixForward { tokens, .. } => {
                assert!(boundary.is_empty(), "the prefix runs once");
                let run = &prompt[tokens.begin as usize..tokens.end as usize];
                boundary = at_positions(run, tokens.begin);
                done.prefix = causal(&boundary, &[]);
            }
            OpKind::Microbatch { members, microbatches_left, .. } => {
                assert!(!boundary.is_empty() && !saw_last);
                saw_last = microbatches_left == 0;
                assert!(members.is_sorted_by(|a, b| a.sequence < b.sequence), "{members:?}");
                let mut row = 0;
                for member in &members {
                    assert_eq!(member.rows.begin, row, "members are contiguous");
                    row = member.rows.end;
                    let rows = suffix(case, member, &boundary);
                    let before = done.suffixes.insert(member.sequence, rows);
                    assert!(before.is_none(), "response {} runs once", member.sequence);
                }
                assert!(
                    row <= case.group.microbatch_rows.into() || members.len() == 1,
                    "{members:?}"
                );
                done.largest_microbatch = done.largest_microbatch.max(row);
            }
            OpKind::PrefixBackward { .. } => {
                assert!(
                    saw_last && !saw_backward,
                    "backward comes once, after the last microbatch"
                );
                saw_backward = true;
            }
            OpKind::Done => {
                assert!(saw_backward);
                return done;
            }
            other => panic!("unknown op {other:?}"),
        }
        plan.complete(id).unwrap();
    }
}

/// A member's rows: inputs `[P[-1]] + S_i[:-1]`, labels `S_i`, the prefix and its own past as keys.
fn suffix(case: &Case, member: &Member, boundary: &[Key]) -> Vec<Row> {
    let labels = &case.responses[member.sequence as usize];
    let mut inputs = vec![*case.prompt.last().unwrap()];
    inputs.extend(&labels[..labels.len() - 1]);
    let span = member.tokens.begin as usize..member.tokens.end as usize;
    assert_eq!(member.rows.count(), member.tokens.count());
    let own = at_positions(&inputs[span.clone()], member.first_position);
    let mut rows = causal(&own, boundary);
    for (row, label) in rows.iter_mut().zip(&labels[span]) {
        row.label = Some((*label, member.weight));
    }
    rows
}

/// Operations of rows in `layers` layers, one addition per row and one per query–key pair.
fn flops(rows: &[Row], layers: u32) -> f64 {
    let shape = model();
    let mut sum = 0.0;
    for row in rows {
        for _layer in 0..layers {
            sum += 6.0 * shape.layer_linear_weights as f64;
            for _key in &row.keys {
                sum += 12.0 * f64::from(shape.heads * shape.head_dim);
            }
        }
        if row.label.is_some() {
            sum += 6.0 * shape.head_weights as f64;
        }
    }
    sum
}

proptest! {
    #[test]
    fn a_plan_runs_the_dense_rows_and_costs_what_they_cost(
        prompt in 2usize..14,
        lengths in prop::collection::vec(1usize..10, 1..7),
        microbatch_rows in 1u32..30,
        dead in any::<bool>(),
    ) {
        let case = case(prompt, &lengths, microbatch_rows, dead);
        let mut plan = case.group.plan().unwrap();
        let prediction = plan.predict();
        let Replayed { prefix, suffixes, largest_microbatch } = replay(&mut plan, &case);
        prop_assert_eq!(suffixes.len(), lengths.len());

        let layers = model().layers;
        let live = layers - u32::from(dead);
        let mut flops_shared = flops(&prefix, live);
        if dead {
            flops_shared += 6.0 * (prefix.len() as u64 * model().last_layer_prefix_weights) as f64;
        }
        let (mut flops_dense, mut dense_rows, mut shared_rows) = (0.0, 0, prefix.len());
        for sequence in 0..lengths.len() {
            let dense = self::dense(&case, sequence);
            let suffix = &suffixes[&(sequence as u32)];
            let ours: Vec<Row> = prefix.iter().chain(suffix).cloned().collect();
            prop_assert_eq!(&ours, &dense, "response {}", sequence);
            flops_dense += flops(&dense, layers);
            flops_shared += flops(suffix, layers);
            dense_rows += dense.len();
            shared_rows += suffix.len();
        }
        // Sums of integers below 2^53: exact.
        prop_assert_eq!(prediction.flops_dense, flops_dense);
        prop_assert_eq!(prediction.flops_shared, flops_shared);
        prop_assert_eq!(prediction.speedup, flops_dense / flops_shared);
        prop_assert_eq!(prediction.token_ratio, dense_rows as f64 / shared_rows as f64);

        // K and V of 2 bytes an element, accumulators of 4; three copies of logits.
        let (rows, saved) = (prefix.len() as u64, model().saved_bytes_per_token_layer);
        let boundary = rows * u64::from(layers) * 2 * (2 * 8) * (2 + 4);
        prop_assert_eq!(prediction.sleep_bytes, rows * saved * u64::from(live));
        prop_assert_eq!(prediction.peak_bytes_a, prediction.sleep_bytes + boundary);
        prop_assert_eq!(prediction.peak_bytes_c, prediction.peak_bytes_a);
        let microbatch = largest_microbatch * (saved * u64::from(layers) + 3 * 10_000 * 2);
        prop_assert_eq!(prediction.peak_bytes_b, boundary + microbatch);
    }

    #[test]
    fn equal_groups_give_equal_plans(
        lengths in prop::collection::vec(1usize..10, 1..12),
        microbatch_rows in 1u32..30,
    ) {
        let case = case(5, &lengths, microbatch_rows, false);
        let plan = case.group.plan().unwrap();
        prop_assert_eq!(plan.to_json(), case.group.plan().unwrap().to_json());
        // Every token has an id of its own, so what the ids share is the prompt alone.
        let full = |response: &Vec<i64>| [&case.prompt[..], response].concat();
        let sequences: Vec<Vec<i64>> = case.responses.iter().map(full).collect();
        let slices: Vec<&[i64]> = sequences.iter().map(Vec::as_slice).collect();
        let by_ids = from_slices(&slices, &[], 10_000).unwrap();
        let scored = |it: &(u64, f64)| Scoring { loss: Loss::From(5), weight: it.1 };
        let scoring: Vec<Scoring> = case.group.responses.iter().map(scored).collect();
        let options = plan.options();
        if lengths.len() > 1 {
            let by_ids = Plan::new(&by_ids, &scoring, options).unwrap();
            prop_assert_eq!(plan.ops(), by_ids.ops(), "plans from ids and from lengths are equal");
        }
    }
}
