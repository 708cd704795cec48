//! Memory that ends where no access is: a kernel that reads past its argument stops the test.

use std::ptr::NonNull;

const GUARD_BYTES: usize = 64 << 10; // a multiple of every page size there is
/// What an element outside the kernel's argument keeps holding.
const CANARY: u8 = 0xa5;

/// `elems` elements, and `slack` more behind them that nothing may write. So `slack` also chooses
/// the alignment of the first.
pub(crate) struct Buffer<T> {
    map: NonNull<u8>,
    map_bytes: usize,
    first: NonNull<T>,
    elems: usize,
    slack: usize,
}

impl<T: Copy> Buffer<T> {
    pub(crate) fn new(values: &[T], slack: usize) -> Self {
        let bytes = size_of_val(values) + slack * size_of::<T>();
        let held = bytes.next_multiple_of(GUARD_BYTES);
        let map_bytes = held + 2 * GUARD_BYTES;
        let access = libc::PROT_NONE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a fresh mapping, of which the middle is opened and then written.
        let map = unsafe {
            let map = libc::mmap(std::ptr::null_mut(), map_bytes, access, kind, -1, 0);
            assert_ne!(map, libc::MAP_FAILED);
            let middle = map.byte_add(GUARD_BYTES);
            assert_eq!(libc::mprotect(middle, held, libc::PROT_READ | libc::PROT_WRITE), 0);
            middle.cast::<u8>().write_bytes(CANARY, held);
            map.cast::<u8>()
        };
        let map = NonNull::new(map).unwrap();
        // SAFETY: within the opened middle, `bytes` before its end.
        let first = unsafe {
            let first = map.add(GUARD_BYTES + held - bytes).cast::<T>();
            first.copy_from_nonoverlapping(NonNull::from(values).cast(), values.len());
            first
        };
        Self { map, map_bytes, first, elems: values.len(), slack }
    }

    pub(crate) fn address(&self) -> *mut T {
        self.first.as_ptr()
    }

    /// The elements, nothing around them having changed.
    pub(crate) fn values(&self) -> Vec<T> {
        let begin = self.map.as_ptr().wrapping_add(GUARD_BYTES);
        let end = self.first.as_ptr().wrapping_add(self.elems);
        let before = self.first.addr().get() - begin.addr();
        let around = [(begin, before), (end.cast(), self.slack * size_of::<T>())];
        for (from, bytes) in around {
            // SAFETY: within the opened middle, written by `new`.
            let bytes = unsafe { std::slice::from_raw_parts(from, bytes) };
            assert!(bytes.iter().all(|byte| *byte == CANARY), "a write outside the argument");
        }
        // SAFETY: within the opened middle, written by `new`; any bits the tests write are a `T`.
        unsafe { std::slice::from_raw_parts(self.first.as_ptr(), self.elems) }.to_vec()
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: the whole mapping of `new`, no longer used.
        unsafe { libc::munmap(self.map.as_ptr().cast(), self.map_bytes) };
    }
}
