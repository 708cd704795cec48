//! Links libdormouse.so: SONAME, exports (`symbols.txt`) with their version (`dormouse.map`), never unloaded.
#![expect(clippy::expect_used, reason = "a build script fails by panicking")]

use std::path::{Path, PathBuf};

/// Version of every export, defined in `dormouse.map`.
const VERSION_NODE: &str = "DORMOUSE_0";
/// Folders from cargo's `OUT_DIR` up to that of the libraries: `out`, the package's, `build`.
const OUT_DIR_DEPTH: usize = 3;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=dormouse.map");
    println!("cargo:rerun-if-changed=symbols.txt");
    let variable = |name| std::env::var_os(name).expect("cargo sets it");
    let here = PathBuf::from(variable("CARGO_MANIFEST_DIR"));
    let soname = format!("libdormouse.so.{}", env!("CARGO_PKG_VERSION_MAJOR"));
    for argument in [
        format!("-Wl,-soname,{soname}"),
        // Handlers of signals and forks stay registered, so the code must stay loaded.
        "-Wl,-z,nodelete".to_owned(),
        format!("-Wl,--version-script={}", here.join("dormouse.map").display()),
    ] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
    // rustc's own script gives the exports no version, and comes first. For lld the name with a version, which this
    // option mentions, is the symbol's from then on.
    let symbols = std::fs::read_to_string(here.join("symbols.txt")).expect("a readable list");
    for symbol in symbols.lines() {
        println!("cargo:rustc-cdylib-link-arg=-Wl,--undefined={symbol}@@{VERSION_NODE}");
    }
    let out = PathBuf::from(variable("OUT_DIR"));
    link(out.ancestors().nth(OUT_DIR_DEPTH).expect("a folder of libraries"), &soname);
}

/// Gives the library its SONAME as a second name, under which linked programs look for it.
fn link(libraries: &Path, soname: &str) {
    let link = libraries.join(soname);
    if !link.is_symlink() {
        std::os::unix::fs::symlink("libdormouse.so", &link).expect("a writable target directory");
    }
}
