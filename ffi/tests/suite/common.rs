//! Builds the two libraries, compiles C programs against them and runs them. A missing compiler named cc is a
//! failure, never a skip.

use std::fmt::Display;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Reports on standard error that a part of a test is skipped, with the reason.
pub(crate) fn skipped(reason: impl Display) {
    // Straight to the descriptor: libtest captures what `println!` writes in a test that passes.
    let _ = writeln!(std::io::stderr(), "skipped: {reason}");
}

/// As [`skipped`]. Fails where the environment variable `required_by` is set.
pub(crate) fn skipped_unless_required(reason: impl Display, required_by: &str) {
    let value = std::env::var_os(required_by);
    let is_required = value.is_some_and(|value| !value.is_empty() && value != "0");
    assert!(!is_required, "{reason}, and {required_by} requires it");
    skipped(reason);
}

/// Returns the root of the repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Returns the folder of `libdormouse.so` and `libdormouse_preload.so`, built from this source.
pub(crate) fn libraries() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        // `make test` has built them. Building this package alone would recompile others.
        if let Some(folder) = std::env::var_os("DORMOUSE_TEST_LIBS") {
            return checked(PathBuf::from(folder));
        }
        // The target directory of the tests: cargo does not build while tests run.
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().to_path_buf();
        let output = Command::new(env!("CARGO"))
            .args(["build", "--quiet", "--offline", "-p", "dormouse", "-p", "dormouse-preload"])
            .arg("--target-dir")
            .arg(&target)
            .current_dir(root())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        checked(target.join("debug"))
    })
}

fn checked(folder: PathBuf) -> PathBuf {
    for name in ["libdormouse.so", "libdormouse_preload.so"] {
        assert!(folder.join(name).exists(), "{name} is not in {}", folder.display());
    }
    folder
}

/// Returns the path of the preload library.
pub(crate) fn preload() -> PathBuf {
    libraries().join("libdormouse_preload.so")
}

/// Creates an empty folder on a disk for one test.
pub(crate) fn folder(test: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _absent = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// Whether a compiled program links `libdormouse.so`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Links {
    /// `-ldormouse`.
    Library,
    /// libc alone.
    Nothing,
}

/// Compiles a C program of one file and returns its path.
pub(crate) fn compile(source: &Path, into: &Path, links: Links) -> PathBuf {
    compile_all(&[source.to_path_buf()], into, links)
}

/// Compiles a C program of several files, named after the first, and returns its path.
pub(crate) fn compile_all(sources: &[PathBuf], into: &Path, links: Links) -> PathBuf {
    compile_with(&[], sources, into, links)
}

/// As [`compile_all`], with more options of the compiler.
pub(crate) fn compile_with(
    options: &[&str],
    sources: &[PathBuf],
    into: &Path,
    links: Links,
) -> PathBuf {
    let program = into.join(sources[0].file_stem().unwrap());
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu99", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .args(options)
        .args(std::env::var(OPTIONS_VARIABLE).unwrap_or_default().split_whitespace())
        .arg("-I")
        .arg(root().join("ffi/include"))
        .arg("-o")
        .arg(&program)
        .args(sources)
        .arg("-lm");
    if links == Links::Library {
        let libraries = libraries();
        cc.arg("-L").arg(libraries).arg("-ldormouse");
        cc.arg(format!("-Wl,-rpath,{}", libraries.display()));
    }
    let output = cc.output().expect("a C compiler named cc is needed");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Compiles `tests/c/NAME.c`.
pub(crate) fn test_program(name: &str, into: &Path, links: Links) -> PathBuf {
    compile(&root().join("tests/c").join(format!("{name}.c")), into, links)
}

/// Options of the C compiler for each program, as a sanitizer of the libraries needs (`scripts/sanitize`). Not set: none.
const OPTIONS_VARIABLE: &str = "DORMOUSE_TEST_CC_OPTIONS";
/// Words of a command that runs each program, as valgrind does (`scripts/sanitize`). Not set: none.
const RUNNER_VARIABLE: &str = "DORMOUSE_TEST_RUNNER";

/// Returns a command without `DORMOUSE_*` variables and `LD_PRELOAD`.
pub(crate) fn clean(program: &Path) -> Command {
    let runner = std::env::var(RUNNER_VARIABLE).unwrap_or_default();
    let mut words = runner.split_whitespace();
    let mut command = match words.next() {
        Some(first) => {
            let mut command = Command::new(first);
            command.args(words).arg(program);
            command
        }
        None => Command::new(program),
    };
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("DORMOUSE_") {
            command.env_remove(name);
        }
    }
    command.env_remove("LD_PRELOAD");
    command
}

/// The outcome of a program.
pub(crate) struct Ended {
    /// Exit code; `None` after a signal.
    pub(crate) code: Option<i32>,
    /// Signal that terminated the program.
    pub(crate) signal: Option<i32>,
    /// Standard output.
    pub(crate) out: String,
    /// Standard error.
    pub(crate) err: String,
}

impl Ended {
    /// Fails unless the program succeeded with nothing on standard error.
    #[track_caller]
    pub(crate) fn well(&self) -> &Self {
        assert!(
            self.code == Some(0) && self.err.is_empty(),
            "code {:?}, signal {:?}\n--- out\n{}\n--- err\n{}",
            self.code,
            self.signal,
            self.out,
            self.err
        );
        self
    }

    /// Fails unless standard output contains `piece`.
    #[track_caller]
    pub(crate) fn says(&self, piece: &str) -> &Self {
        assert!(self.out.contains(piece), "no {piece:?} in\n{}\n--- err\n{}", self.out, self.err);
        self
    }

    /// Fails unless standard error contains `piece`.
    #[track_caller]
    pub(crate) fn complains(&self, piece: &str) -> &Self {
        assert!(self.err.contains(piece), "no {piece:?} in\n{}\n--- out\n{}", self.err, self.out);
        self
    }
}

/// Runs a command and waits for it.
pub(crate) fn run(command: &mut Command) -> Ended {
    use std::os::unix::process::ExitStatusExt;
    let Output { status, stdout, stderr } = command.output().unwrap();
    Ended {
        code: status.code(),
        signal: status.signal(),
        out: String::from_utf8_lossy(&stdout).into_owned(),
        err: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

/// Returns the exported symbols of a library, sorted.
pub(crate) fn exports(library: &Path) -> Vec<String> {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut names: Vec<String> =
        text.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_owned).collect();
    names.sort();
    names
}
