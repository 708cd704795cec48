//! Streams being captured.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;

const NONE: u32 = 0;
const ACTIVE: u32 = 1;
const INVALIDATED: u32 = 2;

const UNSUPPORTED: i32 = 900;
const BROKEN: i32 = 901;
const MERGE: i32 = 902;
const UNMATCHED: i32 = 903;
const UNJOINED: i32 = 904;
const ISOLATION: i32 = 905;
const IMPLICIT: i32 = 906;
const CAPTURED_EVENT: i32 = 907;
const WRONG_THREAD: i32 = 908;

fn status(bench: &Bench, stream: usize) -> u32 {
    get(|status| bench.cu.cuStreamIsCapturing(stream, status))
}

/// Ends a capture; the code, having checked that a graph comes with success alone.
fn end(bench: &Bench, stream: usize) -> i32 {
    let mut graph = 1;
    let code = bench.cu.cuStreamEndCapture(stream, &raw mut graph);
    assert_eq!(graph != 0, code == 0, "a graph and code {code}");
    code
}

#[test]
fn captured_work_is_not_done() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let (stream, event) = (bench.stream(NON_BLOCKING), bench.event());
    let memory = bench.memory(GRANULE);
    assert_eq!(status(&bench, stream), NONE);
    ok(cu.cuStreamBeginCapture_v2(stream, GLOBAL));
    assert_eq!(status(&bench, stream), ACTIVE);
    ok(cu.cuMemsetD8Async(memory.0, 1, GRANULE, stream));
    ok(cu.cuEventRecord(event, stream));
    ok(cu.cuStreamWaitEvent(stream, event, 0));
    ok(cu.cuEventRecordWithFlags(event, stream, 1));
    let (mut state, mut id, mut graph, mut nodes, mut count) = (9, 0, 0, 9, 9);
    ok(cu.cuStreamGetCaptureInfo_v2(
        stream,
        &raw mut state,
        &raw mut id,
        &raw mut graph,
        &raw mut nodes,
        &raw mut count,
    ));
    assert_eq!((state, nodes, count), (ACTIVE, 0, 0));
    assert!(id != 0 && graph != 0);
    assert_eq!(cu.cuStreamBeginCapture_v2(stream, GLOBAL), ILLEGAL_STATE, "twice");
    assert_eq!(end(&bench, stream), 0);
    assert_eq!(status(&bench, stream), NONE);
    assert_eq!(end(&bench, stream), ILLEGAL_STATE, "twice");
    assert_eq!(bench.read(memory.0, 1), [0], "nothing was done");
    assert_eq!(cu.cuEventQuery(event), CAPTURED_EVENT);
    assert_eq!(cu.cuStreamWaitEvent(stream, event, 0), CAPTURED_EVENT);
    ok(cu.cuEventRecord(event, stream));
    ok(cu.cuEventSynchronize(event));
    assert_eq!(cu.cuStreamBeginCapture_v2(0, GLOBAL), UNSUPPORTED, "the legacy stream");
    assert_eq!(cu.cuStreamBeginCapture_v2(stream, 3), INVALID_VALUE, "an unknown mode");
    ok(cu.cuEventDestroy_v2(event));
    ok(cu.cuStreamDestroy_v2(stream));
    bench.give(memory, GRANULE);
}

