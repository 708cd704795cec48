//! The devices' primary contexts, the only ones there are.

use std::cell::Cell;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::capture;
use crate::code::Code;
use crate::device_info::{DEVICES_MAX, check_device};
use crate::entry::{Out, entry};
use crate::state::driver;
use crate::streams;

/// The handle of the first device's context. Never dereferenced.
const CONTEXT: usize = 0xc0de_c0de_0000;
/// Bits of a thread's stack of contexts for each entry.
const ENTRY_BITS: u32 = 4;
/// What streams may ask for: a lower number goes first.
pub(crate) const LEAST_PRIORITY: c_int = 0;
/// The other end of it.
pub(crate) const GREATEST_PRIORITY: c_int = -5;

thread_local! {
    /// This thread's stack of contexts, the current one in the lowest bits: its device plus 1. Deeper ones than
    /// fit are forgotten. No destructor, so that it costs nothing at exit.
    static STACK: Cell<u128> = const { Cell::new(0) };
}

/// Retains that were not released, of each device. Relaxed: they guard no other memory.
static RETAINED: [AtomicU64; DEVICES_MAX] = [const { AtomicU64::new(0) }; DEVICES_MAX];

/// The device of this thread's current context.
pub(crate) fn current() -> Option<usize> {
    let lowest = STACK.get() & ((1 << ENTRY_BITS) - 1);
    (lowest as usize).checked_sub(1)
}

/// Retains that were not released.
pub(crate) fn retained() -> u64 {
    RETAINED.iter().map(|retained| retained.load(Ordering::Relaxed)).sum()
}

/// The handle of a device's context.
pub(crate) fn handle(device: usize) -> usize {
    CONTEXT + device
}

/// The device of a context, which stays usable after the last release: only a handle never given is refused.
fn check_context(context: usize) -> Result<usize, Code> {
    let device = (0..driver()?.devices).find(|device| handle(*device) == context);
    device.ok_or(Code::INVALID_CONTEXT)
}

fn push(device: usize) {
    STACK.set(STACK.get() << ENTRY_BITS | (device as u128 + 1));
}

fn pop() {
    STACK.set(STACK.get() >> ENTRY_BITS);
}

entry! { Init, fn cuDevicePrimaryCtxRetain(context: Out<usize>, device: c_int) {
    let device = check_device(device)?;
    context.put(handle(device))?;
    RETAINED[device].fetch_add(1, Ordering::Relaxed);
    Ok(())
}}

entry! { Init, fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
    let device = check_device(device)?;
    let release = |count: u64| count.checked_sub(1);
    RETAINED[device]
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, release)
        .map(|_| ())
        .map_err(|_| Code::INVALID_CONTEXT)
}}

entry! { Init, fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: Out<c_uint>,
    active: Out<c_int>,
) {
    let device = check_device(device)?;
    flags.put(0)?;
    active.put(c_int::from(RETAINED[device].load(Ordering::Relaxed) > 0))
}}

entry! { Init, fn cuCtxGetCurrent(context: Out<usize>) {
    context.put(current().map_or(0, handle))
}}

entry! { Init, fn cuCtxSetCurrent(context: usize) {
    if context == 0 {
        pop();
        return Ok(());
    }
    let device = check_context(context)?;
    pop();
    push(device);
    Ok(())
}}

entry! { Init, fn cuCtxPushCurrent_v2(context: usize) {
    push(check_context(context)?);
    Ok(())
}}

entry! { Context, fn cuCtxPopCurrent_v2(context: Out<usize>) {
    let popped = current().map_or(0, handle);
    pop();
    context.put_if_asked(popped);
    Ok(())
}}

entry! { Context, fn cuCtxGetDevice(device: Out<c_int>) {
    device.put(current().map_or(0, |device| device as c_int))
}}

entry! { Context, fn cuCtxSynchronize() {
    capture::refuse_unsafe()?;
    streams::synchronize_all(driver()?)
}}

entry! { Context, fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
    least.put_if_asked(LEAST_PRIORITY);
    greatest.put_if_asked(GREATEST_PRIORITY);
    Ok(())
}}
