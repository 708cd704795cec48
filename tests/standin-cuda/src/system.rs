//! The memory calls of the operating system, each once.

use std::ffi::c_void;
use std::ptr::null_mut;

use crate::code::Code;

/// Private anonymous memory that is charged when touched, not when reserved.
const ANONYMOUS: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
/// What a writable page allows.
pub(crate) const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// A size of memory the system refuses is a size the device does not have.
fn mapped(address: *mut c_void) -> Result<usize, Code> {
    if address == libc::MAP_FAILED { Err(Code::OUT_OF_MEMORY) } else { Ok(address as usize) }
}

/// Maps anonymous memory anywhere.
pub(crate) fn map_anywhere(bytes: usize, protection: i32) -> Result<usize, Code> {
    // SAFETY: a fresh mapping at an address of the kernel's choosing touches nothing that exists.
    mapped(unsafe { libc::mmap(null_mut(), bytes, protection, ANONYMOUS, -1, 0) })
}

/// Gives back what [`map_anywhere`] gave.
///
/// # Safety
/// The range is such a mapping, or a part of one, and nothing uses it any more.
pub(crate) unsafe fn unmap(start: usize, bytes: usize) {
    // SAFETY: the caller's. If the call is refused, the addresses leak, which is harmless.
    unsafe { libc::munmap(start as *mut c_void, bytes) };
}

/// Puts fresh anonymous pages there.
///
/// # Safety
/// The range lies in the arena, and its bytes are not wanted.
pub(crate) unsafe fn map_fresh(start: usize, bytes: usize, protection: i32) -> Result<(), Code> {
    let flags = ANONYMOUS | libc::MAP_FIXED;
    // SAFETY: it replaces only the range, which the caller says is ours.
    mapped(unsafe { libc::mmap(start as *mut c_void, bytes, protection, flags, -1, 0) }).map(|_| ())
}

/// Puts `bytes` of `file` there, with no access.
///
/// # Safety
/// The range lies in the arena, and has nothing that is wanted.
pub(crate) unsafe fn map_file(
    start: usize,
    bytes: usize,
    file: i32,
    offset: i64,
) -> Result<(), Code> {
    let flags = libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: it replaces only the range, which the caller says is ours.
    let address =
        unsafe { libc::mmap(start as *mut c_void, bytes, libc::PROT_NONE, flags, file, offset) };
    mapped(address).map(|_| ())
}

/// Sets the protection of a mapping.
///
/// # Safety
/// The range lies in the arena, and no Rust reference points into it.
pub(crate) unsafe fn protect(start: usize, bytes: usize, protection: i32) -> Result<(), Code> {
    // SAFETY: the caller's.
    let status = unsafe { libc::mprotect(start as *mut c_void, bytes, protection) };
    if status == 0 { Ok(()) } else { Err(Code::OUT_OF_MEMORY) }
}

/// Whether all of a range is mapped by somebody.
pub(crate) fn is_mapped(start: usize, bytes: usize) -> bool {
    let page = page_bytes();
    let first = start / page * page;
    let covered = (start - first).saturating_add(bytes);
    // SAFETY: an asynchronous msync starts nothing and changes nothing; it only looks.
    unsafe { libc::msync(first as *mut c_void, covered, libc::MS_ASYNC) == 0 }
}

/// Bytes of one page of the operating system.
pub(crate) fn page_bytes() -> usize {
    dormouse_device::host::os_page_bytes()
}
