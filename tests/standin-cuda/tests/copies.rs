//! Copies, fills, the memory they may touch, and what happens when they touch other.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use common::*;
use standin::Live;

const BYTES: usize = 3 * GRANULE;

#[test]
fn copies_go_between_all_kinds_of_memory() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let first = bench.memory(BYTES);
    let second: usize = get(|address| cu.cuMemAlloc_v2(address, BYTES));
    let pinned: usize = get(|address| cu.cuMemHostAlloc(address, BYTES, 0));
    assert_eq!(bench.live(Live::PinnedBytes), BYTES as u64);
    assert_eq!(bench.live(Live::AllocatedBytes), BYTES as u64);
    let stream = bench.stream(NON_BLOCKING);
    let bytes = pattern(BYTES, 5);
    let mut back = vec![0_u8; BYTES];
    ok(cu.cuMemcpyHtoDAsync_v2(first.0, bytes.as_ptr() as usize, BYTES, stream));
    ok(cu.cuMemcpyDtoDAsync_v2(second, first.0, BYTES, stream));
    ok(cu.cuMemcpyDtoHAsync_v2(pinned, second, BYTES, stream));
    ok(cu.cuMemcpyAsync(back.as_mut_ptr() as usize, pinned, BYTES, stream));
    ok(cu.cuStreamSynchronize(stream));
    assert!(back == bytes);
    let device: usize = get(|address| cu.cuMemHostGetDevicePointer_v2(address, pinned, 0));
    ok(cu.cuMemsetD8Async(device, 0x5a, 16, stream));
    ok(cu.cuMemsetD32Async(second + 16, 0x0403_0201, 4, stream));
    ok(cu.cuMemcpyAsync(second, pinned, 16, stream));
    ok(cu.cuStreamSynchronize(stream));
    assert_eq!(bench.read(second, 16), [0x5a; 16]);
    assert_eq!(bench.read(second + 16, 20)[..16], [1, 2, 3, 4].repeat(4));
    assert_eq!(bench.read(second + 32, 1), bytes[32..33]);
    ok(cu.cuStreamWriteValue32_v2(stream, second + 8, 0x0807_0605, 0));
    ok(cu.cuStreamSynchronize(stream));
    assert_eq!(bench.read(second + 7, 6), [0x5a, 5, 6, 7, 8, 0x5a]);
    ok(cu.cuMemsetD8_v2(second, 0, BYTES));
    assert!(bench.read(second, BYTES).iter().all(|byte| *byte == 0));
    ok(cu.cuMemcpy(second, first.0, BYTES));
    assert!(bench.read(second, BYTES) == bytes);
    ok(cu.cuMemFreeHost(pinned));
    ok(cu.cuMemFree_v2(second));
    ok(cu.cuStreamDestroy_v2(stream));
    bench.give(first, BYTES);
}

#[test]
fn a_pageable_source_may_go_when_the_call_returns() {
    let bench = Bench::new();
    let memory = bench.memory(BYTES);
    let stream = bench.stream(NON_BLOCKING);
    let held = bench.block(stream);
    let mut source = pattern(BYTES, 8);
    ok(bench.cu.cuMemcpyAsync(memory.0, source.as_ptr() as usize, BYTES, stream));
    source.fill(0);
    drop(held);
    ok(bench.cu.cuStreamSynchronize(stream));
    assert!(bench.read(memory.0, BYTES) == pattern(BYTES, 8));
    ok(bench.cu.cuStreamDestroy_v2(stream));
    bench.give(memory, BYTES);
}

