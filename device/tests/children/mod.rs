//! Deeds that may end a process run in a child: the test starts itself again and looks at how that ended.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::process::{Command, Output, exit};

/// Set in child processes.
const CHILD: &str = "DORMOUSE_TEST_CHILD";
/// How a child ends whose deed did not kill it.
const SURVIVED: i32 = 7;

/// Runs `deed` in a child process, which is `test` started again.
pub(crate) fn in_child(test: &str, deed: fn()) -> Output {
    if std::env::var_os(CHILD).is_some() {
        deed();
        exit(SURVIVED);
    }
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap()
}

/// Returns what a child wrote to standard error.
pub(crate) fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
pub(crate) fn assert_survived(output: &Output) {
    assert_eq!(output.status.code(), Some(SURVIVED), "{output:?}");
}
