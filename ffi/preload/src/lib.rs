//! `libdormouse_preload.so`: the malloc family, interposed by LD_PRELOAD.
//!
//! It holds nothing and decides one thing: requests of at least the library's smallest size go to
//! `libdormouse.so`, everything else to libc. It is not an allocator and links no crate of the
//! runtime: two libraries with copies of the same statics would be two runtimes.
//!
//! ```text
//!   program ──malloc(n)──► shim ── n >= min ──► dormouse_heap_malloc   (libdormouse.so)
//!           ──free(p)────►      ── begin <= p < end ──► dormouse_heap_free
//!                               └─ else ──► __libc_malloc, __libc_free (libc)
//! ```
//!
//! # Invariants
//! - **S1** Before the constructor has run, and when the door is closed, everything is libc's.
//! - **S2** A pointer goes back to whoever gave it: two compares against the range decide.
//! - **S3** No lock, no thread-local, no allocation and no panic on any path here. Never unloaded.
//! - **S4** A block that libc grew stays libc's: `realloc` moves nothing across the line upwards.

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// What malloc aligns to on 64-bit Linux.
const ALIGN_BYTES: usize = 16;

/// The library's words: `dormouse_heap_span` of `ffi/include/dormouse_heap.h`.
#[repr(C)]
struct Span {
    begin: AtomicUsize,
    end: AtomicUsize,
    min_bytes: AtomicUsize,
}

unsafe extern "C" {
    fn dormouse_heap_range() -> *const Span;
    fn dormouse_heap_malloc(bytes: usize) -> *mut c_void;
    fn dormouse_heap_calloc(count: usize, bytes: usize) -> *mut c_void;
    fn dormouse_heap_realloc(pointer: *mut c_void, bytes: usize) -> *mut c_void;
    fn dormouse_heap_free(pointer: *mut c_void);
    fn dormouse_heap_aligned_alloc(align: usize, bytes: usize) -> *mut c_void;
    fn dormouse_heap_usable_size(pointer: *mut c_void) -> usize;

    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, bytes: usize) -> *mut c_void;
    fn __libc_realloc(pointer: *mut c_void, bytes: usize) -> *mut c_void;
    fn __libc_memalign(align: usize, bytes: usize) -> *mut c_void;
    fn __libc_free(pointer: *mut c_void);
}

/// A range nobody is in and a door nobody passes: what holds before the constructor (S1).
static CLOSED: Span = Span {
    begin: AtomicUsize::new(0),
    end: AtomicUsize::new(0),
    min_bytes: AtomicUsize::new(usize::MAX),
};

static SPAN: AtomicPtr<Span> = AtomicPtr::new((&raw const CLOSED).cast_mut());

#[used]
#[unsafe(link_section = ".init_array")]
static OPEN: extern "C" fn() = open;

extern "C" fn open() {
    // SAFETY: libdormouse.so is a dependency, so it is loaded and its constructors have run.
    let span = unsafe { dormouse_heap_range() };
    if !span.is_null() {
        // Release pairs with the acquire in `span`.
        SPAN.store(span.cast_mut(), Ordering::Release);
    }
}

#[inline(always)]
fn span() -> &'static Span {
    // SAFETY: either `CLOSED` or the library's own static, and neither library is ever unloaded.
    unsafe { &*SPAN.load(Ordering::Acquire) }
}

/// Whether the library serves a request this large.
#[inline(always)]
fn served(bytes: usize) -> bool {
    // Relaxed: an old value sends a request to libc, which is always right.
    bytes >= span().min_bytes.load(Ordering::Relaxed)
}

/// Whether `pointer` is the library's (S2). Relaxed: whoever holds a block got it after the range
/// was published.
#[inline(always)]
fn ours(pointer: *mut c_void) -> bool {
    let span = span();
    pointer.addr() >= span.begin.load(Ordering::Relaxed)
        && pointer.addr() < span.end.load(Ordering::Relaxed)
}

#[inline(always)]
fn fail(errno: c_int) -> *mut c_void {
    // SAFETY: this thread's own errno, always there.
    unsafe { *libc::__errno_location() = errno };
    null_mut()
}

/// malloc(3).
///
/// # Safety
/// None beyond malloc's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    if served(bytes) {
        // SAFETY: any size is accepted.
        unsafe { dormouse_heap_malloc(bytes) }
    } else {
        // SAFETY: any size is accepted.
        unsafe { __libc_malloc(bytes) }
    }
}

/// calloc(3).
///
/// # Safety
/// None beyond calloc's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    // An overflowing product is libc's to refuse.
    if count.checked_mul(bytes).is_some_and(served) {
        // SAFETY: any sizes are accepted.
        unsafe { dormouse_heap_calloc(count, bytes) }
    } else {
        // SAFETY: any sizes are accepted.
        unsafe { __libc_calloc(count, bytes) }
    }
}

