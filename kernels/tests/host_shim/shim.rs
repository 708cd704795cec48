//! Compiles the sources once and runs launches as the driver would.

use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};

use dormouse_kernels::cuda::{Kernel, Launch};

type Run = unsafe extern "C" fn(grid: u32, block: u32, parameters: *mut *mut c_void);

/// `-fsanitize`: a vector access at an address that is no multiple of its size, which this CPU would
/// allow and a GPU does not, stops the process.
const FLAGS: &[&str] = &[
    "-std=c++17",
    "-O1",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-DDORMOUSE_HOST_SHIM",
    "-fsanitize=alignment,bounds",
    "-fsanitize-undefined-trap-on-error",
];

fn build() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("cuda/host_shim.cpp");
    // A name of its own: two test runs may share the folder.
    let name = format!("host_shim_{}.so", std::process::id());
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let output = Command::new("c++")
        .args(FLAGS)
        .arg("-o")
        .args([&library, &source])
        .output()
        .expect("a C++ compiler named c++ is needed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    library
}

fn load() -> Vec<Run> {
    let library = build();
    let path = CString::new(library.clone().into_os_string().into_vec()).unwrap();
    // SAFETY: a library of our own, without constructors that matter.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!handle.is_null(), "{} does not load", library.display());
    std::fs::remove_file(library).unwrap();
    let find = |kernel: Kernel| {
        let name = CString::new([b"host_", kernel.name().to_bytes()].concat()).unwrap();
        // SAFETY: a handle just opened and never closed.
        let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
        assert!(!symbol.is_null(), "{name:?}");
        // SAFETY: host_shim.cpp gives every function of such a name this type.
        unsafe { std::mem::transmute::<*mut c_void, Run>(symbol) }
    };
    Kernel::ALL.into_iter().map(find).collect()
}

/// Runs `launch` and returns when it is done.
///
/// # Safety
/// The addresses it was made of are of memory as large as its counts say.
pub(crate) unsafe fn run(launch: &Launch) {
    static LIBRARY: OnceLock<Vec<Run>> = OnceLock::new();
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let run = LIBRARY.get_or_init(load)[launch.kernel as usize];
    let mut values = launch.parameters;
    let mut parameters = values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the caller's contract; the values are in the order in which the kernel reads them.
    unsafe { run(launch.blocks, launch.kernel.block_threads(), parameters.as_mut_ptr()) };
}
