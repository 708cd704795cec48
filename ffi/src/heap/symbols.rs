//! The C symbols that only the preload library calls: `ffi/include/dormouse_heap.h`.
//!
//! Their contract is malloc's: NULL with `errno` on failure, no status, no panic.
//!
//! # Safety
//! Every exported function has the contract of the libc function of its name; pointers are live blocks
//! of the heap, and `align` is a power of two.
#![allow(unreachable_pub, reason = "symbols of the library, called by the preload shim")]
#![allow(clippy::missing_safety_doc, reason = "one message above holds for all")]

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use dormouse_device::Fill;
use dormouse_device::host::os_page_bytes;
use dormouse_timeline::now_ns;

use super::registry::{SPAN, Span};
use super::{Heap, copying, lacks_addresses};
use crate::params::{self, HEAP_MIN_BUILT_IN_BYTES, Key, PREFIX};
use crate::{fault, fork, spare, stderr, system};

/// From this size on, reused memory is zeroed by giving its pages back: libc maps such blocks anew as well.
const NEW_PAGES_BYTES_MIN: usize = 1 << 20;
/// Copied at a time when a block moves to libc's heap; a multiple of every page size.
const MOVED_BYTES: usize = 2 << 20;
/// Maximum number of out-of-memory reports that one process writes to standard error at length. Later ones are lines: the
/// last may end the program.
const REPORTS_MAX: usize = 3;
/// Least time between two of those lines.
const LINE_INTERVAL_NS: u64 = 100_000_000;

unsafe extern "C" {
    /// environ(7).
    static environ: *const *const c_char;
}

static REPORTS: AtomicUsize = AtomicUsize::new(0);
/// The earliest time of the next line.
static LINE_FROM_NS: AtomicU64 = AtomicU64::new(0);

/// Opens the heap for requests, and returns the words that the preload library reads on every call. Called by its
/// constructor, before the program's threads. Starts no thread, reserves no addresses, and opens no file but the one in
/// `DORMOUSE_CONFIG`.
#[unsafe(no_mangle)]
#[unsafe(link_section = ".text.constructor")]
pub extern "C" fn dormouse_heap_range() -> *const Span {
    // Most programs ask for little and set no variable. Reading the configuration for them would make 0.4 MiB of this
    // library resident.
    if is_variable_set() {
        guarded((), open);
    } else {
        params::start_plain();
        SPAN.min_bytes.store(HEAP_MIN_BUILT_IN_BYTES as usize, Ordering::Release);
    }
    &raw const SPAN
}

fn open() {
    match params::load(&[]) {
        Ok(config) => {
            let least = usize::try_from(config.number(Key::HeapMin)).unwrap_or(usize::MAX);
            SPAN.min_bytes.store(least, Ordering::Release);
        }
        Err(fault) => stderr::print(&format!(
            "{}; this process uses libc's malloc, and dormouse_runtime_create will fail",
            fault.message
        )),
    }
}

/// Returns whether the environment has a variable of this library. Allocates nothing.
fn is_variable_set() -> bool {
    // SAFETY: called before the program's threads: nothing changes the array or its strings meanwhile. It is null, or
    // ends with a null pointer, and its strings end with a zero, at which `strncmp` stops.
    unsafe {
        let mut variable = environ;
        while !variable.is_null() && !(*variable).is_null() {
            if libc::strncmp(*variable, PREFIX.as_ptr().cast(), PREFIX.len()) == 0 {
                return true;
            }
            variable = variable.add(1);
        }
    }
    false
}

/// Returns whether the preload library is loaded and serves requests.
pub(crate) fn is_preloaded() -> bool {
    SPAN.min_bytes.load(Ordering::Relaxed) != usize::MAX
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
        if let Some(heap) = Heap::get() {
            if let Err(fault) = heap.free(pointer.addr(), 0) {
                broken("free", &fault.message);
            }
            heap.give_back();
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
        return guarded(null_mut(), || unsafe { realloc_in_child(pointer, bytes) });
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
            unsafe { move_bytes(fresh, pointer, has.min(bytes)) };
            if let Err(fault) = heap.free(pointer.addr(), 0) {
                broken("realloc", &fault.message);
            }
            heap.give_back();
        }
        fresh
    })
}

/// malloc_usable_size(3) of a block of the heap. In a forked child it is 0 if a thread of the parent was
/// inside the allocator at the fork.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_heap_usable_size(pointer: *mut c_void) -> usize {
    guarded(0, || {
        let Some(heap) = Heap::get() else { return 0 };
        if fork::in_child() {
            return size_in_child(heap, pointer).unwrap_or(0);
        }
        heap.allocator().lookup(pointer.addr()).map_or(0, |block| block.range.bytes)
    })
}

/// Copies `bytes` bytes. The pages of a large block go back to the kernel meanwhile: it is not resident twice.
///
/// # Safety
/// `from` is a block of the heap, which has whole pages and is freed next; both are valid for `bytes` bytes and distinct.
unsafe fn move_bytes(to: *mut c_void, from: *mut c_void, bytes: usize) {
    let step_bytes = if bytes < NEW_PAGES_BYTES_MIN { bytes } else { MOVED_BYTES };
    let mut at = 0;
    while at < bytes {
        let part = step_bytes.min(bytes - at);
        // SAFETY: the caller's contract. What the kernel takes has been copied, and locked pages are refused.
        unsafe {
            let place = from.byte_add(at);
            if part == MOVED_BYTES {
                populate(to.byte_add(at), part);
            }
            to.byte_add(at).cast::<u8>().copy_from_nonoverlapping(place.cast::<u8>(), part);
            if part == MOVED_BYTES {
                libc::madvise(place, part, libc::MADV_DONTNEED);
            }
        }
        at += part;
    }
}

