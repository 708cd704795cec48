//! The modules of a crate do not import each other in cycles.
//!
//! A module is a file. It imports another one if its code, tests excluded, has a path into it: `use`
//! declarations, qualified names and re-exports. `mod name;` alone is no import.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Crates without cycles.
const CRATES: &[&str] = &["ffi", "ffi/preload", "residency"];

/// Path of a module below its crate, `[]` for the root.
type Module = Vec<String>;

/// Reads the modules of a crate, tests excluded.
fn read(root: &Path) -> BTreeMap<Module, String> {
    let src = root.join("src");
    let mut modules = BTreeMap::new();
    let mut folders = vec![src.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let is_test = matches!(name.as_str(), "tests" | "testing")
                || name.ends_with("_tests")
                || name.contains("loom");
            if is_test {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let inner = path.strip_prefix(&src).unwrap().with_extension("");
                let mut module: Module =
                    inner.iter().map(|part| part.to_str().unwrap().to_owned()).collect();
                if matches!(name.as_str(), "lib" | "main" | "mod") {
                    module.pop();
                }
                modules.insert(module, fs::read_to_string(&path).unwrap());
            }
        }
    }
    modules
}

/// Splits code into identifiers, `::` and other characters. Comments, texts and lifetimes are dropped.
fn tokens(text: &str) -> Vec<String> {
    let mut tokens = Vec::new();
    let letters: Vec<char> = text.chars().collect();
    let is = |at: usize, c: char| letters.get(at) == Some(&c);
    let mut at = 0;
    while at < letters.len() {
        let letter = letters[at];
        if letter == '/' && is(at + 1, '/') {
            while at < letters.len() && letters[at] != '\n' {
                at += 1;
            }
        } else if letter == '"' {
            // A raw text ends with its number of hashes and has no escapes.
            let hashes = letters[..at].iter().rev().take_while(|c| **c == '#').count();
            let is_raw = at > hashes && letters[at - hashes - 1] == 'r';
            let hashes = if is_raw { hashes } else { 0 };
            at += 1;
            while at < letters.len() && !(is(at, '"') && (1..=hashes).all(|by| is(at + by, '#'))) {
                at += if is(at, '\\') && !is_raw { 2 } else { 1 };
            }
            at += 1 + hashes;
        } else if letter == '\'' {
            // A character, or a lifetime.
            at += match (is(at + 1, '\\'), is(at + 2, '\'')) {
                (true, _) => 2 + letters[at + 2..].iter().position(|c| *c == '\'').unwrap().max(1),
                (false, true) => 3,
                (false, false) => 1,
            };
        } else if letter.is_alphanumeric() || letter == '_' {
            let begin = at;
            while at < letters.len() && (letters[at].is_alphanumeric() || letters[at] == '_') {
                at += 1;
            }
            tokens.push(letters[begin..at].iter().collect());
        } else if letter == ':' && is(at + 1, ':') {
            tokens.push("::".to_owned());
            at += 2;
        } else {
            if !letter.is_whitespace() {
                tokens.push(letter.to_string());
            }
            at += 1;
        }
    }
    tokens
}

/// Paths of a file, each with the inline modules around it. Inline test modules are left out.
fn paths(text: &str) -> Vec<(Module, Vec<String>)> {
    let tokens = tokens(text);
    let token = |at: usize| tokens.get(at).map_or("", String::as_str);
    let is_name = |at: usize| token(at).starts_with(|c: char| c.is_alphabetic() || c == '_');
    let mut found = Vec::new();
    // Names of inline modules, and the prefixes of nested `use` trees, by open brace.
    let mut inline: Vec<Option<String>> = Vec::new();
    let mut prefixes: Vec<Vec<String>> = Vec::new();
    let mut test_depth = None;
    let mut at = 0;
    while at < tokens.len() {
        let is_tested = token(at) == "#" && token(at + 2) == "cfg" && token(at + 4) == "test";
        if is_tested && token(at + 7) == "mod" && token(at + 9) == "{" && test_depth.is_none() {
            test_depth = Some(inline.len());
        }
        match token(at) {
            "mod" if token(at + 2) == "{" => {
                inline.push(Some(token(at + 1).to_owned()));
                prefixes.push(Vec::new());
                at += 3;
                continue;
            }
            "{" => {
                inline.push(None);
                prefixes.push(Vec::new());
            }
            "}" => {
                inline.pop();
                prefixes.pop();
                if test_depth == Some(inline.len()) {
                    test_depth = None;
                }
            }
            _ if is_name(at) => {
                let mut path = prefixes.last().cloned().unwrap_or_default();
                path.push(token(at).to_owned());
                while token(at + 1) == "::" && is_name(at + 2) {
                    path.push(token(at + 2).to_owned());
                    at += 2;
                }
                let around: Module = inline.iter().flatten().cloned().collect();
                // A lone `crate` is a visibility, a lone `self` a value.
                if test_depth.is_none() && (path.len() > 1 || token(at + 1) == "::") {
                    found.push((around, path.clone()));
                }
                if token(at + 1) == "::" && token(at + 2) == "{" {
                    inline.push(None);
                    prefixes.push(path);
                    at += 2;
                }
            }
            _ => {}
        }
        at += 1;
    }
    found
}

/// Returns the module of the crate that `path` leads to, seen from `from`.
fn resolve(
    modules: &BTreeMap<Module, String>,
    from: &[String],
    inline: &[String],
    path: &[String],
) -> Option<Module> {
    let here: Module = from.iter().chain(inline).cloned().collect();
    let mut target = match path[0].as_str() {
        "crate" => Vec::new(),
        "self" => here,
        "super" => here[..here.len().checked_sub(1)?].to_vec(),
        child => {
            let child: Module = from.iter().cloned().chain([child.to_owned()]).collect();
            return (path.len() > 1 && modules.contains_key(&child))
                .then(|| extend(modules, child, &path[1..]));
        }
    };
    let mut rest = &path[1..];
    while let Some((first, others)) = rest.split_first()
        && first == "super"
    {
        target.pop()?;
        rest = others;
    }
    Some(extend(modules, target, rest))
}

