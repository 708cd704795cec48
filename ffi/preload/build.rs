//! Links the shim, which exports only the malloc family and the calls that set limits.
//!
//! It names `libdormouse.so` as its auxiliary library: the loader loads it at the start, from the shim's own
//! directory, with static thread-local data like a dependency, and the program runs without it, too.
#![expect(clippy::expect_used, reason = "a build script fails by panicking")]

use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=preload.map");
    let map = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    for argument in [
        "-Wl,--auxiliary=libdormouse.so".to_owned(),
        "-Wl,--enable-new-dtags,-rpath,$ORIGIN".to_owned(),
        "-Wl,-soname,libdormouse_preload.so".to_owned(),
        "-Wl,-z,nodelete,-z,now".to_owned(),
        format!("-Wl,--version-script={}", map.join("preload.map").display()),
    ] {
        println!("cargo:rustc-cdylib-link-arg={argument}");
    }
}
