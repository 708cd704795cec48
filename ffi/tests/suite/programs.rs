//! C programs that use the library: misuse, injected faults, access to sleeping memory, configuration,
//! logging and the example.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::common::{Ended, Links, clean, compile, folder, preload, root, run, test_program};

#[test]
fn a_host_that_loads_the_library_finds_every_function() {
    let program = test_program("plugin", &folder("plugin"), Links::Nothing);
    let library = crate::common::libraries().join("libdormouse.so");
    run(clean(&program).arg(library)).well().says("plugin: all checks passed");
}

/// Compiles and runs a test program with `folder` as its first argument, then `more`.
fn ended(name: &str, more: &[&str], is_preloaded: bool) -> Ended {
    let suffix = if is_preloaded { "-preload" } else { "" };
    let folder = folder(&format!("{name}{suffix}{}", more.concat()));
    let program = test_program(name, &folder, Links::Library);
    let mut command = clean(&program);
    command.arg(&folder).args(more);
    if is_preloaded {
        command.env("LD_PRELOAD", preload());
    }
    run(&mut command)
}

#[test]
fn misuse_returns_typed_errors() {
    ended("misuse", &[], false).well().says("all checks passed");
}

#[test]
fn misuse_returns_typed_errors_under_the_preload_library() {
    ended("misuse", &[], true).well().says("all checks passed");
}

#[test]
fn handles_survive_a_wrong_order_of_destruction() {
    ended("order", &[], false).well().says("all checks passed");
}

#[test]
fn threads_with_handles_of_their_own_do_not_disturb_each_other() {
    ended("threads", &["20"], false).well().says("all checks passed");
}

#[test]
fn a_forest_is_planned_and_run() {
    ended("forest", &[], false).well().says("all checks passed");
}

#[test]
fn rollouts_are_recorded_drafted_from_saved_and_loaded() {
    ended("history", &[], false).well().says("all checks passed");
}

#[test]
fn turns_are_recorded_retrieved_and_found_again() {
    ended("dialogue", &[], false).well().says("all checks passed");
}

#[test]
fn ranks_plan_parts_of_a_tree_and_prefixes_wake_at_their_ops() {
    ended("tree", &[], false).well().says("all checks passed");
}

#[test]
fn a_second_thread_in_an_exclusive_handle_is_refused() {
    ended("exclusive", &[], false).well().says("all checks passed");
}

#[test]
fn a_limit_of_threads_is_named_and_the_directory_is_not_blamed() {
    ended("thread_limit", &[], false).well().says("all checks passed");
}

#[test]
fn an_allocation_log_whose_thread_cannot_start_begins_with_the_next_runtime() {
    /// More than a runtime starts.
    const THREADS_MAX: u32 = 24;
    const ROWS_MIN: usize = 200; // of the program's blocks
    let folder = folder("no_thread");
    let program = test_program("no_thread", &folder, Links::Library);
    let mut met = 0;
    for number in 0..THREADS_MAX {
        let logs = folder.join(number.to_string());
        std::fs::create_dir(&logs).unwrap();
        let mut command = clean(&program);
        command.arg(&folder).arg(number.to_string()).env("DORMOUSE_ALLOC_LOG_DIR", &logs);
        let ended = run(&mut command);
        assert_eq!(ended.code, Some(0), "{number}: {}", ended.err);
        met += usize::from(ended.says("all checks passed").err.contains("no thread for it"));
        let files: Vec<_> = std::fs::read_dir(&logs).unwrap().map(|file| file.unwrap()).collect();
        assert_eq!(files.len(), 1, "{number}: {files:?}\n{}", ended.err);
        let rows = std::fs::read_to_string(files[0].path()).unwrap().lines().count();
        assert!(rows > ROWS_MIN, "{number}: {rows} lines\n{}", ended.err);
    }
    assert_eq!(met, 1, "the thread of the log was refused once");
}

#[test]
fn a_forked_child_is_refused_and_the_parent_is_unaffected() {
    ended("forked", &[], false).well().says("all checks passed");
    ended("forked", &[], true).well().says("all checks passed");
}

