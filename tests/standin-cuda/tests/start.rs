//! What depends on how the process started: each case is a process of its own.
//!
//! Without arguments this program runs itself once per case; with one it is the case.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::ffi::c_void;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::*;
use standin::Standin;

const GRANULARITY: &str = "STANDIN_CUDA_GRANULARITY_BYTES";
const TOTAL_BYTES: &str = "STANDIN_CUDA_TOTAL_BYTES";
const DEVICES: &str = "STANDIN_CUDA_DEVICES";
const COST_NS: &str = "STANDIN_CUDA_COST_NS";
const COSTS: &str = "STANDIN_CUDA_COSTS";
const RUN_AHEAD: &str = "STANDIN_CUDA_RUN_AHEAD";
const EXACT: &str = "STANDIN_CUDA_EXACT";
const WORK_NS: &str = "STANDIN_CUDA_WORK_NS";
const BACKED: &str = "STANDIN_CUDA_BACKED";
const FAIL: &str = "STANDIN_CUDA_FAIL";

/// 4 TiB, which no machine that runs this has.
const TOO_MUCH: &str = "4398046511104";

/// A case: its name, its environment, and what it does.
type Case = (&'static str, &'static [(&'static str, &'static str)], fn());

const CASES: &[Case] = &[
    ("nothing works before cuInit", &[], nothing_works_before_init),
    ("a forked child is refused", &[], a_forked_child_is_refused),
    ("the figures of the environment", &[(GRANULARITY, "8192"), (TOTAL_BYTES, "81920")], figures),
    ("the figures unless set", &[], defaults),
    ("a call costs what the environment says", &[(COST_NS, "3000000")], calls_cost),
    ("a table of costs", &[(COSTS, "tests/costs/all")], costs_are_charged),
    ("a host that is ahead", &[(RUN_AHEAD, "2"), (EXACT, "1")], the_host_is_ahead),
    ("a host that queries", &[(RUN_AHEAD, "1000"), (EXACT, "1")], queries_in_a_row_are_a_wait),
    ("work that a host function proves", &[(RUN_AHEAD, "2")], host_functions_prove_work),
    ("a stream that is held up", &[(RUN_AHEAD, "2")], held_work_is_not_waited_for),
    ("a GPU that a test moves on", &[(RUN_AHEAD, "1000"), (EXACT, "1")], works_end_as_told),
    ("work that takes time", &[(WORK_NS, "3000000")], work_takes_time),
    ("the peak, and the sum of all calls", &[], the_peak_and_all_calls),
    ("two devices", &[(DEVICES, "2")], two_devices),
    ("addresses that are numbers", &[(BACKED, "0"), (TOTAL_BYTES, TOO_MUCH)], numbers),
    ("faults of the environment", &[(FAIL, "cuDeviceGetCount:2:2:999,cuInit:1:1:100")], faults),
    ("a granule that is no power of two", &[(GRANULARITY, "12288")], is_refused),
    ("a granule too small", &[(GRANULARITY, "2048")], is_refused),
    ("a granule that is no number", &[(GRANULARITY, "2M")], is_refused),
    ("a cost beyond a second", &[(COST_NS, "1000000001")], is_refused),
    ("a table that is not there", &[(COSTS, "tests/costs/none")], is_refused),
    ("a table with an unknown name", &[(COSTS, "tests/costs/unknown")], is_refused),
    ("a table with a cost beyond a second", &[(COSTS, "tests/costs/too-much")], is_refused),
    ("a table with a figure too few", &[(COSTS, "tests/costs/short")], is_refused),
    ("a run-ahead that is no number", &[(RUN_AHEAD, "far")], is_refused),
    ("half exact", &[(EXACT, "2")], is_refused),
    ("work of more than a second", &[(WORK_NS, "1000000001")], is_refused),
    ("half a backing", &[(BACKED, "2")], is_refused),
    ("no device", &[(DEVICES, "0")], is_refused),
    ("no memory", &[(TOTAL_BYTES, "0")], is_refused),
    ("a fault with a part missing", &[(FAIL, "cuMemMap:1:1")], is_refused),
    ("a fault of an unknown entry point", &[(FAIL, "cuNothing:1:1:1")], is_refused),
    ("a zeroth fault", &[(FAIL, "cuMemMap:0:1:1")], is_refused),
    ("a fault that succeeds", &[(FAIL, "cuMemMap:1:1:0")], is_refused),
];

