//! A limit of address space that the program sets while the heap exists (decision 0043).
#![allow(unreachable_pub, reason = "a symbol of the library, called by the preload shim")]

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use super::registry::SPAN;
use super::symbols::{errno, guarded, set_errno};
use super::{Heap, copying};
use crate::device::Any;
use crate::fork;

/// Called before the process sets `limit`, a `struct rlimit`, for `RLIMIT_AS`. If the limit falls, the addresses behind
/// the last block return to the system. Waits for requests of other threads that trim or map; never in a forked child.
/// Keeps `errno`.
///
/// # Safety
/// Any pointer is accepted: the kernel checks it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_heap_limit(limit: *const c_void) {
    let errno = errno();
    guarded((), || {
        // A limit between `vfork` and `exec` is not the parent's, whose memory this process uses.
        if let Some(heap) = Heap::get()
            && !fork::borrows_memory()
            && read(limit).is_some_and(|limit| falls(&limit))
        {
            heap.shrink();
        }
    });
    set_errno(errno);
}

/// Returns the limit at `place`; `None` if it cannot be read.
fn read(place: *const c_void) -> Option<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let bytes = size_of_val(&limit);
    // SAFETY: `limit` has that many bytes, and the kernel checks the other side.
    let copied = unsafe { copying::copy_readable((&raw mut limit).cast(), place, bytes) };
    (copied == bytes).then_some(limit)
}

/// Whether the kernel would accept `limit`, as far as its values tell, and then enforce less than now.
fn falls(limit: &libc::rlimit) -> bool {
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writable, and read only after the call has succeeded.
    let is_known = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut now) } == 0;
    is_known && limit.rlim_cur <= limit.rlim_max && limit.rlim_cur < now.rlim_cur
}

impl Heap {
    /// Returns the addresses behind the last block to the system. In a forked child, those behind the last page of
    /// the parent's, without a lock.
    fn shrink(&self) {
        let Any::Host(device) = &**self.allocator.device() else { return };
        if fork::in_child() {
            let end = device.used_end();
            lower(end);
            // SAFETY: no page lies there, the bounds were lowered, and a child maps none (`crate::fork`).
            unsafe { device.shrink_in_child(end) };
            return;
        }
        self.trim(0);
        let end = self.allocator.cut_addresses();
        lower(end);
        // SAFETY: no segment of the allocator, the only user of the device's addresses, lies there or will; the
        // bounds were lowered.
        unsafe { device.shrink(end) };
    }
}

/// Lowers the end that the preload library reads. Relaxed: see `host/end.rs` of `device`.
fn lower(end: usize) {
    SPAN.end.fetch_min(end, Ordering::Relaxed);
}