#[test]
fn a_copy_out_to_pageable_memory_is_done_when_the_call_returns() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let memory = bench.memory(BYTES);
    bench.write(memory.0, &pattern(BYTES, 4));
    let pinned: usize = get(|address| cu.cuMemHostAlloc(address, BYTES, 0));
    bench.write(pinned, &pattern(BYTES, 4));
    let stream = bench.stream(NON_BLOCKING);
    let mut own = vec![0_u8; BYTES];
    let host = own.as_mut_ptr() as usize;
    // To, from, and whether the call waits.
    let cases = [
        ("device to pageable", host, memory.0, true),
        ("pinned to pageable", host, pinned, true),
        ("pageable to pinned", pinned, host, true),
        ("pageable to device", memory.0, host, false),
        ("device to pinned", pinned, memory.0, false),
        ("pinned to device", memory.0, pinned, false),
        ("device to device", memory.0, memory.0, false),
    ];
    for (what, to, from, waits) in cases {
        let held = bench.block(stream);
        // Long enough that a call which does not wait is found out.
        let late = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(20));
            drop(held);
        });
        ok(cu.cuMemcpyAsync(to, from, BYTES, stream));
        let is_done = cu.cuStreamQuery(stream) == 0;
        late.join().unwrap();
        assert_eq!(is_done, waits, "{what}");
        ok(cu.cuStreamSynchronize(stream));
    }
    assert!(own == pattern(BYTES, 4));
    ok(cu.cuMemFreeHost(pinned));
    ok(cu.cuStreamDestroy_v2(stream));
    bench.give(memory, BYTES);
}

#[test]
fn what_no_copy_can_be_is_refused_at_once() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let memory = bench.memory(BYTES);
    let pinned: usize = get(|address| cu.cuMemHostAlloc(address, 4096, 0));
    let host = [0_u8; 64];
    let host = host.as_ptr() as usize;
    let cases = [
        ("to null", cu.cuMemcpyAsync(0, memory.0, 1, 0), INVALID_VALUE),
        ("from null", cu.cuMemcpyHtoD_v2(memory.0, 0, 1), INVALID_VALUE),
        ("to a host address as a device's", cu.cuMemcpyHtoD_v2(host, host, 1), INVALID_VALUE),
        ("from one", cu.cuMemcpyDtoH_v2(host, host, 1), INVALID_VALUE),
        ("both", cu.cuMemcpyDtoDAsync_v2(host, host, 1, 0), INVALID_VALUE),
        ("past the end of pinned memory", cu.cuMemcpy(memory.0, pinned, 4097), INVALID_VALUE),
        ("more than there can be", cu.cuMemcpy(memory.0, host, usize::MAX), INVALID_VALUE),
        ("fill host memory", cu.cuMemsetD8_v2(host, 0, 1), INVALID_VALUE),
        ("fill askew", cu.cuMemsetD32Async(memory.0 + 2, 0, 1, 0), INVALID_VALUE),
        ("write askew", cu.cuStreamWriteValue32_v2(0, memory.0 + 2, 0, 0), INVALID_VALUE),
        ("write with flags", cu.cuStreamWriteValue32_v2(0, memory.0, 0, 2), INVALID_VALUE),
        ("fill too much", cu.cuMemsetD32Async(memory.0, 0, usize::MAX, 0), INVALID_VALUE),
        ("on no stream", cu.cuMemcpyAsync(memory.0, host, 1, 0x50), INVALID_HANDLE),
        ("on a thread's stream", cu.cuMemcpyAsync(memory.0, host, 1, 2), NOT_SUPPORTED),
        ("nothing, from nowhere", cu.cuMemcpy(0, 0, 0), 0),
        ("fill nothing", cu.cuMemsetD8_v2(memory.0, 0, 0), 0),
    ];
    for (what, code, expected) in cases {
        assert_eq!(code, expected, "{what}");
    }
    ok(cu.cuMemFreeHost(pinned));
    bench.give(memory, BYTES);
}

/// Every entry point that can be called with zeroes says it.
fn assert_lost(bench: &Bench, code: i32) {
    let cu = &bench.cu;
    let calls = [
        cu.cuInit(0),
        cu.cuDeviceGetCount(null()),
        cu.cuCtxGetCurrent(null()),
        cu.cuCtxSynchronize(),
        cu.cuMemGetInfo_v2(null(), null()),
        cu.cuMemCreate(null(), 0, null(), 0),
        cu.cuMemUnmap(0, 0),
        cu.cuMemcpy(0, 0, 0),
        cu.cuStreamQuery(0),
        cu.cuStreamSynchronize(0),
        cu.cuEventQuery(0),
        cu.cuEventSynchronize(0),
        cu.cuModuleLoadData(null(), null()),
        cu.cuDevicePrimaryCtxRelease_v2(0),
    ];
    assert_eq!(calls, [code; 14]);
    ok(cu.cuDriverGetVersion(&mut 0));
    get::<usize>(|name| cu.cuGetErrorName(code, name.cast()));
}

