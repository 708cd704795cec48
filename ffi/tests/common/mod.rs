//! What the tests of the boundary share: the two libraries built, C programs compiled against
//! them, and how a program ended. Nothing here is skipped: a missing compiler is a failure.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The repository's root.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_path_buf()
}

/// Where `libdormouse.so` and `libdormouse_preload.so` are, built from this source.
pub fn libraries() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        // `make test` has built them; a build of this package alone would compile others anew.
        if let Some(folder) = std::env::var_os("DORMOUSE_TEST_LIBS") {
            return checked(PathBuf::from(folder));
        }
        // The tests' own target directory: cargo is not building while tests run.
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

/// The preload library's path.
pub fn preload() -> PathBuf {
    libraries().join("libdormouse_preload.so")
}

/// A fresh folder on a disk for one test.
pub fn folder(test: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    let _absent = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

/// Whether a compiled program links `libdormouse.so`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// `-ldormouse`.
    Library,
    /// libc alone.
    Nothing,
}

/// Compiles one C program and gives its path.
pub fn compile(source: &Path, into: &Path, links: Links) -> PathBuf {
    let program = into.join(source.file_stem().unwrap());
    let mut cc = Command::new("cc");
    cc.args(["-std=gnu99", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .arg("-I")
        .arg(root().join("ffi/include"))
        .arg("-o")
        .arg(&program)
        .arg(source);
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
pub fn test_program(name: &str, into: &Path, links: Links) -> PathBuf {
    compile(&root().join("tests/c").join(format!("{name}.c")), into, links)
}

/// A command with no `DORMOUSE_*` of the caller's.
pub fn clean(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("DORMOUSE_") {
            command.env_remove(name);
        }
    }
    command.env_remove("LD_PRELOAD");
    command
}

/// How a program ended.
pub struct Ended {
    /// Its exit code; `None` where a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

impl Ended {
    /// Fails unless it ended well with nothing on standard error.
    #[track_caller]
    pub fn well(&self) -> &Self {
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

    /// Fails unless standard output has `piece`.
    #[track_caller]
    pub fn says(&self, piece: &str) -> &Self {
        assert!(self.out.contains(piece), "no {piece:?} in\n{}\n--- err\n{}", self.out, self.err);
        self
    }

    /// Fails unless standard error has `piece`.
    #[track_caller]
    pub fn complains(&self, piece: &str) -> &Self {
        assert!(self.err.contains(piece), "no {piece:?} in\n{}\n--- out\n{}", self.err, self.out);
        self
    }
}

/// Runs a command to its end.
pub fn run(command: &mut Command) -> Ended {
    use std::os::unix::process::ExitStatusExt;
    let Output { status, stdout, stderr } = command.output().unwrap();
    Ended {
        code: status.code(),
        signal: status.signal(),
        out: String::from_utf8_lossy(&stdout).into_owned(),
        err: String::from_utf8_lossy(&stderr).into_owned(),
    }
}

/// Symbols a library defines for others, sorted.
pub fn exports(library: &Path) -> Vec<String> {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut names: Vec<String> =
        text.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_owned).collect();
    names.sort();
    names
}
