//! Building the library and putting it into the process, once.

use std::ffi::{CStr, CString, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The package, and the file cargo makes of it.
const PACKAGE: &str = "dormouse-standin-cuda";
const BUILT: &str = "libstandin_cuda.so";
/// File name of the driver's library.
const DRIVER: &str = "libcuda.so.1";

/// Granule and total, where a test sets them.
type Figures = Option<(usize, u64)>;

/// The loaded library; it is never unloaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library {
    handle: usize,
}

/// Loads the library with `figures`, or gives the one that was loaded.
pub(crate) fn load(figures: Figures) -> Library {
    static LOADED: OnceLock<(Figures, Library)> = OnceLock::new();
    let (first, library) = LOADED.get_or_init(|| (figures, Library::open(&place(), figures)));
    assert!(
        figures.is_none() || figures == *first,
        "the stand-in was loaded with {first:?}, not {figures:?}: it is one for the process"
    );
    *library
}

/// The test's own target folder: its binary is in `<target>/<profile>/deps`.
fn target() -> PathBuf {
    let program = std::env::current_exe().expect("a test knows its own program");
    program.ancestors().nth(3).expect("a test is in <target>/<profile>/deps").to_path_buf()
}

/// Builds the library in the target folder and returns its path there. `make test` has built it in
/// the folder `DORMOUSE_TEST_LIBS`: a build of this package alone would compile others anew.
fn built(target: &Path) -> PathBuf {
    if let Some(folder) = std::env::var_os("DORMOUSE_TEST_LIBS") {
        return PathBuf::from(folder).join(BUILT);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("two rooms deep");
    // Cargo does not build while tests run, and two of these wait for each other.
    let output = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--offline", "-p", PACKAGE, "--target-dir"])
        .arg(target)
        .current_dir(root)
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target.join("debug").join(BUILT)
}

/// Puts the library where it has the driver's file name.
fn place() -> PathBuf {
    let target = target();
    let library = built(&target);
    let folder = target.join("debug/standin");
    std::fs::create_dir_all(&folder).expect("the target folder is writable");
    // Test processes may race: each puts a whole file in place in one step.
    let own = folder.join(format!("{DRIVER}.{}", std::process::id()));
    std::fs::copy(library, &own).expect("cargo has built it");
    let path = folder.join(DRIVER);
    std::fs::rename(&own, &path).expect("one folder");
    path
}

/// What the loader last complained of.
fn complaint() -> String {
    // SAFETY: it returns null or a string of this thread's.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return String::new();
    }
    // SAFETY: not null, so a string with its zero.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

impl Library {
    fn open(path: &Path, figures: Figures) -> Self {
        if let Some((granularity_bytes, total_bytes)) = figures {
            // SAFETY: the harness's other threads wait for `LOADED` or have not come to it; what
            // reads the environment in Rust takes the same lock as this.
            unsafe {
                std::env::set_var("STANDIN_CUDA_GRANULARITY_BYTES", granularity_bytes.to_string());
                std::env::set_var("STANDIN_CUDA_TOTAL_BYTES", total_bytes.to_string());
            }
        }
        let name = CString::new(path.as_os_str().as_bytes()).expect("a path has no zero byte");
        // SAFETY: the library's initialisers are Rust's own; it is global, so that it is found
        // under its own name.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!handle.is_null(), "{}: {}", path.display(), complaint());
        let library = Self { handle: handle.expose_provenance() };
        // A driver that was there before answers to the name, and would be used instead.
        // SAFETY: nothing is loaded that is not.
        let named =
            unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        assert!(named == handle, "another {DRIVER} is loaded in this process");
        library
    }

    /// The address of a function.
    pub(crate) fn symbol(&self, name: &str) -> *const c_void {
        let text = CString::new(name).expect("a name without a zero byte");
        let handle = std::ptr::with_exposed_provenance_mut(self.handle);
        // SAFETY: the library is never unloaded.
        let address = unsafe { libc::dlsym(handle, text.as_ptr()) };
        assert!(!address.is_null(), "the stand-in has no {name}: {}", complaint());
        address
    }
}
