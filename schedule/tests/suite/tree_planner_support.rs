//! Small batches with token ids, and their forests.

#![allow(dead_code, reason = "each test file uses some of it")]

use crate::batch::Batch;
use dormouse_schedule::forest::{Ending, Forest, NO_PARENT};
use dormouse_schedule::*;
use proptest::prelude::*;

/// Sequences of a small alphabet, each new or a prefix of an earlier one with or without more tokens: ends
/// inside others, duplicates and branches after one token.
pub(crate) fn sequences() -> impl Strategy<Value = Vec<Vec<u32>>> {
    let tokens = |least| prop::collection::vec(0_u32..3, least..9);
    let rest = prop::option::of((any::<prop::sample::Index>(), 0_usize..9));
    prop::collection::vec((rest, tokens(1), 0_usize..4), 1..9).prop_map(|parts| {
        let mut sequences: Vec<Vec<u32>> = Vec::new();
        for (from, new, more) in parts {
            let sequence = match from {
                Some((pick, length)) if !sequences.is_empty() => {
                    let before = &sequences[pick.index(sequences.len())];
                    let kept = &before[..(length + 1).min(before.len())];
                    [kept, &new[..more.min(new.len())]].concat()
                }
                _ => new,
            };
            sequences.push(sequence);
        }
        sequences
    })
}

/// The forest of token sequences, by recursion: the common tokens of a group are one node.
pub(crate) fn forest(sequences: &[Vec<u32>]) -> Forest {
    let mut shape = Shape { endings: vec![Ending::default(); sequences.len()], ..Shape::default() };
    let all: Vec<usize> = (0..sequences.len()).collect();
    grow(sequences, &all, 0, NO_PARENT, &mut shape);
    Forest::from_nodes_with(&shape.parents, &shape.lengths, &shape.endings).unwrap()
}

#[derive(Default)]
struct Shape {
    parents: Vec<u32>,
    lengths: Vec<u64>,
    endings: Vec<Ending>,
}

fn grow(sequences: &[Vec<u32>], group: &[usize], begin: usize, parent: u32, shape: &mut Shape) {
    let mut firsts: Vec<u32> = group.iter().map(|s| sequences[*s][begin]).collect();
    firsts.sort();
    firsts.dedup();
    for token in firsts {
        let own: Vec<usize> =
            group.iter().copied().filter(|s| sequences[*s][begin] == token).collect();
        let longer = |end: usize| own.iter().copied().filter(move |s| sequences[*s].len() > end);
        let mut end = begin + 1;
        let agree = |end: usize| {
            let mut tokens = longer(end).map(|s| sequences[s][end]);
            tokens.next().is_some_and(|token| tokens.all(|other| other == token))
        };
        while agree(end) {
            end += 1;
        }
        let id = shape.parents.len() as u32;
        shape.parents.push(parent);
        shape.lengths.push((end - begin) as u64);
        for &s in &own {
            if sequences[s].len() <= end {
                let tokens = sequences[s].len() as u64;
                shape.endings[s] = Ending { node: NodeId(id), tokens };
            }
        }
        let rest: Vec<usize> = longer(end).collect();
        if !rest.is_empty() {
            grow(sequences, &rest, end, id, shape);
        }
    }
}

pub(crate) fn model() -> ModelShape {
    ModelShape {
        layers: 4,
        heads: 2,
        kv_heads: 1,
        head_dim: 4,
        dtype_bytes: 2,
        layer_linear_weights: 100,
        kv_linear_weights: 20,
        last_layer_prefix_weights: 25,
        head_weights: 50,
        saved_bytes_per_token_layer: 64,
    }
}

/// Labels of one sequence by each kind of loss, picked by a number.
fn loss(pick: u32, tokens: u64) -> Loss {
    let middle = (u64::from(pick) / 4 % 8 + 1).min(tokens);
    match pick % 4 {
        0 => Loss::AllButFirst,
        1 => Loss::From(middle),
        2 if tokens > 1 && middle < tokens => {
            Loss::Spans(vec![Span { begin: middle, end: tokens }])
        }
        3 if tokens > 4 => {
            Loss::Spans(vec![Span { begin: 1, end: 2 }, Span { begin: 3, end: tokens - 1 }])
        }
        _ => Loss::Spans(Vec::new()),
    }
}

/// A batch of sequences without a limit of memory.
pub(crate) fn batch(sequences: &[Vec<u32>], losses: &[u32], microbatch_rows: u32) -> Batch {
    let scoring = sequences.iter().zip(losses.iter().cycle()).enumerate();
    Batch {
        forest: forest(sequences),
        scoring: scoring
            .map(|(index, (tokens, pick))| Scoring {
                loss: loss(*pick, tokens.len() as u64),
                weight: index as f64 * 0.25 - 1.0,
            })
            .collect(),
        options: PlanOptions {
            vocab: 10,
            microbatch_rows,
            wake_window_layers: 2,
            model: model(),
            ..PlanOptions::default()
        },
    }
}

/// Every label of a sequence, one by one.
pub(crate) fn labels(scoring: &Scoring, tokens: u64) -> Vec<u64> {
    let spans = match &scoring.loss {
        Loss::AllButFirst => vec![Span { begin: 1, end: tokens }],
        Loss::From(first) => vec![Span { begin: (*first).max(1), end: tokens }],
        Loss::Spans(spans) => spans.clone(),
    };
    spans.into_iter().flat_map(|span| span.begin..span.end).collect()
}

/// Limits to try, from all that a plan without limit needs down to nothing.
pub(crate) fn device_limits(batch: &Batch) -> Vec<u64> {
    let free = batch.plan().unwrap().predict();
    let most = free.device_bytes.into_iter().max().unwrap_or(0);
    (1..=8).rev().map(|eighth| most * eighth / 8).filter(|bytes| *bytes > 0).collect()
}
