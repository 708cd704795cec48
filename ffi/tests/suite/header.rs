//! The header is generated from the code, compiles without warnings, and declares exactly the exported symbols.

use std::fmt::Write;
use std::process::Command;

use crate::common::{exports, folder, libraries, preload, root, skipped};
use crate::layouts::structs;

/// Generates the header from the sources.
fn generated() -> String {
    let ffi = root().join("ffi");
    let config = cbindgen::Config::from_file(ffi.join("cbindgen.toml")).unwrap();
    let mut builder =
        cbindgen::Builder::new().with_config(config).with_src(ffi.join("src/status.rs"));
    for module in [
        "structs",
        "planning",
        "rollouts",
        "dialogues",
        "library",
        "runtime",
        "memory",
        "tags",
        "stash",
        "forest",
        "plan",
        "prefix",
        "kernels",
        "rollout_history",
        "dialogue_history",
        "torch",
        "plugin",
        "history",
    ] {
        builder = builder.with_src(ffi.join(format!("src/abi/{module}.rs")));
    }
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    with_banners(&String::from_utf8(text).unwrap())
}

/// Sections of the header, by the first line of code in each.
const SECTIONS: &[(&str, &str)] = &[
    ("#define DORMOUSE_VERSION_MAJOR ", "Versions"),
    ("#define DORMOUSE_DEVICE_HOST ", "Constants"),
    ("typedef struct dormouse_forest_t ", "Handles"),
    ("typedef struct dormouse_param_t {", "Structs"),
    ("#define DORMOUSE_OK ", "Status codes"),
    ("extern const struct dormouse_plugin_v1_t ", "Plugin"),
    ("uint32_t dormouse_get_version(", "Library and parameters"),
    ("dormouse_status_t dormouse_runtime_create(", "Runtime"),
    ("dormouse_status_t dormouse_mem_alloc(", "Memory"),
    ("dormouse_status_t dormouse_tag_create(", "Tags"),
    ("dormouse_status_t dormouse_stash_put(", "Stash"),
    ("dormouse_status_t dormouse_forest_create(", "Forest and plan"),
    ("dormouse_status_t dormouse_prefix_create(", "Prefix"),
    ("dormouse_status_t dormouse_kernel_merge_lse(", "Kernels"),
    ("dormouse_status_t dormouse_history_create(", "Rollout history"),
    ("dormouse_status_t dormouse_dialogue_create(", "Dialogue history"),
    ("void *dormouse_torch_malloc(", "PyTorch entry points"),
    ("dormouse_status_t dormouse_torch_record_history(", "Memory history"),
];

/// Inserts a banner before the first item of each section.
fn with_banners(header: &str) -> String {
    let mut text = String::new();
    let mut comment = String::new();
    let mut seen = 0;
    for line in header.lines() {
        if line.starts_with("///") {
            comment.push_str(line);
            comment.push('\n');
            continue;
        }
        if let Some((_, title)) = SECTIONS.iter().find(|(first, _)| line.starts_with(first)) {
            let rule = "-".repeat(88 - title.len());
            writeln!(text, "/* ---- {title} {rule} */\n").unwrap();
            seen += 1;
        }
        text.push_str(&std::mem::take(&mut comment));
        text.push_str(line);
        text.push('\n');
    }
    assert_eq!(seen, SECTIONS.len(), "a section without its first item");
    text
}

fn committed() -> String {
    std::fs::read_to_string(root().join("ffi/include/dormouse.h")).unwrap()
}

/// Returns the names of the declared functions, sorted.
pub(crate) fn declared() -> Vec<String> {
    let text = committed();
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    let mut names: Vec<String> = code
        .filter_map(|line| line.split_once('(').map(|(before, _)| before))
        .filter_map(|before| before.split([' ', '*']).next_back())
        .filter(|name| name.starts_with("dormouse_"))
        .map(str::to_owned)
        .collect();
    names.sort();
    names
}

#[test]
fn the_committed_header_equals_the_generated_one() {
    let path = root().join("ffi/include/dormouse.h");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, generated()).unwrap();
    }
    assert!(committed() == generated(), "dormouse.h has drifted; rerun this test with UPDATE=1");
}

#[test]
fn the_version_macros_equal_the_crate_version() {
    let text = committed();
    let mut parts = env!("CARGO_PKG_VERSION").split('.');
    for part in ["MAJOR", "MINOR", "PATCH"] {
        let line = format!("#define DORMOUSE_VERSION_{part} {}\n", parts.next().unwrap());
        assert!(text.contains(&line), "no {line:?} in dormouse.h");
    }
}

/// Languages and standards in which the header is used.
const STANDARDS: &[(&str, &str)] = &[
    ("c", "c99"),
    ("c", "c11"),
    ("c", "c17"),
    ("c++", "c++11"),
    ("c++", "c++17"),
    ("c++", "c++20"),
];

