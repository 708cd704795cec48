//! Gives the library the driver's name, so that a `dlopen` of `libcuda.so.1` finds it loaded.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rerun-if-changed=build.rs");
}