#[test]
fn sleeping_memory_wakes_unchanged() {
    ended("sleep", &[], false).well().says("all checks passed");
}

#[test]
fn malloc_under_the_preload_library_sleeps_in_place() {
    let ended = ended("heap", &[], true);
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.out, ended.err);
    // Standard error has one report, of the refused request.
    ended.says("all checks passed").complains("67108864");
    assert!(ended.err.lines().count() <= 12, "{}", ended.err);
}

#[test]
fn the_default_budget_refuses_nothing() {
    let ended = ended("overcommit", &[], true);
    ended.well().says("all checks passed");
    assert_eq!(ended.err, "", "no report of a request that libc refuses too");
}

/// The driver that is loaded for a GPU's heap can allocate, which creates the host's heap.
#[test]
fn a_driver_can_allocate_while_it_is_loaded() {
    let folder = folder("loading");
    let mut cc = std::process::Command::new("cc");
    cc.args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).arg(folder.join("libcuda.so.1"));
    assert!(cc.arg(root().join("tests/c/driver.c")).status().unwrap().success());
    std::os::unix::fs::symlink("libcuda.so.1", folder.join("libcuda.so")).unwrap();
    let program = test_program("loading", &folder, Links::Library);
    let mut command = clean(&program);
    command.env("LD_PRELOAD", preload()).env("LD_LIBRARY_PATH", &folder);
    // Requests before the driver's are smaller.
    command.env("DORMOUSE_HEAP_MIN_BYTES", "4MiB");
    run(&mut command).well().says("all checks passed");
}

#[test]
fn a_corrupted_extent_is_an_error_and_other_data_is_kept() {
    let ended = ended("damage", &["corrupt"], false);
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.out, ended.err);
    ended.says("all checks passed").complains("WARN dormouse::storage: checksum differs");
    assert_eq!(ended.err.lines().count(), 1, "one warning, of the second read: {}", ended.err);
}

#[test]
fn a_truncated_file_is_an_error_and_other_data_is_kept() {
    ended("damage", &["truncate"], false).well().says("all checks passed");
}

#[test]
fn an_access_to_sleeping_memory_wakes_it_with_one_warning_each() {
    let ended = touched("wake");
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.out, ended.err);
    ended.says("touch: all checks passed");
    let warnings: Vec<&str> = ended.err.lines().collect();
    assert_eq!(warnings.len(), 3, "{}", ended.err);
    assert!(warnings.iter().all(|line| line.contains("WARN dormouse::offload")), "{}", ended.err);
    for (warning, access) in warnings.iter().zip(["read", "write", "read"]) {
        assert!(warning.contains(&format!("access=\"{access} of 0x")), "{}", ended.err);
        assert!(warning.contains("in \\\"optimizer\\\""), "{}", ended.err);
    }
}

/// Runs the program that accesses sleeping memory.
fn touched(stray: &str) -> Ended {
    let folder = folder(&format!("touch-{stray}"));
    let program = test_program("touch", &folder, Links::Library);
    run(clean(&program).arg(&folder).env("DORMOUSE_OFFLOAD_STRAY", stray))
}

#[test]
fn an_access_to_sleeping_memory_ends_the_process_with_one_message_if_it_is_to_stop() {
    let ended = touched("stop");
    ended.says("before the touch: all checks passed");
    assert_eq!((ended.code, ended.signal), (None, Some(libc_sigsegv())), "{}", ended.err);
    ended.complains("optimizer");
    assert_eq!(ended.err.trim_end().lines().count(), 1, "one message: {}", ended.err);
}

fn libc_sigsegv() -> i32 {
    11
}

/// Runs `create` with `environment`.
fn created(test: &str, environment: &[(&str, &str)], is_preloaded: bool) -> Ended {
    let folder = folder(test);
    let program = test_program("create", &folder, Links::Library);
    let mut command = clean(&program);
    command.envs(environment.iter().copied());
    if is_preloaded {
        command.env("LD_PRELOAD", preload());
    }
    run(&mut command)
}

