//! Spare memory for the library's own small allocations, where libc has none: under a memory limit, or when
//! the system allows no more mappings. The heap refuses requests while little of it is left, so that a request
//! that has begun can end.

use std::alloc::Layout;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

use dormouse_device::sync::Mutex;

use crate::fork;

/// Bytes of spare memory. They are touched only when libc has none.
const SPARE_BYTES: usize = 512 << 10;
/// Unit of its allocations, and their largest alignment.
const CELL_BYTES: usize = 64;
const CELLS: usize = SPARE_BYTES / CELL_BYTES;
const WORDS: usize = CELLS / u64::BITS as usize;
/// The heap refuses requests above this use. The rest is for those that have begun.
const USED_BYTES_MAX: usize = SPARE_BYTES / 4;

#[repr(C, align(64))]
struct Memory(std::cell::UnsafeCell<[u8; SPARE_BYTES]>);

// SAFETY: a cell is used by the owner of its allocation only; `CELLS_USED` hands it out once.
unsafe impl Sync for Memory {}

static MEMORY: Memory = Memory(std::cell::UnsafeCell::new([0; SPARE_BYTES]));
/// A bit for each cell in use.
static CELLS_USED: Mutex<[u64; WORDS]> = Mutex::new([0; WORDS]);
/// Relaxed: a count.
static USED_BYTES: AtomicUsize = AtomicUsize::new(0);

/// Whether the heap must refuse requests.
#[inline]
pub(crate) fn is_low() -> bool {
    USED_BYTES.load(Ordering::Relaxed) > USED_BYTES_MAX
}

/// Whether `pointer` is of the spare memory.
#[inline]
pub(crate) fn contains(pointer: *mut u8) -> bool {
    pointer.addr().wrapping_sub(MEMORY.0.get().addr()) < SPARE_BYTES
}

/// Allocates, or returns null. A forked child gets none: a thread of the parent may hold the lock.
#[cold]
pub(crate) fn take(layout: Layout) -> *mut u8 {
    if layout.align() > CELL_BYTES || layout.size() > SPARE_BYTES || fork::in_child() {
        return null_mut();
    }
    let cells = cells(layout);
    let mut used = CELLS_USED.lock();
    let mut run = 0;
    for cell in 0..CELLS {
        run = if is_used(&used, cell) { 0 } else { run + 1 };
        if run == cells {
            let first = cell + 1 - cells;
            (first..=cell).for_each(|cell| flip(&mut used, cell));
            USED_BYTES.fetch_add(cells * CELL_BYTES, Ordering::Relaxed);
            return MEMORY.0.get().cast::<u8>().wrapping_add(first * CELL_BYTES);
        }
    }
    null_mut()
}

/// Frees an allocation of [`take`]. In a forked child it is a no-op.
#[cold]
pub(crate) fn give(pointer: *mut u8, layout: Layout) {
    if fork::in_child() {
        return;
    }
    let first = (pointer.addr() - MEMORY.0.get().addr()) / CELL_BYTES;
    let mut used = CELLS_USED.lock();
    (first..first + cells(layout)).for_each(|cell| flip(&mut used, cell));
    USED_BYTES.fetch_sub(cells(layout) * CELL_BYTES, Ordering::Relaxed);
}

fn cells(layout: Layout) -> usize {
    layout.size().max(1).div_ceil(CELL_BYTES)
}

fn is_used(used: &[u64; WORDS], cell: usize) -> bool {
    used[cell / u64::BITS as usize] >> (cell % u64::BITS as usize) & 1 == 1
}

fn flip(used: &mut [u64; WORDS], cell: usize) {
    used[cell / u64::BITS as usize] ^= 1 << (cell % u64::BITS as usize);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn allocations_are_aligned_disjoint_and_come_back(
            steps in prop::collection::vec((1..3000_usize, 0..7_u32, any::<bool>()), 1..200),
        ) {
            let mut live: Vec<(*mut u8, Layout)> = Vec::new();
            for (bytes, align, frees) in steps {
                let layout = Layout::from_size_align(bytes, 1 << align).unwrap();
                let pointer = take(layout);
                prop_assert!(!pointer.is_null() && contains(pointer));
                prop_assert_eq!(pointer.addr() % layout.align(), 0);
                let end = pointer.addr() + bytes;
                for &(other, has) in &live {
                    prop_assert!(end <= other.addr() || other.addr() + has.size() <= pointer.addr());
                }
                live.push((pointer, layout));
                if frees {
                    let (pointer, layout) = live.swap_remove(bytes % live.len());
                    give(pointer, layout);
                }
                let used: usize = live.iter().map(|(_, layout)| cells(*layout) * CELL_BYTES).sum();
                prop_assert_eq!(USED_BYTES.load(Ordering::Relaxed), used);
                prop_assert_eq!(is_low(), used > USED_BYTES_MAX);
                if used > SPARE_BYTES / 2 {
                    live.drain(..).for_each(|(pointer, layout)| give(pointer, layout));
                }
            }
            live.drain(..).for_each(|(pointer, layout)| give(pointer, layout));
            prop_assert!(take(Layout::from_size_align(SPARE_BYTES + 1, 1).unwrap()).is_null());
            let all = Layout::from_size_align(SPARE_BYTES, 1).unwrap();
            let whole = take(all);
            prop_assert!(!whole.is_null() && take(Layout::new::<u8>()).is_null());
            give(whole, all);
        }
    }
}
