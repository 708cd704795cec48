//! Whether I/O to a file that was opened with O_DIRECT bypasses the page cache.
//!
//! An accepted O_DIRECT says little: a file system may refuse each request, ask for a larger alignment than ours, or
//! carry requests out through the page cache.
#![expect(unsafe_code, reason = "raw system calls")]

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr::null_mut;

use super::file::{self, Aligned, UNIT_BYTES};

/// Returns whether whole units are read and written past the page cache. `file` was opened with O_DIRECT and has
/// `file_bytes`. Where the system does not say, its first unit is written and read.
pub(super) fn is_direct(file: &File, file_bytes: u64) -> bool {
    alignments(file).map_or_else(|| passes_trial(file, file_bytes), takes_units)
}

/// Has later I/O of `file` go through the page cache.
pub(super) fn make_buffered(file: &File) -> io::Result<()> {
    // SAFETY: plain system calls on an open descriptor.
    let is_done = unsafe {
        let flags = libc::fcntl(file.as_raw_fd(), libc::F_GETFL);
        flags >= 0 && libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_DIRECT) >= 0
    };
    if is_done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Returns whether requests of whole units have these alignments; 0: there is no direct I/O.
fn takes_units(alignments: [u32; 2]) -> bool {
    alignments.iter().all(|&align| (1..=UNIT_BYTES).contains(&(align as usize)))
}

/// Returns the alignments of memory and offsets that direct I/O needs. `None` if the system does not say, as before
/// Linux 6.1 and on some file systems.
fn alignments(file: &File) -> Option<[u32; 2]> {
    let mut found = MaybeUninit::<libc::statx>::zeroed();
    let (fd, wanted) = (file.as_raw_fd(), libc::STATX_DIOALIGN);
    // SAFETY: an empty path names the descriptor; the struct is a writable local.
    let status =
        unsafe { libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, wanted, found.as_mut_ptr()) };
    // SAFETY: plain data, for which zero is a value.
    let found = unsafe { found.assume_init() };
    let is_known = status == 0 && found.stx_mask & wanted != 0;
    is_known.then_some([found.stx_dio_mem_align, found.stx_dio_offset_align])
}

/// Writes and reads the first unit of a file that was never written. Errors other than a refusal decide nothing: later
/// requests report them.
fn passes_trial(file: &File, file_bytes: u64) -> bool {
    // A longer file would end the process by a signal.
    if file::file_bytes_max() < UNIT_BYTES as u64 {
        return true;
    }
    let Some(mut unit) = Aligned::zeroed(UNIT_BYTES) else { return true };
    let memory = unit.memory();
    let was_cached = is_cached(file);
    let tried = file::write_at(file, 0, &memory).and_then(|_| file::read_at(file, 0, &memory));
    let is_refused = tried.is_err_and(|error| error.raw_os_error() == Some(libc::EINVAL));
    let is_direct = shows_direct_io(is_refused, was_cached, is_cached(file));
    if file_bytes == 0 {
        // After an error the file is a unit longer than it should be.
        let _ = file.set_len(0);
    }
    is_direct
}

/// Returns whether a trial shows direct I/O. Nothing is cached of a file that was never written: a system that says so
/// (gVisor, of each mapped page) does not know, and then only a refusal decides.
const fn shows_direct_io(is_refused: bool, was_cached: bool, is_cached: bool) -> bool {
    !is_refused && (was_cached || !is_cached)
}

/// Returns whether the page cache has the first page of the file.
fn is_cached(file: &File) -> bool {
    let mut pages = [0_u8; 1];
    // SAFETY: a new mapping at an address of the kernel's choice, which nobody accesses, is asked about and unmapped. It
    // is one page at most, for which there is one byte.
    unsafe {
        let (access, fd) = (libc::PROT_READ, file.as_raw_fd());
        let start = libc::mmap(null_mut(), UNIT_BYTES, access, libc::MAP_SHARED, fd, 0);
        if start == libc::MAP_FAILED {
            return false;
        }
        let status = libc::mincore(start, UNIT_BYTES, pages.as_mut_ptr());
        libc::munmap(start, UNIT_BYTES);
        status == 0 && pages[0] & 1 == 1
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::testing::disk_dir;

    #[test]
    fn units_have_alignments_up_to_their_size() {
        for (alignments, are_taken) in [
            ([512, 512], true),
            ([4, 4096], true),
            ([0, 0], false),
            ([512, 8192], false),
            ([65536, 512], false),
        ] {
            assert_eq!(takes_units(alignments), are_taken, "{alignments:?}");
        }
    }

    #[test]
    fn a_page_cache_that_knows_a_file_before_its_first_write_decides_nothing() {
        for (is_refused, was_cached, is_cached, is_direct) in [
            (false, false, false, true),
            (false, false, true, false),
            (false, true, true, true),
            (true, false, false, false),
            (true, true, true, false),
        ] {
            let seen = (is_refused, was_cached, is_cached);
            assert_eq!(shows_direct_io(is_refused, was_cached, is_cached), is_direct, "{seen:?}");
        }
    }

    /// What a file system leaves in the page cache although it accepts O_DIRECT is known by that.
    #[test]
    fn a_trial_tells_buffered_io_from_direct_io() {
        let unit = UNIT_BYTES as u64;
        let opened = file::open_unlinked(&disk_dir(), 0).unwrap();
        file::preallocate(&opened, 0, unit).unwrap();
        assert!(!is_cached(&opened));
        assert!(!passes_trial(&opened, unit));
        match file::open_unlinked(&disk_dir(), libc::O_DIRECT) {
            Err(e) => println!("no O_DIRECT here: {e}"),
            Ok(direct) => {
                assert!(alignments(&direct).is_none_or(takes_units));
                assert!(passes_trial(&direct, 0));
                assert_eq!(direct.metadata().unwrap().len(), 0);
                make_buffered(&direct).unwrap();
                assert!(!passes_trial(&direct, 0));
            }
        }
    }
}
