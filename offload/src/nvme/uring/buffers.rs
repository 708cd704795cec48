//! Memory lent for long, registered with every ring: the kernel need not look its pages up again
//! for each request, which is most of what a request costs it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use super::KernelRing;
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
    rings: Vec<Arc<KernelRing>>,
    /// Held by whoever lends or takes back: the kernel takes its time over that.
    changing: Mutex<()>,
    /// Held for moments, by every request. Taken after `changing`.
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
    pub(in crate::nvme) fn new(rings: &[Arc<KernelRing>]) -> (Self, Option<io::Error>) {
        let made =
            |ring: &Arc<KernelRing>| ring.submitter().register_buffers_sparse(SLOTS_MAX.into());
        let refused = rings.iter().find_map(|ring| made(ring).err());
        let free = if refused.is_none() { (0..SLOTS_MAX).rev().collect() } else { Vec::new() };
        let table = Mutex::new(Table { pieces: BTreeMap::new(), free });
        (Self { rings: rings.to_vec(), changing: Mutex::new(()), table }, refused)
    }

    /// Lends memory until it is taken back. Where that is refused it can be used all the same.
    pub(in crate::nvme) fn lend(&self, memory: &IoMemory) -> io::Result<()> {
        let _one_at_a_time = lock(&self.changing);
        // Lent twice is lent anew.
        self.remove(memory);
        for at in (0..memory.bytes()).step_by(PIECE_BYTES_MAX) {
            let piece = memory.part(at, PIECE_BYTES_MAX);
            if let Err(e) = self.lend_piece(&piece) {
                self.remove(memory);
                return Err(e);
            }
        }
        Ok(())
    }

    fn lend_piece(&self, piece: &IoMemory) -> io::Result<()> {
        let free = lock(&self.table).free.pop();
        let slot = free.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSPC))?;
        let placed = self.rings.iter().try_for_each(|ring| put(ring, slot, piece));
        if placed.is_err() {
            self.clear(slot);
        }
        let mut table = lock(&self.table);
        match placed {
            Ok(()) => {
                let end = piece.address() + piece.bytes();
                table.pieces.insert(piece.address(), (end, slot));
            }
            Err(_) => table.free.push(slot),
        }
        placed
    }

    /// Takes memory back: nothing uses it, and once this returns no request can reach it. (A kernel
    /// before 6.4 may hold its pages until requests before are over.)
    pub(in crate::nvme) fn take_back(&self, memory: &IoMemory) {
        let _one_at_a_time = lock(&self.changing);
        self.remove(memory);
    }

    /// The slot that all of a request's memory lies in.
    pub(super) fn find(&self, memory: &IoMemory) -> Option<u16> {
        let table = lock(&self.table);
        let (_, &(end, slot)) = table.pieces.range(..=memory.address()).next_back()?;
        (memory.address() + memory.bytes() <= end).then_some(slot)
    }

    fn remove(&self, memory: &IoMemory) {
        for at in (0..memory.bytes()).step_by(PIECE_BYTES_MAX) {
            let removed = lock(&self.table).pieces.remove(&(memory.address() + at));
            if let Some((_, slot)) = removed {
                self.clear(slot);
                lock(&self.table).free.push(slot);
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

fn put(ring: &KernelRing, slot: u16, piece: &IoMemory) -> io::Result<()> {
    let named = libc::iovec { iov_base: piece.address() as *mut _, iov_len: piece.bytes() };
    // SAFETY: `IoMemory::new`'s contract, until the table's copy of it is removed (U3).
    unsafe { ring.submitter().register_buffers_update(slot.into(), &[named], None) }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::super::{REFUSALS_MAX, Ring, set_up};
    use super::*;
    use crate::nvme::error::IoOperation;
    use crate::nvme::faults::disk_dir;
    use crate::nvme::note::Note;
    use crate::nvme::queue::{Queue, Request};
    use crate::nvme::{Aligned, DirectFile, UNIT_BYTES};

    /// A slot that is empty while the table says what lies in it: every request fails in the ring, and
    /// the file is as good as ever.
    #[test]
    fn what_the_ring_turns_down_the_file_does() {
        let file = Arc::new(DirectFile::create(&disk_dir(), 64 * UNIT_BYTES as u64).unwrap());
        let ring = match set_up(&file, 4) {
            Ok(ring) => ring,
            Err(refusal) => return super::super::refused_here(&refusal.error),
        };
        let rings = [Arc::new(ring)];
        let (buffers, refused) = Buffers::new(&rings);
        assert!(refused.is_none(), "{refused:?}");
        let (buffers, note) = (Arc::new(buffers), Arc::new(Note::default()));
        let mut data = Aligned::zeroed(UNIT_BYTES).unwrap();
        data.as_mut_slice().fill(7);
        buffers.lend(&data.memory()).unwrap();
        buffers.clear(buffers.find(&data.memory()).unwrap());
        let [ring] = rings;
        let mut queue = Ring::new(ring, file, Arc::clone(&buffers), 4, Arc::clone(&note));
        let mut round = |operation, offset| {
            queue.push(9, Request { operation, offset, memory: data.memory() });
            let answer = queue.wait().unwrap();
            assert_eq!((answer.token, answer.result.unwrap()), (9, UNIT_BYTES));
        };
        for turn in 0..u64::from(REFUSALS_MAX) / 2 {
            assert_eq!(note.get(), None, "turn {turn}");
            round(IoOperation::Write, turn * UNIT_BYTES as u64);
            round(IoOperation::Read, turn * UNIT_BYTES as u64);
        }
        let reason = note.get().unwrap();
        assert!(reason.starts_with("a request through io_uring: "), "{reason}");
        round(IoOperation::Read, 0);
        drop(queue);
        assert!(data.as_slice().iter().all(|byte| *byte == 7));
    }
}
