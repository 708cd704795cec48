//! Readable accounting: `tests/testdata/experts/`.

use std::fmt::Write as _;

use dormouse_parallel::experts::{Accounting, Baseline, Formula, Selection, Spanning};

use crate::experts::router;
use crate::experts_forest::forest;
use crate::{lines, number, scenarios};

#[test]
fn experts_scenarios() {
    scenarios("experts", 6, run);
}

fn run(input: &str) -> String {
    let mut router = router();
    let mut baseline = Baseline { feeds_last_token: true, ..Baseline::default() };
    let (mut sequences, mut microbatches) = (Vec::new(), Vec::new());
    for (key, words) in lines(input) {
        match key {
            "formula" => {
                baseline.formula = match words[0] {
                    "switch" => Formula::Switch,
                    "pooled" => Formula::PooledLayers,
                    _ => Formula::RunningCounts {
                        ranks: number(&words, 1),
                        microbatches: number(&words, 2),
                    },
                }
            }
            "sequence" => {
                sequences.push(words[0].bytes().collect());
                baseline.scopes.push(number(&words, 2));
                microbatches.push(number(&words, 4));
            }
            "weights" => {
                baseline.scope_weights = (0..words.len()).map(|at| number(&words, at)).collect();
            }
            "last_unfed" => baseline.feeds_last_token = false,
            "cut_at_microbatches" => baseline.spanning = Spanning::CutAtMicrobatches,
            "capacity" => router.capacity_limit = true,
            "sinkhorn" => router.selection = Selection::Sinkhorn,
            "counts_only" => {
                (router.aux_coefficient, router.z_coefficient) = (0.0, 0.0);
                router.counts_wanted = true;
            }
            other => panic!("unknown line {other:?}"),
        }
    }
    match Accounting::of(&forest(&sequences, usize::MAX), &microbatches, &baseline, &router) {
        Ok(accounting) => show(&accounting),
        Err(error) => format!("refused: {error}\n"),
    }
}

fn show(accounting: &Accounting) -> String {
    let mut text = String::new();
    let captured = match (accounting.counts, accounting.sums) {
        (true, true) => "counts and sums",
        (true, false) => "counts",
        _ => "nothing",
    };
    writeln!(text, "captures {captured}; last layer {:?}", accounting.last_layer).unwrap();
    for (number, portion) in accounting.portions.iter().enumerate() {
        writeln!(
            text,
            "portion {number}: node {} rows {}..{}, {} copies, z weight {:.4}",
            portion.node.0, portion.rows.begin, portion.rows.end, portion.copies, portion.z_weight
        )
        .unwrap();
    }
    for terms in &accounting.scopes {
        let reads: Vec<String> =
            terms.reads.iter().map(|read| format!("{} × {}", read.copies, read.portion)).collect();
        writeln!(
            text,
            "scope {} in microbatch {}: {} tokens, weight {:.3}, scales {:.3} {:.5} {:.5}; {}",
            terms.scope,
            terms.microbatch,
            terms.tokens,
            terms.weight,
            terms.loss_scale,
            terms.count_scale,
            terms.probability_scale,
            reads.join(", ")
        )
        .unwrap();
    }
    text
}
