//! Programs that are not linked to the library, under the preload library.

use std::path::Path;
use std::process::Command;

use crate::common::{Links, clean, folder, preload, run, test_program};

/// Returns a system program under the preload library, which serves requests from one page on.
fn under(program: &str) -> Command {
    let mut command = clean(Path::new(program));
    command.env("LD_PRELOAD", preload()).env("DORMOUSE_HEAP_MIN_BYTES", "4KiB");
    command
}

#[test]
fn the_malloc_family_passes_a_stress_test() {
    let program = test_program("torture", &folder("torture"), Links::Nothing);
    run(&mut clean(&program)).well().says("all checks passed");
    for least in ["4KiB", "64KiB"] {
        let mut command = clean(&program);
        command.env("LD_PRELOAD", preload()).env("DORMOUSE_HEAP_MIN_BYTES", least);
        let ended = run(&mut command);
        // Standard error has the reports of the sizes that are refused.
        assert_eq!(ended.code, Some(0), "{}\n{}", ended.out, ended.err);
        ended.says("all checks passed");
    }
}

#[test]
fn system_programs_run() {
    run(under("/bin/ls").arg("/")).well().says("etc");
    run(under("/bin/sh").args(["-c", "seq 200000 | sort -rn | head -1"])).well().says("200000");
    run(under("/bin/sh").args(["-c", "x=$(echo sub | cat); (echo $x shell)"]))
        .well()
        .says("sub shell");
}

#[test]
fn python_runs_with_threads_and_processes() {
    let script = "\
import subprocess, threading, os, zlib
big = [bytearray(1 << 20) for _ in range(20)]
assert all(not any(b[:100]) for b in big)
def work():
    for n in range(50):
        data = bytes(300000)
        assert zlib.decompress(zlib.compress(data, 1)) == data
threads = [threading.Thread(target=work) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
print(subprocess.run(['/bin/echo', 'child'], capture_output=True, text=True).stdout.strip())
pid = os.fork()
if pid == 0:
    grown = bytearray(big[0]) + bytes(1 << 21)
    del big
    os._exit(0 if len(grown) == 3 << 20 else 1)
print('fork', os.waitpid(pid, 0)[1])
";
    run(under("/usr/bin/python3").args(["-c", script])).well().says("child").says("fork 0");
}

#[test]
fn a_process_has_one_instance_of_the_library() {
    // ctypes finds the instance that the preload library loaded.
    let script = format!(
        "import ctypes\n\
         lib = ctypes.CDLL({:?})\n\
         own = ctypes.CDLL(None)\n\
         a = ctypes.cast(lib.dormouse_get_version, ctypes.c_void_p).value\n\
         b = ctypes.cast(own.dormouse_get_version, ctypes.c_void_p).value\n\
         assert a == b, (a, b)\n\
         print('one', lib.dormouse_get_version())\n",
        crate::common::libraries().join("libdormouse.so")
    );
    run(under("/usr/bin/python3").args(["-c", &script])).well().says("one");
}

#[test]
fn a_program_runs_without_the_library_and_says_so_once() {
    let alone = folder("preload-alone").join("libdormouse_preload.so");
    std::fs::copy(preload(), &alone).unwrap();
    let program = test_program("torture", &folder("torture-alone"), Links::Nothing);
    // The path in which cargo lets tests find libraries.
    let mut command = clean(&program);
    let ended = run(command.env("LD_PRELOAD", &alone).env_remove("LD_LIBRARY_PATH"));
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.out, ended.err);
    ended.says("all checks passed").complains("libdormouse.so was not found");
    assert_eq!(ended.err.lines().count(), 1, "{}", ended.err);
}

#[test]
fn libc_serves_a_process_whose_range_cannot_be_reserved() {
    let program = test_program("torture", &folder("torture-limit"), Links::Nothing);
    let shell = format!("ulimit -v 4000000; exec {}", program.display());
    let mut command = clean(Path::new("/bin/sh"));
    command.args(["-c", &shell]).env("LD_PRELOAD", preload());
    let ended = run(&mut command);
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.out, ended.err);
    ended.says("all checks passed").complains("this process uses libc's malloc");
    assert_eq!(ended.err.lines().count(), 1, "{}", ended.err);
}

/// Processes that fork early. A hang is a matter of chance: before the mend, 18 of 20 hung.
const EARLY_PROCESSES: usize = 20;

#[test]
fn children_forked_at_any_time_can_use_memory() {
    let program = test_program("fork_early", &folder("fork-early"), Links::Nothing);
    run(&mut clean(&program)).well().says("all checks passed");
    for _ in 0..EARLY_PROCESSES {
        let mut command = clean(&program);
        run(command.env("LD_PRELOAD", preload())).well().says("all checks passed");
    }
}

