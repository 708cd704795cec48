//! Queries the kernel whether an address is accessible, without faulting.
//!
//! Needed for a fault whose span was thawed or woken between the access and the handler. Both queries are
//! async-signal-safe and change no memory.

use std::ffi::c_void;
use std::ptr::null;
use std::sync::atomic::AtomicU32;

/// Runs `call` and returns whether it failed with `EFAULT`.
fn is_fault(call: impl FnOnce() -> libc::c_long) -> bool {
    let status = call();
    // SAFETY: errno's address is this thread's own.
    status == -1 && unsafe { *libc::__errno_location() } == libc::EFAULT
}

/// Whether the eight bytes around `address` are readable: `rt_sigprocmask` reads its set before it refuses
/// an invalid operation.
pub(super) fn readable(address: usize) -> bool {
    const NO_SUCH_OPERATION: libc::c_long = -1;
    let set = (address & !7) as *const c_void;
    // SAFETY: the kernel checks the address; the operation is refused, so no mask changes.
    !is_fault(|| unsafe {
        libc::syscall(libc::SYS_rt_sigprocmask, NO_SUCH_OPERATION, set, null::<c_void>(), 8_usize)
    })
}

/// Whether the four bytes around `address` are writable: a futex operation adds 0 to them atomically.
pub(super) fn writable(address: usize) -> bool {
    /// No thread waits on it.
    static UNUSED: AtomicU32 = AtomicU32::new(0);
    // FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_LT, -2048)
    const ADD_NOTHING: u32 = 1 << 28 | 2 << 24 | 0x800;
    let word = (address & !3) as *mut u32;
    // SAFETY: the kernel checks the address and adds 0 atomically. Futex waiters must accept spurious wakes.
    !is_fault(|| unsafe {
        libc::syscall(
            libc::SYS_futex,
            UNUSED.as_ptr(),
            libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG,
            0,
            0_usize,
            word,
            ADD_NOTHING,
        )
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Operation;
    use crate::host::system;

    #[test]
    fn reports_access_for_each_protection() {
        let range = system::fresh(system::os_page_bytes(), Operation::Map).unwrap();
        let inside = range.start + 13;
        // SAFETY: the test's own mapping, referred to by nothing.
        unsafe {
            (inside as *mut u8).write(7);
            assert!(readable(inside) && writable(inside));
            system::protect(range, system::READ_ONLY, Operation::Freeze).unwrap();
            assert!(readable(inside) && !writable(inside));
            assert_eq!((inside as *const u8).read(), 7);
            system::close(range, Operation::Seal).unwrap();
            assert!(!readable(inside) && !writable(inside));
            system::release(range);
        }
    }
}
