//! C programs under the C compiler's AddressSanitizer and UndefinedBehaviorSanitizer. The library is not instrumented:
//! what it does with the programs' memory is seen where it copies, allocates and frees.

use std::path::Path;

use crate::common::{Links, clean, compile_with, folder, root, run};

/// Options of the compiler. The first finding ends the program.
const OPTIONS: &[&str] = &["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];

/// Runs a program with a folder and `more` as its arguments. `at_exit` says whether it ends with a live runtime,
/// whose threads then hold memory.
fn runs_clean(name: &str, source: &Path, more: &[&str], at_exit: AtExit) {
    let folder = folder(&format!("sanitized-{name}"));
    let program = compile_with(OPTIONS, &[source.to_path_buf()], &folder, Links::Library);
    let mut command = clean(&program);
    let leaks = if at_exit == AtExit::Nothing { "1" } else { "0" };
    command.env("ASAN_OPTIONS", format!("detect_leaks={leaks}"));
    let ended = run(command.arg(&folder).args(more));
    ended.well().says(&format!("{name}: all checks passed"));
}

/// What a program leaves at its end.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AtExit {
    Nothing,
    Runtime,
}

fn program(name: &str) -> std::path::PathBuf {
    root().join(format!("tests/c/{name}.c"))
}

#[test]
fn programs_that_use_every_kind_of_handle() {
    for name in ["forest", "tree", "sleep", "history"] {
        runs_clean(name, &program(name), &[], AtExit::Nothing);
    }
}

#[test]
fn programs_that_misuse_handles_and_results() {
    for (name, at_exit) in [("misuse", AtExit::Nothing), ("order", AtExit::Runtime)] {
        runs_clean(name, &program(name), &[], at_exit);
    }
    let source = crate::wrong::written(&folder("sanitized-wrong-source"));
    runs_clean("wrong", &source, &[], AtExit::Runtime);
}

#[test]
fn programs_of_threads() {
    runs_clean("threads", &program("threads"), &["8"], AtExit::Nothing);
    runs_clean("exclusive", &program("exclusive"), &[], AtExit::Nothing);
}
