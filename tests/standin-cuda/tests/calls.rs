//! Contexts, modules, names, faults and counts.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::ffi::{CStr, c_char};

use common::*;
use standin::Live;

#[test]
fn calls_need_a_current_context() {
    let bench = Bench::new();
    let cu = bench.cu;
    let without = std::thread::spawn(move || {
        assert_eq!(get::<usize>(|context| cu.cuCtxGetCurrent(context)), 0);
        let mut number = 0;
        let number = &raw mut number;
        [
            cu.cuCtxGetDevice(number),
            cu.cuCtxPopCurrent_v2(null()),
            cu.cuCtxSynchronize(),
            cu.cuMemGetInfo_v2(null(), null()),
            cu.cuMemAlloc_v2(null(), 1),
            cu.cuMemHostAlloc(null(), 1, 0),
            cu.cuMemCreate(null(), GRANULE, null(), 0),
            cu.cuMemUnmap(0, 0),
            cu.cuStreamCreate(null(), 0),
            cu.cuStreamSynchronize(0),
            cu.cuEventCreate(null(), 0),
            cu.cuMemcpy(0, 0, 0),
            cu.cuMemsetD8Async(0, 0, 0, 0),
            cu.cuModuleLoadData(null(), null()),
            cu.cuLaunchHostFunc(0, None, null()),
        ]
    });
    assert_eq!(without.join().unwrap(), [INVALID_CONTEXT; 15]);
    ok(cu.cuStreamSynchronize(0));
}

#[test]
fn contexts_are_a_stack_of_each_thread() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let current = || get::<usize>(|context| cu.cuCtxGetCurrent(context));
    assert_eq!(cu.cuCtxSetCurrent(0x50), INVALID_CONTEXT);
    assert_eq!(cu.cuCtxPushCurrent_v2(0x50), INVALID_CONTEXT);
    assert_eq!(cu.cuCtxPushCurrent_v2(0), INVALID_CONTEXT);
    ok(cu.cuCtxPushCurrent_v2(bench.context));
    assert_eq!(get::<usize>(|context| cu.cuCtxPopCurrent_v2(context)), bench.context);
    assert_eq!(current(), bench.context, "what was below");
    ok(cu.cuCtxPopCurrent_v2(null()));
    assert_eq!(current(), 0);
    ok(cu.cuCtxPushCurrent_v2(bench.context));
    ok(cu.cuCtxPushCurrent_v2(bench.context));
    ok(cu.cuCtxSetCurrent(0));
    assert_eq!(current(), bench.context, "no context pops the top, and there is one below");
    ok(cu.cuCtxSetCurrent(0));
    assert_eq!(current(), 0);
    ok(cu.cuCtxSetCurrent(0));
    ok(cu.cuCtxSetCurrent(bench.context));
    assert_eq!(get::<i32>(|device| cu.cuCtxGetDevice(device)), 0);
    assert_eq!(bench.live(Live::Contexts), 1);
    let state = || {
        let (mut flags, mut active) = (9, 9);
        ok(cu.cuDevicePrimaryCtxGetState(0, &raw mut flags, &raw mut active));
        active
    };
    assert_eq!(state(), 1);
    ok(cu.cuDevicePrimaryCtxRelease_v2(0));
    assert_eq!(state(), 0);
    assert_eq!(cu.cuDevicePrimaryCtxRelease_v2(0), INVALID_CONTEXT, "released twice");
    assert_eq!(get::<usize>(|context| cu.cuDevicePrimaryCtxRetain(context, 0)), bench.context);
    assert_eq!(cu.cuDevicePrimaryCtxRetain(null(), 0), INVALID_VALUE);
    assert_eq!(cu.cuDevicePrimaryCtxRetain(null(), 1), INVALID_DEVICE);
}

