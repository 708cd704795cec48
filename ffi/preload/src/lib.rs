//! `libdormouse_preload.so`: the malloc family, interposed by LD_PRELOAD, and the calls that limit address space.
//!
//! Requests of at least the minimum size go to `libdormouse.so`, all others to libc. The shim keeps no
//! state and links no crate of the runtime: a second copy of its statics would be a second runtime.
//!
//! ```text
//!   program ──malloc(n)──► shim ── n >= min_bytes ──► dormouse_heap_malloc   (libdormouse.so)
//!           ──free(p)────►      ── begin <= p < end ─► dormouse_heap_free
//!                               └─ else ──► __libc_malloc, __libc_free (libc)
//! ```
//!
//! # Invariants
//! - **S1** Before the constructor has run, and in a process without a heap, libc serves every request. A request is
//!   served, or a block ours, only after the functions of the library have been found.
//! - **S2** A pointer is freed by its allocator: two comparisons with the range decide.
//! - **S3** No lock, no thread-local, no allocation and no panic on any path. Never unloaded.
//! - **S4** `realloc` never moves a block of libc to the heap. A block that begins with `realloc` is libc's: it
//!   will grow.
//! - **S5** The whole family is ours, or none: a program with its own `malloc` keeps it, and the heap stays
//!   closed. What is called libc here is the library that defines `__libc_malloc`: mimalloc and tcmalloc
//!   define the whole set, jemalloc none of it.
//!
//! # Safety
//! Every exported function has the contract of its manual page. Like libc's, none may be called in a signal
//! handler.
#![allow(clippy::missing_safety_doc, reason = "one sentence above holds for all")]

mod family;
mod library;
mod limits;

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use library::{Realloc, UsableSize};

/// Alignment of malloc on 64-bit Linux.
const ALIGN_BYTES: usize = 16;

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, bytes: usize) -> *mut c_void;
    fn __libc_realloc(pointer: *mut c_void, bytes: usize) -> *mut c_void;
    fn __libc_memalign(align: usize, bytes: usize) -> *mut c_void;
    fn __libc_free(pointer: *mut c_void);
}

#[used]
#[unsafe(link_section = ".init_array")]
static OPEN: extern "C" fn() = open;

/// `malloc_usable_size` of the allocator that serves as libc's, looked up once.
static USABLE_SIZE: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
/// `realloc` of a program that has its own malloc family; null if the family is ours.
static OTHER_REALLOC: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

extern "C" fn open() {
    USABLE_SIZE.store(family::of_libc(c"malloc_usable_size"), Ordering::Relaxed);
    limits::find();
    let other = family::other_realloc();
    OTHER_REALLOC.store(other, Ordering::Relaxed);
    if !other.is_null() {
        // The program's own family frees what we would serve (S5).
        return;
    }
    library::find();
}

/// Returns whether the library serves a request of `bytes`.
#[inline(always)]
fn served(bytes: usize) -> bool {
    // Relaxed: with an old value libc serves the request, which is always correct.
    bytes >= library::span().min_bytes.load(Ordering::Relaxed)
}

/// Returns whether `pointer` is a block of the library (S2). Relaxed: a thread that has a block got it
/// after the range was published, and one that has memory of others in a part that has left the range since
/// got it after the end had fallen (decision 0043).
#[inline(always)]
fn ours(pointer: *mut c_void) -> bool {
    let span = library::span();
    pointer.addr() >= span.begin.load(Ordering::Relaxed)
        && pointer.addr() < span.end.load(Ordering::Relaxed)
}

#[inline(always)]
fn fail(errno: c_int) -> *mut c_void {
    // SAFETY: errno of this thread always exists.
    unsafe { *libc::__errno_location() = errno };
    null_mut()
}

/// malloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    if served(bytes) {
        // SAFETY: any size is accepted.
        unsafe { (library::functions().malloc)(bytes) }
    } else {
        // SAFETY: any size is accepted.
        unsafe { __libc_malloc(bytes) }
    }
}

/// calloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn calloc(count: usize, bytes: usize) -> *mut c_void {
    // libc refuses a product that overflows.
    if count.checked_mul(bytes).is_some_and(served) {
        // SAFETY: any sizes are accepted.
        unsafe { (library::functions().calloc)(count, bytes) }
    } else {
        // SAFETY: any sizes are accepted.
        unsafe { __libc_calloc(count, bytes) }
    }
}

/// realloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn realloc(pointer: *mut c_void, bytes: usize) -> *mut c_void {
    if !ours(pointer) {
        // SAFETY: the caller's contract; null, or a block of libc by S2, and by S4 it stays one.
        return unsafe { __libc_realloc(pointer, bytes) };
    }
    if bytes == 0 {
        // As in glibc. SAFETY: the caller's contract; a block of the library by S2.
        unsafe { (library::functions().free)(pointer) };
        return null_mut();
    }
    // SAFETY: the caller's contract; a block of the library by S2.
    unsafe { (library::functions().realloc)(pointer, bytes) }
}

/// reallocarray(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn reallocarray(
    pointer: *mut c_void,
    count: usize,
    bytes: usize,
) -> *mut c_void {
    let Some(bytes) = count.checked_mul(bytes) else { return fail(libc::ENOMEM) };
    let other = OTHER_REALLOC.load(Ordering::Relaxed);
    if other.is_null() {
        // SAFETY: the caller's contract.
        return unsafe { realloc(pointer, bytes) };
    }
    // SAFETY: the signature of realloc(3).
    let other = unsafe { std::mem::transmute::<*mut c_void, Realloc>(other) };
    // SAFETY: the caller's contract; a block of the program's own family.
    unsafe { other(pointer, bytes) }
}

/// free(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn free(pointer: *mut c_void) {
    if ours(pointer) {
        // SAFETY: the caller's contract; a block of the library by S2.
        unsafe { (library::functions().free)(pointer) }
    } else {
        // SAFETY: the caller's contract; a block of libc by S2.
        unsafe { __libc_free(pointer) }
    }
}

/// memalign(3). Rounds `align` up to a power of two, as glibc does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memalign(align: usize, bytes: usize) -> *mut c_void {
    let Some(align) = align.max(ALIGN_BYTES).checked_next_power_of_two() else {
        return fail(libc::EINVAL);
    };
    if served(bytes) {
        // SAFETY: a power of two.
        unsafe { (library::functions().aligned_alloc)(align, bytes) }
    } else {
        // SAFETY: a power of two.
        unsafe { __libc_memalign(align, bytes) }
    }
}

/// aligned_alloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
    if !align.is_power_of_two() {
        return fail(libc::EINVAL);
    }
    // SAFETY: any size is accepted.
    unsafe { memalign(align, bytes) }
}

/// posix_memalign(3). Returns the error and keeps `errno`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_memalign(
    place: *mut *mut c_void,
    align: usize,
    bytes: usize,
) -> c_int {
    if !align.is_power_of_two() || align < size_of::<*mut c_void>() {
        return libc::EINVAL;
    }
    // SAFETY: errno of this thread always exists.
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

/// Size of a system page in bytes.
fn page_bytes() -> usize {
    // SAFETY: sysconf accepts any name.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// valloc(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn valloc(bytes: usize) -> *mut c_void {
    // SAFETY: any size is accepted.
    unsafe { memalign(page_bytes(), bytes) }
}

/// pvalloc(3): valloc(3) of whole pages.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvalloc(bytes: usize) -> *mut c_void {
    match bytes.max(1).checked_next_multiple_of(page_bytes()) {
        // SAFETY: any size is accepted.
        Some(bytes) => unsafe { memalign(page_bytes(), bytes) },
        None => fail(libc::ENOMEM),
    }
}

/// malloc_usable_size(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_usable_size(pointer: *mut c_void) -> usize {
    if ours(pointer) {
        // SAFETY: the caller's contract; a block of the library by S2.
        return unsafe { (library::functions().usable_size)(pointer) };
    }
    let mut found = USABLE_SIZE.load(Ordering::Relaxed);
    if found.is_null() {
        // Before the constructor has run.
        found = family::of_libc(c"malloc_usable_size");
        USABLE_SIZE.store(found, Ordering::Relaxed);
    }
    if found.is_null() {
        return 0;
    }
    // SAFETY: the signature of malloc_usable_size(3).
    let usable_size = unsafe { std::mem::transmute::<*mut c_void, UsableSize>(found) };
    // SAFETY: the caller's contract; a block of libc by S2.
    unsafe { usable_size(pointer) }
}

/// malloc_trim(3): releases free memory of the heap and of libc. Returns 1 if there was any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn malloc_trim(pad: usize) -> c_int {
    // SAFETY: any number is accepted; the range is published.
    let ours = if library::is_found() { unsafe { (library::functions().trim)(pad) } } else { 0 };
    let found = family::of_libc(c"malloc_trim");
    if found.is_null() {
        return ours;
    }
    // SAFETY: the signature of malloc_trim(3).
    let trim = unsafe { std::mem::transmute::<*mut c_void, library::Trim>(found) };
    // SAFETY: any number is accepted.
    ours | unsafe { trim(pad) }
}
