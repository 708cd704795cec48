//! The C symbols that only the preload library calls: `ffi/include/dormouse_heap.h`.
//!
//! Their contract is malloc's: NULL with `errno` on failure, no status, no panic.
//!
//! # Safety
//! Every exported function has the contract of the libc function of its name; pointers are live blocks
//! of the heap, and `align` is a power of two.
#![allow(unreachable_pub, reason = "symbols of the library, called by the preload shim")]
#![allow(clippy::missing_safety_doc, reason = "one message above holds for all")]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use dormouse_device::Fill;
use dormouse_device::host::os_page_bytes;

use super::Heap;
use super::registry::{SPAN, Span};
use crate::params::{self, Key};
use crate::{fault, fork, stderr, system};

/// From this size on, reused memory is zeroed by giving its pages back: libc maps such blocks anew as well.
const NEW_PAGES_BYTES_MIN: usize = 1 << 20;
/// Maximum number of out-of-memory reports that one process writes to standard error.
const REPORTS_MAX: usize = 3;

static OPENED: Once = Once::new();
static REPORTS: AtomicUsize = AtomicUsize::new(0);

/// Reads the configuration once and returns the words that the preload library reads on every call.
/// Starts no thread, reserves no addresses, and opens no file but the one in `DORMOUSE_CONFIG`.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_heap_range() -> *const Span {
    guarded((), || {
        OPENED.call_once(|| match params::load(&[]) {
            Ok(config) => {
                let least = usize::try_from(config.number(Key::HeapMin)).unwrap_or(usize::MAX);
                SPAN.min_bytes.store(least, Ordering::Release);
            }
            Err(fault) => stderr::print(&format!(
                "{}; this process uses libc's malloc, and dormouse_runtime_create will fail",
                fault.message
            )),
        });
    });
    &raw const SPAN
}

/// Returns whether the preload library is loaded and serves requests.
pub(crate) fn is_preloaded() -> bool {
    OPENED.is_completed() && SPAN.min_bytes.load(Ordering::Relaxed) != usize::MAX
}

/// malloc(3), for requests of at least the minimum size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_heap_malloc(bytes: usize) -> *mut c_void {
    guarded(null_mut(), || obtain(bytes, 1, Fill::Any).0)
}

/// calloc(3). New pages are zero; reused ones are zeroed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_heap_calloc(count: usize, bytes: usize) -> *mut c_void {
    guarded(null_mut(), || {
        let Some(bytes) = count.checked_mul(bytes) else { return no_memory() };
        let (pointer, zeroed) = obtain(bytes, 1, Fill::Zero);
        if !pointer.is_null() && !zeroed {
            // SAFETY: a new block of at least `bytes` bytes.
            unsafe { clear(pointer, bytes) };
        }
        pointer
    })
}

/// aligned_alloc(3) and its family.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_heap_aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
    guarded(null_mut(), || obtain(bytes, align, Fill::Any).0)
}

/// free(3) of a block of the heap. Never blocks and keeps `errno`. In a forked child it is a no-op.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_heap_free(pointer: *mut c_void) {
    if fork::in_child() {
        return;
    }
    let errno = errno();
    guarded((), || {
        if let Some(heap) = Heap::get()
            && let Err(fault) = heap.free(pointer.addr(), 0)
        {
            broken("free", &fault.message);
        }
    });
    set_errno(errno);
}

/// realloc(3) of a block of the heap. A sleeping block is woken first. A block that does not fit in place moves to
/// libc's heap, which grows large blocks by moving pages: memory that is reallocated is no tensor, and need not
/// be able to sleep.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_heap_realloc(pointer: *mut c_void, bytes: usize) -> *mut c_void {
    if fork::in_child() {
        // SAFETY: the caller's contract.
        return unsafe { realloc_in_child(pointer, bytes) };
    }
    guarded(null_mut(), || {
        let Some(heap) = Heap::get() else { return no_memory() };
        let Some(block) = heap.allocator().lookup(pointer.addr()) else {
            broken("realloc", &format!("{pointer:p} is in no live block"));
        };
        if let Err(fault) = heap.wake(pointer.addr()) {
            fault::set_last_error(&fault.message);
            stderr::print(&format!("realloc of a sleeping block: {}", fault.message));
            return no_memory();
        }
        let has = block.range.bytes;
        if bytes <= has && bytes >= has / 2 {
            return pointer;
        }
        // SAFETY: any size is accepted.
        let fresh = unsafe { system::__libc_malloc(bytes) };
        if !fresh.is_null() {
            // SAFETY: both are live, distinct blocks of at least the smaller size. The old one is awake,
            // and its owner is inside realloc.
            unsafe {
                fresh.cast::<u8>().copy_from_nonoverlapping(pointer.cast::<u8>(), has.min(bytes));
            }
            if let Err(fault) = heap.free(pointer.addr(), 0) {
                broken("realloc", &fault.message);
            }
        }
        fresh
    })
}

