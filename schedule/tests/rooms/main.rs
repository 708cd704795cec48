//! Layouts: properties against naive models, and readable scenarios in `tests/testdata/layout/*.txt`.
//!
//! `UPDATE=1 cargo test -p dormouse-schedule` rewrites the expectations; read the diff.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod layout;
mod layout_scenarios;
#[path = "../scenario_files/mod.rs"]
mod scenario_files;

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
