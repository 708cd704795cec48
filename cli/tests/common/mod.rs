//! Helpers of the program's tests: temporary folders and the program itself.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "each test uses some of it; it fails by panicking"
)]

pub(crate) mod tables;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use dormouse_cli::Report;

/// A folder that is removed after the test.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dormouse-cli-{}-{number}", std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn put(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    /// The report of a plan with these arguments, computed in this process.
    pub(crate) fn report(&self, arguments: &[&str]) -> Report {
        let all: Vec<&str> =
            ["plan", "--json"].into_iter().chain(arguments.iter().copied()).collect();
        let output = dormouse(&self.0, &all);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {error}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The error of a refused plan.
    pub(crate) fn refusal(&self, arguments: &[&str]) -> String {
        let all: Vec<&str> = ["plan"].into_iter().chain(arguments.iter().copied()).collect();
        let output = dormouse(&self.0, &all);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(output.stdout.is_empty(), "a refused plan prints nothing to standard output");
        String::from_utf8(output.stderr).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The program in a folder, with empty standard input.
pub(crate) fn program(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dormouse"));
    command.current_dir(folder).stdin(Stdio::null());
    command
}

/// The program's output.
pub(crate) fn dormouse(folder: &Path, arguments: &[impl AsRef<OsStr>]) -> Output {
    program(folder).args(arguments).output().unwrap()
}
