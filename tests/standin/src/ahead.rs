//! Tests again, in a process whose host is ahead of the GPU.

use std::process::Command;

const RUN_AHEAD: &str = "STANDIN_CUDA_RUN_AHEAD";
const WORK_NS: &str = "STANDIN_CUDA_WORK_NS";
/// What each work takes if the host is one ahead. The streams are quick otherwise, so what forgets to wait can find
/// its bytes there.
const ONE_WORK_NS: &str = "20000";

/// Runs the tests of this program whose names contain `filter` again, in a process whose host is ahead of the GPU by
/// `works`, with these variables. Works take time if the host is one ahead. Does nothing in such a process.
///
/// # Panics
/// Where one of them fails, or there is none.
pub fn run_again_ahead(works: u64, filter: &str, variables: &[(&str, &str)]) {
    if std::env::var_os(RUN_AHEAD).is_some() {
        return;
    }
    let program = std::env::current_exe().expect("a test knows its own program");
    let mut command = Command::new(program);
    command.arg(filter).env(RUN_AHEAD, works.to_string()).envs(variables.iter().copied());
    if works == 1 {
        command.env(WORK_NS, ONE_WORK_NS);
    }
    let output = command.output().expect("it has just run");
    let (said, complained) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let has_run = !said.contains("test result: ok. 0 passed");
    assert!(output.status.success() && has_run, "{works} works ahead: {said}\n{complained}");
}