#[test]
fn a_forked_child_resizes_all_of_a_block() {
    let program = test_program("forked_realloc", &folder("forked-realloc"), Links::Nothing);
    for arguments in [&[][..], &["refused"]] {
        let mut command = clean(&program);
        run(command.args(arguments).env("LD_PRELOAD", preload())).well().says("all checks passed");
    }
}

#[test]
fn a_fork_leaves_free_memory_behind() {
    let program = test_program("fork_cached", &folder("fork-cached"), Links::Nothing);
    run(clean(&program).env("LD_PRELOAD", preload())).well().says("all checks passed");
}

/// Kind of limit, when it is set, and the limits in MiB: first, last, step. For `maps`, mappings.
const LIMITS: [(&str, &str, [u32; 3]); 8] = [
    ("as", "fresh", [0, 8, 1]),
    ("as", "used", [0, 132, 12]),
    ("as", "exec", [20, 60, 10]),
    ("data", "fresh", [0, 44, 2]),
    ("data", "used", [0, 12, 1]),
    ("data", "exec", [4, 61, 3]),
    ("maps", "fresh", [0, 40, 4]),
    ("maps", "used", [0, 40, 4]),
];

#[test]
fn a_memory_limit_causes_null_and_no_signal() {
    let program = test_program("limits", &folder("limits"), Links::Nothing);
    for (kind, when, limits) in LIMITS {
        let mut command = clean(&program);
        command.args([kind, when]).args(limits.map(|limit| limit.to_string()));
        command.env("LD_PRELOAD", preload()).env("DORMOUSE_HEAP_MIN_BYTES", "4KiB");
        let ended = run(&mut command);
        // Standard error has the reports of requests that are refused.
        assert_eq!(ended.code, Some(0), "{kind} {when}\n{}\n{}", ended.out, ended.err);
        ended.says("all checks passed");
    }
}

/// Cases of `later_limit.c`.
const LATER_LIMITS: [&str; 11] = [
    "setrlimit",
    "setrlimit64",
    "prlimit",
    "prlimit64",
    "twice",
    "hard",
    "threads",
    "child",
    "busy",
    "borrowed",
    "wrong",
];

#[test]
fn a_later_limit_of_address_space_leaves_the_room_of_libc() {
    let program = test_program("later_limit", &folder("later-limit"), Links::Nothing);
    for case in LATER_LIMITS {
        run(clean(&program).args([case, "0"])).well().says("all checks passed");
        let mut command = clean(&program);
        run(command.args([case, "1"]).env("LD_PRELOAD", preload()))
            .well()
            .says("all checks passed");
    }
    // Smaller blocks of the heap, and a budget of the user's, which limits memory and not addresses.
    for (name, value) in
        [("DORMOUSE_HEAP_MIN_BYTES", "4KiB"), ("DORMOUSE_CPU_BUDGET_BYTES", "16GiB")]
    {
        for case in ["setrlimit", "threads", "busy"] {
            let mut command = clean(&program);
            command.args([case, "1"]).env("LD_PRELOAD", preload()).env(name, value);
            run(&mut command).well().says("all checks passed");
        }
    }
}

#[test]
fn python_and_shells_limit_their_address_space() {
    let script = "\
import os, resource, threading
kept = bytearray(8 << 20)
limit = 1 << 30, resource.getrlimit(resource.RLIMIT_AS)[1]
def use():
    resource.setrlimit(resource.RLIMIT_AS, limit)
    blocks = [bytearray(1 << 20) for _ in range(200)]
    small = [object() for _ in range(1000000)]
    thread = threading.Thread(target=bytearray, args=(100 << 20,))
    thread.start(); thread.join()
    try:
        bytearray(1 << 30)
    except MemoryError:
        return not any(kept)
pid = os.fork()
if pid == 0:
    os._exit(0 if use() else 1)
print('child', os.waitpid(pid, 0)[1], 'parent', use())
";
    run(under("/usr/bin/python3").args(["-c", script])).well().says("child 0 parent True");
    // The shell forks after it has limited itself.
    let script =
        "x=$(head -c 1000000 /dev/zero | tr '\\0' x); ulimit -S -v 1000000; (y=$x$x; echo ${#y})";
    run(under("/bin/sh").args(["-c", script])).well().says("2000000");
}

#[test]
fn the_first_large_request_opens_no_file() {
    let program = test_program("sandboxed", &folder("sandboxed"), Links::Nothing);
    let mut command = clean(&program);
    run(command.arg("plain").env("LD_PRELOAD", preload())).well().says("all checks passed");
    let mut command = clean(&program);
    command.env("LD_PRELOAD", preload()).env("DORMOUSE_HEAP_MIN_BYTES", "4KiB");
    run(&mut command).well().says("all checks passed");
}
