//! Programs with an allocator of their own, under the preload library. `REQUIRE_ALLOCATORS` in the environment: one that
//! is not installed fails its test instead of skipping it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{clean, folder, preload, root, run, skipped, skipped_unless_required};

/// Compiles `tests/c/family.c` with `arguments`. `None` if the linker does not find the allocator.
fn family(into: &Path, name: &str, arguments: &[&str]) -> Option<PathBuf> {
    let program = into.join(name);
    let output = Command::new("cc")
        .args([
            "-std=gnu99",
            "-O1",
            "-g",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fno-builtin",
            "-pthread",
        ])
        .arg("-o")
        .arg(&program)
        .arg(root().join("tests/c/family.c"))
        .args(arguments)
        .output()
        .expect("a C compiler named cc is needed");
    let text = String::from_utf8_lossy(&output.stderr);
    if text.contains("cannot find -l") {
        return None;
    }
    assert!(output.status.success(), "{text}");
    Some(program)
}

/// Runs a program with the allocator that `arguments` link, with and without the preload library. `package`: Debian's;
/// empty: it has none.
fn runs_with(name: &str, package: &str, arguments: &[&str]) {
    let Some(program) = family(&folder(&format!("family-{name}")), name, arguments) else {
        let reason = format!("the allocator {name} is not installed");
        return match package {
            "" => skipped(reason),
            _ => skipped_unless_required(
                format_args!("{reason} ({package} on Debian)"),
                "REQUIRE_ALLOCATORS",
            ),
        };
    };
    run(&mut clean(&program)).well().says("all checks passed");
    for least in ["4KiB", "64KiB"] {
        let mut command = clean(&program);
        command.env("LD_PRELOAD", preload()).env("DORMOUSE_HEAP_MIN_BYTES", least);
        run(&mut command).well().says("all checks passed");
    }
}

#[test]
fn programs_with_libc_run() {
    runs_with("libc", "libc6-dev", &[]);
    runs_with("libc-fixed-address", "libc6-dev", &["-no-pie"]);
}

#[test]
fn programs_with_jemalloc_run() {
    let package = "libjemalloc-dev";
    runs_with("jemalloc", package, &["-Wl,--no-as-needed", "-ljemalloc"]);
    runs_with("jemalloc-static", package, &["-l:libjemalloc.a", "-lstdc++", "-lm", "-ldl"]);
}

#[test]
fn programs_with_mimalloc_run() {
    let package = "libmimalloc-dev";
    runs_with("mimalloc", package, &["-Wl,--no-as-needed", "-lmimalloc"]);
    runs_with(
        "mimalloc-static",
        "",
        &["-Wl,--whole-archive", "-l:libmimalloc.a", "-Wl,--no-whole-archive"],
    );
}

#[test]
fn programs_with_tcmalloc_run() {
    let package = "libgoogle-perftools-dev";
    runs_with("tcmalloc", package, &["-Wl,--no-as-needed", "-ltcmalloc_minimal"]);
    let archive = ["-Wl,--whole-archive", "-l:libtcmalloc_minimal.a", "-Wl,--no-whole-archive"];
    runs_with("tcmalloc-static", package, &[&archive[..], &["-lstdc++", "-lm"]].concat());
}