/// As [`created`], by a shell that has run `limits`.
fn created_under(limits: &str, test: &str, environment: &[(&str, &str)]) -> Ended {
    let program = test_program("create", &folder(test), Links::Library);
    let script = format!("{limits}; exec \"$0\"");
    let mut command = clean(Path::new("/bin/sh"));
    command.arg("-c").arg(script).arg(program).envs(environment.iter().copied());
    run(&mut command)
}

#[test]
fn defaults_need_no_environment() {
    created("defaults", &[], false)
        .well()
        .says("DORMOUSE_OK")
        .says("nvme: DORMOUSE_NVME_DIR is not set")
        .says("DORMOUSE_OFFLOAD_WINDOW_LAYERS = 3 [4] count; no step was measured yet")
        .says("DORMOUSE_NVME_FILE_BYTES = auto [4] size; DORMOUSE_NVME_DIR is not set")
        .says("of memory that is available")
        .says("DORMOUSE_TRACE_EVENTS_MAX = 65536 [0] count; \n");
}

/// What was built in before would fail here: a file of 4 GiB. Memory cannot be locked, so io_uring registers none.
#[test]
fn automatic_values_work_on_a_small_disk_and_with_no_memory_to_lock() {
    let dir = folder("small-files");
    let at = [("DORMOUSE_NVME_DIR", dir.to_str().unwrap())];
    let limits = "ulimit -f 16384; ulimit -l 0"; // files in blocks of 512 bytes
    created_under(limits, "small-auto", &at)
        .says("DORMOUSE_OK")
        .says("DORMOUSE_NVME_FILE_BYTES = 8388608 [4] size; ulimit -f allows files of 8 MiB");
    let fixed = [at[0], ("DORMOUSE_NVME_FILE_BYTES", "4GiB")];
    created_under(limits, "small-fixed", &fixed).says("DORMOUSE_ERR_IO").says("File too large");
}

#[test]
fn automatic_values_have_their_reasons_and_a_set_one_wins() {
    let dir = folder("auto-files");
    let conf = dir.join("auto.conf");
    std::fs::write(&conf, "DORMOUSE_OFFLOAD_IO_THREADS = 3\nDORMOUSE_OFFLOAD_WINDOW_LAYERS = 9\n")
        .unwrap();
    let environment = [
        ("DORMOUSE_CONFIG", conf.to_str().unwrap()),
        ("DORMOUSE_NVME_DIR", dir.to_str().unwrap()),
        ("DORMOUSE_OFFLOAD_WINDOW_LAYERS", "auto"),
        ("DORMOUSE_NVME_ENGINE", "threads"),
        ("DORMOUSE_HOST_BUDGET_BYTES", "1MiB"),
    ];
    created("auto", &environment, false)
        .well()
        .says("DORMOUSE_OFFLOAD_IO_THREADS = 3 [1] count; \n")
        .says("DORMOUSE_HOST_BUDGET_BYTES = 1048576 [2] size; \n")
        .says("DORMOUSE_OFFLOAD_WINDOW_LAYERS = 3 [4] count; no step was measured yet")
        .says("DORMOUSE_OFFLOAD_INFLIGHT_BYTES = 268435456 [4] size; no link was measured yet")
        .says("/s at a latency of ");
    let threads = [environment[1], environment[3]];
    created("auto-threads", &threads, false)
        .well()
        .says("[4] count; CPUs: ")
        .says("one request per thread: DORMOUSE_NVME_ENGINE is threads");
}

#[test]
fn the_environment_sets_values_and_is_named_as_their_source() {
    let dir = folder("env-nvme");
    let environment = [
        ("DORMOUSE_NVME_DIR", dir.to_str().unwrap()),
        ("DORMOUSE_NVME_FILE_BYTES", "8MiB"),
        ("DORMOUSE_OFFLOAD_WINDOW_LAYERS", "5"),
    ];
    created("env", &environment, true)
        .well()
        .says("DORMOUSE_NVME_FILE_BYTES = 8388608 [2] size")
        .says("DORMOUSE_OFFLOAD_WINDOW_LAYERS = 5 [2] count");
}

