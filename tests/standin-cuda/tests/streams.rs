//! Streams, events and host functions.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use common::*;
use standin::Live;

/// How often a thing that must not happen is looked for.
const LOOKS: usize = 2000;

/// Notes what runs, in its order.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u32>>>);

impl Log {
    fn note(&self, bench: &Bench, stream: usize, what: u32) {
        let log = Arc::clone(&self.0);
        bench.call(stream, move || log.lock().unwrap().push(what));
    }

    #[track_caller]
    fn is(&self, expected: &[u32]) {
        assert_eq!(*self.0.lock().unwrap(), expected);
    }
}

#[test]
fn streams_run_beside_each_other_and_each_in_order() {
    let bench = Bench::new();
    let (first, second) = (bench.stream(NON_BLOCKING), bench.stream(NON_BLOCKING));
    let log = Log::default();
    let held = bench.block(first);
    log.note(&bench, first, 2);
    log.note(&bench, second, 1);
    ok(bench.cu.cuStreamSynchronize(second));
    log.is(&[1]);
    for _ in 0..LOOKS {
        assert_eq!(bench.cu.cuStreamQuery(first), NOT_READY);
    }
    ok(bench.cu.cuStreamQuery(second));
    log.note(&bench, first, 3);
    drop(held);
    ok(bench.cu.cuCtxSynchronize());
    log.is(&[1, 2, 3]);
    ok(bench.cu.cuStreamQuery(first));
    assert_eq!(bench.live(Live::Streams), 2);
    ok(bench.cu.cuStreamDestroy_v2(first));
    ok(bench.cu.cuStreamDestroy_v2(second));
}

#[test]
fn an_idle_stream_is_found_idle_however_it_is_asked() {
    let bench = Bench::new();
    let stream = bench.stream(NON_BLOCKING);
    ok(bench.cu.cuStreamQuery(stream));
    let log = Log::default();
    log.note(&bench, stream, 1);
    // Each query that began the wait anew would be too early again.
    while bench.cu.cuStreamQuery(stream) == NOT_READY {}
    log.is(&[1]);
    ok(bench.cu.cuStreamDestroy_v2(stream));
}

#[test]
fn blocking_streams_are_ordered_with_the_legacy_stream() {
    for legacy in [0, 1] {
        let bench = Bench::new();
        let (blocking, other, free) =
            (bench.stream(0), bench.stream(0), bench.stream(NON_BLOCKING));
        let log = Log::default();
        let held = bench.block(blocking);
        log.note(&bench, blocking, 1);
        log.note(&bench, legacy, 2);
        log.note(&bench, other, 3);
        log.note(&bench, free, 0);
        ok(bench.cu.cuStreamSynchronize(free));
        log.is(&[0]);
        for _ in 0..LOOKS {
            assert_eq!(bench.cu.cuStreamQuery(legacy), NOT_READY);
            assert_eq!(bench.cu.cuStreamQuery(other), NOT_READY);
        }
        drop(held);
        ok(bench.cu.cuStreamSynchronize(other));
        log.is(&[0, 1, 2, 3]);
        // A synchronous copy, which is on the legacy stream, waits as well.
        let held = bench.block(other);
        log.note(&bench, other, 4);
        let waiting = std::thread::spawn(move || drop((std::thread::yield_now(), held)));
        let memory = bench.memory(GRANULE);
        assert_eq!(bench.read(memory.0, 1), [0]);
        log.is(&[0, 1, 2, 3, 4]);
        waiting.join().unwrap();
        bench.give(memory, GRANULE);
        for stream in [blocking, other, free] {
            ok(bench.cu.cuStreamDestroy_v2(stream));
        }
    }
}

#[test]
fn waiting_for_a_blocking_stream_is_not_waiting_for_the_legacy_one() {
    let bench = Bench::new();
    let blocking = bench.stream(0);
    let log = Log::default();
    log.note(&bench, blocking, 1);
    let held = bench.block(0);
    ok(bench.cu.cuStreamSynchronize(blocking));
    log.is(&[1]);
    drop(held);
    ok(bench.cu.cuStreamDestroy_v2(blocking));
}

