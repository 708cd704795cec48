//! Copies of memory that may be unreadable. The kernel does the reading, so that a missing page ends the
//! copy and is no fault.

use std::ffi::{c_int, c_void};

/// Bytes that go through a pipe at a time. An empty pipe takes them without waiting.
const PIPE_STEP_BYTES: usize = 4096;

/// Copies up to `bytes` bytes from `from` to `to` and returns their number. Stops at the first missing
/// page.
///
/// # Safety
/// `to` is writable for `bytes` and no part of what is read.
pub(super) unsafe fn copy_readable(to: *mut c_void, from: *const c_void, bytes: usize) -> usize {
    let mut done = 0;
    while done < bytes {
        // SAFETY: inside the caller's ranges.
        let (to, from) = unsafe { (to.byte_add(done), from.byte_add(done)) };
        // SAFETY: the caller's contract.
        match unsafe { copy_once(to, from, bytes - done) } {
            // One call copies less than 2 GiB, or up to a missing page.
            Ok(copied) if copied > 0 => done += copied,
            Ok(_) | Err(libc::EFAULT) => break,
            // The call is refused: a filter of system calls, or another kernel.
            // SAFETY: the caller's contract.
            Err(_) => return done + unsafe { copy_through_pipe(to, from, bytes - done) },
        }
    }
    done
}

/// One `process_vm_readv` from this process.
///
/// # Safety
/// As [`copy_readable`].
unsafe fn copy_once(to: *mut c_void, from: *const c_void, bytes: usize) -> Result<usize, c_int> {
    let local = libc::iovec { iov_base: to, iov_len: bytes };
    let remote = libc::iovec { iov_base: from.cast_mut(), iov_len: bytes };
    // SAFETY: `local` is writable by the caller's contract; the kernel checks `remote`.
    let copied = unsafe {
        libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
    };
    counted(copied)
}

/// [`copy_readable`] by calls that every process has.
///
/// # Safety
/// As [`copy_readable`].
unsafe fn copy_through_pipe(to: *mut c_void, from: *const c_void, bytes: usize) -> usize {
    let mut ends = [0; 2];
    // SAFETY: room for two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } != 0 {
        return 0;
    }
    let [out, into] = ends;
    let mut done = 0;
    while done < bytes {
        // A page at a time: a write across a missing page would lose what precedes it.
        let step = PIPE_STEP_BYTES - (from.addr() + done) % PIPE_STEP_BYTES;
        let step = step.min(bytes - done);
        // SAFETY: the kernel checks what is read; `to` is writable by the caller's contract.
        let copied = unsafe {
            match counted(libc::write(into, from.byte_add(done), step)) {
                Ok(written) => counted(libc::read(out, to.byte_add(done), written)),
                Err(code) => Err(code),
            }
        };
        match copied {
            Ok(copied) if copied > 0 => done += copied,
            _ => break,
        }
    }
    for end in ends {
        // SAFETY: ours, from above.
        unsafe { libc::close(end) };
    }
    done
}

/// Returns the count of a system call, or errno.
fn counted(result: isize) -> Result<usize, c_int> {
    // SAFETY: errno of this thread always exists.
    usize::try_from(result).map_err(|_| unsafe { *libc::__errno_location() })
}

#[cfg(test)]
mod tests {
    use super::*;

    type Copy = unsafe fn(*mut c_void, *const c_void, usize) -> usize;

    /// Copies from `skip` bytes into two pages of which the second is unreadable.
    fn copy_across_a_missing_page(copy: Copy, skip: usize) {
        let page = 4096;
        // SAFETY: an anonymous mapping of our own.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                3 * page,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(map, libc::MAP_FAILED);
        // SAFETY: inside the mapping.
        unsafe { map.cast::<u8>().write_bytes(7, 3 * page) };
        // SAFETY: the last page of the mapping.
        assert_eq!(unsafe { libc::mprotect(map.byte_add(2 * page), page, libc::PROT_NONE) }, 0);
        let mut seen = vec![0_u8; 3 * page];
        // SAFETY: `seen` is that long.
        let copied = unsafe { copy(seen.as_mut_ptr().cast(), map.byte_add(skip), 3 * page - skip) };
        assert_eq!(copied, 2 * page - skip);
        assert!(seen.iter().take(copied).all(|byte| *byte == 7));
        assert!(seen.iter().skip(copied).all(|byte| *byte == 0));
        // SAFETY: the mapping of above.
        unsafe { libc::munmap(map, 3 * page) };
    }

    #[test]
    fn reading_stops_at_the_first_missing_page() {
        for skip in [0, 1, 4095, 4096, 8191] {
            copy_across_a_missing_page(copy_readable, skip);
            copy_across_a_missing_page(copy_through_pipe, skip);
        }
    }
}