/// Does `work` on a stream of its own and asserts that it loses the device, and when.
fn assert_loses(bench: &Bench, what: &str, work: impl FnOnce(usize) -> i32) {
    let stream = bench.stream(NON_BLOCKING);
    let (event, held) = (bench.event(), bench.block(stream));
    ok(work(stream));
    ok(bench.cu.cuEventRecord(event, stream));
    assert_eq!(bench.cu.cuStreamQuery(stream), NOT_READY, "{what}: not before it is reached");
    drop(held);
    assert_eq!(bench.cu.cuEventSynchronize(event), ILLEGAL_ADDRESS, "{what}");
    assert_lost(bench, ILLEGAL_ADDRESS);
    bench.standin.recover();
    ok(bench.cu.cuStreamSynchronize(stream));
    ok(bench.cu.cuStreamDestroy_v2(stream));
    ok(bench.cu.cuEventDestroy_v2(event));
}

#[test]
fn an_illegal_copy_loses_the_device_when_it_is_reached() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let good = bench.memory(BYTES);
    let (hole, spare) = (bench.reserve(BYTES), bench.create(GRANULE));
    bench.write(good.0, &pattern(BYTES, 2));
    let host: usize = get(|address| cu.cuMemHostAlloc(address, BYTES, 0));
    bench.write(host, &pattern(BYTES, 6));
    assert_loses(&bench, "nothing mapped at the source", |stream| {
        cu.cuMemcpyAsync(good.0, hole, GRANULE, stream)
    });
    assert_loses(&bench, "nothing mapped at the destination", |stream| {
        cu.cuMemcpyAsync(hole, good.0, GRANULE, stream)
    });
    assert_loses(&bench, "to the host from nothing", |stream| {
        cu.cuMemcpyDtoHAsync_v2(host, hole, GRANULE, stream)
    });
    assert_loses(&bench, "a fill of nothing", |stream| {
        cu.cuMemsetD8Async(hole, 1, GRANULE, stream)
    });
    ok(cu.cuMemMap(hole, GRANULE, 0, spare, 0));
    assert_loses(&bench, "mapped and not opened", |stream| {
        cu.cuMemcpyAsync(good.0, hole, GRANULE, stream)
    });
    ok(bench.set_access(hole, GRANULE, READ));
    assert_loses(&bench, "a write to what may be read", |stream| {
        cu.cuMemcpyAsync(hole, good.0, GRANULE, stream)
    });
    ok(bench.set_access(hole, GRANULE, READ_WRITE));
    assert_loses(&bench, "past the end of a mapping", |stream| {
        cu.cuMemcpyAsync(hole, good.0, 2 * GRANULE, stream)
    });
    assert_loses(&bench, "unmapped before it is reached", |stream| {
        let code = cu.cuMemsetD8Async(hole, 1, GRANULE, stream);
        ok(cu.cuMemUnmap(hole, GRANULE));
        code
    });
    assert!(bench.read(host, BYTES) == pattern(BYTES, 6), "nothing was copied");
    assert_eq!(cu.cuMemcpy(host, hole, 1), ILLEGAL_ADDRESS, "a call that waits says it itself");
    bench.standin.recover();
    ok(cu.cuMemFreeHost(host));
    assert!(bench.read(good.0, BYTES) == pattern(BYTES, 2), "nothing was copied");
    ok(cu.cuMemRelease(spare));
    ok(cu.cuMemAddressFree(hole, BYTES));
    bench.give(good, BYTES);
}

