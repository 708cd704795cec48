//! The C symbols the preload library calls, and nobody else: `ffi/include/dormouse_heap.h`.
//!
//! Their contract is malloc's: NULL with `errno` on failure, never a status, never a panic.
#![allow(unreachable_pub, reason = "symbols of the library, called by the preload shim")]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use dormouse_alloc::AllocError;
use dormouse_device::Fill;

use super::{Heap, SPAN, Span, child};
use crate::params::{self, Key};
use crate::{fault, fork, note, system};

/// Most out-of-memory reports written to standard error by one process.
const REPORTS_MAX: usize = 3;

static OPENED: Once = Once::new();
static REPORTS: AtomicUsize = AtomicUsize::new(0);

/// Reads the environment once and gives the words the preload library looks at on every call.
/// Starts no thread, opens no file but the one `DORMOUSE_CONFIG` names, reserves nothing yet.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_heap_range() -> *const Span {
    guarded((), || {
        OPENED.call_once(|| match params::load(&[]) {
            Ok(config) => {
                let least = usize::try_from(config.number(Key::HeapMin)).unwrap_or(usize::MAX);
                SPAN.min_bytes.store(least, Ordering::Release);
            }
            Err(fault) => note::say(&format!(
                "{}; this process runs on libc's malloc, and dormouse_runtime_create will fail",
                fault.sentence
            )),
        });
    });
    &raw const SPAN
}

/// Whether the preload library is there and its door open: somebody asked for the range.
pub(crate) fn preload_is_open() -> bool {
    OPENED.is_completed() && SPAN.min_bytes.load(Ordering::Relaxed) != usize::MAX
}

/// malloc for requests of at least the smallest served.
///
/// # Safety
/// malloc's own: none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_heap_malloc(bytes: usize) -> *mut c_void {
    guarded(null_mut(), || obtain(bytes, 1, Fill::Any).0)
}

/// calloc: zeroed pages where the block is mapped for it, cleared where it is reused.
///
/// # Safety
/// calloc's own: none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_heap_calloc(count: usize, bytes: usize) -> *mut c_void {
    guarded(null_mut(), || {
        let Some(bytes) = count.checked_mul(bytes) else { return no_memory() };
        let (pointer, zeroed) = obtain(bytes, 1, Fill::Zero);
        if !pointer.is_null() && !zeroed {
            // SAFETY: just handed out with at least `bytes` bytes.
            unsafe { pointer.cast::<u8>().write_bytes(0, bytes) };
        }
        pointer
    })
}

/// aligned_alloc and its family.
///
/// # Safety
/// `align` is a power of two.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_heap_aligned_alloc(align: usize, bytes: usize) -> *mut c_void {
    guarded(null_mut(), || obtain(bytes, align, Fill::Any).0)
}

/// free of a block of ours. Never blocks, keeps `errno`; in a forked child it does nothing.
///
/// # Safety
/// free's own: `pointer` is a live block that nobody uses any more.
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
            broken("free", &fault.sentence);
        }
    });
    set_errno(errno);
}

/// realloc of a block of ours. A sleeping block is woken first.
///
/// # Safety
/// realloc's own: `pointer` is a live block of ours.
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
            fault::keep(&fault.sentence);
            note::say(&format!("realloc of a sleeping block: {}", fault.sentence));
            return no_memory();
        }
        let has = block.range.bytes;
        if bytes <= has && bytes >= has / 2 {
            return pointer;
        }
        let fresh = if bytes >= SPAN.min_bytes.load(Ordering::Relaxed) {
            obtain(bytes, 1, Fill::Any).0
        } else {
            // SAFETY: any size is accepted.
            unsafe { system::__libc_malloc(bytes) }
        };
        if !fresh.is_null() {
            // SAFETY: both are live, distinct blocks of at least the lesser size; the old one is
            // awake and its owner's, who is inside realloc.
            unsafe {
                fresh.cast::<u8>().copy_from_nonoverlapping(pointer.cast::<u8>(), has.min(bytes));
            }
            if let Err(fault) = heap.free(pointer.addr(), 0) {
                broken("realloc", &fault.sentence);
            }
        }
        fresh
    })
}

/// malloc_usable_size of a block of ours; 0 in a forked child, which may not look.
///
/// # Safety
/// `pointer` is a live block of ours.
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

/// Memory for malloc, and whether it is known to be zero.
fn obtain(bytes: usize, align: usize, fill: Fill) -> (*mut c_void, bool) {
    if fork::in_child() {
        // SAFETY: any size and power-of-two alignment are accepted.
        return (unsafe { system::__libc_memalign(align.max(16), bytes) }, false);
    }
    // Once there is a heap, finding it takes no lock (I5 of the crate).
    let heap = Heap::get()
        .map_or_else(|| params::in_effect().and_then(|config| Heap::get_or_make(&config)), Ok);
    let heap = match heap {
        Ok(heap) => heap,
        Err(fault) => {
            // The range could not be reserved: say so once and leave the door closed.
            if SPAN.min_bytes.swap(usize::MAX, Ordering::Relaxed) != usize::MAX {
                note::say(&format!("{}; this process runs on libc's malloc", fault.sentence));
            }
            // SAFETY: any size and power-of-two alignment are accepted.
            return (unsafe { system::__libc_memalign(align.max(16), bytes) }, false);
        }
    };
    match heap.allocate(bytes.max(1), align.max(1), 0, fill) {
        Ok(block) => (std::ptr::with_exposed_provenance_mut(block.range.start), block.zeroed),
        Err(error) => {
            report(&error);
            (no_memory(), false)
        }
    }
}

/// malloc has no way to say why: the report goes to this thread's last error, and the first few
/// to standard error.
fn report(error: &AllocError) {
    let text = error.to_string();
    fault::keep(&text);
    if REPORTS.fetch_add(1, Ordering::Relaxed) < REPORTS_MAX {
        note::say(&text);
    }
}

/// In a child: a copy in libc's heap of as much as can be read; ours is left alone.
///
/// # Safety
/// `pointer` was a block of ours in the parent.
unsafe fn realloc_in_child(pointer: *mut c_void, bytes: usize) -> *mut c_void {
    // SAFETY: any size is accepted.
    let fresh = unsafe { system::__libc_malloc(bytes) };
    // SAFETY: `fresh` has `bytes` bytes; the kernel checks the other side.
    if fresh.is_null() || bytes == 0 || unsafe { child::copy_readable(fresh, pointer, bytes) } > 0 {
        return fresh;
    }
    // SAFETY: just allocated, and used by nobody.
    unsafe { system::__libc_free(fresh) };
    no_memory()
}

/// A free or realloc that names no live block: the program's heap is broken, as libc would say.
fn broken(what: &str, sentence: &str) -> ! {
    note::say(&format!("{what}(): invalid pointer: {sentence}"));
    std::process::abort()
}

/// Keeps panics on this side.
fn guarded<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(otherwise)
}

fn no_memory() -> *mut c_void {
    set_errno(libc::ENOMEM);
    null_mut()
}

fn errno() -> i32 {
    // SAFETY: this thread's own errno, always there.
    unsafe { *libc::__errno_location() }
}

fn set_errno(value: i32) {
    // SAFETY: this thread's own errno, always there.
    unsafe { *libc::__errno_location() = value };
}