#[test]
fn unsafe_calls_are_refused_and_break_the_capture() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let (stream, other, event) =
        (bench.stream(NON_BLOCKING), bench.stream(NON_BLOCKING), bench.event());
    let memory = bench.memory(GRANULE);
    let mut at = 0;
    let at = &raw mut at;
    let calls: [(&str, &dyn Fn() -> i32); 15] = [
        ("cuMemAlloc", &|| cu.cuMemAlloc_v2(at, 1)),
        ("cuMemFree", &|| cu.cuMemFree_v2(0)),
        ("cuMemHostAlloc", &|| cu.cuMemHostAlloc(at, 1, 0)),
        ("cuMemFreeHost", &|| cu.cuMemFreeHost(0)),
        ("cuMemHostRegister", &|| cu.cuMemHostRegister_v2(0, 0, 0)),
        ("cuMemHostUnregister", &|| cu.cuMemHostUnregister(0)),
        ("cuEventQuery", &|| cu.cuEventQuery(event)),
        ("cuEventSynchronize", &|| cu.cuEventSynchronize(event)),
        ("cuStreamQuery", &|| cu.cuStreamQuery(other)),
        ("cuStreamSynchronize", &|| cu.cuStreamSynchronize(other)),
        ("cuCtxSynchronize", &|| cu.cuCtxSynchronize()),
        ("cuMemcpy", &|| cu.cuMemcpy(memory.0, memory.0, 1)),
        ("cuMemsetD8", &|| cu.cuMemsetD8_v2(memory.0, 0, 1)),
        ("cuModuleLoadData", &|| cu.cuModuleLoadData(at, b"image".as_ptr())),
        ("cuModuleUnload", &|| cu.cuModuleUnload(0)),
    ];
    for (what, call) in calls {
        ok(cu.cuStreamBeginCapture_v2(stream, GLOBAL));
        assert_eq!(call(), UNSUPPORTED, "{what}");
        assert_eq!(status(&bench, stream), INVALIDATED, "{what}");
        assert_eq!(cu.cuMemsetD8Async(memory.0, 0, 1, stream), BROKEN, "{what}");
        assert_eq!(end(&bench, stream), BROKEN, "{what}");
        assert_eq!(status(&bench, stream), NONE, "{what}");
    }
    // What a capture does not mind.
    ok(cu.cuStreamBeginCapture_v2(stream, GLOBAL));
    let more = bench.memory(GRANULE);
    ok(cu.cuMemcpyAsync(more.0, memory.0, GRANULE, other));
    ok(cu.cuEventRecord(event, other));
    assert_eq!(status(&bench, stream), ACTIVE);
    assert_eq!(end(&bench, stream), 0);
    ok(cu.cuStreamSynchronize(other));
    // A look at the captured stream breaks it whatever the mode.
    ok(cu.cuStreamBeginCapture_v2(stream, RELAXED));
    assert_eq!(cu.cuStreamQuery(stream), UNSUPPORTED);
    assert_eq!(end(&bench, stream), BROKEN);
    // So does one at an event in it.
    let looks: [&dyn Fn() -> i32; 2] =
        [&|| cu.cuEventQuery(event), &|| cu.cuEventSynchronize(event)];
    for look in looks {
        ok(cu.cuStreamBeginCapture_v2(stream, RELAXED));
        ok(cu.cuEventRecord(event, stream));
        let mut mode = RELAXED;
        ok(cu.cuThreadExchangeStreamCaptureMode(&raw mut mode));
        assert_eq!(look(), CAPTURED_EVENT);
        ok(cu.cuThreadExchangeStreamCaptureMode(&raw mut mode));
        assert_eq!(end(&bench, stream), BROKEN);
    }
    bench.give(more, GRANULE);
    bench.give(memory, GRANULE);
    ok(cu.cuEventDestroy_v2(event));
    for stream in [stream, other] {
        ok(cu.cuStreamDestroy_v2(stream));
    }
}

#[test]
fn modes_say_whose_unsafe_calls_are_refused() {
    let bench = Bench::new();
    let (stream, event) = (bench.stream(NON_BLOCKING), bench.event());
    let exchange = |mode: u32| {
        let mut mode = mode;
        ok(bench.cu.cuThreadExchangeStreamCaptureMode(&raw mut mode));
        mode
    };
    // Of the capture, of the thread; whether the capturing thread and another are refused.
    let cases = [
        (GLOBAL, GLOBAL, true, true),
        (GLOBAL, THREAD_LOCAL, true, false),
        (GLOBAL, RELAXED, false, false),
        (THREAD_LOCAL, GLOBAL, true, false),
        (THREAD_LOCAL, THREAD_LOCAL, true, false),
        (THREAD_LOCAL, RELAXED, false, false),
        (RELAXED, GLOBAL, false, false),
        (RELAXED, THREAD_LOCAL, false, false),
        (RELAXED, RELAXED, false, false),
    ];
    for (capture, thread, own, others) in cases {
        let query = || {
            ok(bench.cu.cuCtxSetCurrent(bench.context));
            let before = exchange(thread);
            let code = bench.cu.cuEventQuery(event);
            assert_eq!(exchange(before), thread);
            code
        };
        let expected = |is_refused| if is_refused { UNSUPPORTED } else { 0 };
        ok(bench.cu.cuStreamBeginCapture_v2(stream, capture));
        let other = std::thread::scope(|scope| scope.spawn(query).join().unwrap());
        assert_eq!(other, expected(others), "another thread, {capture} and {thread}");
        assert_eq!(query(), expected(own), "its own thread, {capture} and {thread}");
        let outcome = if own || others { BROKEN } else { 0 };
        assert_eq!(end(&bench, stream), outcome, "{capture} and {thread}");
    }
    let mut mode = 3;
    assert_eq!(bench.cu.cuThreadExchangeStreamCaptureMode(&raw mut mode), INVALID_VALUE);
    ok(bench.cu.cuEventDestroy_v2(event));
    ok(bench.cu.cuStreamDestroy_v2(stream));
}