#[test]
fn an_invalid_value_is_refused_with_the_accepted_values() {
    let cases = [
        ("DORMOUSE_CPU_BUDGET_BYTES", "0", "1MiB to 64TiB"),
        ("DORMOUSE_CPU_BUDGET_BYTES", "lots", "1MiB to 64TiB"),
        ("DORMOUSE_OFFLOAD_IO_THREADS", "-1", "1 to 64"),
        ("DORMOUSE_OFFLOAD_CHECKSUM", "perhaps", "on, off"),
        ("DORMOUSE_NVME_ENGINE", "io_uring", "auto, uring, threads"),
        ("DORMOUSE_NVME_QUEUE_DEPTH", "0", "1 to 256"),
        ("DORMOUSE_LOG", "verbose", "target=level pairs"),
        ("DORMOUSE_CONFIG", "/nowhere/at.all", "NAME = VALUE"),
    ];
    for (name, value, accepted) in cases {
        let ended = created("bad", &[(name, value)], false);
        ended.well().says("DORMOUSE_ERR_CONFIG").says(name).says(value).says(accepted);
    }
}

#[test]
fn only_warnings_are_logged_by_default() {
    created("log-default", &[], false).well();
    let ended = created("log-info", &[("DORMOUSE_LOG", "info")], false);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    ended
        .complains(" INFO dormouse::ffi: runtime created ")
        .complains("device=\"Host 0\"")
        .complains("settings=\"DORMOUSE_LOG=info (environment)\"");
    assert_eq!(ended.err.lines().count(), 1, "{}", ended.err);
    // Only rank 0 logs the settings.
    created("log-rank", &[("DORMOUSE_LOG", "info"), ("RANK", "1")], false).well();
    created("log-others", &[("DORMOUSE_LOG", "alloc=debug")], false).well();
}

#[test]
fn log_events_are_written_to_the_configured_file() {
    let dir = folder("log-file-dir");
    let pattern = dir.join("%r-%p.log");
    let environment = [
        ("DORMOUSE_LOG", "info"),
        ("DORMOUSE_LOG_FILE", pattern.to_str().unwrap()),
        ("SLURM_PROCID", "0"),
    ];
    created("log-file", &environment, false).well();
    let files: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    assert!(files[0].file_name().to_str().unwrap().starts_with("0-"), "{files:?}");
    let text = std::fs::read_to_string(files[0].path()).unwrap();
    assert!(text.contains("runtime created"), "{text}");
    for (path, why) in [("/nowhere/a.log", "could not open"), ("/tmp/%q", "accepted: %h host")] {
        let ended = created("log-bad", &[("DORMOUSE_LOG_FILE", path)], false);
        ended.well().says("DORMOUSE_ERR_CONFIG").says("DORMOUSE_LOG_FILE").says(why);
    }
}

#[test]
fn log_events_can_be_read_and_a_forked_child_emits_none() {
    for is_preloaded in [false, true] {
        let suffix = if is_preloaded { "-preload" } else { "" };
        let folder = folder(&format!("log{suffix}"));
        let file = folder.join("events.log");
        let program = test_program("log", &folder, Links::Library);
        let mut command = clean(&program);
        command.env("DORMOUSE_LOG", "trace").env("DORMOUSE_LOG_FILE", &file);
        command.env("DORMOUSE_HEAP_MIN_BYTES", "4KiB");
        if is_preloaded {
            command.env("LD_PRELOAD", preload());
        }
        let ended = run(&mut command);
        assert_eq!(ended.code, Some(0), "{}\n{}", ended.out, ended.err);
        ended
            .says("all checks passed")
            .says("\"message\":\"stash declined\"")
            .says("\"bytes\":12345")
            .says("\"storage_key\":77")
            .says("\"level\":\"INFO\"");
        // Events that are read are also written to the file; the child writes none.
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains("stash declined bytes=12345"), "{text}");
        assert!(!text.contains("bytes=54321"), "{text}");
        assert_eq!(text.matches("runtime created").count(), 1, "{text}");
    }
}