/// Maps the pages of memory about to be written, all at once: by faults one at a time they take half as long again. Does
/// nothing before Linux 5.14.
///
/// # Safety
/// `place` is in a live block of libc, valid for `bytes` bytes.
unsafe fn populate(place: *mut c_void, bytes: usize) {
    let start = place.map_addr(|address| address & !(os_page_bytes() - 1));
    let end = (place.addr() + bytes) & !(os_page_bytes() - 1);
    // SAFETY: no byte changes. The first page has the block's start or header, the others are its own.
    unsafe { libc::madvise(start, end.saturating_sub(start.addr()), libc::MADV_POPULATE_WRITE) };
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

/// malloc_trim(3) of the heap: unmaps free pages but `pad` bytes. Returns 1 if there were any. Does nothing in a
/// forked child.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_heap_trim(pad: usize) -> c_int {
    if fork::in_child() {
        return 0;
    }
    guarded(0, || Heap::get().is_some_and(|heap| heap.trim(pad as u64)).into())
}

/// Returns the size of a block of the parent, if its state is whole in this child.
fn size_in_child(heap: &Heap, pointer: *mut c_void) -> Option<usize> {
    heap.allocator().try_lookup(pointer.addr()).flatten().map(|block| block.range.bytes)
}

/// Allocates a block, and returns whether its bytes are known to be zero.
fn obtain(bytes: usize, align: usize, fill: Fill) -> (*mut c_void, bool) {
    // Zeroed by libc itself: `clear` is for blocks of the heap.
    let from_libc = || match fill {
        // SAFETY: any size is accepted. Zeroed memory is asked for with no alignment (calloc).
        Fill::Zero => (unsafe { system::__libc_calloc(1, bytes) }, true),
        // SAFETY: any size and power-of-two alignment are accepted.
        Fill::Any => (unsafe { system::__libc_memalign(align.max(16), bytes) }, false),
    };
    if fork::in_child() {
        return from_libc();
    }
    if spare::is_low() {
        return (no_memory(), false);
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
        // libc serves requests beyond the default budget, and those that find no addresses.
        Err(error)
            if !heap.has_chosen_budget()
                || bytes as u64 > heap.reserve_bytes()
                || lacks_addresses(&error) =>
        {
            from_libc()
        }
        Err(error) => {
            // malloc returns no message: it goes to this thread's last error and to standard error.
            let text = heap.fault_of(error).message;
            fault::set_last_error(&text);
            report(&text);
            (no_memory(), false)
        }
    }
}

/// Writes an out-of-memory report to standard error: at length, or its first line and its last, which names the dump.
fn report(text: &str) {
    if REPORTS.fetch_add(1, Ordering::Relaxed) < REPORTS_MAX {
        stderr::print(text);
        return;
    }
    let now_ns = now_ns();
    let from_ns = LINE_FROM_NS.load(Ordering::Relaxed);
    let next_ns = now_ns + LINE_INTERVAL_NS;
    // Another thread that was faster writes its own line.
    let is_due = now_ns >= from_ns
        && LINE_FROM_NS
            .compare_exchange(from_ns, next_ns, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok();
    if is_due {
        let (first, rest) = text.split_once('\n').unwrap_or((text, ""));
        let last = rest.lines().next_back().unwrap_or("");
        stderr::print(&format!("{first} {last}"));
    }
}

/// In a forked child: copies the block to libc's heap and leaves it alone. NULL if a part of it cannot be
/// read, for example because it sleeps.
///
/// # Safety
/// `pointer` was a live block of the heap in the parent.
unsafe fn realloc_in_child(pointer: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: any size is accepted.
    let fresh = unsafe { system::__libc_malloc(bytes) };
    if fresh.is_null() {
        return fresh;
    }
    // With an unknown size, the readable bytes: at least one page of the block.
    let size_bytes = Heap::get().and_then(|heap| size_in_child(heap, pointer));
    let wanted_bytes = size_bytes.unwrap_or(usize::MAX).min(bytes);
    // SAFETY: `fresh` has `bytes` bytes; the kernel checks the other side.
    let copied_bytes = unsafe { copying::copy_readable(fresh, pointer, wanted_bytes) };
    if copied_bytes == wanted_bytes || (size_bytes.is_none() && copied_bytes > 0) {
        return fresh;
    }
    // SAFETY: just allocated, and unused.
    unsafe { system::__libc_free(fresh) };
    no_memory()
}

/// Ends the process after a free or realloc of no live block, as libc does.
fn broken(what: &str, message: &str) -> ! {
    stderr::print(&format!("{what}(): invalid pointer: {message}"));
    std::process::abort()
}

pub(super) fn guarded<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(otherwise)
}

fn no_memory() -> *mut c_void {
    set_errno(libc::ENOMEM);
    null_mut()
}

pub(super) fn errno() -> i32 {
    // SAFETY: errno of this thread always exists.
    unsafe { *libc::__errno_location() }
}

pub(super) fn set_errno(value: i32) {
    // SAFETY: errno of this thread always exists.
    unsafe { *libc::__errno_location() = value };
}