#[test]
fn a_copy_of_freed_memory_loses_the_device() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let good = bench.memory(BYTES);
    let block: usize = get(|address| cu.cuMemAlloc_v2(address, 100));
    assert_loses(&bench, "past the end of an allocation", |stream| {
        cu.cuMemsetD8Async(block, 1, 101, stream)
    });
    ok(cu.cuMemFree_v2(block));
    assert_loses(&bench, "freed", |stream| cu.cuMemcpyAsync(good.0, block, 1, stream));
    let pinned: usize = get(|address| cu.cuMemHostAlloc(address, 4096, 0));
    assert_loses(&bench, "pinned memory freed before it is reached", |stream| {
        let code = cu.cuMemcpyAsync(good.0, pinned, 4096, stream);
        ok(cu.cuMemFreeHost(pinned));
        code
    });
    let stale = bench.memory(GRANULE);
    bench.give(stale, GRANULE);
    assert_loses(&bench, "addresses given back", |stream| {
        cu.cuMemcpyAsync(stale.0, good.0, 1, stream)
    });
    bench.give(good, BYTES);
}

#[test]
fn what_was_queued_behind_a_loss_is_not_done() {
    let bench = Bench::new();
    let memory = bench.memory(GRANULE);
    let stream = bench.stream(NON_BLOCKING);
    let held = bench.block(stream);
    let (report, ran) = std::sync::mpsc::channel();
    ok(bench.cu.cuMemsetD8Async(memory.0, 1, GRANULE, stream));
    bench.call(stream, move || report.send(()).unwrap());
    bench.standin.lose(719);
    assert_lost(&bench, 719);
    drop(held);
    // The host function is dropped with its sender when the test ends; until then nothing is sent.
    assert!(ran.recv_timeout(std::time::Duration::from_millis(50)).is_err());
    bench.standin.recover();
    ok(bench.cu.cuStreamSynchronize(stream));
    assert_eq!(bench.read(memory.0, 1), [0]);
    ok(bench.cu.cuStreamDestroy_v2(stream));
    bench.give(memory, GRANULE);
}

#[test]
fn allocations_and_pinned_memory_refuse_misuse() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let mut at = 0_usize;
    let at = &raw mut at;
    let block: usize = get(|address| cu.cuMemAlloc_v2(address, 100));
    let pinned: usize = get(|address| cu.cuMemHostAlloc(address, 100, 7));
    let own = vec![0_u8; 3 << 12];
    let own = own.as_ptr() as usize;
    ok(cu.cuMemHostRegister_v2(own + 4096, 4096, 3));
    let cases = [
        ("allocate nothing", cu.cuMemAlloc_v2(at, 0), INVALID_VALUE),
        ("allocate into nowhere", cu.cuMemAlloc_v2(null(), 1), INVALID_VALUE),
        ("allocate everything", cu.cuMemAlloc_v2(at, usize::MAX), OUT_OF_MEMORY),
        ("free inside", cu.cuMemFree_v2(block + 1), INVALID_VALUE),
        ("free host memory", cu.cuMemFree_v2(pinned), INVALID_VALUE),
        ("pin nothing", cu.cuMemHostAlloc(at, 0, 0), INVALID_VALUE),
        ("pin with unknown flags", cu.cuMemHostAlloc(at, 1, 8), INVALID_VALUE),
        ("free device memory as pinned", cu.cuMemFreeHost(block), INVALID_VALUE),
        ("free what is registered", cu.cuMemFreeHost(own + 4096), INVALID_VALUE),
        ("register null", cu.cuMemHostRegister_v2(0, 1, 0), INVALID_VALUE),
        ("register nothing", cu.cuMemHostRegister_v2(own, 0, 0), INVALID_VALUE),
        ("register with unknown flags", cu.cuMemHostRegister_v2(own, 1, 16), INVALID_VALUE),
        ("register device memory", cu.cuMemHostRegister_v2(block, 1, 0), INVALID_VALUE),
        ("register what is not there", cu.cuMemHostRegister_v2(4096, 1, 0), INVALID_VALUE),
        ("register again", cu.cuMemHostRegister_v2(own + 4096, 4096, 0), ALREADY_REGISTERED),
        ("register over", cu.cuMemHostRegister_v2(own, 3 << 12, 0), ALREADY_REGISTERED),
        ("register over the end", cu.cuMemHostRegister_v2(own + 8191, 9, 0), ALREADY_REGISTERED),
        ("register read-only", cu.cuMemHostRegister_v2(own, 1, 8), NOT_SUPPORTED),
        ("unregister inside", cu.cuMemHostUnregister(own + 4097), NOT_REGISTERED),
        ("unregister what was allocated", cu.cuMemHostUnregister(pinned), INVALID_VALUE),
        ("a device's address of pageable", cu.cuMemHostGetDevicePointer_v2(at, own, 0), 1),
    ];
    for (what, code, expected) in cases {
        assert_eq!(code, expected, "{what}");
    }
    assert_eq!(bench.live(Live::PinnedBytes), 4196);
    ok(cu.cuMemHostUnregister(own + 4096));
    assert_eq!(cu.cuMemHostUnregister(own + 4096), NOT_REGISTERED, "twice");
    ok(cu.cuMemFreeHost(pinned));
    assert_eq!(cu.cuMemFreeHost(pinned), INVALID_VALUE, "twice");
    ok(cu.cuMemFree_v2(block));
    assert_eq!(cu.cuMemFree_v2(block), INVALID_VALUE, "twice");
}

