//! Links libdormouse.so: its SONAME, its exports (`dormouse.map`), never unloaded.
#![expect(clippy::expect_used, reason = "a build script has nobody to return an error to")]

use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=dormouse.map");
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    for argument in [
        "-Wl,-soname,libdormouse.so".to_owned(),
        // A handler of signals and of forks stays registered: the code must stay too.
        "-Wl,-z,nodelete".to_owned(),
        format!("-Wl,--version-script={}", here.join("dormouse.map").display()),
    ] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}