/// Follows `rest` from `module` as far as it names modules.
fn extend(modules: &BTreeMap<Module, String>, mut module: Module, rest: &[String]) -> Module {
    for name in rest {
        module.push(name.clone());
        if !modules.contains_key(&module) {
            module.pop();
            break;
        }
    }
    // An inline module belongs to its file.
    while !modules.contains_key(&module) {
        module.pop();
    }
    module
}

/// Imports of each module.
fn graph(modules: &BTreeMap<Module, String>) -> BTreeMap<Module, BTreeSet<Module>> {
    let imports = |(module, text): (&Module, &String)| {
        let found = paths(text);
        let targets =
            found.iter().filter_map(|(inline, path)| resolve(modules, module, inline, path));
        (module.clone(), targets.filter(|target| target != module).collect())
    };
    modules.iter().map(imports).collect()
}

/// Returns the first cycle as `a -> b -> a`.
fn cycle(graph: &BTreeMap<Module, BTreeSet<Module>>) -> Option<String> {
    fn visit<'a>(
        graph: &'a BTreeMap<Module, BTreeSet<Module>>,
        module: &'a Module,
        path: &mut Vec<&'a Module>,
        done: &mut BTreeSet<&'a Module>,
    ) -> Option<String> {
        if let Some(begin) = path.iter().position(|seen| *seen == module) {
            let name =
                |it: &&Module| if it.is_empty() { "crate".to_owned() } else { it.join("::") };
            let names: Vec<String> = path[begin..].iter().chain([&module]).map(name).collect();
            return Some(names.join(" -> "));
        }
        if done.contains(module) {
            return None;
        }
        path.push(module);
        let found = graph[module].iter().find_map(|import| visit(graph, import, path, done));
        path.pop();
        done.insert(module);
        found
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|module| visit(graph, module, &mut Vec::new(), &mut done))
}

#[test]
fn modules_import_each_other_without_cycles() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for name in CRATES {
        let modules = read(&root.join(name));
        let graph = graph(&modules);
        if modules.len() > 1 {
            let imports: usize = graph.values().map(BTreeSet::len).sum();
            // Every module but the first is imported by another.
            assert!(imports + 1 >= modules.len(), "{name}: {imports} imports found");
        }
        if let Some(cycle) = cycle(&graph) {
            panic!("modules of {name} import each other in a cycle: {cycle}");
        }
    }
}

#[test]
fn imports_between_these_modules_run_one_way() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for (name, from, to) in [
        ("offload", "engine", "prefix"),
        ("schedule", "tree_planner::predict", "tree_planner::draft"),
    ] {
        let graph = graph(&read(&root.join(name)));
        let (from, to) = (module(from), module(to));
        assert!(
            graph.contains_key(&from) && graph.contains_key(&to),
            "{name}: a module is missing"
        );
        for (importer, imports) in graph.iter().filter(|(it, _)| it.starts_with(&from)) {
            let wrong = imports.iter().find(|import| import.starts_with(&to));
            assert_eq!(wrong, None, "{name}: imported by {}", importer.join("::"));
        }
    }
}

fn module(path: &str) -> Module {
    path.split_terminator("::").map(str::to_owned).collect()
}

fn modules(texts: &[(&str, &str)]) -> BTreeMap<Module, String> {
    texts.iter().map(|(path, text)| (module(path), (*text).to_owned())).collect()
}

#[test]
fn a_cycle_is_found_through_uses_qualified_names_and_re_exports() {
    let root = ("", "mod a; mod b; mod c;");
    let c = ("c", "pub use super::a::A;");
    for b in ["use crate::{c::A, other};", "fn f() { crate::c::A::new() }", "use super::c::{self};"]
    {
        let found = cycle(&graph(&modules(&[root, ("a", "use crate::b::B;"), ("b", b), c])));
        assert_eq!(found.unwrap(), "a -> b -> c -> a", "{b}");
    }
    let child = [("", ""), ("a", "mod x; fn f() { x::g() }"), ("a::x", "use super::Item;")];
    assert_eq!(cycle(&graph(&modules(&child))).unwrap(), "a -> a::x -> a");
}

#[test]
fn comments_texts_tests_and_declarations_are_no_imports() {
    let a = "mod x; // crate::b\nconst T: &str = \"crate::b\"; #[cfg(test)] mod tests { use crate::b::B; }";
    let raw = "const R: &str = r#\"crate::b \" crate::b\"#; const C: char = '\"'; use crate::c::C;";
    let texts =
        [("", "mod a; mod b;"), ("a", a), ("a::x", "use super::T;"), ("b", "use crate::a::T;")];
    assert_eq!(cycle(&graph(&modules(&texts))), None);
    let imports = graph(&modules(&[("", ""), ("a", raw), ("b", ""), ("c", "")]));
    assert_eq!(imports[&module("a")], BTreeSet::from([module("c")]), "raw texts and characters");
    let inline = [("", "use a::c;"), ("a", "pub mod c { pub use super::b::*; }"), ("a::b", "")];
    let graph = graph(&modules(&inline));
    assert_eq!(
        graph[&vec!["a".to_owned()]],
        BTreeSet::from([vec!["a".to_owned(), "b".to_owned()]])
    );
    assert_eq!(cycle(&graph), None);
}