#[test]
fn the_legacy_stream_waits_for_destroyed_streams_too() {
    let bench = Bench::new();
    let stream = bench.stream(0);
    let log = Log::default();
    let held = bench.block(stream);
    log.note(&bench, stream, 1);
    ok(bench.cu.cuStreamDestroy_v2(stream));
    assert_eq!(bench.live(Live::Streams), 0);
    log.note(&bench, 0, 2);
    assert_eq!(bench.cu.cuStreamQuery(0), NOT_READY);
    drop(held);
    ok(bench.cu.cuStreamSynchronize(0));
    log.is(&[1, 2]);
}

#[test]
fn a_destroyed_stream_finishes_its_work() {
    let bench = Bench::new();
    let (stream, event) = (bench.stream(NON_BLOCKING), bench.event());
    let log = Log::default();
    let held = bench.block(stream);
    log.note(&bench, stream, 1);
    ok(bench.cu.cuEventRecord(event, stream));
    ok(bench.cu.cuStreamDestroy_v2(stream));
    assert_eq!(bench.cu.cuEventQuery(event), NOT_READY);
    drop(held);
    ok(bench.cu.cuCtxSynchronize());
    ok(bench.cu.cuEventQuery(event));
    log.is(&[1]);
    ok(bench.cu.cuEventDestroy_v2(event));
}

#[test]
fn a_wait_keeps_the_record_it_found() {
    let bench = Bench::new();
    let [ahead, later, behind] = [(); 3].map(|()| bench.stream(NON_BLOCKING));
    let event = bench.event();
    ok(bench.cu.cuEventQuery(event));
    ok(bench.cu.cuStreamWaitEvent(behind, event, 0));
    ok(bench.cu.cuStreamSynchronize(behind));
    let log = Log::default();
    let (first, second) = (bench.block(ahead), bench.block(later));
    ok(bench.cu.cuEventRecord(event, ahead));
    ok(bench.cu.cuStreamWaitEvent(behind, event, 0));
    ok(bench.cu.cuEventRecord(event, later));
    log.note(&bench, behind, 1);
    drop(first);
    ok(bench.cu.cuStreamSynchronize(behind));
    log.is(&[1]);
    assert_eq!(bench.cu.cuEventQuery(event), NOT_READY, "it means the later record now");
    ok(bench.cu.cuStreamWaitEvent(behind, event, 0));
    ok(bench.cu.cuEventDestroy_v2(event));
    assert_eq!(bench.cu.cuStreamQuery(behind), NOT_READY, "a destroyed event is waited for");
    drop(second);
    ok(bench.cu.cuStreamSynchronize(behind));
    for stream in [ahead, later, behind] {
        ok(bench.cu.cuStreamDestroy_v2(stream));
    }
}

#[test]
fn held_events_are_late_for_all_who_wait() {
    let bench = &Bench::new();
    let (ahead, behind) = (bench.stream(NON_BLOCKING), bench.stream(NON_BLOCKING));
    let (early, late) = (bench.event(), bench.event());
    let log = Log::default();
    ok(bench.cu.cuEventRecord(early, ahead));
    bench.standin.hold_events(true);
    ok(bench.cu.cuEventRecord(late, ahead));
    ok(bench.cu.cuStreamWaitEvent(behind, late, 0));
    log.note(bench, behind, 2);
    log.note(bench, ahead, 1);
    ok(bench.cu.cuStreamSynchronize(ahead));
    ok(bench.cu.cuEventSynchronize(early));
    for _ in 0..LOOKS {
        assert_eq!(bench.cu.cuEventQuery(late), NOT_READY);
        assert_eq!(bench.cu.cuStreamQuery(behind), NOT_READY);
    }
    log.is(&[1]);
    std::thread::scope(|scope| {
        let (report, returned) = mpsc::channel();
        scope.spawn(move || {
            ok(bench.cu.cuCtxSetCurrent(bench.context));
            report.send(bench.cu.cuEventSynchronize(late)).unwrap();
        });
        let early = returned.recv_timeout(Duration::from_millis(20));
        assert!(early.is_err(), "it was not waited for: {early:?}");
        bench.standin.hold_events(false);
        ok(returned.recv().unwrap());
    });
    ok(bench.cu.cuStreamSynchronize(behind));
    log.is(&[1, 2]);
    ok(bench.cu.cuEventRecord(late, ahead));
    ok(bench.cu.cuEventSynchronize(late));
    for event in [early, late] {
        ok(bench.cu.cuEventDestroy_v2(event));
    }
    for stream in [ahead, behind] {
        ok(bench.cu.cuStreamDestroy_v2(stream));
    }
}

