//! Tests again, in a process whose stand-in is another: its host is ahead of the GPU, or it has two devices.

use std::process::Command;

const RUN_AHEAD: &str = "STANDIN_CUDA_RUN_AHEAD";
const DEVICES: &str = "STANDIN_CUDA_DEVICES";
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
    let ahead = works.to_string();
    let mut variables = [variables, &[(RUN_AHEAD, ahead.as_str())]].concat();
    if works == 1 {
        variables.push((WORK_NS, ONE_WORK_NS));
    }
    run(filter, &variables);
}

/// Runs the `body` of the test `name` in a process with two devices.
///
/// # Panics
/// Where it fails, or there is no such test.
pub fn run_on_two_devices(name: &str, body: impl FnOnce()) {
    match std::env::var_os(DEVICES) {
        None => run(name, &[(DEVICES, "2")]),
        Some(_) => body(),
    }
}

/// Runs the tests of this program whose names contain `filter` again, with these variables.
fn run(filter: &str, variables: &[(&str, &str)]) {
    let program = std::env::current_exe().expect("a test knows its own program");
    let mut command = Command::new(program);
    command.arg(filter).envs(variables.iter().copied());
    let output = command.output().expect("it has just run");
    let (said, complained) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let has_run = !said.contains("test result: ok. 0 passed");
    assert!(output.status.success() && has_run, "{variables:?}: {said}\n{complained}");
}