#[test]
fn pointers_say_what_they_are() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let number = |attribute, address| {
        let mut value = -1_i32;
        let code = cu.cuPointerGetAttribute((&raw mut value).cast(), attribute, address);
        if code == 0 { Ok(value) } else { Err(code) }
    };
    let word = |attribute, address| {
        let mut value = usize::MAX;
        ok(cu.cuPointerGetAttribute((&raw mut value).cast(), attribute, address));
        value
    };
    const CONTEXT: i32 = 1;
    const TYPE: i32 = 2;
    const START: i32 = 11;
    const SIZE: i32 = 12;
    const MAPPED: i32 = 13;
    let memory = bench.memory(GRANULE);
    let block: usize = get(|address| cu.cuMemAlloc_v2(address, 100));
    let pinned: usize = get(|address| cu.cuMemHostAlloc(address, 100, 0));
    assert_eq!(number(TYPE, memory.0 + 5), Ok(2));
    assert_eq!(number(TYPE, block + 99), Ok(2));
    assert_eq!(number(TYPE, pinned), Ok(1));
    assert_eq!(number(TYPE, block + 100), Err(INVALID_VALUE), "past its end");
    assert_eq!(number(TYPE, &raw const bench as usize), Err(INVALID_VALUE), "pageable");
    assert_eq!((word(START, memory.0 + 5), word(SIZE, memory.0 + 5)), (memory.0, GRANULE));
    assert_eq!((word(START, block + 5), word(SIZE, block + 5)), (block, 100));
    assert_eq!((word(CONTEXT, block), word(CONTEXT, memory.0)), (bench.context, 0));
    assert_eq!(number(MAPPED, memory.0), Ok(1));
    let range = |address| {
        let (mut base, mut bytes) = (0, 0);
        let code = cu.cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, address);
        (code, base, bytes)
    };
    assert_eq!(range(block + 5), (0, block, 100));
    assert_eq!(range(memory.0 + 5), (0, memory.0, GRANULE));
    assert_eq!(range(pinned).0, NOT_FOUND);
    ok(cu.cuMemUnmap(memory.0, GRANULE));
    assert_eq!(number(MAPPED, memory.0), Ok(0));
    let (mut kind, mut ordinal) = (-1_i32, -1_i32);
    let data = [(&raw mut kind).cast(), (&raw mut ordinal).cast()];
    let attributes = [TYPE, 9];
    let all = |address| {
        ok(cu.cuPointerGetAttributes(2, attributes.as_ptr(), data.as_ptr(), address));
        // SAFETY: both are alive, and written by the call alone.
        unsafe { (data[0].cast::<i32>().read(), data[1].cast::<i32>().read()) }
    };
    assert_eq!(all(block), (2, 0));
    assert_eq!(all(pinned), (1, 0));
    assert_eq!(all(&raw const bench as usize), (0, -2), "unknown memory is no error here");
    ok(cu.cuMemFree_v2(block));
    ok(cu.cuMemFreeHost(pinned));
    ok(cu.cuMemAddressFree(memory.0, GRANULE));
    ok(cu.cuMemRelease(memory.1));
}
