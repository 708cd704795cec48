//! Threads race the destruction of handles with every function of the header that takes one.
//!
//! The table is generated from the header: name, arguments and documented errors of each function. An argument
//! without a value here fails the test, so a new function cannot be forgotten.

use std::collections::BTreeMap;
use std::fmt::Write;

use crate::common::{Links, clean, compile, folder, root, run};
use crate::declarations::{Function, functions};

/// Calls of each thread per function.
const CALLS: &str = "150";

/// Values of arguments in C, by function (or `*`), type and name (or `*`). The first match counts.
const VALUES: &[(&str, &str, &str, &str)] = &[
    ("dormouse_mem_free", "void *", "ptr", "own_block(c)"),
    ("dormouse_mem_read", "const void *", "ptr", "asleep"),
    ("dormouse_stash_put", "const void *", "ptr", "c->source"),
    ("dormouse_prefix_add_boundary", "const void *", "ptr", "c->source"),
    ("dormouse_prefix_add_boundary", "uint64_t", "bytes", "4096"),
    // Room for what sleeps to wake.
    (
        "dormouse_runtime_set_budget",
        "uint64_t",
        "bytes",
        "PICK4(c, 0, 64 << 20, 128 << 20, 256 << 20)",
    ),
    ("dormouse_plan_create", "*", "options", "&c->plan_options"),
    ("dormouse_plan_complete_op", "uint64_t", "op_id", "op.id"),
    ("dormouse_forest_add", "uint64_t", "kind", "0"),
    ("*", "void *", "stream", "NULL"),
    ("*", "void *", "ptr", "block(c)"),
    ("*", "const void *", "ptr", "block(c)"),
    ("*", "const void *const *", "ptrs", "block_array(c)"),
    ("*", "const void *", "ids", "c->source"),
    ("*", "const void *", "grad", "c->source"),
    ("*", "void *", "dst", "c->scratch"),
    ("*", "char *", "text", "PICK2(c, 0, 1) ? c->scratch : NULL"),
    ("*", "char *", "buffer", "PICK2(c, 0, 1) ? c->scratch : NULL"),
    ("*", "char *", "texts", "PICK2(c, 0, 1) ? c->scratch + (2 << 20) : NULL"),
    ("*", "struct dormouse_forest_node_t *", "nodes", "(void *)c->scratch"),
    ("*", "struct dormouse_plan_node_t *", "nodes", "(void *)c->scratch"),
    ("*", "struct dormouse_block_t *", "blocks", "(void *)c->scratch"),
    ("*", "struct dormouse_range_t *", "ranges", "(void *)c->scratch"),
    ("*", "struct dormouse_memory_event_t *", "events", "(void *)(c->scratch + (2 << 20))"),
    ("*", "struct dormouse_frame_t *", "frames", "(void *)c->scratch"),
    ("*", "struct dormouse_ending_t *", "endings", "(void *)(c->scratch + (2 << 20))"),
    ("*", "const struct dormouse_options_t *", "*", "&c->options"),
    ("*", "const struct dormouse_sequences_t *", "*", "&c->sequences"),
    ("*", "const struct dormouse_merge_args_t *", "*", "&c->merge_args"),
    ("*", "const struct dormouse_history_options_t *", "*", "&c->history_options"),
    ("*", "const struct dormouse_tokens_t *", "*", "&c->rollouts[0].prompt"),
    ("*", "const struct dormouse_rollout_t *", "*", "c->rollouts"),
    ("*", "struct dormouse_draft_t *", "*", "c->drafts"),
    ("*", "struct dormouse_digest_t *", "*", "&c->drafts[0].prompt"),
    ("*", "const struct dormouse_dialogue_options_t *", "*", "&c->dialogue_options"),
    ("*", "const struct dormouse_turn_t *", "*", "c->turns"),
    ("*", "const struct dormouse_query_t *", "*", "&c->query"),
    ("*", "struct dormouse_found_t *", "found", "(void *)c->scratch"),
    ("dormouse_dialogue_get_text", "uint64_t", "id", "next(c) % 4"),
    ("*", "int32_t", "text", "PICK4(c, 0, 1, 2, 3)"),
    ("*", "const char *", "name", "\"raced\""),
    ("*", "const char *", "path", "dump"),
    ("dormouse_plan_load", "const char *", "text", "\"{}\""),
    ("*", "const char *", "request", "\"{}\""),
    ("*", "uint64_t", "bytes", "PICK4(c, 0, 4096, 65536, 65536)"),
    ("*", "uint64_t", "align", "PICK4(c, 0, 64, 4096, 3)"),
    ("*", "uint64_t", "flags", "PICK4(c, 0, 1, 2, 64)"),
    ("*", "uint64_t", "capacity", "PICK4(c, 0, 16, 8192, 8192)"),
    ("*", "uint64_t", "texts_capacity", "PICK4(c, 0, 16, 8192, 8192)"),
    ("*", "uint64_t *", "lengths", "(void *)(c->scratch + (1 << 20))"),
    ("*", "uint64_t", "node_capacity", "PICK2(c, 0, 64)"),
    ("*", "uint64_t", "ending_capacity", "PICK2(c, 0, 64)"),
    ("*", "uint64_t", "range_capacity", "PICK2(c, 0, 64)"),
    ("*", "uint64_t", "event_capacity", "PICK2(c, 0, 64)"),
    ("*", "uint64_t", "events_max", "PICK4(c, 0, 1, 64, 1 << 30)"),
    ("*", "uint32_t", "skipped", "next(c)"),
    ("*", "uint32_t", "tag", "next(c) % 4"),
    ("*", "int", "stacks", "0"),
    ("*", "int", "forgets", "next(c) % 2"),
    ("*", "uint64_t", "count", "next(c) % 4"),
    ("*", "uint64_t", "storage_key", "next(c) % 4"),
    ("*", "uint64_t", "id", "stash_id(c)"),
    ("*", "uint64_t", "elems", "PICK2(c, 1024, 5)"),
    ("*", "uint32_t", "index", "next(c) % 64"),
    ("*", "uint32_t", "id_bytes", "PICK4(c, 4, 4, 8, 3)"),
    ("*", "uint32_t", "prefix_id", "next(c) % 4"),
    ("*", "uint32_t", "layers", "PICK4(c, LAYERS, LAYERS, 1, 0)"),
    ("*", "uint32_t", "layer", "PICK4(c, 0, 0, 1, 9)"),
    ("*", "uint32_t", "slot", "next(c) % 2"),
    ("*", "int32_t", "tier", "PICK4(c, 0, 1, 2, 3)"),
    ("*", "int32_t", "format", "PICK4(c, 1, 2, 3, 4)"),
    ("*", "int32_t", "phase", "PICK4(c, 1, 2, 3, 4)"),
    ("*", "int32_t", "edge", "1 + next(c) % 5"),
    ("*", "int32_t", "dtype", "PICK4(c, 3, 3, 1, 9)"),
    ("*", "int32_t", "device", "0"),
];