#[test]
fn live_figures_are_the_statistics_and_a_forked_child_writes_none() {
    for is_preloaded in [false, true] {
        let suffix = if is_preloaded { "-preload" } else { "" };
        let folder = folder(&format!("live{suffix}"));
        let program = test_program("live", &folder, Links::Library);
        let pattern = folder.join("%r.page");
        let mut command = clean(&program);
        command.env("DORMOUSE_STATS_FILE", &pattern).env("RANK", "3");
        command.arg(&folder).arg(folder.join("3.page"));
        if is_preloaded {
            command.env("LD_PRELOAD", preload());
        }
        run(&mut command).well().says("all checks passed");
    }
}

#[test]
fn a_file_of_live_figures_that_cannot_be_created_is_refused_by_name() {
    let dir = folder("live-dir");
    for (path, why) in [
        ("/dev/null", "is a device; accepted: a regular file"),
        (dir.to_str().unwrap(), "is a directory; accepted: a regular file"),
        ("/nowhere/a.page", "could not create /nowhere/a.page"),
        ("/tmp/%q", "accepted: %h host"),
    ] {
        let ended = created("live-bad", &[("DORMOUSE_STATS_FILE", path)], false);
        ended.well().says("DORMOUSE_ERR_CONFIG").says("DORMOUSE_STATS_FILE").says(why);
    }
    // The figures of a runtime that could not be created do not stay.
    let (page, nvme) = (dir.join("page"), dir.join("absent"));
    let environment = [
        ("DORMOUSE_STATS_FILE", page.to_str().unwrap()),
        ("DORMOUSE_NVME_DIR", nvme.to_str().unwrap()),
    ];
    created("live-bad", &environment, false).well().says("DORMOUSE_ERR_IO");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "no file remains");
}

#[test]
fn an_invalid_value_under_the_preload_library_is_reported_once_and_libc_serves() {
    let ended = created("bad-preload", &[("DORMOUSE_HEAP_MIN_BYTES", "3")], true);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    ended.says("DORMOUSE_ERR_CONFIG").complains("DORMOUSE_HEAP_MIN_BYTES is \"3\"");
    assert_eq!(ended.err.lines().count(), 1, "{}", ended.err);
}

#[test]
fn an_unknown_name_causes_one_warning_with_the_nearest_name() {
    let ended = created("unknown", &[("DORMOUSE_NVMEDIR", "/x")], false);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    ended.complains("unknown parameter DORMOUSE_NVMEDIR; did you mean DORMOUSE_NVME_DIR?");
    assert_eq!(ended.err.lines().count(), 1, "{}", ended.err);
    let silenced = [("DORMOUSE_NVMEDIR", "/x"), ("DORMOUSE_WARN_UNKNOWN", "0")];
    created("unknown-silenced", &silenced, false).well();
    created("lib", &[("DORMOUSE_LIB", "/x/libdormouse.so")], false).well();
}

#[test]
fn help_prints_the_table_and_the_process_continues() {
    let ended = created("help", &[("DORMOUSE_HELP", "1")], false);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    ended.says("DORMOUSE_OK").complains("DORMOUSE_CPU_BUDGET_BYTES = ").complains("[environment]");
}

#[test]
fn help_is_printed_beside_an_invalid_value() {
    let environment = [
        ("DORMOUSE_HELP", "1"),
        ("DORMOUSE_OFFLOAD_CHECKSUM", "maybe"),
        ("DORMOUSE_OFFLOAD_WINDOW_LAYERS", "7"),
        ("DORMOUSE_TEAPOT", "1"),
    ];
    for is_preloaded in [false, true] {
        let ended = created("help-bad", &environment, is_preloaded);
        ended
            .says("DORMOUSE_ERR_CONFIG")
            .says("DORMOUSE_OFFLOAD_CHECKSUM is \"maybe\" from the environment")
            .complains("DORMOUSE_OFFLOAD_CHECKSUM = on  [built in]")
            .complains("DORMOUSE_OFFLOAD_WINDOW_LAYERS = 7  [environment]")
            .complains("unknown parameter DORMOUSE_TEAPOT");
        assert_eq!(ended.err.matches("dormouse parameters, with").count(), 1, "{}", ended.err);
    }
}