#[test]
fn the_device_says_what_it_is() {
    let bench = Bench::new();
    let cu = &bench.cu;
    assert_eq!(get::<i32>(|count| cu.cuDeviceGetCount(count)), 1);
    assert_eq!(get::<i32>(|device| cu.cuDeviceGet(device, 0)), 0);
    assert_eq!(cu.cuDeviceGet(&mut 0, 1), INVALID_DEVICE);
    assert_eq!(get::<usize>(|bytes| cu.cuDeviceTotalMem_v2(bytes, 0)) as u64, TOTAL);
    assert_eq!(get::<i32>(|can| cu.cuDeviceCanAccessPeer(can, 0, 0)), 0);
    assert_ne!(get::<[u8; 16]>(|uuid| cu.cuDeviceGetUuid_v2(uuid, 0)), [0; 16]);
    let name = |room: i32| {
        let mut name = [b'x' as c_char; 64];
        ok(cu.cuDeviceGetName(name.as_mut_ptr(), room, 0));
        // SAFETY: the call left a string with its zero.
        let text = unsafe { CStr::from_ptr(name.as_ptr()) };
        text.to_str().unwrap().to_owned()
    };
    assert_eq!(name(64), "dormouse stand-in");
    assert_eq!(name(9), "dormouse", "cut to the room there is");
    assert_eq!(cu.cuDeviceGetName(&mut 0, 0, 0), INVALID_VALUE);
    let attribute = |number| get::<i32>(|value| cu.cuDeviceGetAttribute(value, number, 0));
    // Compute capability, virtual memory, unified addresses, processors, RDMA of mapped memory.
    assert_eq!([75, 76, 102, 41, 16, 110].map(attribute), [9, 0, 1, 1, 132, 1]);
    assert_eq!(cu.cuDeviceGetAttribute(&mut 0, 0, 0), INVALID_VALUE);
    assert_eq!(cu.cuDeviceGetAttribute(&mut 0, 10_000, 0), INVALID_VALUE);
}

#[test]
fn codes_have_the_drivers_names() {
    let bench = Bench::new();
    let text = |code, call: unsafe fn(&Bench, i32, *mut *const c_char) -> i32| {
        let mut text = std::ptr::null();
        // SAFETY: it writes one pointer.
        let status = unsafe { call(&bench, code, &raw mut text) };
        // SAFETY: success leaves a string with its zero.
        (status == 0).then(|| unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned())
    };
    let name = |code| text(code, |bench, code, name| bench.cu.cuGetErrorName(code, name));
    let words = |code| text(code, |bench, code, words| bench.cu.cuGetErrorString(code, words));
    assert_eq!(name(0).as_deref(), Some("CUDA_SUCCESS"));
    assert_eq!(name(2).as_deref(), Some("CUDA_ERROR_OUT_OF_MEMORY"));
    assert_eq!(words(2).as_deref(), Some("out of memory"));
    assert_eq!(name(907).as_deref(), Some("CUDA_ERROR_CAPTURED_EVENT"));
    assert_eq!((name(-7), words(12_345)), (None, None));
}

#[test]
fn entry_points_are_found_by_name() {
    let bench = Bench::new();
    let find = |name: &CStr| {
        let (mut address, mut status) = (9, 9);
        let name = name.as_ptr();
        let (at, how) = (&raw mut address, &raw mut status);
        let code = bench.cu.cuGetProcAddress_v2(name, at, 12_020, 0, how);
        (code, address, status)
    };
    let address = |name: &str| bench.standin.symbol(name) as usize;
    assert_eq!(find(c"cuMemCreate"), (0, address("cuMemCreate"), 0));
    assert_eq!(find(c"cuMemAlloc"), (0, address("cuMemAlloc_v2"), 0), "its newest version");
    assert_eq!(find(c"cuMemAlloc_v2"), (0, address("cuMemAlloc_v2"), 0));
    assert_eq!(find(c"cuGetProcAddress"), (0, address("cuGetProcAddress_v2"), 0));
    assert_eq!(find(c"cuNothing"), (NOT_FOUND, 0, 1));
}

