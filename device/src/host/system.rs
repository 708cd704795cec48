//! The memory calls of the operating system, with typed errors.
//!
//! These calls run inside `malloc`: they do not allocate on success, take no lock and use no thread-local
//! with a destructor.

use std::ffi::c_void;
use std::ptr::null_mut;

use crate::{AddressRange, DeviceError, Operation};

/// Private anonymous memory, charged when touched.
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
/// Access for [`protect`].
pub(super) const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
pub(super) const READ_ONLY: i32 = libc::PROT_READ;
pub(super) const NO_ACCESS: i32 = libc::PROT_NONE;

/// Returns the page size of the operating system in bytes.
#[must_use]
pub fn os_page_bytes() -> usize {
    // SAFETY: sysconf reads a constant of the system.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// Creates a `Refused` error from errno.
pub(super) fn refused(operation: Operation, range: AddressRange) -> DeviceError {
    DeviceError::of_system(operation, range, &std::io::Error::last_os_error())
}

fn map_anywhere(
    bytes: usize,
    protection: i32,
    operation: Operation,
) -> Result<AddressRange, DeviceError> {
    // SAFETY: a new anonymous mapping at an address chosen by the kernel affects no existing memory.
    let address = unsafe { libc::mmap(null_mut(), bytes, protection, ANONYMOUS, -1, 0) };
    if address == libc::MAP_FAILED {
        return Err(refused(operation, AddressRange::new(0, bytes)));
    }
    Ok(AddressRange::new(address as usize, bytes))
}

/// Reserves addresses without pages and access.
pub(super) fn reserve(bytes: usize) -> Result<AddressRange, DeviceError> {
    map_anywhere(bytes, NO_ACCESS, Operation::Reserve)
}

/// Maps zeroed pages at any address.
pub(crate) fn fresh(bytes: usize, operation: Operation) -> Result<AddressRange, DeviceError> {
    map_anywhere(bytes, READ_WRITE, operation)
}

/// Returns addresses and pages to the system.
///
/// # Safety
/// `range` is an unused mapping of ours.
pub(crate) unsafe fn release(range: AddressRange) {
    if range.bytes == 0 {
        return;
    }
    // SAFETY: the caller's contract. It fails only if splitting a mapping exceeds the system's limit; the
    // addresses are then leaked.
    unsafe { libc::munmap(range.start as *mut c_void, range.bytes) };
}

/// Changes the access to `range`; its pages stay.
///
/// # Safety
/// `range` lies in a reservation of ours. No Rust reference needs a removed access: the guard serves writers
/// of a read-only range, and no thread needs the contents of an inaccessible one.
pub(super) unsafe fn protect(
    range: AddressRange,
    access: i32,
    operation: Operation,
) -> Result<(), DeviceError> {
    // SAFETY: the caller's contract.
    let status = unsafe { libc::mprotect(range.start as *mut c_void, range.bytes, access) };
    if status == 0 { Ok(()) } else { Err(refused(operation, range)) }
}

/// Makes `range` readable and writable.
///
/// # Safety
/// `range` lies in a reservation of ours.
pub(super) unsafe fn open(range: AddressRange, operation: Operation) -> Result<(), DeviceError> {
    // SAFETY: the caller's contract; access is only added.
    unsafe { protect(range, READ_WRITE, operation) }
}

/// [`open`] for the fault handler: async-signal-safe, returns whether it succeeded.
///
/// # Safety
/// As [`open`].
pub(super) unsafe fn open_in_handler(range: AddressRange) -> bool {
    // SAFETY: the caller's contract; access is only added.
    unsafe { libc::mprotect(range.start as *mut c_void, range.bytes, READ_WRITE) == 0 }
}

/// Removes the pages of `range` in any case: if the mapping cannot be replaced, it stays without pages.
///
/// # Safety
/// `range` lies in a reservation of ours, is not accessed, and its contents are not needed.
pub(super) unsafe fn clear(range: AddressRange) {
    // SAFETY: the caller's contract. Private pages that are not locked can always be dropped.
    unsafe {
        if close(range, Operation::Unmap).is_err() {
            let _ = protect(range, NO_ACCESS, Operation::Unmap);
            libc::madvise(range.start as *mut c_void, range.bytes, libc::MADV_DONTNEED);
        }
    }
}

/// Removes the pages of `range` and the access to it in one step for other threads (I2). The kernel
/// checks its limits first: after an error the range is unchanged.
///
/// # Safety
/// `range` lies in a reservation of ours, and its contents are not needed.
pub(super) unsafe fn close(range: AddressRange, operation: Operation) -> Result<(), DeviceError> {
    let (start, flags) = (range.start as *mut c_void, ANONYMOUS | libc::MAP_FIXED);
    // SAFETY: MAP_FIXED replaces only `range`, which is ours.
    let address = unsafe { libc::mmap(start, range.bytes, NO_ACCESS, flags, -1, 0) };
    if address == libc::MAP_FAILED { Err(refused(operation, range)) } else { Ok(()) }
}

/// Moves the pages of `from` to `onto` in one step (I2), and unmaps `from`.
///
/// # Safety
/// Both are ours and equally long; `from` is one mapping, and its addresses are not used again; the
/// contents of `onto` are not needed.
pub(super) unsafe fn move_pages(
    from: AddressRange,
    onto: AddressRange,
    operation: Operation,
) -> Result<(), DeviceError> {
    // SAFETY: the caller's contract.
    if unsafe { remap(from, onto, 0) } {
        return Ok(());
    }
    let error = refused(operation, onto);
    plug(onto);
    Err(error)
}

/// Moves the pages of `from` to `onto`; `from` stays a mapping without pages. Returns whether it
/// succeeded: it fails if `from` is more than one mapping, and on kernels before 5.7.
///
/// # Safety
/// Both are ours and equally long; `from` is inaccessible, and its contents are not needed there; the
/// contents of `onto` are not needed; the page after `from` is mapped.
pub(super) unsafe fn move_leaving(from: AddressRange, onto: AddressRange) -> bool {
    // SAFETY: the caller's contract.
    if !unsafe { is_one_mapping(from) } {
        return false;
    }
    // SAFETY: the caller's contract.
    let moved = unsafe { remap(from, onto, libc::MREMAP_DONTUNMAP) };
    if !moved {
        plug(onto);
    }
    moved
}

/// Whether `range` lies in one mapping. Moving several mappings fails on most kernels after the target is
/// unmapped, and may stop half-way on the newest.
///
/// It tries to grow `range` in place by a page, which is impossible: the kernel returns `ENOMEM`, or another
/// error if the range crosses mappings.
///
/// # Safety
/// `range` is ours, and the page after it is mapped.
unsafe fn is_one_mapping(range: AddressRange) -> bool {
    let grown_bytes = range.bytes + os_page_bytes();
    // SAFETY: the caller's contract: it cannot grow, so nothing changes.
    let address = unsafe { libc::mremap(range.start as *mut c_void, range.bytes, grown_bytes, 0) };
    debug_assert_eq!(address, libc::MAP_FAILED, "{range:x?} grew");
    address == libc::MAP_FAILED
        && std::io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM)
}

/// # Safety
/// As [`move_pages`].
unsafe fn remap(from: AddressRange, onto: AddressRange, flags: i32) -> bool {
    let (old, new) = (from.start as *mut c_void, onto.start as *mut c_void);
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | flags;
    // SAFETY: the caller's contract.
    let address = unsafe { libc::mremap(old, from.bytes, onto.bytes, flags, new) };
    address != libc::MAP_FAILED
}

/// Fills the hole that a failed move may have left in our reservation, before another mapping does.
fn plug(onto: AddressRange) {
    let (start, flags) = (onto.start as *mut c_void, ANONYMOUS | libc::MAP_FIXED_NOREPLACE);
    // SAFETY: it maps only unmapped addresses of a reservation of ours.
    unsafe { libc::mmap(start, onto.bytes, NO_ACCESS, flags, -1, 0) };
}
