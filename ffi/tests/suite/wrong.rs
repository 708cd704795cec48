//! Each function of the header with one wrong argument at a time: the status is the documented one, the message says
//! what is accepted, and results stay as they were.
//!
//! The calls are generated from the header. An argument without a value here fails the test, so a new function cannot
//! be forgotten.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use crate::common::{Links, clean, compile, folder, preload, root, run};
use crate::declarations::{Function, KINDS, functions};

/// Right values of arguments in C, by function (or `*`), type and name. `k` is the number of the argument.
const VALUES: &[(&str, &str, &str, &str)] = &[
    ("dormouse_mem_read", "const void *", "ptr", "asleep"),
    ("dormouse_mem_read", "uint64_t", "bytes", "16"),
    ("dormouse_prefix_add_boundary", "uint64_t", "bytes", "4096"),
    ("dormouse_log_read", "uint64_t", "capacity", "RESULT_BYTES"),
    ("dormouse_runtime_write_dump", "uint64_t", "capacity", "RESULT_BYTES"),
    ("*", "void *", "stream", "NULL"),
    ("*", "void *", "ptr", "block"),
    ("*", "const void *", "ptr", "block"),
    ("*", "const void *const *", "ptrs", "&block_pointer"),
    ("*", "const void *", "ids", "source"),
    ("*", "const void *", "grad", "source"),
    ("*", "void *", "dst", "result(k)"),
    ("*", "char *", "text", "result(k)"),
    ("*", "char *", "buffer", "result(k)"),
    ("*", "char *", "texts", "result(k)"),
    ("*", "uint64_t *", "lengths", "result(k)"),
    ("*", "struct dormouse_forest_node_t *", "nodes", "result(k)"),
    ("*", "struct dormouse_plan_node_t *", "nodes", "result(k)"),
    ("*", "struct dormouse_block_t *", "blocks", "result(k)"),
    ("*", "struct dormouse_range_t *", "ranges", "result(k)"),
    ("*", "struct dormouse_memory_event_t *", "events", "result(k)"),
    ("*", "struct dormouse_frame_t *", "frames", "result(k)"),
    ("*", "struct dormouse_ending_t *", "endings", "result(k)"),
    ("*", "const struct dormouse_options_t *", "options", "given(k, &options, sizeof options)"),
    (
        "*",
        "const struct dormouse_sequences_t *",
        "sequences",
        "given(k, &sequences, sizeof sequences)",
    ),
    (
        "*",
        "const struct dormouse_plan_options_t *",
        "options",
        "given(k, &plan_options, sizeof plan_options)",
    ),
    (
        "*",
        "const struct dormouse_merge_args_t *",
        "args",
        "given(k, &merge_args, sizeof merge_args)",
    ),
    (
        "*",
        "const struct dormouse_history_options_t *",
        "options",
        "given(k, &history_options, sizeof history_options)",
    ),
    (
        "*",
        "const struct dormouse_tokens_t *",
        "prompt",
        "copied(k, &rollout.prompt, sizeof rollout.prompt)",
    ),
    ("*", "const struct dormouse_rollout_t *", "rollouts", "copied(k, &rollout, sizeof rollout)"),
    ("*", "struct dormouse_draft_t *", "drafts", "copied(k, &draft, sizeof draft)"),
    ("*", "struct dormouse_digest_t *", "digest_out", "result(k)"),
    (
        "*",
        "const struct dormouse_dialogue_options_t *",
        "options",
        "given(k, &dialogue_options, sizeof dialogue_options)",
    ),
    ("*", "const struct dormouse_turn_t *", "turns", "copied(k, &turn, sizeof turn)"),
    ("*", "const struct dormouse_query_t *", "query", "copied(k, &query, sizeof query)"),
    ("*", "struct dormouse_found_t *", "found", "result(k)"),
    ("dormouse_dialogue_get_text", "uint64_t", "id", "0"),
    ("*", "int32_t", "text", "0"),
    ("*", "const char *", "name", "\"wrong\""),
    ("*", "const char *", "path", "dump"),
    ("dormouse_plan_load", "const char *", "text", "\"{}\""),
    ("*", "const char *", "request", "request"),
    ("*", "uint64_t", "bytes", "4096"),
    ("*", "uint64_t", "align", "0"),
    ("*", "uint64_t", "flags", "1"),
    ("*", "uint64_t", "capacity", "16"),
    ("*", "uint64_t", "texts_capacity", "16"),
    ("*", "uint64_t", "node_capacity", "16"),
    ("*", "uint64_t", "ending_capacity", "16"),
    ("*", "uint64_t", "range_capacity", "16"),
    ("*", "uint64_t", "event_capacity", "16"),
    ("*", "uint64_t", "events_max", "0"),
    ("*", "uint32_t", "skipped", "0"),
    ("*", "uint32_t", "tag", "1"),
    ("*", "int", "stacks", "0"),
    ("*", "int", "forgets", "0"),
    ("*", "uint64_t", "count", "1"),
    ("*", "uint64_t", "kind", "0"),
    ("*", "uint64_t", "storage_key", "1"),
    ("*", "uint64_t", "id", "stashed"),
    ("*", "uint64_t", "op_id", "0"),
    ("*", "uint64_t", "elems", "1024"),
    ("*", "uint32_t", "index", "0"),
    ("*", "uint32_t", "id_bytes", "4"),
    ("*", "uint32_t", "prefix_id", "0"),
    ("*", "uint32_t", "layers", "2"),
    ("*", "uint32_t", "layer", "0"),
    ("*", "uint32_t", "slot", "0"),
    ("*", "int32_t", "tier", "1"),
    ("*", "int32_t", "format", "1"),
    ("*", "int32_t", "phase", "1"),
    ("*", "int32_t", "edge", "1"),
    ("*", "int32_t", "dtype", "3"),
    ("*", "int32_t", "device", "0"),
];