#[test]
fn kernels_are_counted_when_they_are_reached() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let module: usize = get(|module| cu.cuModuleLoadData(module, b"image".as_ptr()));
    let find = |module, name: &CStr| {
        let mut function = 0;
        let code = cu.cuModuleGetFunction(&raw mut function, module, name.as_ptr());
        (code, function)
    };
    let (code, scale) = find(module, c"scale");
    ok(code);
    assert_eq!(find(module, c"").0, NOT_FOUND);
    assert_eq!(find(0x50, c"scale").0, INVALID_HANDLE);
    assert_eq!(cu.cuModuleLoadData(&mut 0, null()), INVALID_VALUE);
    assert_eq!(get::<i32>(|value| cu.cuFuncGetAttribute(value, 0, scale)), 1024);
    let launch = |function, sides: [u32; 6], shared, stream| {
        let [a, b, c, d, e, f] = sides;
        cu.cuLaunchKernel(function, a, b, c, d, e, f, shared, stream, null(), null())
    };
    let stream = bench.stream(NON_BLOCKING);
    let before = bench.standin.launches("scale");
    let held = bench.block(stream);
    ok(launch(scale, [7, 1, 1, 256, 1, 1], 0, stream));
    ok(launch(scale, [1, 1, 1, 1, 1, 1], 0, stream));
    assert_eq!(bench.standin.launches("scale"), before, "not before it is reached");
    drop(held);
    ok(cu.cuStreamSynchronize(stream));
    assert_eq!(bench.standin.launches("scale"), before + 2);
    for side in 0..6 {
        let mut sides = [1; 6];
        sides[side] = 0;
        assert_eq!(launch(scale, sides, 0, stream), INVALID_VALUE, "side {side}");
    }
    assert_eq!(launch(scale, [1, 1, 1, 1025, 1, 1], 0, stream), INVALID_VALUE, "a large block");
    assert_eq!(launch(scale, [1, 1, 1, 32, 32, 2], 0, stream), INVALID_VALUE, "a large block");
    assert_eq!(launch(scale, [1; 6], 1 << 20, stream), INVALID_VALUE, "much shared memory");
    assert_eq!(launch(module, [1; 6], 0, stream), INVALID_HANDLE);
    ok(cu.cuModuleUnload(module));
    assert_eq!(cu.cuModuleUnload(module), INVALID_HANDLE, "twice");
    assert_eq!(launch(scale, [1; 6], 0, stream), INVALID_HANDLE, "its module is gone");
    ok(cu.cuStreamSynchronize(stream));
    assert_eq!(bench.standin.launches("scale"), before + 2);
    ok(cu.cuStreamDestroy_v2(stream));
}

#[test]
fn the_nth_call_from_now_fails() {
    let bench = Bench::new();
    let before = bench.standin.calls("cuMemCreate");
    bench.standin.fail("cuMemCreate", 2, 2, 205);
    let mut made = Vec::new();
    let codes: Vec<i32> = (0..5)
        .map(|_| {
            let mut handle = 0;
            let prop = &raw const PINNED_ON_DEVICE;
            let code = bench.cu.cuMemCreate(&raw mut handle, GRANULE, prop, 0);
            if code == 0 {
                made.push(handle);
            }
            code
        })
        .collect();
    assert_eq!(codes, [0, 205, 205, 0, 0]);
    assert_eq!(bench.live(Live::Handles), 3, "a failed call has no effect");
    assert_eq!(bench.standin.calls("cuMemCreate"), before + 5);
    bench.standin.fail("cuMemRelease", 1, u64::MAX, 999);
    assert_eq!(bench.cu.cuMemRelease(made[0]), 999);
    bench.standin.heal();
    for handle in made {
        ok(bench.cu.cuMemRelease(handle));
    }
}

#[test]
fn a_fault_that_cannot_be_is_no_fault() {
    let bench = Bench::new();
    for (entry, nth, count) in [("cuNothing", 1, 1), ("cuMemMap", 0, 1), ("cuMemMap", 1, 0)] {
        let fail = || bench.standin.fail(entry, nth, count, 1);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(fail));
        assert!(outcome.is_err(), "{entry}:{nth}:{count}");
    }
}

#[test]
fn a_loss_is_everybodys_until_recovery() {
    let bench = Bench::new();
    bench.standin.lose(214);
    assert_eq!(bench.cu.cuStreamSynchronize(0), 214);
    bench.standin.lose(700);
    assert_eq!(bench.cu.cuMemGetInfo_v2(null(), null()), 214, "the first loss stays");
    bench.standin.recover();
    ok(bench.cu.cuStreamSynchronize(0));
}
