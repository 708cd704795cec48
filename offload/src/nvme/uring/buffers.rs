//! Memory lent for long, registered with every ring: the kernel need not look its pages up again
//! for each request, which is most of what a request costs it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use io_uring::IoUring;

use crate::nvme::file::IoMemory;
use crate::sync::{Mutex, lock};

/// Pieces of memory registered at a time.
const SLOTS_MAX: u16 = 1024;
/// The longest piece the kernel registers as one.
const PIECE_BYTES_MAX: usize = 1 << 30;

#[derive(Debug, Default)]
struct Table {
    /// By first address: the address behind it, and its slot.
    pieces: BTreeMap<usize, (usize, u16)>,
    free: Vec<u16>,
}

/// What is lent, the same in every ring.
pub(in crate::nvme) struct Buffers {
    rings: Vec<Arc<IoUring>>,
    table: Mutex<Table>,
}

impl std::fmt::Debug for Buffers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffers").field("table", &self.table).finish_non_exhaustive()
    }
}

impl Buffers {
    /// A table in each of the rings; with none where the kernel has no such tables (before 5.19),
    /// and why.
    pub(in crate::nvme) fn new(rings: &[Arc<IoUring>]) -> (Self, Option<io::Error>) {
        let made = |ring: &Arc<IoUring>| ring.submitter().register_buffers_sparse(SLOTS_MAX.into());
        let refused = rings.iter().find_map(|ring| made(ring).err());
        let free = if refused.is_none() { (0..SLOTS_MAX).rev().collect() } else { Vec::new() };
        let table = Mutex::new(Table { pieces: BTreeMap::new(), free });
        (Self { rings: rings.to_vec(), table }, refused)
    }

    /// Lends memory until it is taken back. Where that is refused it can be used all the same.
    pub(in crate::nvme) fn lend(&self, memory: &IoMemory) -> io::Result<()> {
        let mut table = lock(&self.table);
        // Lent twice is lent anew.
        self.remove(&mut table, memory);
        for at in (0..memory.bytes()).step_by(PIECE_BYTES_MAX) {
            let piece = memory.part(at, PIECE_BYTES_MAX);
            let full = || io::Error::from_raw_os_error(libc::ENOSPC);
            let lent = table.free.pop().ok_or_else(full).and_then(|slot| {
                let placed = self.rings.iter().try_for_each(|ring| put(ring, slot, &piece));
                if placed.is_err() {
                    self.clear(slot);
                    table.free.push(slot);
                }
                placed.map(|()| slot)
            });
            match lent {
                Ok(slot) => {
                    let end = piece.address() + piece.bytes();
                    table.pieces.insert(piece.address(), (end, slot));
                }
                Err(e) => {
                    self.remove(&mut table, memory);
                    return Err(e);
                }
            }
        }
        Ok(())
    }

    /// Takes memory back: nothing uses it, and once this returns the kernel holds none of it.
    pub(in crate::nvme) fn take_back(&self, memory: &IoMemory) {
        self.remove(&mut lock(&self.table), memory);
    }

    /// The slot that all of a request's memory lies in.
    pub(super) fn find(&self, memory: &IoMemory) -> Option<u16> {
        let table = lock(&self.table);
        let (_, &(end, slot)) = table.pieces.range(..=memory.address()).next_back()?;
        (memory.address() + memory.bytes() <= end).then_some(slot)
    }

    fn remove(&self, table: &mut Table, memory: &IoMemory) {
        for at in (0..memory.bytes()).step_by(PIECE_BYTES_MAX) {
            if let Some((_, slot)) = table.pieces.remove(&(memory.address() + at)) {
                self.clear(slot);
                table.free.push(slot);
            }
        }
    }

    fn clear(&self, slot: u16) {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        for ring in &self.rings {
            // A ring that refuses keeps the pages until it goes; the slot is written over before
            // it is used again, so no request can reach them.
            // SAFETY: no memory is named.
            let _ =
                unsafe { ring.submitter().register_buffers_update(slot.into(), &[nothing], None) };
        }
    }
}

fn put(ring: &IoUring, slot: u16, piece: &IoMemory) -> io::Result<()> {
    let named = libc::iovec { iov_base: piece.address() as *mut _, iov_len: piece.bytes() };
    // SAFETY: `IoMemory::new`'s contract, until the table's copy of it is removed (U3).
    unsafe { ring.submitter().register_buffers_update(slot.into(), &[named], None) }
}
