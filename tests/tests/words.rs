//! Retired names stay retired (docs/glossary.md): identifiers of the crates, the C header, the
//! environment table and the Python package.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Words that no identifier contains anywhere.
const RETIRED: &[&str] = &[
    "ask", "asks", "desk", "door", "doors", "doomed", "errand", "ledger", "lockstep", "tariff",
    "trunk", "wave", "waves",
];

/// Words that have another meaning elsewhere: the rooms in which no identifier contains them.
const RETIRED_IN: &[(&str, &[&str])] = &[
    ("alloc", &["front"]),
    ("offload", &["carry", "gate", "line", "node", "seat"]),
    ("storage", &["carry", "gate", "node", "seat"]),
    ("residency", &["carry", "gate", "line", "node", "seat"]),
    ("schedule", &["walk", "words"]),
    ("parallel", &["walk", "words"]),
];

/// Names of functions, types and handles of the C API and of Python that have been renamed.
const RETIRED_NAMES: &[&str] = &["dormouse_node_", "DORMOUSE_DOOR_", "DORMOUSE_OP_NODE_"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Files below `folder` whose name ends in `extension`, tests excluded.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry.unwrap().path();
            let is_test = path.file_name().is_some_and(|name| {
                let name = name.to_string_lossy();
                name.starts_with("test") || name.ends_with("_tests.rs")
            });
            if path.is_dir() && !is_test {
                folders.push(path);
            } else if !is_test && path.extension().is_some_and(|e| e == extension) {
                found.push(path);
            }
        }
    }
    found
}

/// The words of an identifier: `WakeAhead_2nd` has `wake`, `ahead`, `2nd`.
fn words(identifier: &str) -> BTreeSet<String> {
    let mut words = BTreeSet::new();
    let mut word = String::new();
    let mut after_lower = false;
    for letter in identifier.chars() {
        if letter == '_' || (letter.is_uppercase() && after_lower) {
            words.insert(std::mem::take(&mut word).to_lowercase());
        }
        if letter != '_' {
            word.push(letter);
        }
        after_lower = letter.is_lowercase() || letter.is_ascii_digit();
    }
    words.insert(word.to_lowercase());
    words.remove("");
    words
}

/// The identifier that a line declares for others than its own module, if it declares one.
fn declared(line: &str, keywords: &[&str]) -> Option<String> {
    let mut tokens =
        line.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|t| !t.is_empty());
    tokens.find(|token| keywords.contains(token))?;
    tokens.next().map(str::to_owned)
}

/// Every word of `text` that is retired, with the text it stands in.
fn offences(found: &mut Vec<String>, place: &str, identifier: &str, retired: &[&str]) {
    let words = words(identifier);
    for word in retired.iter().filter(|word| words.contains(**word)) {
        found.push(format!("{place}: `{identifier}` contains the retired word `{word}`"));
    }
}

#[test]
fn identifiers_split_into_words() {
    let of = |identifier| words(identifier).into_iter().collect::<Vec<_>>().join(" ");
    assert_eq!(of("WakeAhead"), "ahead wake");
    assert_eq!(of("DORMOUSE_OP_WAVE"), "dormouse op wave");
    assert_eq!(of("task_mask"), "mask task");
    assert_eq!(of("in2Door"), "door in2");
}

#[test]
fn rust_identifiers_have_no_retired_words() {
    const KEYWORDS: &[&str] =
        &["fn", "struct", "enum", "trait", "type", "mod", "const", "static", "union"];
    let (mut found, mut seen) = (Vec::new(), 0);
    for entry in fs::read_dir(root()).unwrap() {
        let room = entry.unwrap().file_name().to_string_lossy().into_owned();
        let mut retired = RETIRED.to_vec();
        for (_, words) in RETIRED_IN.iter().filter(|(name, _)| *name == room) {
            retired.extend(*words);
        }
        for path in files(&root().join(&room).join("src"), "rs") {
            let shown = path.strip_prefix(root()).unwrap().display().to_string();
            offences(&mut found, &shown, path.file_stem().unwrap().to_str().unwrap(), &retired);
            for line in fs::read_to_string(&path).unwrap().lines() {
                let code = line.split("//").next().unwrap();
                if let Some(name) = declared(code, KEYWORDS) {
                    seen += 1;
                    offences(&mut found, &shown, &name, &retired);
                }
            }
        }
    }
    assert!(seen > 2_000, "only {seen} declarations seen");
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn the_header_and_the_environment_have_no_retired_words() {
    let mut found = Vec::new();
    for name in ["ffi/include/dormouse.h", "docs/params.md", "README.md", "docs/quickstart.md"] {
        let text = fs::read_to_string(root().join(name)).unwrap();
        for token in text.split(|c: char| !(c.is_alphanumeric() || c == '_')) {
            offences(&mut found, name, token, RETIRED);
            for retired in RETIRED_NAMES.iter().filter(|retired| token.starts_with(**retired)) {
                found.push(format!("{name}: `{token}` is a {retired}* name"));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn python_names_have_no_retired_words() {
    let (mut found, mut seen) = (Vec::new(), 0);
    for path in files(&root().join("python/dormouse"), "py") {
        let shown = path.strip_prefix(root()).unwrap().display().to_string();
        offences(&mut found, &shown, path.file_stem().unwrap().to_str().unwrap(), RETIRED);
        for line in fs::read_to_string(&path).unwrap().lines() {
            let code = line.trim_start();
            if let Some(rest) = code.strip_prefix("def ").or_else(|| code.strip_prefix("class ")) {
                seen += 1;
                let name = rest.split(|c: char| !(c.is_alphanumeric() || c == '_')).next().unwrap();
                offences(&mut found, &shown, name, RETIRED);
            }
        }
    }
    assert!(seen > 300, "only {seen} definitions seen");
    assert!(found.is_empty(), "{}", found.join("\n"));
}