#[test]
fn names_and_values_of_a_file_are_reported_with_their_line() {
    let file = folder("config-lines").join("it.conf");
    let path = file.to_str().unwrap();
    std::fs::write(&file, "# mine\nDORMOUSE_LOG_LEVEL = debug\n\nDORMOUSE_OFFLOAD_WINDOW = 2\n")
        .unwrap();
    let ended = created("config-names", &[("DORMOUSE_CONFIG", path)], false);
    ended
        .says("DORMOUSE_OK")
        .complains(&format!(
            "unknown parameter DORMOUSE_LOG_LEVEL in {path}:2; did you mean DORMOUSE_LOG?"
        ))
        .complains(&format!(
            "DORMOUSE_OFFLOAD_WINDOW in {path}:4; did you mean DORMOUSE_OFFLOAD_WINDOW_LAYERS?"
        ));
    assert_eq!(ended.err.lines().count(), 2, "{}", ended.err);
    std::fs::write(&file, "\nDORMOUSE_NVME_QUEUE_DEPTH = deep\nDORMOUSE_LOG\n").unwrap();
    created("config-values", &[("DORMOUSE_CONFIG", path)], false)
        .well()
        .says(&format!(
            "DORMOUSE_NVME_QUEUE_DEPTH is \"deep\" from {path}:2; accepted: auto, or 1 to 256"
        ))
        .says(&format!("{path}:3 is \"DORMOUSE_LOG\"; accepted: NAME = VALUE"));
}

#[test]
fn a_path_with_a_comment_sign_survives_a_dump() {
    let place = folder("a #1 100% \"x\"");
    let program = test_program("sleep", &place, Links::Library);
    let logs = folder("log #2");
    let log = logs.join("%%1 # log.txt");
    run(clean(&program).arg(&place).env("DORMOUSE_LOG_FILE", &log)).well();
    assert!(logs.join("%1 # log.txt").exists());
    let dump = place.join("params.conf");
    created("reloaded-path", &[("DORMOUSE_CONFIG", dump.to_str().unwrap())], false)
        .well()
        .says(&format!("DORMOUSE_LOG_FILE = {} [1] path", log.display()))
        .says(&format!("DORMOUSE_NVME_DIR = {} [1] path", place.display()));
}

#[test]
fn an_earlier_name_sets_its_parameter_and_causes_one_warning() {
    let old = [("DORMOUSE_ALLOC_BUDGET_BYTES", "1.5 GB")];
    for is_preloaded in [false, true] {
        let ended = created("earlier-name", &old, is_preloaded);
        assert_eq!(ended.code, Some(0), "{}", ended.err);
        ended
            .says("DORMOUSE_CPU_BUDGET_BYTES = 1610612736 [2] size")
            .complains("DORMOUSE_ALLOC_BUDGET_BYTES is now called DORMOUSE_CPU_BUDGET_BYTES");
        assert_eq!(ended.err.lines().count(), 1, "{}", ended.err);
    }
}

#[test]
fn a_budget_of_a_kind_of_device_that_is_not_in_use_is_a_warning() {
    let gpus = ("DORMOUSE_CUDA_BUDGET_BYTES", "4 GB");
    let ended = created("other-budget", &[gpus], false);
    ended
        .says("DORMOUSE_OK")
        .complains("the budget that is set is of another kind of device")
        .complains("set=\"DORMOUSE_CUDA_BUDGET_BYTES\"")
        .complains("limit=\"DORMOUSE_CPU_BUDGET_BYTES\"");
    assert_eq!(ended.err.lines().count(), 1, "{}", ended.err);
    let both = [gpus, ("DORMOUSE_CPU_BUDGET_BYTES", "4GiB")];
    created("both-budgets", &both, false).well().says("DORMOUSE_OK");
}

#[test]
fn an_empty_variable_is_not_set() {
    let environment = [
        ("DORMOUSE_OFFLOAD_WINDOW_LAYERS", ""),
        ("DORMOUSE_LOG", ""),
        ("DORMOUSE_CONFIG", ""),
        ("DORMOUSE_DUMP", ""),
        ("DORMOUSE_TEAPOT", ""),
    ];
    created("empty", &environment, true)
        .well()
        .says("DORMOUSE_OFFLOAD_WINDOW_LAYERS = 3 [4] count")
        .says("DORMOUSE_DUMP = oom [0] set");
}

