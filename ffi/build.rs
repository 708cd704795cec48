//! Links libdormouse.so: SONAME, exports (`dormouse.map`), never unloaded.
#![expect(clippy::expect_used, reason = "a build script fails by panicking")]

use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=dormouse.map");
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    for argument in [
        "-Wl,-soname,libdormouse.so".to_owned(),
        // Handlers of signals and forks stay registered, so the code must stay loaded.
        "-Wl,-z,nodelete".to_owned(),
        format!("-Wl,--version-script={}", here.join("dormouse.map").display()),
    ] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}
