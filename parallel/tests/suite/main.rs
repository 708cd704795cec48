//! The plans of this crate against naive models, and readable scenarios in `tests/testdata/ROOM/*.txt`.
//!
//! `UPDATE=1 cargo test -p dormouse-parallel` rewrites the expectations; read the diff.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod balance;
mod balance_common;
mod balance_scenarios;
#[path = "../../../schedule/tests/suite/batch.rs"]
mod batch;
mod collective_order;
mod context;
mod context_scenarios;
mod draw;
mod experts;
mod experts_forest;
mod experts_scenarios;
mod json;
mod naive_pipeline;
mod naive_tiers;
mod pipeline_properties;
mod pipeline_scenarios;
mod queries;
mod rollout;
mod rollout_scenarios;
mod scenario_files;
mod simulate_properties;
mod simulate_scenarios;
mod simulate_trees;

use std::str::FromStr;

use scenario_files::scenarios;

/// Lines of a scenario as key and words, comments apart.
fn lines(input: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    input.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(|line| {
        let mut words = line.split_whitespace();
        (words.next().unwrap(), words.collect())
    })
}

/// The word at a place, as a number.
fn number<T: FromStr>(words: &[&str], at: usize) -> T {
    words[at].parse().unwrap_or_else(|_| panic!("{words:?} has no number at {at}"))
}
