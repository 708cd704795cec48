//! The memory calls of the operating system, each once, with its errno made a typed error.
//!
//! Nothing here allocates on success, takes a lock or touches a thread-local with a destructor:
//! these calls run inside `malloc`.

use std::ffi::c_void;
use std::ptr::null_mut;

use crate::{AddressRange, DeviceError, Operation};

/// Private anonymous memory that is charged when touched, not when reserved.
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
/// What a mapped page allows.
const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Bytes of one page of the operating system.
#[must_use]
pub fn os_page_bytes() -> usize {
    // SAFETY: sysconf reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// The `Refused` error of `operation` from the errno of the call just made.
pub(super) fn refused(operation: Operation, range: AddressRange) -> DeviceError {
    let error = std::io::Error::last_os_error();
    DeviceError::Refused {
        operation,
        start: range.start,
        bytes: range.bytes,
        code: error.raw_os_error().unwrap_or(0),
        reason: error.to_string(),
    }
}

/// Maps `bytes` anywhere.
fn map_anywhere(
    bytes: usize,
    protection: i32,
    operation: Operation,
) -> Result<AddressRange, DeviceError> {
    // SAFETY: a fresh anonymous mapping at an address of the kernel's choosing touches no memory
    // that exists.
    let address = unsafe { libc::mmap(null_mut(), bytes, protection, ANONYMOUS, -1, 0) };
    if address == libc::MAP_FAILED {
        return Err(refused(operation, AddressRange::new(0, bytes)));
    }
    Ok(AddressRange::new(address as usize, bytes))
}

/// Reserves addresses: nothing behind them, no access.
pub(super) fn reserve(bytes: usize) -> Result<AddressRange, DeviceError> {
    map_anywhere(bytes, libc::PROT_NONE, Operation::Reserve)
}

/// Fresh zeroed pages anywhere.
pub(crate) fn fresh(bytes: usize, operation: Operation) -> Result<AddressRange, DeviceError> {
    map_anywhere(bytes, READ_WRITE, operation)
}

/// Gives addresses and pages back to the system.
///
/// # Safety
/// `range` is a mapping of ours that nothing uses any more.
pub(crate) unsafe fn release(range: AddressRange) {
    if range.bytes == 0 {
        return;
    }
    // SAFETY: the caller says the mapping is ours and unused. It fails only where splitting a
    // mapping passes the system's limit; the addresses are then leaked, which harms nobody.
    unsafe { libc::munmap(range.start as *mut c_void, range.bytes) };
}

/// Sets the protection of `range`.
///
/// # Safety
/// `range` is ours, and no Rust reference into it outlives the access taken away.
unsafe fn protect(
    range: AddressRange,
    protection: i32,
    operation: Operation,
) -> Result<(), DeviceError> {
    // SAFETY: the caller's.
    let status = unsafe { libc::mprotect(range.start as *mut c_void, range.bytes, protection) };
    if status == 0 { Ok(()) } else { Err(refused(operation, range)) }
}

/// Opens `range` for reading and writing.
///
/// # Safety
/// `range` lies in a reservation of ours.
pub(super) unsafe fn open(range: AddressRange, operation: Operation) -> Result<(), DeviceError> {
    // SAFETY: the caller's; access is only added.
    unsafe { protect(range, READ_WRITE, operation) }
}

/// [`open`] for the fault handler: async-signal-safe, and only whether it worked.
///
/// # Safety
/// As [`open`].
pub(super) unsafe fn open_in_handler(range: AddressRange) -> bool {
    // SAFETY: the caller's; access is only added.
    unsafe { libc::mprotect(range.start as *mut c_void, range.bytes, READ_WRITE) == 0 }
}

/// Makes a mapped `range` read-only.
///
/// # Safety
/// `range` lies in a reservation of ours; its writers are ready for the guard's handler.
pub(super) unsafe fn write_protect(
    range: AddressRange,
    operation: Operation,
) -> Result<(), DeviceError> {
    // SAFETY: the caller's.
    unsafe { protect(range, libc::PROT_READ, operation) }
}

/// Takes access to `range` away; its pages stay.
///
/// # Safety
/// `range` lies in a reservation of ours, and its bytes are not wanted by anybody who would touch
/// them.
pub(super) unsafe fn shut(range: AddressRange, operation: Operation) -> Result<(), DeviceError> {
    // SAFETY: the caller's.
    unsafe { protect(range, libc::PROT_NONE, operation) }
}

/// Takes the pages of `range` away for certain: where the mapping cannot be replaced it stays, empty.
///
/// # Safety
/// `range` lies in a reservation of ours; nobody touches it, and its bytes are not wanted.
pub(super) unsafe fn clear(range: AddressRange) {
    // SAFETY: the caller's.
    unsafe {
        if close(range, Operation::Unmap).is_err() {
            // Where this is refused as well, nothing is left that could be done.
            let _ = shut(range, Operation::Unmap);
            drop_pages(range);
        }
    }
}

/// Gives the pages of `range` to the system, the mapping stays. Needs no new mapping, so that it
/// works where [`close`] is refused.
///
/// # Safety
/// `range` is ours, nobody touches it, and its bytes are not wanted.
pub(super) unsafe fn drop_pages(range: AddressRange) {
    // SAFETY: the caller's. Private pages that are not locked can always be dropped.
    unsafe { libc::madvise(range.start as *mut c_void, range.bytes, libc::MADV_DONTNEED) };
}

/// Takes pages and access of `range` away in one step: other threads see the owner's bytes
/// until it, and nothing after (I2). The kernel checks its limits before it removes anything, so
/// that a refusal leaves the range as it was.
///
/// # Safety
/// `range` lies in a reservation of ours, and its bytes are not wanted.
pub(super) unsafe fn close(range: AddressRange, operation: Operation) -> Result<(), DeviceError> {
    // SAFETY: MAP_FIXED replaces only `range`, which the caller says is ours.
    let address = unsafe {
        libc::mmap(
            range.start as *mut c_void,
            range.bytes,
            libc::PROT_NONE,
            ANONYMOUS | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED { Err(refused(operation, range)) } else { Ok(()) }
}

/// Moves the pages of `from` onto `onto` in one step (I2); `from` is gone then.
///
/// # Safety
/// Both are ours, equally long; `from` is one mapping, and nothing uses its addresses again; `onto`
/// has no pages that are wanted.
pub(super) unsafe fn move_pages(
    from: AddressRange,
    onto: AddressRange,
    operation: Operation,
) -> Result<(), DeviceError> {
    // SAFETY: the caller's.
    if unsafe { remap(from, onto, 0) } {
        return Ok(());
    }
    let error = refused(operation, onto);
    plug(onto);
    Err(error)
}

/// Moves the pages of `from` onto `onto`; `from` stays a mapping, with no pages. Whether it worked:
/// it does not where `from` is more than one mapping, nor on kernels before 5.7.
///
/// # Safety
/// Both are ours, equally long; `from` is shut, and its bytes are not wanted there; `onto` has no
/// pages that are wanted; the page behind `from` is mapped.
pub(super) unsafe fn move_leaving(from: AddressRange, onto: AddressRange) -> bool {
    // SAFETY: the caller's.
    if !unsafe { is_one_mapping(from) } {
        return false;
    }
    // SAFETY: the caller's.
    let moved = unsafe { remap(from, onto, libc::MREMAP_DONTUNMAP) };
    if !moved {
        plug(onto);
    }
    moved
}

/// Whether `range` lies in one mapping. A move of several fails on most kernels after it has
/// unmapped the target, and on the newest may stop half-way, so it is not even tried.
///
/// It is asked to grow by a page where it is, which it cannot, for there is something: the kernel
/// says `ENOMEM`, unless it found before that the range crosses mappings.
///
/// # Safety
/// `range` is ours, and the page behind it is mapped.
unsafe fn is_one_mapping(range: AddressRange) -> bool {
    let grown_bytes = range.bytes + os_page_bytes();
    // SAFETY: the caller's: nothing can grow here, so nothing changes.
    let address = unsafe { libc::mremap(range.start as *mut c_void, range.bytes, grown_bytes, 0) };
    debug_assert_eq!(address, libc::MAP_FAILED, "{range:x?} grew");
    address == libc::MAP_FAILED
        && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM)
}

/// # Safety
/// As [`move_pages`].
unsafe fn remap(from: AddressRange, onto: AddressRange, flags: i32) -> bool {
    // SAFETY: the caller's.
    let address = unsafe {
        libc::mremap(
            from.start as *mut c_void,
            from.bytes,
            onto.bytes,
            libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | flags,
            onto.start as *mut c_void,
        )
    };
    address != libc::MAP_FAILED
}

/// A move that failed late may have left a hole in our reservation, for anybody's mapping to fall
/// into. NOREPLACE plugs only a hole.
fn plug(onto: AddressRange) {
    // SAFETY: it maps only addresses of a reservation of ours that nothing else has.
    unsafe {
        libc::mmap(
            onto.start as *mut c_void,
            onto.bytes,
            libc::PROT_NONE,
            ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
            -1,
            0,
        )
    };
}
