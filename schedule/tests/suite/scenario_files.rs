//! Scenario files: the text above the rule is the input, the text below the expected output.
//!
//! The tests of `parallel` include this file. `UPDATE=1 cargo test -p CRATE` rewrites the expectations; read the
//! diff.

use std::fs;
use std::path::Path;
use std::str::FromStr;

const RULE: &str = "----\n";

/// Runs all scenarios in `tests/testdata/ROOM`, at least `least`.
pub(crate) fn scenarios(room: &str, least: usize, run: impl Fn(&str) -> String) {
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

/// Returns the lines of a scenario as key and words, without comments.
pub(crate) fn lines(input: &str) -> impl Iterator<Item = (&str, Vec<&str>)> {
    input.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).map(|line| {
        let mut words = line.split_whitespace();
        (words.next().unwrap(), words.collect())
    })
}

/// Parses the word at an index as a number.
pub(crate) fn number<T: FromStr>(words: &[&str], at: usize) -> T {
    words[at].parse().unwrap_or_else(|_| panic!("{words:?} has no number at {at}"))
}