#[test]
fn elapsed_time_is_between_complete_timed_events() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let stream = bench.stream(NON_BLOCKING);
    let (start, end) = (bench.event(), bench.event());
    let untimed: usize = get(|event| cu.cuEventCreate(event, 2));
    let mut passed = 0_f32;
    assert_eq!(cu.cuEventElapsedTime(&raw mut passed, start, end), INVALID_HANDLE, "no record");
    ok(cu.cuEventRecord(start, stream));
    ok(cu.cuEventSynchronize(start));
    let held = bench.block(stream);
    ok(cu.cuEventRecord(end, stream));
    ok(cu.cuEventRecord(untimed, stream));
    assert_eq!(cu.cuEventElapsedTime(&raw mut passed, start, end), NOT_READY);
    std::thread::sleep(Duration::from_millis(20));
    drop(held);
    ok(cu.cuStreamSynchronize(stream));
    ok(cu.cuEventElapsedTime(&raw mut passed, start, end));
    assert!(passed >= 19.0, "{passed} ms");
    let mut same = 0_f32;
    ok(cu.cuEventElapsedTime_v2(&raw mut same, start, end));
    assert_eq!(same, passed, "under its newer name");
    let mut back = 0_f32;
    ok(cu.cuEventElapsedTime(&raw mut back, end, start));
    assert!(back <= -19.0, "{back} ms");
    assert_eq!(cu.cuEventElapsedTime(&raw mut passed, start, untimed), INVALID_HANDLE);
    for event in [start, end, untimed] {
        ok(cu.cuEventDestroy_v2(event));
    }
    ok(cu.cuStreamDestroy_v2(stream));
}

#[test]
fn a_host_function_may_not_call_the_driver() {
    let bench = Bench::new();
    let (report, found) = mpsc::channel();
    let cu = bench.cu;
    bench.call(0, move || {
        let mut count = 0;
        let codes = [
            cu.cuInit(0),
            cu.cuDeviceGetCount(&raw mut count),
            cu.cuCtxGetCurrent(null()),
            cu.cuMemGetInfo_v2(null(), null()),
            cu.cuStreamQuery(0),
            cu.cuEventQuery(0),
            cu.cuMemRelease(0),
        ];
        report.send(codes).unwrap();
    });
    assert_eq!(found.recv().unwrap(), [NOT_PERMITTED; 7]);
    ok(bench.cu.cuStreamSynchronize(0));
}

