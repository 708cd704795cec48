//! The C compiler's sizes and offsets of every struct of the header are those pinned in `ffi/src/abi/layouts.rs`, which
//! the Rust compiler checks.

use std::fmt::Write;
use std::path::PathBuf;

use crate::common::{Links, clean, compile, folder, root, run};

/// What the rows begin with.
const ROW: &str = "pinned! { ";

/// A struct of the header.
pub(crate) struct Struct {
    pub(crate) name: String,
    fields: Vec<String>,
}

impl Struct {
    /// Whether it starts with `size` and `version`, and may therefore grow.
    pub(crate) fn is_versioned(&self) -> bool {
        self.fields.starts_with(&["size".to_owned(), "version".to_owned()])
    }
}

/// Reads the structs of the header.
pub(crate) fn structs() -> Vec<Struct> {
    let text = std::fs::read_to_string(root().join("ffi/include/dormouse.h")).unwrap();
    let mut structs: Vec<Struct> = Vec::new();
    let mut is_inside = false;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("typedef struct ")
            && let Some(name) = rest.strip_suffix(" {")
        {
            structs.push(Struct { name: name.to_owned(), fields: Vec::new() });
            is_inside = true;
        } else if line.starts_with('}') {
            is_inside = false;
        } else if is_inside && !line.trim_start().starts_with("///") {
            structs.last_mut().unwrap().fields.push(field(line));
        }
    }
    assert!(structs.len() > 20, "only {} structs found", structs.len());
    structs
}

/// Returns the name that a declaration declares: a scalar, an array or a pointer to a function.
fn field(declaration: &str) -> String {
    let declarator = match declaration.split_once("(*") {
        Some((_, function)) => function.split(')').next().unwrap(),
        None => declaration.split([';', '[']).next().unwrap(),
    };
    declarator.rsplit([' ', '*']).next().unwrap().to_owned()
}

/// Returns the rows of the C compiler.
fn measured() -> String {
    let mut code = String::from(
        "#include <dormouse.h>\n#include <stddef.h>\n#include <stdio.h>\nint main(void)\n{\n",
    );
    for Struct { name, fields } in structs() {
        writeln!(code, "    printf(\"{ROW}{name} %zu:\", sizeof({name}));").unwrap();
        for (at, field) in fields.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            writeln!(code, "    printf(\"{comma} {field} %zu\", offsetof({name}, {field}));")
                .unwrap();
        }
        code.push_str("    printf(\" }\\n\");\n");
    }
    code.push_str("    return 0;\n}\n");
    let folder = folder("layouts");
    let source = folder.join("layouts.c");
    std::fs::write(&source, code).unwrap();
    let ended = run(&mut clean(&compile(&source, &folder, Links::Nothing)));
    ended.well();
    ended.out
}

/// Whether `new` keeps all that programs compiled with `old` rely on: a versioned struct may have new fields at its end.
fn extends(new: &str, old: &str) -> bool {
    let fields = |row: &str| row.split_once(": ").unwrap().1.trim_end_matches(" }").to_owned();
    let is_versioned = fields(old).starts_with("size 0, version 4,");
    new == old || is_versioned && fields(new).starts_with(&format!("{}, ", fields(old)))
}

fn path() -> PathBuf {
    root().join("ffi/src/abi/layouts.rs")
}

#[test]
fn sizes_and_offsets_are_those_pinned() {
    let text = std::fs::read_to_string(path()).unwrap();
    let (pinned, code): (Vec<&str>, Vec<&str>) =
        text.lines().partition(|line| line.starts_with(ROW));
    let measured = measured();
    let of = |row: &str| row.split(' ').nth(2).unwrap().to_owned();
    for old in &pinned {
        let new = measured.lines().find(|new| of(new) == of(old));
        assert!(
            new.is_some_and(|new| extends(new, old)),
            "compiled programs rely on `{old}`, and the header now has {new:?}; accepted: new structs, \
             and new fields at the end of a struct that starts with size and version"
        );
    }
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(path(), format!("{}\n{measured}", code.join("\n"))).unwrap();
    } else {
        assert_eq!(pinned.join("\n"), measured.trim_end(), "rerun this test with UPDATE=1");
    }
}

#[test]
fn only_versioned_structs_grow_and_only_at_their_end() {
    let old = "pinned! { a_t 16: size 0, version 4, x 8 }";
    assert!(extends(old, old));
    assert!(extends("pinned! { a_t 24: size 0, version 4, x 8, y 16 }", old));
    assert!(!extends("pinned! { a_t 24: size 0, version 4, y 8, x 16 }", old));
    assert!(!extends("pinned! { a_t 16: size 0, version 4, y 8 }", old));
    let old = "pinned! { b_t 8: x 0 }";
    assert!(!extends("pinned! { b_t 16: x 0, y 8 }", old));
    assert!(!extends("pinned! { b_t 16: x 0 }", old));
}
