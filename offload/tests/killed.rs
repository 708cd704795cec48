//! A process is killed while its regions go to the file: nothing is left on the disk.
//!
//! The test starts itself again, lets that sleep and wake regions, and kills it in the middle.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, unsafe_code, reason = "helpers of tests, and a fork")]

use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio, exit};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dormouse_alloc::{Allocator, Config, Request};
use dormouse_device::Device;
use dormouse_device::host::{HostConfig, HostDevice};
use dormouse_offload::{Engine, EngineConfig, NvmeConfig, Role, Tier, label};
use dormouse_storage::{IoEngine, close_in_child};
use dormouse_timeline::Timeline;

/// Where a child has its file, and how it does its I/O. Only children have them.
const DIR: &str = "DORMOUSE_TEST_DIR";
const ENGINE: &str = "DORMOUSE_TEST_ENGINE";
/// Default number of kills of each kind.
const KILLS_DEFAULT: u64 = 10;
/// Disk space of each process: so large that other users of the disk take less than half of the sum.
const FILE_BYTES: u64 = 1 << 30;
const REGIONS: usize = 6;
const REGION_BYTES: usize = 4 << 20;
/// What a child says when its regions begin to fall asleep, and when they have.
const BEGUN: u8 = b'w';
const ASLEEP: u8 = b'r';
/// Number of parts into which the time of the writes is divided.
const PARTS: u64 = 100;
/// How long the system may take to close what a killed process had open.
const PATIENCE: Duration = Duration::from_secs(20);

/// What a child does until it is killed.
fn sleep_and_wake(dir: &Path, io_engine: IoEngine, leaves_loader: bool) {
    let bytes = REGIONS * REGION_BYTES;
    let device = HostDevice::new(HostConfig::new(16 * bytes, 4 * bytes as u64)).unwrap();
    let config = Config::new(device.page_bytes(), 4 * bytes as u64);
    let timeline = Arc::new(Timeline::new(1024));
    let allocator = Allocator::new(Arc::new(device), config, Arc::clone(&timeline)).unwrap();
    let allocator = Arc::new(allocator);
    let nvme = NvmeConfig {
        dir: dir.to_owned(),
        file_bytes: FILE_BYTES,
        file_bytes_max: 0,
        io_threads: 2,
        io_engine,
        queue_depth: 4,
        write_budget_bytes: 0,
    };
    let config = EngineConfig { nvme: Some(nvme), ..EngineConfig::default() };
    let engine = Engine::new(Arc::clone(&allocator), config, timeline).unwrap();
    let ids: Vec<_> = (0..REGIONS)
        .map(|_| {
            let address = allocator.allocate(&Request::new(REGION_BYTES)).unwrap().range.start;
            // SAFETY: a live, awake block of the test's own.
            unsafe { std::ptr::write_bytes(address as *mut u8, 7, REGION_BYTES) };
            engine.adopt(address, Role::Dormant, label("killed", None)).unwrap()
        })
        .collect();
    let move_all = || {
        let outcome = engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
        assert_eq!(outcome.accepted_bytes, bytes as u64, "{outcome:?}");
        engine.wait_settled(&ids).unwrap();
    };
    if leaves_loader {
        let forked = fork_a_loader(dir);
        move_all();
        engine.wait_awake(&ids).unwrap();
        forked.join().unwrap();
    }
    let say = |what| std::io::stderr().write_all(&[what]).unwrap();
    loop {
        say(BEGUN);
        move_all();
        say(ASLEEP);
        engine.wait_awake(&ids).unwrap();
    }
}

extern "C" fn let_go() {
    close_in_child();
}

/// A child of the process's own, which outlives it, as one that loads data for a trainer. It is
/// forked while other threads are at work.
fn fork_a_loader(dir: &Path) -> JoinHandle<()> {
    let note = dir.with_extension("loader");
    // SAFETY: the handler is async-signal-safe.
    assert_eq!(unsafe { libc::pthread_atfork(None, None, Some(let_go)) }, 0);
    std::thread::spawn(move || {
        // SAFETY: the child does what a signal handler may.
        let loader = unsafe { libc::fork() };
        assert!(loader >= 0);
        if loader == 0 {
            // SAFETY: plain system calls. Readers of the parent's output must not wait for this process.
            unsafe {
                libc::close(libc::STDERR_FILENO);
                loop {
                    libc::pause();
                }
            }
        }
        fs::write(note, loader.to_string()).unwrap();
    })
}

/// Descriptors of a process that name a file in `dir`.
fn open_files(process: u32, dir: &Path) -> usize {
    let Ok(entries) = fs::read_dir(format!("/proc/{process}/fd")) else { return 0 };
    let links = entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    links.filter(|link| link.starts_with(dir)).count()
}

