//! The device's primary context, the only one there is.

use std::cell::Cell;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::capture;
use crate::code::Code;
use crate::device_info::check_device;
use crate::entry::{Out, entry};
use crate::state::driver;
use crate::streams;

/// The context's handle. Never dereferenced.
pub(crate) const CONTEXT: usize = 0xc0de_c0de_0000;
/// What streams may ask for: a lower number goes first.
pub(crate) const LEAST_PRIORITY: c_int = 0;
/// The other end of it.
pub(crate) const GREATEST_PRIORITY: c_int = -5;

thread_local! {
    /// How deep this thread's stack of contexts is: with one context, that says it all.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Retains that were not released. Relaxed: it guards no other memory.
static RETAINED: AtomicU64 = AtomicU64::new(0);

/// Whether this thread has a current context.
pub(crate) fn is_current() -> bool {
    DEPTH.get() > 0
}

/// Retains that were not released.
pub(crate) fn retained() -> u64 {
    RETAINED.load(Ordering::Relaxed)
}

/// The context stays usable after the last release, so that only a handle never given is refused.
fn check_context(context: usize) -> Result<(), Code> {
    if context == CONTEXT { Ok(()) } else { Err(Code::INVALID_CONTEXT) }
}

entry! { Init, fn cuDevicePrimaryCtxRetain(context: Out<usize>, device: c_int) {
    check_device(device)?;
    context.put(CONTEXT)?;
    RETAINED.fetch_add(1, Ordering::Relaxed);
    Ok(())
}}

entry! { Init, fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
    check_device(device)?;
    let release = |count: u64| count.checked_sub(1);
    RETAINED
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, release)
        .map(|_| ())
        .map_err(|_| Code::INVALID_CONTEXT)
}}

entry! { Init, fn cuDevicePrimaryCtxGetState(
    device: c_int,
    flags: Out<c_uint>,
    active: Out<c_int>,
) {
    check_device(device)?;
    flags.put(0)?;
    active.put(c_int::from(retained() > 0))
}}

entry! { Init, fn cuCtxGetCurrent(context: Out<usize>) {
    context.put(if is_current() { CONTEXT } else { 0 })
}}

entry! { Init, fn cuCtxSetCurrent(context: usize) {
    if context == 0 {
        DEPTH.set(DEPTH.get().saturating_sub(1));
        return Ok(());
    }
    check_context(context)?;
    DEPTH.set(DEPTH.get().max(1));
    Ok(())
}}

entry! { Init, fn cuCtxPushCurrent_v2(context: usize) {
    check_context(context)?;
    DEPTH.set(DEPTH.get().saturating_add(1));
    Ok(())
}}

entry! { Context, fn cuCtxPopCurrent_v2(context: Out<usize>) {
    DEPTH.set(DEPTH.get().saturating_sub(1));
    context.put_if_asked(CONTEXT);
    Ok(())
}}

entry! { Context, fn cuCtxGetDevice(device: Out<c_int>) {
    device.put(0)
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