#[test]
fn handles_that_are_not_there_are_refused() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let (stream, event) = (bench.stream(NON_BLOCKING), bench.event());
    let (stale_stream, stale_event) = (bench.stream(NON_BLOCKING), bench.event());
    ok(cu.cuStreamDestroy_v2(stale_stream));
    ok(cu.cuEventDestroy_v2(stale_event));
    for bad in [stale_stream, stale_event, event, 0x50] {
        let mut status = 0;
        let codes = [
            cu.cuStreamQuery(bad),
            cu.cuStreamSynchronize(bad),
            cu.cuStreamWaitEvent(bad, event, 0),
            cu.cuStreamDestroy_v2(bad),
            cu.cuStreamGetCtx(bad, null()),
            cu.cuStreamGetPriority(bad, null()),
            cu.cuStreamGetFlags(bad, null()),
            cu.cuStreamGetId(bad, null()),
            cu.cuStreamIsCapturing(bad, &raw mut status),
            cu.cuStreamBeginCapture_v2(bad, 0),
            cu.cuEventRecord(event, bad),
            cu.cuMemsetD8Async(bad, 0, 0, bad),
            cu.cuLaunchHostFunc(bad, None, null()),
        ];
        assert_eq!(codes, [INVALID_HANDLE; 13], "{bad:x} as a stream");
    }
    for bad in [stale_stream, stale_event, stream, 0, 0x50] {
        let codes = [
            cu.cuEventQuery(bad),
            cu.cuEventSynchronize(bad),
            cu.cuEventDestroy_v2(bad),
            cu.cuEventRecord(bad, stream),
            cu.cuStreamWaitEvent(stream, bad, 0),
            cu.cuEventElapsedTime(&mut 0.0, bad, event),
        ];
        assert_eq!(codes, [INVALID_HANDLE; 6], "{bad:x} as an event");
    }
    let mut made = 0;
    let made = &raw mut made;
    let cases = [
        ("destroy the legacy stream", cu.cuStreamDestroy_v2(0), INVALID_HANDLE),
        ("a thread's own stream", cu.cuStreamQuery(2), NOT_SUPPORTED),
        ("a stream with unknown flags", cu.cuStreamCreate(made, 2), INVALID_VALUE),
        ("a stream into nowhere", cu.cuStreamCreate(null(), 0), INVALID_VALUE),
        ("an event with unknown flags", cu.cuEventCreate(made, 8), INVALID_VALUE),
        ("a shared event with timing", cu.cuEventCreate(made, 4), INVALID_VALUE),
        ("an event into nowhere", cu.cuEventCreate(null(), 0), INVALID_VALUE),
        ("no host function", cu.cuLaunchHostFunc(stream, None, null()), INVALID_VALUE),
        ("a record with flags", cu.cuEventRecordWithFlags(event, stream, 1), INVALID_VALUE),
        ("a wait with flags", cu.cuStreamWaitEvent(stream, event, 1), INVALID_VALUE),
        ("a record without", cu.cuEventRecordWithFlags(event, stream, 0), 0),
    ];
    for (what, code, expected) in cases {
        assert_eq!(code, expected, "{what}");
    }
    assert_eq!((bench.live(Live::Streams), bench.live(Live::Events)), (1, 1));
    ok(cu.cuStreamDestroy_v2(stream));
    ok(cu.cuEventDestroy_v2(event));
}

#[test]
fn streams_say_what_they_are() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let (mut least, mut greatest) = (9, 9);
    ok(cu.cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest));
    assert_eq!((least, greatest), (0, -5));
    let streams = [-3, -100, 100].map(|priority| {
        get::<usize>(|stream| cu.cuStreamCreateWithPriority(stream, NON_BLOCKING, priority))
    });
    let priorities = streams.map(|stream| get::<i32>(|p| cu.cuStreamGetPriority(stream, p)));
    assert_eq!(priorities, [-3, -5, 0]);
    let id = |stream| get::<u64>(|id| cu.cuStreamGetId(stream, id));
    assert_ne!(id(streams[0]), id(streams[1]));
    assert_eq!(id(0), id(1), "one legacy stream under two names");
    let flags =
        [streams[0], 0].map(|stream| get::<u32>(|flags| cu.cuStreamGetFlags(stream, flags)));
    assert_eq!(flags, [NON_BLOCKING, 0]);
    assert_eq!(get::<usize>(|context| cu.cuStreamGetCtx(streams[0], context)), bench.context);
    for stream in streams {
        ok(cu.cuStreamDestroy_v2(stream));
    }
}

#[test]
fn many_threads_on_many_streams() {
    const THREADS: usize = 4;
    const ROUNDS: u8 = 50;
    let bench = Bench::new();
    std::thread::scope(|scope| {
        for number in 0..THREADS {
            let bench = &bench;
            scope.spawn(move || {
                ok(bench.cu.cuCtxSetCurrent(bench.context));
                let flags = if number % 2 == 0 { NON_BLOCKING } else { 0 };
                let (stream, event) = (bench.stream(flags), bench.event());
                for round in 0..ROUNDS {
                    let memory = bench.memory(GRANULE);
                    let seed = round.wrapping_mul(7) ^ number as u8;
                    ok(bench.cu.cuMemsetD8Async(memory.0, seed, GRANULE, stream));
                    ok(bench.cu.cuEventRecord(event, stream));
                    ok(bench.cu.cuStreamWaitEvent(0, event, 0));
                    assert!(bench.read(memory.0, GRANULE).iter().all(|byte| *byte == seed));
                    bench.give(memory, GRANULE);
                }
                ok(bench.cu.cuStreamDestroy_v2(stream));
                ok(bench.cu.cuEventDestroy_v2(event));
            });
        }
    });
}
