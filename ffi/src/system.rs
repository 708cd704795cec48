//! The allocator of this library itself: libc's own entry points, never the interposed `malloc`, so that
//! the runtime cannot re-enter itself inside `malloc`. Where libc has no memory, [`spare`] serves: Rust would
//! end the process otherwise.

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::c_void;

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

// SAFETY: glibc's allocator meets the contract. Larger alignments go to memalign. `__libc_free` and
// `__libc_realloc` accept every pointer returned here that is not of `spare`.
unsafe impl GlobalAlloc for System {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: any size and any power-of-two alignment are accepted.
        let pointer = unsafe {
            if layout.align() <= LIBC_ALIGN {
                __libc_malloc(layout.size())
            } else {
                __libc_memalign(layout.align(), layout.size())
            }
        };
        if pointer.is_null() { spare::take(layout) } else { pointer.cast() }
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
        // SAFETY: the caller's contract: a pointer from this allocator.
        unsafe { __libc_free(pointer.cast()) }
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