#[test]
fn waiting_for_captured_work_joins_the_capture() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let [origin, side, other] = [(); 3].map(|()| bench.stream(NON_BLOCKING));
    let (fork, join) = (bench.event(), bench.event());
    let memory = bench.memory(GRANULE);
    let begin_and_fork = || {
        ok(cu.cuStreamBeginCapture_v2(origin, GLOBAL));
        ok(cu.cuEventRecord(fork, origin));
        ok(cu.cuStreamWaitEvent(side, fork, 0));
        assert_eq!(status(&bench, side), ACTIVE);
        ok(cu.cuMemsetD8Async(memory.0, 1, GRANULE, side));
    };
    begin_and_fork();
    ok(cu.cuEventRecord(join, side));
    ok(cu.cuStreamWaitEvent(origin, join, 0));
    assert_eq!(end(&bench, origin), 0);
    assert_eq!(status(&bench, side), NONE);
    begin_and_fork();
    assert_eq!(end(&bench, origin), UNJOINED);
    begin_and_fork();
    ok(cu.cuEventRecord(join, side));
    ok(cu.cuStreamWaitEvent(origin, join, 0));
    ok(cu.cuMemsetD8Async(memory.0, 1, GRANULE, side));
    assert_eq!(end(&bench, origin), UNJOINED, "more work after the join");
    begin_and_fork();
    assert_eq!(end(&bench, side), UNMATCHED);
    assert_eq!(end(&bench, origin), BROKEN);
    // Work outside cannot be waited for, even if it is done.
    ok(cu.cuEventRecord(join, other));
    ok(cu.cuEventSynchronize(join));
    ok(cu.cuStreamBeginCapture_v2(origin, GLOBAL));
    assert_eq!(cu.cuStreamWaitEvent(origin, join, 0), ISOLATION);
    assert_eq!(end(&bench, origin), BROKEN);
    // Two captures do not become one.
    ok(cu.cuStreamBeginCapture_v2(origin, RELAXED));
    ok(cu.cuStreamBeginCapture_v2(other, RELAXED));
    ok(cu.cuEventRecord(fork, origin));
    assert_eq!(cu.cuStreamWaitEvent(other, fork, 0), MERGE);
    assert_eq!((end(&bench, origin), end(&bench, other)), (BROKEN, BROKEN));
    assert_eq!(bench.read(memory.0, 1), [0], "nothing was done");
    bench.give(memory, GRANULE);
    for event in [fork, join] {
        ok(cu.cuEventDestroy_v2(event));
    }
    for stream in [origin, side, other] {
        ok(cu.cuStreamDestroy_v2(stream));
    }
}

#[test]
fn the_legacy_stream_breaks_the_capture_of_a_blocking_one() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let (blocking, free, event) = (bench.stream(0), bench.stream(NON_BLOCKING), bench.event());
    ok(cu.cuStreamBeginCapture_v2(free, RELAXED));
    ok(cu.cuEventRecord(event, 0));
    assert_eq!(end(&bench, free), 0, "a stream that is not ordered with it does not mind");
    ok(cu.cuStreamBeginCapture_v2(blocking, RELAXED));
    let mut found = 0;
    assert_eq!(cu.cuStreamIsCapturing(0, &raw mut found), IMPLICIT);
    assert_eq!(status(&bench, blocking), ACTIVE, "asking breaks nothing");
    assert_eq!(cu.cuEventRecord(event, 0), IMPLICIT);
    assert_eq!(end(&bench, blocking), BROKEN);
    ok(cu.cuEventRecord(event, 0));
    ok(cu.cuEventDestroy_v2(event));
    for stream in [blocking, free] {
        ok(cu.cuStreamDestroy_v2(stream));
    }
}