/// C code before a call.
const BEFORE: &[(&str, &str)] = &[
    ("dormouse_tag_leave", "dormouse_tag_enter(tag);"),
    (
        "dormouse_plan_complete_op",
        "dormouse_op_t op; DORMOUSE_INIT(&op); dormouse_plan_get_op(plan, &op);",
    ),
];

/// C code that follows a success.
const AFTER: &[(&str, &str)] = &[
    ("dormouse_tag_enter", "after_tag_enter(tag);"),
    ("dormouse_mem_alloc", "after_mem_alloc(c, runtime, ptr_out);"),
    ("dormouse_stash_put", "after_stash_put(runtime, id_out);"),
];

/// Functions without a status. They take no handle (checked below).
const WITHOUT_STATUS: &[&str] = &["dormouse_get_", "dormouse_torch_"];

/// Writes a C function that calls it with values.
fn wrapper(called: &Function) -> String {
    let name = &called.name;
    let (mut before, mut values, mut after) = (String::new(), Vec::new(), String::new());
    for (of, argument) in &called.arguments {
        let found = VALUES.iter().find(|(function, known, called, _)| {
            (*function == "*" || function == name)
                && (*known == "*" || known == of)
                && (*called == "*" || called == argument)
        });
        let value = if let Some(kind) = Function::kind(of, "*") {
            writeln!(before, "    {of}{argument} = handle(c, {kind});").unwrap();
            argument.clone()
        } else if let Some(kind) = Function::kind(of, "**") {
            let of = of.strip_suffix('*').unwrap();
            writeln!(before, "    {of}{argument} = NULL;").unwrap();
            writeln!(after, "        publish(c, {kind}, {argument});").unwrap();
            format!("&{argument}")
        } else if let Some((.., value)) = found {
            (*value).to_owned()
        } else {
            let of = of.strip_suffix('*').filter(|_| argument.ends_with("_out"));
            let missing = format!("{name}: add a value for `{argument}` to VALUES");
            let of = of.expect(&missing);
            // A result. Versioned structs begin with their size.
            writeln!(before, "    {of} {argument};").unwrap();
            let initial = if of.starts_with("struct ") {
                format!("    DORMOUSE_INIT(&{argument});")
            } else {
                format!("    memset(&{argument}, 0, sizeof {argument});")
            };
            writeln!(before, "{initial}").unwrap();
            format!("&{argument}")
        };
        values.push(value);
    }
    if let Some((_, code)) = BEFORE.iter().find(|(function, _)| function == name) {
        writeln!(before, "    {code}").unwrap();
    }
    if let Some((_, code)) = AFTER.iter().find(|(function, _)| function == name) {
        writeln!(after, "        {code}").unwrap();
    }
    let values = values.join(", ");
    format!(
        "static dormouse_status_t call_{name}(context_t *c)\n{{\n{before}    (void)c;\n    \
         dormouse_status_t status = {name}({values});\n    if (status == DORMOUSE_OK) {{\n{after}    \
         }}\n    return status;\n}}\n\n"
    )
}

