//! The door for tests: what no driver has. It answers before `cuInit` and after a loss.

use std::ffi::{CStr, c_char, c_int};

use crate::code::Code;
use crate::space::Access;
use crate::{capture, context, cost, faults, hold, modules, runs, state};

/// The string at `text`, or none that names anything.
///
/// # Safety
/// `text` is null or a string with its zero.
unsafe fn name<'a>(text: *const c_char) -> &'a str {
    if text.is_null() {
        return "";
    }
    // SAFETY: the caller's.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap_or_default()
}

/// Makes the `nth` call of `entry` from now (1 is the next) and the `count - 1` after it return
/// `code`, with no effect. 0, or -1 for an unknown entry point or a zero among the numbers.
///
/// # Safety
/// `entry` is null or a string with its zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_fail(
    entry: *const c_char,
    nth: u64,
    count: u64,
    code: c_int,
) -> c_int {
    // SAFETY: the caller's.
    let entry = unsafe { name(entry) };
    if faults::fail(entry, nth, count, code) { 0 } else { -1 }
}

/// Takes every fault back.
#[unsafe(no_mangle)]
pub extern "C" fn standin_heal() {
    faults::heal();
}

/// How often `entry` was called, refused calls as well; `UINT64_MAX` for an unknown one.
///
/// # Safety
/// `entry` is null or a string with its zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_calls(entry: *const c_char) -> u64 {
    // SAFETY: the caller's.
    faults::calls(unsafe { name(entry) }).unwrap_or(u64::MAX)
}

/// How many calls of all entry points there were, refused calls as well.
#[unsafe(no_mangle)]
pub extern "C" fn standin_calls_total() -> u64 {
    faults::calls_total()
}

/// How many launches of `kernel` a stream has reached.
///
/// # Safety
/// `kernel` is null or a string with its zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_launches(kernel: *const c_char) -> u64 {
    // SAFETY: the caller's.
    modules::launches(unsafe { name(kernel) })
}

/// 1 if a device may write at an address now, else 0.
#[unsafe(no_mangle)]
pub extern "C" fn standin_is_accessible(device: usize, address: usize) -> c_int {
    let may_write = |driver: &state::Driver| {
        driver.memory().is_accessible(device, address, 1, Access::ReadWrite)
    };
    c_int::from(state::driver().is_ok_and(may_write))
}

/// Not zero: events recorded from now on complete only after the hold. Zero: the hold ends.
#[unsafe(no_mangle)]
pub extern "C" fn standin_hold_events(hold: c_int) {
    if hold == 0 { hold::end() } else { hold::begin() }
}

/// A capture of `stream` begins at its next `cuEventRecord`, in the relaxed mode. 0 takes that back.
#[unsafe(no_mangle)]
pub extern "C" fn standin_capture_at_record(stream: usize) {
    capture::begin_at_record(stream);
}

/// What one `cuMemUnmap` does with several mappings side by side from now on: 0 unmaps them all, 1 is
/// refused, 2 unmaps the first alone and does not say so. 0, or -1 for another number.
#[unsafe(no_mangle)]
pub extern "C" fn standin_unmap_runs(way: c_int) -> c_int {
    if runs::set(way) { 0 } else { -1 }
}

/// The virtual time of this thread, in ns: calls with a cost in the table advance it.
#[unsafe(no_mangle)]
pub extern "C" fn standin_clock_ns() -> u64 {
    cost::clock_ns()
}

/// Sets the virtual time of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn standin_set_clock_ns(ns: u64) {
    cost::set_clock_ns(ns);
}

/// Says until which virtual time kernels run, for tables in which unmapping waits for them.
#[unsafe(no_mangle)]
pub extern "C" fn standin_set_kernels_end_ns(ns: u64) {
    cost::set_kernels_end_ns(ns);
}

/// Gives the device one more work, on no stream. The legacy stream ends with the last work.
#[unsafe(no_mangle)]
pub extern "C" fn standin_give_work() {
    if let Ok(driver) = state::driver() {
        driver.ahead.give();
    }
}

/// With a run-ahead: works up to this number are done.
#[unsafe(no_mangle)]
pub extern "C" fn standin_end_works(work: u64) {
    if let Ok(driver) = state::driver() {
        driver.ahead.wait(work);
    }
}

/// With a run-ahead: the last work that somebody waited for, or that `standin_end_works` named.
#[unsafe(no_mangle)]
pub extern "C" fn standin_ended_works() -> u64 {
    state::driver().map_or(0, |driver| driver.ahead.waited())
}

/// Loses the device: every entry point returns `code` from now on.
#[unsafe(no_mangle)]
pub extern "C" fn standin_lose(code: c_int) {
    state::lose(Code(code));
}

/// Takes a loss back. What was queued meanwhile was not done.
#[unsafe(no_mangle)]
pub extern "C" fn standin_recover() {
    state::recover();
}

/// How much there is now of `handles`, `handle_bytes`, `mappings`, `reservations`, `streams`,
/// `events`, `pinned_bytes`, `allocated_bytes` or `contexts` (retains), or the most bytes of device
/// memory that were ever in use at once, `peak_bytes`; `UINT64_MAX` for another.
///
/// # Safety
/// `what` is null or a string with its zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_live(what: *const c_char) -> u64 {
    // SAFETY: the caller's.
    let what = unsafe { name(what) };
    let Ok(driver) = state::driver() else { return 0 };
    let memory = driver.memory();
    let count = match what {
        "handles" => memory.handles.len(),
        "handle_bytes" => memory.handles.values().map(|handle| handle.bytes).sum(),
        "mappings" => memory.mappings.len(),
        "reservations" => memory.reservations.len(),
        "streams" => driver.streams.count(),
        "events" => state::lock(&driver.events).len(),
        "pinned_bytes" => memory.pinned.values().map(|pinned| pinned.bytes).sum(),
        "allocated_bytes" => memory.allocations.values().sum(),
        "peak_bytes" => memory.peak_bytes(),
        "contexts" => return context::retained(),
        _ => return u64::MAX,
    };
    count as u64
}