fn main() {
    if let Some(name) = std::env::args().nth(1).filter(|name| !name.starts_with('-')) {
        let (_, _, case) = CASES.iter().find(|(known, ..)| *known == name).unwrap();
        return case();
    }
    // Built once here, so that the cases need not.
    let _built = standin::load();
    let mut failed = 0;
    for (name, environment, _) in CASES {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let variables =
            [GRANULARITY, TOTAL_BYTES, COST_NS, COSTS, RUN_AHEAD, EXACT, WORK_NS, BACKED, FAIL];
        for variable in variables {
            command.env_remove(variable);
        }
        let output = command.arg(name).envs(environment.iter().copied()).output().unwrap();
        let passed = output.status.success();
        println!("start: {name}: {}", if passed { "ok" } else { "FAILED" });
        if !passed {
            failed += 1;
            println!("{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    assert_eq!(failed, 0, "cases failed");
}

/// Entry points with the figures of the environment.
fn plain() -> Entries {
    Entries::find(&standin::load())
}

fn nothing_works_before_init() {
    let cu = plain();
    let codes = [
        cu.cuDeviceGetCount(null()),
        cu.cuCtxGetCurrent(null()),
        cu.cuMemAlloc_v2(null(), 0),
        cu.cuStreamQuery(0),
        cu.cuThreadExchangeStreamCaptureMode(null()),
    ];
    assert_eq!(codes, [NOT_INITIALIZED; 5]);
    assert!(get::<i32>(|version| cu.cuDriverGetVersion(version)) >= 13_000);
    assert_eq!(standin::load().live(standin::Live::Handles), 0);
    assert_eq!(cu.cuInit(1), INVALID_VALUE);
    assert_eq!(cu.cuDeviceGetCount(null()), NOT_INITIALIZED);
    ok(cu.cuInit(0));
    ok(cu.cuInit(0));
    assert_eq!(get::<i32>(|count| cu.cuDeviceGetCount(count)), 1);
}

fn a_forked_child_is_refused() {
    let cu = plain();
    ok(cu.cuInit(0));
    // SAFETY: the child calls the driver, which refuses it without a lock, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let are_refused =
            cu.cuInit(0) == NOT_INITIALIZED && cu.cuDeviceGetCount(null()) == NOT_INITIALIZED;
        // SAFETY: the child ends, and nothing of the parent's is run.
        unsafe { libc::_exit(i32::from(!are_refused)) };
    }
    let mut status = -1;
    // SAFETY: it waits for our child, and writes one number.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child was served");
    assert_eq!(get::<i32>(|count| cu.cuDeviceGetCount(count)), 1);
}

fn check_figures(granule: usize, total: usize) {
    let cu = plain();
    ok(cu.cuInit(0));
    let prop = &raw const PINNED_ON_DEVICE;
    assert_eq!(get::<usize>(|bytes| cu.cuMemGetAllocationGranularity(bytes, prop, 0)), granule);
    assert_eq!(get::<usize>(|bytes| cu.cuDeviceTotalMem_v2(bytes, 0)), total);
}

fn figures() {
    check_figures(8192, 81_920);
}

fn defaults() {
    check_figures(2 << 20, 8 << 30);
}

/// Only a lower bound is looked at: a slow machine may make a call take any time.
fn calls_cost() {
    let cu = plain();
    ok(cu.cuInit(0));
    ok(cu.cuCtxSetCurrent(get(|context| cu.cuDevicePrimaryCtxRetain(context, 0))));
    let begin = Instant::now();
    let address = get::<usize>(|address| cu.cuMemAlloc_v2(address, 1));
    ok(cu.cuMemFree_v2(address));
    let prop = &raw const PINNED_ON_DEVICE;
    let range = get::<usize>(|range| cu.cuMemAddressReserve(range, 2 << 20, 0, 0, 0));
    let handle = get::<u64>(|handle| cu.cuMemCreate(handle, 2 << 20, prop, 0));
    ok(cu.cuMemMap(range, 2 << 20, 0, handle, 0));
    ok(cu.cuMemUnmap(range, 2 << 20));
    ok(cu.cuMemRelease(handle));
    assert!(begin.elapsed() >= Duration::from_millis(6 * 3), "a call was free");
}

/// Exact: the clock is virtual. The table's figures are distinct powers of ten.
fn costs_are_charged() {
    const GRANULE: usize = 2 << 20;
    let (cu, standin) = (plain(), standin::load());
    ok(cu.cuInit(0));
    ok(cu.cuCtxSetCurrent(get(|context| cu.cuDevicePrimaryCtxRetain(context, 0))));
    let charged = |call: &mut dyn FnMut() -> i32| {
        standin.set_clock_ns(7);
        ok(call());
        standin.clock_ns() - 7
    };
    let prop = &raw const PINNED_ON_DEVICE;
    let range = get::<usize>(|range| cu.cuMemAddressReserve(range, 3 * GRANULE, 0, 0, 0));
    let (mut small, mut large) = (0_u64, 0_u64);
    assert_eq!(charged(&mut || cu.cuMemCreate(&raw mut small, GRANULE, prop, 0)), 1 + 2 * 10);
    assert_eq!(charged(&mut || cu.cuMemCreate(&raw mut large, 2 * GRANULE, prop, 0)), 1 + 4 * 10);
    assert_eq!(charged(&mut || cu.cuMemMap(range, GRANULE, 0, small, 0)), 100);
    assert_eq!(charged(&mut || cu.cuMemMap(range + GRANULE, 2 * GRANULE, 0, large, 0)), 100);
    let description = [1, 0, 3];
    let opened = &mut || cu.cuMemSetAccess(range, 3 * GRANULE, &raw const description, 1);
    assert_eq!(charged(opened), 2 * 1_000 + 6 * 10_000, "two handles, six MiB");
    standin.set_kernels_end_ns(1_007);
    let unmapped = &mut || cu.cuMemUnmap(range, 3 * GRANULE);
    assert_eq!(charged(unmapped), 1_000 + 2 * 100_000, "after the kernels");
    assert_eq!(charged(&mut || cu.cuMemRelease(small)), 1_000_000);
    let other = std::thread::spawn(move || standin::load().clock_ns());
    assert_eq!(other.join().unwrap(), 0, "each thread has its own clock");
    let mapped = &mut || cu.cuMemMap(range, 2 * GRANULE, 0, large, 0);
    assert_eq!(charged(mapped), 100 + 10_000_000, "the first map after a release");
    ok(cu.cuMemUnmap(range, 2 * GRANULE));
    assert_eq!(charged(mapped), 100, "the second");
}

/// Works of all streams are counted: one is done when two came after it, or when it is waited for.
fn the_host_is_ahead() {
    let cu = plain();
    ok(cu.cuInit(0));
    ok(cu.cuCtxSetCurrent(get(|context| cu.cuDevicePrimaryCtxRetain(context, 0))));
    let [first, second, third] =
        [(); 3].map(|()| get::<usize>(|stream| cu.cuStreamCreate(stream, NON_BLOCKING)));
    let event = || get::<usize>(|event| cu.cuEventCreate(event, 0));
    let work = |stream| ok(cu.cuLaunchHostFunc(stream, Some(nothing), std::ptr::null_mut()));
    let (early, late) = (event(), event());
    ok(cu.cuEventRecord(early, first));
    assert_eq!([cu.cuStreamQuery(first), cu.cuEventQuery(early)], [0, 0], "nothing was given");
    work(first);
    ok(cu.cuEventRecord(early, first));
    work(second);
    ok(cu.cuEventRecord(late, second));
    assert_eq!([cu.cuStreamQuery(first), cu.cuEventQuery(early)], [NOT_READY; 2]);
    // It is behind work of the second one, and has none of its own.
    ok(cu.cuStreamWaitEvent(third, late, 0));
    work(second);
    assert_eq!([cu.cuStreamQuery(first), cu.cuEventQuery(early)], [0, 0], "two came after it");
    let behind = [cu.cuEventQuery(late), cu.cuStreamQuery(second), cu.cuStreamQuery(third)];
    assert_eq!(behind, [NOT_READY; 3]);
    ok(cu.cuEventSynchronize(late));
    let behind = [cu.cuEventQuery(late), cu.cuStreamQuery(second), cu.cuStreamQuery(third)];
    assert_eq!(behind, [0, NOT_READY, 0]);
    ok(cu.cuStreamSynchronize(second));
    ok(cu.cuStreamQuery(second));
    work(second);
    assert_eq!(cu.cuStreamQuery(second), NOT_READY);
    ok(cu.cuCtxSynchronize());
    ok(cu.cuStreamQuery(second));
}

/// An event of the legacy stream, behind one more work.
fn behind_a_work(cu: &Entries, standin: &Standin) -> usize {
    standin.give_work();
    let event = get::<usize>(|event| cu.cuEventCreate(event, 0));
    ok(cu.cuEventRecord(event, 0));
    event
}

/// 64 queries of one event, and nothing else: the host waits.
fn queries_in_a_row_are_a_wait() {
    let cu = plain();
    let standin = standin::load();
    ok(cu.cuInit(0));
    ok(cu.cuCtxSetCurrent(get(|context| cu.cuDevicePrimaryCtxRetain(context, 0))));
    let event = || behind_a_work(&cu, &standin);
    let (early, late) = (event(), event());
    let query = |event, times: u32| {
        (0..times).for_each(|_| assert_eq!(cu.cuEventQuery(event), NOT_READY));
    };
    query(early, 63);
    query(late, 63);
    query(early, 63);
    assert_eq!(cu.cuStreamQuery(0), NOT_READY);
    query(early, 63);
    standin.give_work();
    query(early, 63);
    assert_eq!(standin.ended_works(), 0);
    query(early, 1);
    assert_eq!(standin.ended_works(), 1);
    assert_eq!([cu.cuEventQuery(early), cu.cuEventQuery(late)], [0, NOT_READY]);
}

fn works_end_as_told() {
    let cu = plain();
    let standin = standin::load();
    ok(cu.cuInit(0));
    ok(cu.cuCtxSetCurrent(get(|context| cu.cuDevicePrimaryCtxRetain(context, 0))));
    let event = || behind_a_work(&cu, &standin);
    let events = [event(), event(), event()];
    let are_done = || events.map(|event| cu.cuEventQuery(event) == 0);
    assert_eq!((are_done(), standin.ended_works()), ([false; 3], 0));
    standin.end_works(1);
    assert_eq!((are_done(), standin.ended_works()), ([true, false, false], 1));
    ok(cu.cuEventSynchronize(events[1]));
    assert_eq!((are_done(), standin.ended_works()), ([true, true, false], 2));
    assert_eq!(cu.cuStreamQuery(0), NOT_READY);
    standin.end_works(3);
    ok(cu.cuStreamQuery(0));
}

extern "C" fn nothing(_: *mut c_void) {}

/// Holds its stream up until the sender is gone.
extern "C" fn wait_for(receiver: *mut c_void) {
    // SAFETY: a receiver that outlives the stream's work.
    let receiver = unsafe { &*receiver.cast::<Receiver<()>>() };
    let _ = receiver.recv();
}

extern "C" fn note_call(is_called: *mut c_void) {
    // SAFETY: a flag that outlives the stream's work.
    unsafe { &*is_called.cast::<AtomicBool>() }.store(true, Ordering::SeqCst);
}

fn host_functions_prove_work() {
    let cu = plain();
    ok(cu.cuInit(0));
    ok(cu.cuCtxSetCurrent(get(|context| cu.cuDevicePrimaryCtxRetain(context, 0))));
    let stream = get::<usize>(|stream| cu.cuStreamCreate(stream, NON_BLOCKING));
    let [before, behind] = [(); 2].map(|()| get::<usize>(|event| cu.cuEventCreate(event, 0)));
    let address = get::<usize>(|address| cu.cuMemAlloc_v2(address, 4096));
    ok(cu.cuMemsetD8Async(address, 0, 4096, stream));
    ok(cu.cuEventRecord(before, stream));
    assert_eq!(cu.cuEventQuery(before), NOT_READY);
    let is_called = AtomicBool::new(false);
    ok(cu.cuLaunchHostFunc(stream, Some(note_call), (&raw const is_called).cast_mut().cast()));
    ok(cu.cuEventRecord(behind, stream));
    while !is_called.load(Ordering::SeqCst) {
        std::thread::yield_now();
    }
    assert_eq!(cu.cuEventQuery(before), 0, "it was called behind the event");
    assert_eq!([cu.cuEventQuery(behind), cu.cuStreamQuery(stream)], [NOT_READY; 2]);
    ok(cu.cuEventSynchronize(behind));
    ok(cu.cuCtxSynchronize());
}

fn held_work_is_not_waited_for() {
    let cu = plain();
    ok(cu.cuInit(0));
    ok(cu.cuCtxSetCurrent(get(|context| cu.cuDevicePrimaryCtxRetain(context, 0))));
    let [held, other] =
        [(); 2].map(|()| get::<usize>(|stream| cu.cuStreamCreate(stream, NON_BLOCKING)));
    let event = get::<usize>(|event| cu.cuEventCreate(event, 0));
    let (go, receiver) = channel::<()>();
    ok(cu.cuLaunchHostFunc(held, Some(wait_for), (&raw const receiver).cast_mut().cast()));
    ok(cu.cuEventRecord(event, held));
    (0..2).for_each(|_| ok(cu.cuLaunchHostFunc(other, Some(nothing), std::ptr::null_mut())));
    assert_eq!([cu.cuEventQuery(event), cu.cuStreamQuery(held)], [NOT_READY; 2]);
    drop(go);
    // No call waits for the event. It completes because two works were given after it.
    while cu.cuEventQuery(event) == NOT_READY {
        std::thread::yield_now();
    }
    ok(cu.cuStreamQuery(held));
}

/// Only a lower bound is looked at.
fn work_takes_time() {
    let cu = plain();
    ok(cu.cuInit(0));
    ok(cu.cuCtxSetCurrent(get(|context| cu.cuDevicePrimaryCtxRetain(context, 0))));
    let begin = Instant::now();
    (0..4).for_each(|_| ok(cu.cuLaunchHostFunc(0, Some(nothing), std::ptr::null_mut())));
    ok(cu.cuStreamSynchronize(0));
    assert!(begin.elapsed() >= Duration::from_millis(4 * 3), "work took no time");
}

fn the_peak_and_all_calls() {
    let cu = plain();
    let standin = standin::load();
    ok(cu.cuInit(0));
    ok(cu.cuCtxSetCurrent(get(|context| cu.cuDevicePrimaryCtxRetain(context, 0))));
    let before = standin.calls_total();
    let prop = &raw const PINNED_ON_DEVICE;
    let handle = get::<u64>(|handle| cu.cuMemCreate(handle, 2 << 20, prop, 0));
    let address = get::<usize>(|address| cu.cuMemAlloc_v2(address, 4096));
    ok(cu.cuMemRelease(handle));
    let other = get::<usize>(|address| cu.cuMemAlloc_v2(address, 8192));
    ok(cu.cuMemFree_v2(address));
    ok(cu.cuMemFree_v2(other));
    assert_eq!(standin.peak_bytes(), (2 << 20) + 4096, "both at once, and never more");
    assert_eq!(standin.calls_total() - before, 6);
}

fn two_devices() {
    let cu = plain();
    ok(cu.cuInit(0));
    assert_eq!(get::<i32>(|count| cu.cuDeviceGetCount(count)), 2);
    assert_eq!(get::<i32>(|device| cu.cuDeviceGet(device, 1)), 1);
    assert_eq!(cu.cuDeviceGet(&mut 0, 2), INVALID_DEVICE);
    let uuids = [0, 1].map(|device| get::<[u8; 16]>(|uuid| cu.cuDeviceGetUuid_v2(uuid, device)));
    assert_ne!(uuids[0], uuids[1]);
    let peers = [(0, 1), (1, 0), (1, 1)];
    let can = peers.map(|(from, to)| get::<i32>(|can| cu.cuDeviceCanAccessPeer(can, from, to)));
    assert_eq!(can, [1, 1, 0]);
    // Each has a context: a thread has a stack of both.
    let contexts = [0, 1].map(|device| get::<usize>(|it| cu.cuDevicePrimaryCtxRetain(it, device)));
    let now = || {
        let context = get::<usize>(|context| cu.cuCtxGetCurrent(context));
        (context, get::<i32>(|device| cu.cuCtxGetDevice(device)))
    };
    ok(cu.cuCtxSetCurrent(contexts[0]));
    ok(cu.cuCtxPushCurrent_v2(contexts[1]));
    assert_eq!(now(), (contexts[1], 1));
    assert_eq!(cu.cuMemAlloc_v2(&mut 0, 1), NOT_SUPPORTED);
    let stream = get::<usize>(|stream| cu.cuStreamCreate(stream, NON_BLOCKING));
    assert_eq!(get::<usize>(|context| cu.cuCtxPopCurrent_v2(context)), contexts[1]);
    assert_eq!(now(), (contexts[0], 0));
    assert_eq!(get::<usize>(|context| cu.cuStreamGetCtx(stream, context)), contexts[1]);
    // Memory of the second, which each device may touch only where it was told so.
    let bytes = 2 << 20;
    let on_second = Properties { location: [1, 1], ..PINNED_ON_DEVICE };
    let range = get::<usize>(|range| cu.cuMemAddressReserve(range, bytes, 0, 0, 0));
    let handle = get::<u64>(|handle| cu.cuMemCreate(handle, bytes, &raw const on_second, 0));
    ok(cu.cuMemMap(range, bytes, 0, handle, 0));
    let access = || {
        [[1, 0], [1, 1]]
            .map(|place| get::<u64>(|it| cu.cuMemGetAccess(it, &raw const place, range)))
    };
    let allow = |device: i32, flags: u32| {
        let description: Description = [1, device, flags as i32];
        ok(cu.cuMemSetAccess(range, bytes, &raw const description, 1));
        access()
    };
    assert_eq!(allow(1, READ_WRITE), [0, 3]);
    assert_eq!(allow(0, READ_WRITE), [3, 3]);
    ok(cu.cuMemsetD8_v2(range, 1, bytes));
    assert_eq!(allow(0, 0), [0, 3]);
    assert_eq!(cu.cuMemsetD8_v2(range, 1, bytes), ILLEGAL_ADDRESS, "the first may not");
}

fn numbers() {
    let cu = plain();
    let bytes: usize = TOO_MUCH.parse().unwrap();
    ok(cu.cuInit(0));
    ok(cu.cuCtxSetCurrent(get(|context| cu.cuDevicePrimaryCtxRetain(context, 0))));
    let prop = &raw const PINNED_ON_DEVICE;
    let range = get::<usize>(|range| cu.cuMemAddressReserve(range, bytes, 0, 0, 0));
    let handle = get::<u64>(|handle| cu.cuMemCreate(handle, bytes, prop, 0));
    ok(cu.cuMemMap(range, bytes, 0, handle, 0));
    assert_eq!(cu.cuMemAlloc_v2(&mut 0, 1), OUT_OF_MEMORY, "it counts");
    ok(cu.cuMemUnmap(range, bytes));
    ok(cu.cuMemRelease(handle));
    let address = get::<usize>(|address| cu.cuMemAlloc_v2(address, bytes));
    assert_eq!(cu.cuMemsetD8_v2(address, 1, 1), ILLEGAL_ADDRESS, "nothing is there");
}

fn faults() {
    let cu = plain();
    assert_eq!(cu.cuInit(0), 100);
    ok(cu.cuInit(0));
    let mut count = 0;
    let codes = [(); 4].map(|()| cu.cuDeviceGetCount(&raw mut count));
    assert_eq!(codes, [0, 999, 999, 0]);
}

fn is_refused() {
    let cu = plain();
    assert_eq!(cu.cuInit(0), INVALID_VALUE);
    assert_eq!(cu.cuInit(0), INVALID_VALUE, "as often as it is asked");
    assert_eq!(cu.cuDeviceGetCount(null()), NOT_INITIALIZED);
}