/// Processes that have a file in `dir` open.
fn users(dir: &Path) -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap();
    let processes = entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok());
    processes.filter(|&process| open_files(process, dir) > 0).collect()
}

fn free_bytes(dir: &Path) -> u64 {
    let path = std::ffi::CString::new(dir.to_str().unwrap()).unwrap();
    // SAFETY: plain data, for which zero is a value.
    let mut found: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: a terminated string and a writable struct, both ours.
    assert_eq!(unsafe { libc::statvfs(path.as_ptr(), &raw mut found) }, 0);
    found.f_bfree * found.f_frsize
}

/// Reads until the child says so.
fn wait_said(child: &mut Child, what: u8) {
    let mut said = [0];
    while said[0] != what {
        let count = child.stderr.as_mut().unwrap().read(&mut said).unwrap();
        assert_eq!(count, 1, "the child ended by itself");
        assert!([BEGUN, ASLEEP].contains(&said[0]), "{}", rest(child, said[0]));
    }
}

fn rest(child: &mut Child, first: u8) -> String {
    let mut text = vec![first];
    child.stderr.as_mut().unwrap().read_to_end(&mut text).unwrap();
    String::from_utf8_lossy(&text).into_owned()
}

/// Starts `test` again as a child, and kills it. True where it was writing then.
fn kill_one(test: &str, dir: &Path, number: u64) -> bool {
    let engine = if number.is_multiple_of(2) { IoEngine::Auto } else { IoEngine::Threads };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(DIR, dir)
        .env(ENGINE, engine.name())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_said(&mut child, BEGUN);
    let begun = Instant::now();
    wait_said(&mut child, ASLEEP);
    let took = begun.elapsed();
    wait_said(&mut child, BEGUN);
    // At any part of that time but the last, and the same ones in each run.
    std::thread::sleep(took * (number * 7 % PARTS) as u32 / (PARTS + PARTS / 2) as u32);
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
    let last = rest(&mut child, BEGUN);
    last.as_bytes().last() == Some(&BEGUN)
}

/// Ends what a killed process has left running; 0 where that is nothing.
fn end_loader(dir: &Path) -> u64 {
    let loader = dir.with_extension("loader");
    let Ok(text) = fs::read_to_string(&loader) else { return 0 };
    let process: i32 = text.parse().unwrap();
    // SAFETY: a process that a child of ours started and that was not waited for.
    assert_eq!(unsafe { libc::kill(process, libc::SIGKILL) }, 0, "it has not lived on");
    fs::remove_file(loader).unwrap();
    1
}

/// Kills as many as were asked for; each may leave a child of its own. Where this is such a process,
/// does what they do.
fn kill_many(test: &str, leaves_loader: bool) {
    if let Some(dir) = std::env::var_os(DIR) {
        let engine = std::env::var(ENGINE).unwrap();
        sleep_and_wake(Path::new(&dir), IoEngine::named(&engine).unwrap(), leaves_loader);
        exit(1);
    }
    let kills = std::env::var("CAMPAIGN_KILLS").ok().filter(|text| !text.is_empty());
    let kills = kills.map_or(KILLS_DEFAULT, |text| text.parse().unwrap());
    let exe = std::env::current_exe().unwrap();
    let dir = exe.with_file_name(format!("{test}-{}", std::process::id()));
    fs::create_dir(&dir).unwrap();
    let free_before = free_bytes(&dir);
    let mut writing = 0;
    for number in 0..kills {
        writing += u64::from(kill_one(test, &dir, number));
        assert_eq!(fs::read_dir(&dir).unwrap().count(), 0, "a file has a name");
        let (users, loaders) = (users(&dir), end_loader(&dir));
        assert_eq!(users, [0; 0], "they have the file open");
        assert_eq!(loaders, u64::from(leaves_loader));
    }
    assert!(writing * 2 >= kills, "only {writing} of {kills} were killed while they wrote");
    let start = Instant::now();
    // What the kernel frees behind a killed process's back may take it a moment.
    let is_back = || free_bytes(&dir) + kills * FILE_BYTES / 2 >= free_before;
    while !is_back() {
        assert!(start.elapsed() < PATIENCE, "of {free_before} bytes {} are free", free_bytes(&dir));
        std::thread::sleep(Duration::from_millis(10));
    }
    fs::remove_dir(&dir).unwrap();
    println!("{test}: {kills} killed, {writing} of them while they wrote");
}

#[test]
fn a_killed_process_leaves_nothing_on_disk() {
    kill_many("a_killed_process_leaves_nothing_on_disk", false);
}

#[test]
fn nor_does_one_whose_child_lives_on() {
    kill_many("nor_does_one_whose_child_lives_on", true);
}
