//! The allocator of this library itself: libc's own entry points, never the interposed `malloc`, so that
//! the runtime cannot re-enter itself inside `malloc`. Where libc has no memory, [`spare`] serves: Rust would
//! end the process otherwise.
//!
//! `__libc_memalign` is not among them: the sanitizers of C compilers replace it, but not `__libc_free`. A larger
//! alignment is found inside a block of `__libc_malloc`, whose address is noted below the result.

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::c_void;
use std::ptr::null_mut;

use crate::spare;

unsafe extern "C" {
    pub(crate) fn __libc_malloc(bytes: usize) -> *mut c_void;
    pub(crate) fn __libc_calloc(count: usize, bytes: usize) -> *mut c_void;
    pub(crate) fn __libc_realloc(pointer: *mut c_void, bytes: usize) -> *mut c_void;
    pub(crate) fn __libc_memalign(align: usize, bytes: usize) -> *mut c_void;
    pub(crate) fn __libc_free(pointer: *mut c_void);
}

/// Alignment of `__libc_malloc` on 64-bit Linux.
const LIBC_ALIGN: usize = 16;

#[derive(Debug)]
pub(crate) struct System;

/// Allocates with an alignment beyond [`LIBC_ALIGN`]. NULL: libc has no memory.
fn alloc_aligned(layout: Layout) -> *mut u8 {
    let Some(bytes) = layout.size().checked_add(layout.align()) else { return null_mut() };
    // SAFETY: any size is accepted.
    let block: *mut u8 = unsafe { __libc_malloc(bytes) }.cast();
    if block.is_null() {
        return block;
    }
    let offset = layout.align() - block.addr() % layout.align();
    // SAFETY: `offset` is at most the alignment, so `size` bytes follow, and at least `LIBC_ALIGN`, of which both
    // addresses are multiples, so a pointer fits in between.
    unsafe {
        let pointer = block.add(offset);
        pointer.cast::<*mut u8>().sub(1).write(block);
        pointer
    }
}

/// Frees what [`alloc_aligned`] returned.
///
/// # Safety
/// `pointer` is live and of that function.
unsafe fn free_aligned(pointer: *mut u8) {
    // SAFETY: the caller's contract: the block is noted there.
    unsafe { __libc_free(pointer.cast::<*mut c_void>().sub(1).read()) }
}

// SAFETY: glibc's allocator meets the contract. `__libc_free` and `__libc_realloc` accept every pointer returned here
// that is neither of `spare` nor of `alloc_aligned`.
unsafe impl GlobalAlloc for System {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let pointer = if layout.align() <= LIBC_ALIGN {
            // SAFETY: any size is accepted.
            unsafe { __libc_malloc(layout.size()) }.cast()
        } else {
            alloc_aligned(layout)
        };
        if pointer.is_null() { spare::take(layout) } else { pointer }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.align() <= LIBC_ALIGN {
            // SAFETY: any size is accepted.
            let pointer: *mut u8 = unsafe { __libc_calloc(1, layout.size()) }.cast();
            if !pointer.is_null() {
                return pointer;
            }
        }
        // SAFETY: the caller's contract, passed on.
        let pointer = unsafe { self.alloc(layout) };
        if !pointer.is_null() {
            // SAFETY: just allocated with `size` bytes.
            unsafe { pointer.write_bytes(0, layout.size()) };
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if spare::contains(pointer) {
            return spare::give(pointer, layout);
        }
        // SAFETY: the caller's contract: a pointer from this allocator, with this layout.
        unsafe {
            if layout.align() <= LIBC_ALIGN {
                __libc_free(pointer.cast());
            } else {
                free_aligned(pointer);
            }
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        if layout.align() <= LIBC_ALIGN && !spare::contains(pointer) {
            // SAFETY: the caller's contract: a pointer from this allocator.
            let moved: *mut u8 = unsafe { __libc_realloc(pointer.cast(), bytes) }.cast();
            if !moved.is_null() {
                return moved;
            }
        }
        // SAFETY: the alignment is valid; the caller's contract covers the size.
        let fresh = unsafe { self.alloc(Layout::from_size_align_unchecked(bytes, layout.align())) };
        if !fresh.is_null() {
            // SAFETY: both are live and distinct, of at least the smaller size.
            unsafe { fresh.copy_from_nonoverlapping(pointer, layout.size().min(bytes)) };
            // SAFETY: the caller's contract: a pointer from this allocator.
            unsafe { self.dealloc(pointer, layout) };
        }
        fresh
    }
}