/// Warnings that a project may have turned into errors.
const WARNINGS: &[&str] =
    &["-Wall", "-Wextra", "-pedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow"];
const WARNINGS_OF_C: &[&str] = &["-Wstrict-prototypes", "-Wmissing-prototypes"];
const WARNINGS_OF_CPP: &[&str] = &["-Wold-style-cast", "-Wzero-as-null-pointer-constant"];

/// A program that uses the macros of the header.
fn macros_in_use() -> String {
    let mut code = String::from(
        "#include <dormouse.h>\nint main(int argc, char **argv)\n{\n    uint32_t sum = DORMOUSE_VERSION;\n    (void)argv;\n",
    );
    for each in structs().iter().filter(|each| each.is_versioned()) {
        let name = &each.name;
        writeln!(code, "    {name} a_{name};\n    DORMOUSE_INIT(&a_{name});").unwrap();
        writeln!(code, "    sum += a_{name}.size + a_{name}.version;").unwrap();
    }
    code + "    return argc > 1 && sum == 0;\n}\n"
}

#[test]
fn the_header_compiles_without_warnings() {
    let source = folder("header").join("macros.txt");
    std::fs::write(&source, macros_in_use()).unwrap();
    for compiler in ["cc", "clang"] {
        if compiler == "clang" && Command::new(compiler).arg("--version").output().is_err() {
            skipped("the header compiled by clang, which is not installed");
            continue;
        }
        for (language, standard) in STANDARDS {
            let more = if *language == "c" { WARNINGS_OF_C } else { WARNINGS_OF_CPP };
            let output = Command::new(compiler)
                .args(["-x", language, &format!("-std={standard}"), "-Werror", "-fsyntax-only"])
                .args(WARNINGS)
                .args(more)
                .arg("-I")
                .arg(root().join("ffi/include"))
                .arg(&source)
                .output()
                .expect("a C and C++ compiler named cc is needed");
            let text = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{compiler} {language} {standard}: {text}");
        }
    }
}

#[test]
fn every_function_documents_its_threads_and_errors() {
    let text = committed();
    let mut doc = String::new();
    let mut seen = 0;
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix("///") {
            doc.push_str(comment);
            continue;
        }
        if line.contains('(')
            && !line.starts_with(' ')
            && (line.contains(" dormouse_") || line.contains(" *dormouse_"))
        {
            seen += 1;
            let threads = doc.contains("Any-thread") || doc.contains("Exclusive");
            let errors = doc.contains("Errors:") || doc.contains("Never fails");
            assert!(threads && errors, "the doc of `{line}` lacks threads or errors:{doc}");
        }
        doc.clear();
    }
    assert_eq!(seen, declared().len(), "a function was not found");
}

#[test]
fn the_library_exports_only_the_header_and_the_heap_symbols() {
    let declared = declared();
    assert_eq!(declared.len(), 93, "{declared:?}");
    let list = include_str!("../../symbols.txt");
    let (heap, api): (Vec<_>, Vec<_>) =
        list.lines().partition(|name| name.starts_with("dormouse_heap_"));
    let (plugin, functions) = api.split_first().unwrap();
    assert_eq!(functions, declared, "symbols.txt against the header");
    assert!(committed().contains(&format!("_t {plugin};\n")), "{plugin} is not declared");
    assert_eq!(heap.len(), 9);
    let versioned: Vec<String> = list.lines().map(|name| format!("{name}@@DORMOUSE_0")).collect();
    assert_eq!(exports(&libraries().join("libdormouse.so")), versioned);
}

#[test]
fn the_preload_library_exports_only_the_malloc_family_and_limits() {
    let interposed = [
        "aligned_alloc",
        "calloc",
        "free",
        "malloc",
        "malloc_trim",
        "malloc_usable_size",
        "memalign",
        "posix_memalign",
        "prlimit",
        "prlimit64",
        "pvalloc",
        "realloc",
        "reallocarray",
        "setrlimit",
        "setrlimit64",
        "valloc",
    ];
    assert_eq!(exports(&preload()), interposed);
}

#[test]
fn the_preload_library_links_the_library_and_neither_is_unloaded() {
    let dynamic = |path: &std::path::Path| {
        let output = Command::new("readelf").arg("-dW").arg(path).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let library = dynamic(&libraries().join("libdormouse.so"));
    assert!(library.contains("Library soname: [libdormouse.so.0]"), "{library}");
    assert!(library.contains("NODELETE"), "{library}");
    let shim = dynamic(&preload());
    for part in ["Auxiliary library: [libdormouse.so]", "[$ORIGIN]", "NODELETE"] {
        assert!(shim.contains(part), "no {part} in {shim}");
    }
    assert!(
        !library.contains("libdormouse_preload"),
        "the library does not link the preload library"
    );
}
