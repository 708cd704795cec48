//! Readable scenarios: `testdata/*.txt`, each with arguments, files, and the program's output.
//!
//! ```text
//! $ plan batch.jsonl --json
//! ---- file batch.jsonl
//! {"ids": [1, 2, 3]}
//! ---- status 0
//! ---- stdout
//! …
//! ---- stderr
//! ```
//! `UPDATE=1 cargo test -p dormouse-cli` rewrites the expectations; read the diff.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::path::Path;

use common::{Folder, dormouse};

/// Width of a report.
const COLUMNS: usize = 80;

/// A scenario: its first line, its files by name, and the text before the expectations.
struct Scenario {
    arguments: Vec<String>,
    files: Vec<(String, String)>,
    given: String,
}

fn parse(text: &str) -> Scenario {
    let end = text.find("---- status").unwrap_or(text.len());
    let given = &text[..end];
    let mut lines = given.lines();
    let first = lines.by_ref().find(|line| !line.starts_with('#')).unwrap();
    let arguments = first.strip_prefix("$ ").unwrap().split_whitespace().map(str::to_owned);
    let arguments = arguments.collect();
    let mut files: Vec<(String, String)> = Vec::new();
    for line in lines {
        if let Some(name) = line.strip_prefix("---- file ") {
            files.push((name.to_owned(), String::new()));
        } else {
            let (_, text) = files.last_mut().unwrap();
            text.push_str(line);
            text.push('\n');
        }
    }
    Scenario { arguments, files, given: given.to_owned() }
}

#[test]
fn scenarios_match() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testdata");
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|it| it.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|it| it == "txt"));
    paths.sort();
    assert!(paths.len() >= 20, "only {} scenarios found", paths.len());
    let mut different = Vec::new();
    for path in paths {
        let wanted = fs::read_to_string(&path).unwrap();
        let scenario = parse(&wanted);
        let here = Folder::new();
        here.put("shape.json", include_str!("../../examples/plan/shape.json"));
        here.put("config.json", include_str!("../../examples/plan/config.json"));
        here.put("machine.json", include_str!("../../examples/plan/machine.json"));
        for (name, text) in &scenario.files {
            here.put(name, text);
        }
        let output = dormouse(here.path(), &scenario.arguments);
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let seen = format!(
            "{}---- status {}\n---- stdout\n{}---- stderr\n{}",
            scenario.given,
            output.status.code().unwrap(),
            text(&output.stdout),
            text(&output.stderr)
        );
        let is_table = scenario.arguments[0] == "plan"
            && !scenario.arguments.iter().any(|it| ["-j", "--json", "--help"].contains(&&**it));
        for line in text(&output.stdout).lines().filter(|_| is_table) {
            assert!(line.chars().count() <= COLUMNS, "{}: {line}", path.display());
        }
        if seen != wanted {
            if std::env::var_os("UPDATE").is_some() {
                fs::write(&path, &seen).unwrap();
            }
            different.push(format!("{}:\n{seen}", path.display()));
        }
    }
    assert!(different.is_empty(), "not as written:\n{}", different.join("\n"));
}
