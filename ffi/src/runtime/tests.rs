//! Destruction while calls of other threads are inside, on the stand-in driver.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use super::*;
use crate::abi::memory::{dormouse_mem_alloc as mem_alloc, dormouse_mem_free as mem_free};
use crate::abi::runtime::{dormouse_runtime_create as create, dormouse_runtime_destroy as destroy};
use crate::abi::stash::{
    dormouse_stash_drop as stash_drop, dormouse_stash_get as stash_get,
    dormouse_stash_put as stash_put,
};

const PAGE_BYTES: usize = 2 << 20;
const TOTAL_BYTES: u64 = 256 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// A pointer that another thread passes on.
struct Sent<T>(*mut T);

// SAFETY: the handle of a runtime is for any thread, and the block lives until that thread has ended.
unsafe impl<T> Send for Sent<T> {}

fn gpu_runtime() -> *mut c::dormouse_runtime_t {
    let options = c::dormouse_options_t {
        size: size_of::<c::dormouse_options_t>() as u32,
        version: c::DORMOUSE_STRUCT_VERSION,
        device_kind: c::DORMOUSE_DEVICE_CUDA,
        host_budget_bytes: 16 << 20,
        ..c::dormouse_options_t::default()
    };
    let mut runtime = null_mut();
    // SAFETY: a struct with its size, and a place for the handle.
    assert_eq!(unsafe { create(&raw const options, &raw mut runtime) }, status::DORMOUSE_OK);
    runtime
}

#[test]
fn a_runtime_is_busy_while_a_stash_is_copied() {
    let standin = standin::load_with(PAGE_BYTES, TOTAL_BYTES);
    let _turn = standin.exclusive();
    let runtime = gpu_runtime();
    let mut block: *mut c_void = null_mut();
    // SAFETY: a live runtime, and a place for the address.
    let taken = unsafe { mem_alloc(runtime, PAGE_BYTES as u64, 0, null_mut(), &raw mut block) };
    assert_eq!(taken, status::DORMOUSE_OK);
    let waits = standin.calls("cuEventSynchronize");
    standin.hold_events(true);
    let sent = (Sent(runtime), Sent(block));
    let stash = std::thread::spawn(move || {
        let (Sent(runtime), Sent(block)) = { sent };
        let mut id = 0;
        // SAFETY: a live runtime, a block of that length, and a place for the id.
        let put =
            unsafe { stash_put(runtime, block, PAGE_BYTES as u64, 7, null_mut(), &raw mut id) };
        (put, id)
    });
    let since = Instant::now();
    while standin.calls("cuEventSynchronize") == waits {
        assert!(since.elapsed() < PATIENCE, "the copy is not waited for");
        std::thread::yield_now();
    }
    // SAFETY: a live runtime.
    assert_eq!(unsafe { destroy(runtime) }, status::DORMOUSE_ERR_BUSY);
    standin.hold_events(false);
    let (put, id) = stash.join().unwrap();
    assert_eq!(put, status::DORMOUSE_OK);
    // SAFETY: a live runtime with a block and a stash of that length, each given back once.
    unsafe {
        assert_eq!(destroy(runtime), status::DORMOUSE_ERR_BUSY);
        assert_eq!(stash_get(runtime, id, block, null_mut()), status::DORMOUSE_OK);
        assert_eq!(stash_drop(runtime, id), status::DORMOUSE_OK);
        assert_eq!(mem_free(runtime, block, null_mut()), status::DORMOUSE_OK);
        assert_eq!(destroy(runtime), status::DORMOUSE_OK);
        assert_eq!(destroy(runtime), status::DORMOUSE_ERR_STALE);
    }
}

#[test]
fn nothing_is_made_of_a_runtime_that_is_destroyed() {
    let standin = standin::load_with(PAGE_BYTES, TOTAL_BYTES);
    let _turn = standin.exclusive();
    let handle = gpu_runtime();
    let runtime = Runtime::get(handle).unwrap();
    let makers = [runtime.begin_making().unwrap(), runtime.begin_making().unwrap()];
    for (left, maker) in [2, 1].into_iter().zip(makers) {
        let fault = runtime.makers.close(Vec::new).unwrap_err();
        assert_eq!(fault.status, status::DORMOUSE_ERR_BUSY);
        assert!(fault.message.contains(&format!("{left} call")), "{}", fault.message);
        drop(maker);
    }
    let fault = runtime.makers.close(|| vec!["tag t".to_owned()]).unwrap_err();
    assert!(fault.message.contains("tag t; destroy them"), "{}", fault.message);
    drop(runtime.begin_making().unwrap());
    // SAFETY: a live runtime.
    assert_eq!(unsafe { destroy(handle) }, status::DORMOUSE_OK);
    assert_eq!(runtime.begin_making().unwrap_err().status, status::DORMOUSE_ERR_STALE);
}