/// Arguments that say how much a buffer holds. A caller who promises more than there is cannot be refused.
const PROMISES: &[&str] = &[
    "capacity",
    "texts_capacity",
    "node_capacity",
    "ending_capacity",
    "range_capacity",
    "event_capacity",
];

/// What a wrong value must return.
enum Wanted {
    Status(&'static str),
    /// Success, a notice, or any of the documented errors.
    Documented,
}

/// A wrong value: what it is in words, C code for it, and what the function returns.
struct Wrong {
    what: String,
    value: String,
    wanted: Wanted,
}

fn wrong(what: &str, value: &str, wanted: Wanted) -> Wrong {
    Wrong { what: what.to_owned(), value: value.to_owned(), wanted }
}

/// Returns the right value of an argument.
fn right(function: &Function, at: usize) -> String {
    let (of, argument) = &function.arguments[at];
    let found = VALUES.iter().find(|(name, known, called, _)| {
        (*name == "*" || *name == function.name) && known == of && called == argument
    });
    let text = if let Some(kind) = Function::kind(of, "*") {
        format!("live[{kind}]")
    } else if let Some((.., value)) = found {
        (*value).to_owned()
    } else {
        let of = of.strip_suffix('*').filter(|_| argument.ends_with("_out"));
        let missing = format!("{}: add a value for `{argument}` to VALUES", function.name);
        let of = of.expect(&missing).trim();
        if of.starts_with("struct ") && !of.contains('*') {
            format!("sized(k, sizeof({of}))")
        } else {
            "result(k)".to_owned()
        }
    };
    text.replace("(k", &format!("({at}"))
}

/// Whether the documentation of `function` says that `argument` may be NULL. "Both" and "Each" are its arrays.
fn may_be_null(function: &Function, argument: &str) -> bool {
    let is_array = !argument.ends_with("_out");
    function.doc.split(". ").filter(|sentence| sentence.contains(" may be NULL")).any(|sentence| {
        let sentence = sentence.trim();
        sentence.contains(&format!("`{argument}`"))
            || is_array && (sentence.starts_with("Both ") || sentence.starts_with("Each "))
    })
}

/// Returns the wrong values of an argument.
fn wrongs(function: &Function, at: usize, documented: &[String]) -> Vec<Wrong> {
    use Wanted::{Documented, Status};
    let (of, argument) = &function.arguments[at];
    let value = right(function, at);
    let lists = |status: &str| documented.iter().any(|known| known == status);
    // Destroying or freeing NULL is a no-op; the handle beside a block is required.
    let is_no_op = function.doc.contains("NULL is a no-op")
        && (argument == "ptr" || function.name.ends_with("_destroy"));
    let null = || match () {
        () if may_be_null(function, argument) => Documented,
        () if is_no_op => Status("DORMOUSE_OK"),
        () => Status("DORMOUSE_ERR_NULL"),
    };
    if let Some(kind) = Function::kind(of, "*") {
        let mut all = vec![wrong("NULL", "NULL", null())];
        all.push(wrong(
            "a destroyed handle",
            &format!("stale[{kind}]"),
            Status("DORMOUSE_ERR_STALE"),
        ));
        for (other, name) in KINDS.iter().enumerate().filter(|(other, _)| *other != kind) {
            let what = format!("a live {name}");
            all.push(wrong(&what, &format!("live[{other}]"), Status("DORMOUSE_ERR_HANDLE")));
        }
        for foreign in ["(void *)1", "(void *)UINTPTR_MAX", "source", "(void *)&failures"] {
            all.push(wrong(foreign, foreign, Status("DORMOUSE_ERR_HANDLE")));
        }
        return all;
    }
    if of == "const char *" {
        return vec![
            wrong("NULL", "NULL", null()),
            wrong("no UTF-8", "\"\\xff\\xfe\"", Status("DORMOUSE_ERR_ARGUMENT")),
            wrong("too long", "long_text", Documented),
            wrong("empty", "\"\"", Documented),
        ];
    }
    if argument == "stream" {
        return vec![wrong("a stream of another device", "source", Documented)];
    }
    if of.ends_with('*') {
        let mut all = vec![wrong("NULL", "NULL", null())];
        if value.starts_with("sized") || value.starts_with("given") {
            let changes: &[(&str, &str)] = &[
                ("version 0", "with_version(VALUE, 0)"),
                ("version 2", "with_version(VALUE, 2)"),
                ("size 0", "with_size(VALUE, 0)"),
                ("size 7", "with_size(VALUE, 7)"),
                ("size of all", "with_size(VALUE, UINT32_MAX)"),
            ];
            for (what, change) in changes {
                let value = change.replace("VALUE", &value);
                all.push(wrong(what, &value, Status("DORMOUSE_ERR_VERSION")));
            }
        }
        // Bytes and addresses have no alignment.
        if !["void *", "const void *", "char *", "const void *const *"].contains(&of.as_str()) {
            let odd = format!("(void *)((char *){value} + 1)");
            all.push(wrong("misaligned", &odd, Status("DORMOUSE_ERR_ARGUMENT")));
        }
        if argument == "ptr" && lists("NOT_OURS") {
            for foreign in ["(void *)&failures", "(void *)1", "(void *)UINTPTR_MAX"] {
                all.push(wrong(foreign, foreign, Status("DORMOUSE_ERR_NOT_OURS")));
            }
        }
        return all;
    }
    let values: &[&str] = match of.as_str() {
        _ if PROMISES.contains(&argument.as_str()) => &["0", "1"],
        "uint64_t" => &["0", "1", "UINT64_MAX", "(uint64_t)INT64_MAX"],
        "uint32_t" => &["0", "1", "UINT32_MAX"],
        "int32_t" | "int" => &["0", "-1", "INT32_MAX", "INT32_MIN"],
        _ => &[],
    };
    assert!(!values.is_empty(), "{}: `{argument}` has the type {of}", function.name);
    values.iter().map(|value| wrong(value, value, Documented)).collect()
}

/// Writes one call, with `changed` as one of its arguments.
fn call(function: &Function, changed: Option<(usize, &Wrong)>) -> String {
    let values: Vec<String> = (0..function.arguments.len())
        .map(|at| match changed {
            Some((number, wrong)) if number == at => wrong.value.clone(),
            _ => right(function, at),
        })
        .collect();
    let mut text = String::from("    reset();\n");
    let mut names = Vec::new();
    for (at, ((of, _), value)) in function.arguments.iter().zip(values).enumerate() {
        let space = if of.ends_with('*') { "" } else { " " };
        writeln!(text, "        {of}{space}a{at} = {value};").unwrap();
        names.push(format!("a{at}"));
    }
    write!(text, "        remember();\n        seen = {}({});\n", function.name, names.join(", "))
        .unwrap();
    text
}

/// Generates the C program.
fn program() -> String {
    let functions = functions();
    let all: BTreeMap<String, &Function> = functions.iter().map(|f| (f.name.clone(), f)).collect();
    let header = root().join("tests/c/wrong.h");
    let mut text = format!("#include \"{}\"\n\n", header.display());
    let (mut wrong_calls, mut right_calls) = (String::new(), String::new());
    for function in functions.iter().filter(|function| function.has_status) {
        let name = &function.name;
        let errors = function.errors(&all);
        let list: String = errors.iter().map(|error| format!("DORMOUSE_ERR_{error}, ")).collect();
        writeln!(text, "static const int32_t errors_{name}[] = {{{list}0}};").unwrap();
        let is_written = if function.doc.contains("written)") { 1 } else { 0 };
        for at in 0..function.arguments.len() {
            for wrong in wrongs(function, at, &errors) {
                let (wanted, code) = match wrong.wanted {
                    Wanted::Status(status) => ("ONE", status),
                    Wanted::Documented => ("ANY", "0"),
                };
                let argument = &function.arguments[at].1;
                let what = wrong.what.replace('\\', "\\\\").replace('"', "'");
                writeln!(
                    wrong_calls,
                    "    {{\n    {}        check(\"{name}\", \"{argument}: {what}\", seen, {wanted}, {code}, \
                     errors_{name}, {is_written});\n    }}",
                    call(function, Some((at, &wrong)))
                )
                .unwrap();
            }
        }
        writeln!(
            right_calls,
            "    {{\n    {}        check(\"{name}\", \"in a child\", seen, ONE, DORMOUSE_ERR_FORKED, errors_{name}, 0);\n    }}",
            call(function, None)
        )
        .unwrap();
    }
    format!(
        "{text}\nstatic void wrong_calls(void)\n{{\n    dormouse_status_t seen;\n{wrong_calls}}}\n\n\
         static void calls_in_a_child(void)\n{{\n    dormouse_status_t seen;\n{right_calls}}}\n\n\
         int main(int argc, char **argv)\n{{\n    return run(argc, argv, wrong_calls, calls_in_a_child);\n}}\n"
    )
}

/// Writes the program into `folder` and returns its path.
pub(crate) fn written(folder: &Path) -> PathBuf {
    let source = folder.join("wrong.c");
    std::fs::write(&source, program()).unwrap();
    source
}

#[test]
fn each_wrong_argument_has_its_documented_error() {
    for (name, preloaded) in [("wrong", None), ("wrong-preload", Some(preload()))] {
        let folder = folder(name);
        let program = compile(&written(&folder), &folder, Links::Library);
        let mut command = clean(&program);
        command.arg(&folder).envs(preloaded.map(|library| ("LD_PRELOAD", library)));
        run(&mut command).well().says("wrong: all checks passed");
    }
}