#[test]
fn a_capture_ends_on_its_thread_or_with_its_stream() {
    let bench = Bench::new();
    let stream = bench.stream(NON_BLOCKING);
    let elsewhere = |mode| {
        ok(bench.cu.cuStreamBeginCapture_v2(stream, mode));
        let thread = || {
            ok(bench.cu.cuCtxSetCurrent(bench.context));
            end(&bench, stream)
        };
        std::thread::scope(|scope| scope.spawn(thread).join().unwrap())
    };
    assert_eq!(elsewhere(THREAD_LOCAL), WRONG_THREAD);
    assert_eq!(end(&bench, stream), 0);
    assert_eq!(elsewhere(RELAXED), 0);
    ok(bench.cu.cuStreamBeginCapture_v2(stream, GLOBAL));
    ok(bench.cu.cuStreamDestroy_v2(stream));
    ok(bench.cu.cuStreamSynchronize(0));
}

#[test]
fn a_graph_does_what_was_captured_whenever_it_is_launched() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let [stream, side, other] = [(); 3].map(|()| bench.stream(NON_BLOCKING));
    let (from, to, event) = (bench.memory(GRANULE), bench.memory(GRANULE), bench.event());
    ok(cu.cuStreamBeginCapture_v2(stream, GLOBAL));
    ok(cu.cuMemcpyAsync(to.0, from.0, GRANULE, stream));
    ok(cu.cuEventRecord(event, stream));
    ok(cu.cuStreamWaitEvent(side, event, 0));
    ok(cu.cuMemsetD8Async(to.0, 7, 1, side));
    ok(cu.cuEventRecord(event, side));
    ok(cu.cuStreamWaitEvent(stream, event, 0));
    let graph = get(|graph| cu.cuStreamEndCapture(stream, graph));
    assert_eq!(get(|count| cu.cuGraphGetNodes(graph, null(), count)), 2, "order is no work");
    let instance = get(|instance| cu.cuGraphInstantiateWithFlags(instance, graph, 0));
    ok(cu.cuGraphDestroy(graph));
    for seed in [1, 2] {
        let mut data = pattern(GRANULE, seed);
        bench.write(from.0, &data);
        let held = bench.block(other);
        ok(cu.cuGraphLaunch(instance, other));
        assert_ne!(bench.read(to.0, GRANULE), data, "it is behind what the stream had");
        drop(held);
        ok(cu.cuStreamSynchronize(other));
        data[0] = 7;
        assert_eq!(bench.read(to.0, GRANULE), data);
    }
    // What was launched goes on after the graph.
    bench.write(from.0, &pattern(GRANULE, 3));
    let held = bench.block(other);
    ok(cu.cuGraphLaunch(instance, other));
    ok(cu.cuGraphExecDestroy(instance));
    drop(held);
    ok(cu.cuStreamSynchronize(other));
    assert_eq!(bench.read(to.0 + 1, GRANULE - 1), pattern(GRANULE, 3)[1..]);
    let mut nothing = 0;
    for gone in [
        cu.cuGraphLaunch(instance, other),
        cu.cuGraphExecDestroy(instance),
        cu.cuGraphDestroy(graph),
        cu.cuGraphInstantiateWithFlags(&raw mut nothing, graph, 0),
        cu.cuGraphGetNodes(graph, null(), &raw mut nothing),
    ] {
        assert_eq!(gone, INVALID_VALUE);
    }
    bench.give(from, GRANULE);
    bench.give(to, GRANULE);
    ok(cu.cuEventDestroy_v2(event));
    for stream in [stream, side, other] {
        ok(cu.cuStreamDestroy_v2(stream));
    }
}
