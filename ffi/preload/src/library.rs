//! The functions of `libdormouse.so`, found by name: the program runs without the library, too.

use std::cell::UnsafeCell;
use std::ffi::{CStr, c_int, c_void};
use std::mem::{MaybeUninit, transmute};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

/// Written where the library is missing.
const MISSING: &str = "dormouse: libdormouse.so was not found beside libdormouse_preload.so; this process uses \
     libc's malloc\n";

/// `dormouse_heap_span` of `ffi/include/dormouse_heap.h`, written by the library.
#[repr(C)]
pub(crate) struct Span {
    pub(crate) begin: AtomicUsize,
    pub(crate) end: AtomicUsize,
    pub(crate) min_bytes: AtomicUsize,
}

/// An empty range that serves no request, used before the library is found (S1).
static CLOSED: Span = Span {
    begin: AtomicUsize::new(0),
    end: AtomicUsize::new(0),
    min_bytes: AtomicUsize::new(usize::MAX),
};

static SPAN: AtomicPtr<Span> = AtomicPtr::new((&raw const CLOSED).cast_mut());

/// Returns the range of the heap.
#[inline(always)]
pub(crate) fn span() -> &'static Span {
    // SAFETY: `CLOSED` or the library's static. Neither library is ever unloaded.
    unsafe { &*SPAN.load(Ordering::Acquire) }
}

/// Returns whether the functions of the library were found, and the family is ours.
pub(crate) fn is_found() -> bool {
    !std::ptr::eq(span(), &raw const CLOSED)
}

pub(crate) type Realloc = unsafe extern "C" fn(*mut c_void, usize) -> *mut c_void;
pub(crate) type UsableSize = unsafe extern "C" fn(*mut c_void) -> usize;
pub(crate) type Trim = unsafe extern "C" fn(usize) -> c_int;
type Limit = unsafe extern "C" fn(*const c_void);
type Malloc = unsafe extern "C" fn(usize) -> *mut c_void;
type Pair = unsafe extern "C" fn(usize, usize) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void);
type Range = unsafe extern "C" fn() -> *const Span;

/// `ffi/include/dormouse_heap.h`.
#[derive(Clone, Copy)]
pub(crate) struct Functions {
    pub(crate) malloc: Malloc,
    pub(crate) calloc: Pair,
    pub(crate) realloc: Realloc,
    pub(crate) free: Free,
    pub(crate) aligned_alloc: Pair,
    pub(crate) usable_size: UsableSize,
    pub(crate) trim: Trim,
    pub(crate) limit: Limit,
}

struct Found(UnsafeCell<MaybeUninit<Functions>>);

// SAFETY: written once, by the constructor, before the range is published; read after that.
unsafe impl Sync for Found {}

static FOUND: Found = Found(UnsafeCell::new(MaybeUninit::uninit()));

/// Returns the functions.
///
/// # Safety
/// [`find`] has published a range, and the caller has seen it.
#[inline(always)]
pub(crate) unsafe fn functions() -> Functions {
    // SAFETY: the caller's contract: written, and not written again.
    unsafe { (*FOUND.0.get()).assume_init() }
}

/// Finds the functions, and publishes the range of the heap. Without the library it writes a message. Called once, by the
/// constructor.
pub(crate) fn find() {
    let Some((functions, range)) = look_up() else {
        // SAFETY: a live string. A failed write to standard error cannot be reported.
        let _ignored =
            unsafe { libc::write(libc::STDERR_FILENO, MISSING.as_ptr().cast(), MISSING.len()) };
        return;
    };
    // SAFETY: the only write, before any read.
    unsafe { (*FOUND.0.get()).write(functions) };
    // SAFETY: loaded with this library, and never unloaded.
    let span = unsafe { range() };
    if !span.is_null() {
        // Release pairs with the acquire in `span`.
        SPAN.store(span.cast_mut(), Ordering::Release);
    }
}

fn look_up() -> Option<(Functions, Range)> {
    let of = |name: &CStr| {
        // SAFETY: a static name; dlsym is thread-safe.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    };
    // SAFETY: the signatures of `dormouse_heap.h`.
    unsafe {
        let functions = Functions {
            malloc: transmute::<*mut c_void, Malloc>(of(c"dormouse_heap_malloc")?),
            calloc: transmute::<*mut c_void, Pair>(of(c"dormouse_heap_calloc")?),
            realloc: transmute::<*mut c_void, Realloc>(of(c"dormouse_heap_realloc")?),
            free: transmute::<*mut c_void, Free>(of(c"dormouse_heap_free")?),
            aligned_alloc: transmute::<*mut c_void, Pair>(of(c"dormouse_heap_aligned_alloc")?),
            usable_size: transmute::<*mut c_void, UsableSize>(of(c"dormouse_heap_usable_size")?),
            trim: transmute::<*mut c_void, Trim>(of(c"dormouse_heap_trim")?),
            limit: transmute::<*mut c_void, Limit>(of(c"dormouse_heap_limit")?),
        };
        Some((functions, transmute::<*mut c_void, Range>(of(c"dormouse_heap_range")?)))
    }
}