/// Generates the C program.
fn program() -> String {
    let functions = functions();
    let all: BTreeMap<String, &Function> = functions.iter().map(|f| (f.name.clone(), f)).collect();
    let header = root().join("tests/c/race.h");
    let mut text = format!("#include \"{}\"\n\n", header.display());
    let mut table = String::new();
    for function in &functions {
        let kinds = function.arguments.iter().filter_map(|(of, _)| Function::kind(of, "*"));
        let kinds = kinds.fold(0, |bits, kind| bits | 1 << kind);
        if !function.has_status {
            let is_known = WITHOUT_STATUS.iter().any(|start| function.name.starts_with(start));
            assert!(is_known && kinds == 0, "{} has no status", function.name);
            continue;
        }
        let name = &function.name;
        text.push_str(&wrapper(function));
        let errors: String =
            function.errors(&all).iter().map(|error| format!("DORMOUSE_ERR_{error}, ")).collect();
        writeln!(text, "static const int32_t errors_{name}[] = {{{errors}0}};\n").unwrap();
        writeln!(table, "    {{\"{name}\", call_{name}, {kinds}, errors_{name}}},").unwrap();
    }
    format!(
        "{text}static const entry_t TABLE[] = {{\n{table}}};\n\nint main(int argc, char **argv)\n{{\n    \
         return run(TABLE, sizeof TABLE / sizeof *TABLE, argc, argv);\n}}\n"
    )
}

#[test]
fn every_function_of_the_header_is_in_the_table() {
    let (text, functions) = (program(), functions());
    assert_eq!(functions.len(), crate::header::declared().len());
    for function in functions.iter().filter(|function| function.has_status) {
        assert!(text.contains(&format!("{{\"{}\", ", function.name)), "{}", function.name);
    }
}

#[test]
fn threads_that_destroy_handles_in_use_get_documented_errors() {
    let folder = folder("race");
    let source = folder.join("race.c");
    std::fs::write(&source, program()).unwrap();
    let program = compile(&source, &folder, Links::Library);
    let mut command = clean(&program);
    command.env("DORMOUSE_DUMP_DIR", &folder).env("DORMOUSE_DUMP", "off");
    let ended = run(command.arg(&folder).arg(folder.join("dump")).arg(CALLS));
    assert_eq!(ended.code, Some(0), "{:?}\n{}\n{}", ended.signal, ended.out, ended.err);
    ended.says("race: all checks passed");
}