/// realloc(3).
///
/// # Safety
/// `pointer` is NULL or a live block of this family.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(pointer: *mut c_void, bytes: usize) -> *mut c_void {
    if pointer.is_null() {
        // SAFETY: any size is accepted.
        return unsafe { malloc(bytes) };
    }
    if !ours(pointer) {
        // SAFETY: the caller's contract; libc's by S2 and stays so by S4.
        return unsafe { __libc_realloc(pointer, bytes) };
    }
    if bytes == 0 {
        // As glibc does it.
        // SAFETY: the caller's contract.
        unsafe { dormouse_heap_free(pointer) };
        return null_mut();
    }
    // SAFETY: the caller's contract; the library's by S2.
    unsafe { dormouse_heap_realloc(pointer, bytes) }
}

/// reallocarray(3).
///
/// # Safety
/// As realloc.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(
    pointer: *mut c_void,
    count: usize,
    bytes: usize,
) -> *mut c_void {
    match count.checked_mul(bytes) {
        // SAFETY: the caller's contract.
        Some(bytes) => unsafe { realloc(pointer, bytes) },
        None => fail(libc::ENOMEM),
    }
}

/// free(3).
///
/// # Safety
/// `pointer` is NULL or a live block of this family that nobody uses any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(pointer: *mut c_void) {
    if ours(pointer) {
        // SAFETY: the caller's contract; the library's by S2.
        unsafe { dormouse_heap_free(pointer) }
    } else {
        // SAFETY: the caller's contract; libc's by S2.
        unsafe { __libc_free(pointer) }
    }
}

/// memalign(3), and the core of its family: `align` is brought to a power of two as glibc does.
///
/// # Safety
/// None beyond memalign's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memalign(align: usize, bytes: usize) -> *mut c_void {
    let Some(align) = align.max(ALIGN_BYTES).checked_next_power_of_two() else {
        return fail(libc::EINVAL);
    };
    if served(bytes) {
        // SAFETY: a power of two.
        unsafe { dormouse_heap_aligned_alloc(align, bytes) }
    } else {
        // SAFETY: a power of two.
        unsafe { __libc_memalign(align, bytes) }
    }
}

/// aligned_alloc(3).
///
/// # Safety
/// None beyond aligned_alloc's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
    if !align.is_power_of_two() {
        return fail(libc::EINVAL);
    }
    // SAFETY: any size is accepted.
    unsafe { memalign(align, bytes) }
}

/// posix_memalign(3): the error is the result, and `errno` stays as it was.
///
/// # Safety
/// `place` is writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(
    place: *mut *mut c_void,
    align: usize,
    bytes: usize,
) -> c_int {
    if !align.is_power_of_two() || align < size_of::<*mut c_void>() {
        return libc::EINVAL;
    }
    // SAFETY: this thread's own errno, always there.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: any size is accepted.
    let pointer = unsafe { memalign(align, bytes) };
    if pointer.is_null() {
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = errno };
        return libc::ENOMEM;
    }
    // SAFETY: the caller's contract.
    unsafe { place.write(pointer) };
    0
}

/// Bytes of an OS page.
fn page_bytes() -> usize {
    // SAFETY: sysconf reads a number and takes any name.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// valloc(3).
///
/// # Safety
/// None beyond valloc's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn valloc(bytes: usize) -> *mut c_void {
    // SAFETY: any size is accepted.
    unsafe { memalign(page_bytes(), bytes) }
}

/// pvalloc(3): valloc of whole pages.
///
/// # Safety
/// None beyond pvalloc's own.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvalloc(bytes: usize) -> *mut c_void {
    match bytes.max(1).checked_next_multiple_of(page_bytes()) {
        // SAFETY: any size is accepted.
        Some(bytes) => unsafe { memalign(page_bytes(), bytes) },
        None => fail(libc::ENOMEM),
    }
}

/// malloc_usable_size(3).
///
/// # Safety
/// `pointer` is NULL or a live block of this family.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(pointer: *mut c_void) -> usize {
    if ours(pointer) {
        // SAFETY: the caller's contract; the library's by S2.
        return unsafe { dormouse_heap_usable_size(pointer) };
    }
    // libc has no other name for it, so the next one in line is asked: looked up at each call,
    // because keeping it would need a place that two threads fill.
    type UsableSize = unsafe extern "C" fn(*mut c_void) -> usize;
    // SAFETY: a static name; dlsym is any-thread.
    let next = unsafe { libc::dlsym(libc::RTLD_NEXT, c"malloc_usable_size".as_ptr()) };
    if next.is_null() {
        return 0;
    }
    // SAFETY: that is the signature malloc_usable_size(3) has had ever since.
    let next = unsafe { std::mem::transmute::<*mut c_void, UsableSize>(next) };
    // SAFETY: the caller's contract; libc's by S2.
    unsafe { next(pointer) }
}