/// malloc_usable_size(3) of a block of the heap. Returns 0 in a forked child, which takes no lock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_heap_usable_size(pointer: *mut c_void) -> usize {
    if fork::in_child() {
        return 0;
    }
    guarded(0, || {
        let block = Heap::get().and_then(|heap| heap.allocator().lookup(pointer.addr()));
        block.map_or(0, |block| block.range.bytes)
    })
}

/// Zeroes reused memory. A large block gets new pages from the kernel, which a sparse user never touches.
///
/// # Safety
/// `pointer` is a new block of the heap, which has whole pages, of at least `bytes` bytes.
unsafe fn clear(pointer: *mut c_void, bytes: usize) {
    if bytes >= NEW_PAGES_BYTES_MIN {
        let pages_bytes = bytes.next_multiple_of(os_page_bytes());
        // SAFETY: the caller's contract. Private pages read as zeroes afterwards; locked ones are refused.
        if unsafe { libc::madvise(pointer, pages_bytes, libc::MADV_DONTNEED) } == 0 {
            return;
        }
    }
    // SAFETY: the caller's contract.
    unsafe { pointer.cast::<u8>().write_bytes(0, bytes) };
}

/// Allocates a block, and returns whether its bytes are known to be zero.
fn obtain(bytes: usize, align: usize, fill: Fill) -> (*mut c_void, bool) {
    // SAFETY: any size and power-of-two alignment are accepted.
    let from_libc = || (unsafe { system::__libc_memalign(align.max(16), bytes) }, false);
    if fork::in_child() {
        return from_libc();
    }
    // An existing heap is found without a lock (I5 of the crate).
    let heap = Heap::get()
        .map_or_else(|| params::in_effect().and_then(|config| Heap::get_or_create(&config)), Ok);
    let heap = match heap {
        Ok(heap) => heap,
        Err(fault) => {
            // The range could not be reserved: reported once, and the preload library stops asking.
            if SPAN.min_bytes.swap(usize::MAX, Ordering::Relaxed) != usize::MAX {
                stderr::print(&format!("{}; this process uses libc's malloc", fault.message));
            }
            return from_libc();
        }
    };
    match heap.allocate(bytes.max(1), align.max(1), 0, fill) {
        Ok(block) => (std::ptr::with_exposed_provenance_mut(block.range.start), block.zeroed),
        // A limit that nobody has set refuses nothing that libc would serve.
        Err(_) if !heap.has_chosen_budget() || bytes as u64 > heap.reserve_bytes() => from_libc(),
        Err(error) => {
            // malloc returns no message: it goes to this thread's last error and to standard error.
            let text = error.to_string();
            fault::set_last_error(&text);
            if REPORTS.fetch_add(1, Ordering::Relaxed) < REPORTS_MAX {
                stderr::print(&text);
            }
            (no_memory(), false)
        }
    }
}

/// In a forked child: copies the readable bytes to libc's heap and leaves the block alone.
///
/// # Safety
/// `pointer` was a live block of the heap in the parent.
unsafe fn realloc_in_child(pointer: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: any size is accepted.
    let fresh = unsafe { system::__libc_malloc(bytes) };
    // SAFETY: `fresh` has `bytes` bytes; the kernel checks the other side.
    if fresh.is_null() || bytes == 0 || unsafe { copy_readable(fresh, pointer, bytes) } > 0 {
        return fresh;
    }
    // SAFETY: just allocated, and unused.
    unsafe { system::__libc_free(fresh) };
    no_memory()
}

/// Copies up to `bytes` bytes from `from` to `to` and returns their number. Stops at the first missing
/// page: the kernel does the reading, so that it is no fault.
///
/// # Safety
/// `to` is writable for `bytes`.
unsafe fn copy_readable(to: *mut c_void, from: *const c_void, bytes: usize) -> usize {
    let local = libc::iovec { iov_base: to, iov_len: bytes };
    let remote = libc::iovec { iov_base: from.cast_mut(), iov_len: bytes };
    // SAFETY: `local` is writable by the caller's contract; the kernel checks `remote`.
    let copied = unsafe {
        libc::process_vm_readv(libc::getpid(), &raw const local, 1, &raw const remote, 1, 0)
    };
    usize::try_from(copied).unwrap_or(0)
}

/// Ends the process after a free or realloc of no live block, as libc does.
fn broken(what: &str, message: &str) -> ! {
    stderr::print(&format!("{what}(): invalid pointer: {message}"));
    std::process::abort()
}

fn guarded<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(otherwise)
}

fn no_memory() -> *mut c_void {
    set_errno(libc::ENOMEM);
    null_mut()
}

fn errno() -> i32 {
    // SAFETY: errno of this thread always exists.
    unsafe { *libc::__errno_location() }
}

fn set_errno(value: i32) {
    // SAFETY: errno of this thread always exists.
    unsafe { *libc::__errno_location() = value };
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
