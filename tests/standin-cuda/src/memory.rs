//! Memory by `cuMemAlloc`, and what is left.

use crate::code::Code;
use crate::entry::{Out, entry};
use crate::state::driver;
use crate::{capture, context};

entry! { Context, fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
    let driver = driver()?;
    free.put(driver.memory().free_bytes())?;
    total.put(driver.total_bytes)
}}

entry! { Context, fn cuMemAlloc_v2(address: Out<usize>, bytes: usize) {
    capture::refuse_unsafe()?;
    address.check()?;
    if context::current() != Some(0) {
        return Err(Code::NOT_SUPPORTED);
    }
    let driver = driver()?;
    driver.costs.spin();
    address.put(driver.memory_mut().allocate(bytes)?)
}}

// It does not wait for the streams, which the driver's documents do not promise either: what they
// still do there is found out.
entry! { Context, fn cuMemFree_v2(address: usize) {
    capture::refuse_unsafe()?;
    let driver = driver()?;
    driver.costs.spin();
    driver.memory_mut().free(address)
}}

/// Device addresses are what `CUdeviceptr` is in C.
const _: () = assert!(size_of::<usize>() == size_of::<cudarc::driver::sys::CUdeviceptr>());
