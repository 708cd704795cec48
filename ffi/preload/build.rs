//! Links the shim. It requires `libdormouse.so` in its own directory and exports only the malloc family.
//!
//! Cargo cannot build one cdylib before another, so the shim is linked to an empty library with the same
//! SONAME. The `dormouse_heap_*` symbols resolve when the process loads the real one.
#![expect(clippy::expect_used, reason = "a build script fails by panicking")]

use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=preload.map");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let source = out.join("empty.c");
    std::fs::write(&source, "").expect("OUT_DIR is writable");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let status = Command::new(&compiler)
        .args(["-shared", "-nostdlib", "-Wl,-soname,libdormouse.so", "-o"])
        .arg(out.join("libdormouse.so"))
        .arg(&source)
        .status();
    assert!(status.is_ok_and(|status| status.success()), "the C compiler {compiler} must work");

    let map = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    for argument in [
        format!("-L{}", out.display()),
        "-Wl,--push-state,--no-as-needed,-ldormouse,--pop-state".to_owned(),
        "-Wl,--enable-new-dtags,-rpath,$ORIGIN".to_owned(),
        "-Wl,-soname,libdormouse_preload.so".to_owned(),
        // The empty library lacks the heap symbols.
        "-Wl,--unresolved-symbols=ignore-all".to_owned(),
        "-Wl,-z,nodelete,-z,now".to_owned(),
        format!("-Wl,--version-script={}", map.join("preload.map").display()),
    ] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}