#[test]
fn a_dumped_configuration_loads_again() {
    let dir = folder("reload");
    let program = test_program("sleep", &dir, Links::Library);
    run(clean(&program).arg(&dir)).well();
    let dump = dir.join("params.conf");
    created("reloaded", &[("DORMOUSE_CONFIG", dump.to_str().unwrap())], false)
        .well()
        .says("DORMOUSE_NVME_FILE_BYTES = 16777216 [1] size");
    for name in ["sleep.html", "sleep.pftrace"] {
        assert!(std::fs::metadata(dir.join(name)).unwrap().len() > 100, "{name}");
    }
}

#[test]
fn values_that_would_hang_or_never_end_are_refused_by_name() {
    let fifo = folder("refused-values").join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let fifo = fifo.to_str().unwrap();
    for (test, name, value, reason) in [
        ("config-device", "DORMOUSE_CONFIG", "/dev/zero", "no regular file"),
        ("config-fifo", "DORMOUSE_CONFIG", fifo, "no regular file"),
        ("log-fifo", "DORMOUSE_LOG_FILE", fifo, "no process reads from it"),
        ("cuda-page", "DORMOUSE_CUDA_PAGE_BYTES", "3", "a power of two"),
    ] {
        let ended = created(test, &[(name, value)], false);
        ended.well().says("DORMOUSE_ERR_CONFIG").says(name).says(reason);
    }
}

#[test]
fn an_unusable_nvme_directory_is_refused_by_name() {
    let missing = created("missing", &[("DORMOUSE_NVME_DIR", "/nowhere/at/all")], false);
    missing.well().says("DORMOUSE_ERR_IO").says("/nowhere/at/all").says("writable directory");

    let memory = created("memory", &[("DORMOUSE_NVME_DIR", "/dev/shm")], false);
    memory.well().says("DORMOUSE_ERR_TIER").says("/dev/shm").says("memory");

    let dir = folder("read-only");
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o500)).unwrap();
    let file = dir.join("a-file");
    let unwritable = if is_root() {
        // Root can write to any directory, but not below a file.
        std::fs::write(&file, "").unwrap();
        file
    } else {
        dir
    };
    let ended =
        created("unwritable", &[("DORMOUSE_NVME_DIR", unwritable.to_str().unwrap())], false);
    ended.well().says("DORMOUSE_ERR_IO").says(unwritable.to_str().unwrap());
}

fn is_root() -> bool {
    std::fs::metadata("/proc/self").is_ok_and(|about| {
        use std::os::unix::fs::MetadataExt;
        about.uid() == 0
    })
}

#[test]
fn a_file_larger_than_the_disk_fails_the_creation() {
    let dir = folder("huge");
    let environment =
        [("DORMOUSE_NVME_DIR", dir.to_str().unwrap()), ("DORMOUSE_NVME_FILE_BYTES", "8TiB")];
    let ended = created("too-large", &environment, false);
    ended
        .well()
        .says("DORMOUSE_ERR_IO")
        .says("a file of 8796093022208 bytes; accepted: at most")
        .says("DORMOUSE_NVME_FILE_BYTES = 8796093022208");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0, "no file remains");
}

/// The example, linked and under the preload library.
#[test]
fn the_example_runs_a_step() {
    let dir = folder("example");
    let program = compile(&root().join("examples/c/step.c"), &dir, Links::Library);
    let page = dir.join("step.html");
    run(clean(&program).arg(&dir).arg(&page))
        .well()
        .says("memory from dormouse_mem_alloc")
        .says("every byte came back");
    assert!(Path::new(&page).exists());
    run(clean(&program).arg(&dir).env("LD_PRELOAD", preload()))
        .well()
        .says("memory from malloc (preload)")
        .says("every byte came back");
    let nowhere = run(&mut clean(&program));
    assert_eq!(nowhere.code, Some(2), "{}", nowhere.err);
    nowhere.complains("DORMOUSE_NVME_DIR is not set");
}
