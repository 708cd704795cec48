//! Memory lent for long, registered with every ring: the kernel need not look its pages up again
//! for each request, which is most of what a request costs it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use super::KernelRing;
use crate::file::IoMemory;
use crate::sync::{Mutex, lock};

/// Pieces of memory registered at a time: as many as the kernel takes (a table of them costs it 8 to
/// 16 bytes for each), and as many as where it has not the memory for that.
const SLOTS_MAX: [u16; 2] = [1 << 14, 1 << 10];
/// The longest piece the kernel registers as one.
const PIECE_BYTES_MAX: usize = 1 << 30;

#[derive(Debug, Default)]
struct Table {
    /// By first address: the address behind it, and its slot.
    pieces: BTreeMap<usize, (usize, u16)>,
    free: Vec<u16>,
}

/// Why memory is not registered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unlent {
    /// No place in the tables.
    #[error("all {slots} places for registered memory are taken")]
    NoPlace {
        /// How many there are.
        slots: u16,
    },
    /// The system's words.
    #[error("{0}")]
    Refused(#[from] io::Error),
}

/// What is lent, the same in every ring.
pub(crate) struct Buffers {
    rings: Vec<Arc<KernelRing>>,
    /// Places in each ring's table.
    slots: u16,
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
    pub(crate) fn new(rings: &[Arc<KernelRing>]) -> (Self, Option<io::Error>) {
        let made = |ring: &Arc<KernelRing>| {
            most_slots(|slots| ring.submitter().register_buffers_sparse(slots.into()))
        };
        let fewest =
            rings.iter().try_fold(SLOTS_MAX[0], |so_far, ring| Ok(made(ring)?.min(so_far)));
        let (slots, refused) = match fewest {
            Ok(slots) => (slots, None),
            Err(e) => (0, Some(e)),
        };
        let table = Mutex::new(Table { pieces: BTreeMap::new(), free: (0..slots).rev().collect() });
        (Self { rings: rings.to_vec(), slots, changing: Mutex::new(()), table }, refused)
    }

    /// Lends memory until it is taken back. Where that is refused it can be used all the same.
    pub(crate) fn lend(&self, memory: &IoMemory) -> Result<(), Unlent> {
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

    fn lend_piece(&self, piece: &IoMemory) -> Result<(), Unlent> {
        let free = lock(&self.table).free.pop();
        let slot = free.ok_or(Unlent::NoPlace { slots: self.slots })?;
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
        Ok(placed?)
    }

    /// Takes memory back: nothing uses it, and once this returns no request can reach it. (A kernel
    /// before 6.4 may hold its pages until requests before are over.)
    pub(crate) fn take_back(&self, memory: &IoMemory) {
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

/// The first of `SLOTS_MAX` that `make` makes a table of.
fn most_slots(mut make: impl FnMut(u16) -> io::Result<()>) -> io::Result<u16> {
    let [most, fewer] = SLOTS_MAX;
    make(most).map(|()| most).or_else(|_| make(fewer).map(|()| fewer))
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
    use crate::error::IoOperation;
    use crate::fallback::Fallback;
    use crate::queue::{Queue, Request};
    use crate::testing::disk_dir;
    use crate::{Aligned, DirectFile, UNIT_BYTES};

    #[test]
    fn a_kernel_that_makes_no_large_table_is_asked_for_a_small_one() {
        let mut asked = Vec::new();
        let mut made = |up_to: u16| {
            asked.clear();
            let answer = most_slots(|slots| {
                asked.push(slots);
                let refused = || Err(io::Error::from_raw_os_error(libc::ENOMEM));
                if slots <= up_to { Ok(()) } else { refused() }
            });
            (answer.map_err(|e| e.raw_os_error().unwrap()), asked.clone())
        };
        assert_eq!(made(u16::MAX), (Ok(16_384), vec![16_384]));
        assert_eq!(made(16_383), (Ok(1024), vec![16_384, 1024]));
        assert_eq!(made(1023), (Err(libc::ENOMEM), vec![16_384, 1024]));
    }

    /// What is lent and taken back is counted in the table, whatever the rings: here there are none.
    #[test]
    fn as_much_is_lent_as_there_are_places_and_the_refusal_names_them() {
        let (buffers, refused) = Buffers::new(&[]);
        assert!(refused.is_none(), "{refused:?}");
        let places = usize::from(SLOTS_MAX[0]);
        let mut data = Aligned::zeroed(places + 1).unwrap();
        let memory = data.memory();
        for at in 0..places {
            buffers.lend(&memory.part(at, 1)).unwrap();
        }
        let one_more = memory.part(places, 1);
        let refused = buffers.lend(&one_more).unwrap_err().to_string();
        assert_eq!(refused, "all 16384 places for registered memory are taken");
        buffers.take_back(&memory.part(7, 1));
        buffers.lend(&one_more).unwrap();
        assert!(buffers.find(&one_more).is_some() && buffers.find(&memory.part(7, 1)).is_none());
    }

    /// In a ring's own table there are as many.
    #[test]
    fn a_ring_takes_memory_in_the_last_place_too() {
        let file = Arc::new(DirectFile::create(&disk_dir(), 64 * UNIT_BYTES as u64).unwrap());
        let ring = match set_up(&file, 4) {
            Ok(ring) => Arc::new(ring),
            Err(refusal) => return super::super::refused_here(&refusal.error),
        };
        let (buffers, refused) = Buffers::new(&[Arc::clone(&ring)]);
        assert!(refused.is_none(), "{refused:?}");
        assert_eq!(buffers.slots, SLOTS_MAX[0]);
        let mut data = Aligned::zeroed(UNIT_BYTES).unwrap();
        put(&ring, buffers.slots - 1, &data.memory()).unwrap();
        put(&ring, buffers.slots, &data.memory()).unwrap_err();
        buffers.clear(buffers.slots - 1);
    }

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
        let (buffers, note) = (Arc::new(buffers), Arc::new(Fallback::default()));
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
