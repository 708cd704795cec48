//! Layouts, context shards, routers' accounting and rollout assignment: properties against naive
//! models, and readable scenarios in `tests/testdata/ROOM/*.txt`.
//!
//! `UPDATE=1 cargo test -p dormouse-schedule` rewrites the expectations; read the diff.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod context;
mod context_scenarios;
mod experts;
mod experts_forest;
mod experts_scenarios;
mod json;
mod layout;
mod layout_scenarios;
mod rollout;
mod rollout_scenarios;

use std::fs;
use std::path::Path;
use std::str::FromStr;

const RULE: &str = "----\n";

/// Runs every scenario of a room: what stands above the rule gives what stands below.
fn scenarios(room: &str, least: usize, run: impl Fn(&str) -> String) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testdata").join(room);
    let mut seen = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let (input, expected) = text.split_once(RULE).unwrap();
        let got = run(input);
        if std::env::var_os("UPDATE").is_some() {
            fs::write(&path, format!("{input}{RULE}{got}")).unwrap();
        } else {
            assert_eq!(got, expected, "{}", path.display());
        }
        seen += 1;
    }
    assert!(seen >= least, "only {seen} scenarios found");
}

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
