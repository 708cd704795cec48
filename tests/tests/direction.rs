//! The imports between workspace members are those that docs/design.md §2 draws.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

mod members;

use members::{packages, root};

/// Returns the table of docs/design.md: each workspace member and the members it may import.
fn drawn() -> BTreeMap<String, BTreeSet<String>> {
    let text = fs::read_to_string(root().join("docs/design.md")).unwrap();
    let table = text.split("```imports\n").nth(1).unwrap().split("```").next().unwrap();
    let line = |line: &str| {
        let (member, imports) = line.split_once(':').unwrap();
        let imports = imports.split_whitespace().map(|name| format!("dormouse-{name}")).collect();
        (member.to_owned(), imports)
    };
    table.lines().map(line).collect()
}

/// Normal and build dependencies of each workspace member that are members themselves.
fn arrows() -> BTreeMap<String, BTreeSet<String>> {
    let packages = packages();
    let members: BTreeSet<&str> = packages.iter().map(|p| p["name"].as_str().unwrap()).collect();
    packages
        .iter()
        .map(|package| {
            let imports = package["dependencies"]
                .as_array()
                .unwrap()
                .iter()
                .filter(|d| d["kind"].as_str() != Some("dev"))
                .map(|d| d["name"].as_str().unwrap())
                .filter(|name| members.contains(name))
                .map(str::to_owned)
                .collect();
            (package["name"].as_str().unwrap().to_owned(), imports)
        })
        .collect()
}

#[test]
fn the_design_draws_the_imports_that_exist_and_no_others() {
    let (drawn, exist) = (drawn(), arrows());
    assert!(exist.len() > 10, "only {} members found", exist.len());
    let members = |table: &BTreeMap<String, BTreeSet<String>>| {
        table.keys().cloned().collect::<BTreeSet<String>>()
    };
    assert_eq!(members(&drawn), members(&exist), "members in docs/design.md §2 and in Cargo.toml");
    for (member, imports) in &exist {
        assert_eq!(&drawn[member], imports, "imports of {member}: docs/design.md §2, then Cargo");
    }
}

#[test]
fn the_imports_hold_no_cycle() {
    let drawn = drawn();
    let mut done: BTreeSet<&str> = BTreeSet::new();
    while done.len() < drawn.len() {
        let ready: Vec<&str> = drawn
            .iter()
            .filter(|(member, imports)| {
                !done.contains(member.as_str()) && imports.iter().all(|i| done.contains(i.as_str()))
            })
            .map(|(member, _)| member.as_str())
            .collect();
        assert!(!ready.is_empty(), "a cycle among the members not in {done:?}");
        done.extend(ready);
    }
}
