//! Reading a block of ours in a forked child, where no lock may be taken.

use std::ffi::c_void;

/// Copies up to `bytes` bytes from `from` to `to`, stopping at the first page that is not there.
/// Gives the bytes copied. The kernel does the reading, so a missing page is no fault.
///
/// # Safety
/// `to` is writable for `bytes`.
pub(crate) unsafe fn copy_readable(to: *mut c_void, from: *const c_void, bytes: usize) -> usize {
    let local = libc::iovec { iov_base: to, iov_len: bytes };
    let remote = libc::iovec { iov_base: from.cast_mut(), iov_len: bytes };
    // SAFETY: `local` is writable by the caller's contract; `remote` is checked by the kernel.
    let copied = unsafe {
        libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
    };
    usize::try_from(copied).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_stops_at_the_first_missing_page() {
        let page = 4096;
        // SAFETY: an anonymous mapping of our own.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                2 * page,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(map, libc::MAP_FAILED);
        // SAFETY: inside the mapping.
        unsafe { map.cast::<u8>().write_bytes(7, 2 * page) };
        // SAFETY: the second page of the mapping.
        assert_eq!(unsafe { libc::mprotect(map.byte_add(page), page, libc::PROT_NONE) }, 0);
        let mut seen = vec![0_u8; 2 * page];
        // SAFETY: `seen` is that long.
        let copied = unsafe { copy_readable(seen.as_mut_ptr().cast(), map, 2 * page) };
        assert_eq!(copied, page);
        assert!(seen.iter().take(page).all(|byte| *byte == 7));
        // SAFETY: the mapping of above.
        unsafe { libc::munmap(map, 2 * page) };
    }
}
