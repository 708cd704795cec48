//! Long-lived memory, registered with every ring: the kernel then does not look up its pages for each
//! request, which is most of the cost of a request.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use super::KernelRing;
use crate::file::IoMemory;
use crate::sync::{Mutex, lock};

/// Limits of the registered pieces of memory: the kernel's limit (a table costs 8 to 16 bytes per slot),
/// and a smaller one for when the kernel is short of memory.
const SLOTS_MAX: [u16; 2] = [1 << 14, 1 << 10];
/// The longest piece that the kernel accepts.
const PIECE_BYTES_MAX: usize = 1 << 30;

#[derive(Debug, Default)]
struct Table {
    /// By first address: the end address and the slot.
    pieces: BTreeMap<usize, (usize, u16)>,
    free: Vec<u16>,
}

/// Why memory is not registered.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unlent {
    /// The tables are full.
    #[error("all {slots} places for registered memory are taken")]
    NoPlace {
        /// Slots of a table.
        slots: u16,
    },
    /// The error of the system.
    #[error("{0}")]
    Refused(#[from] io::Error),
}

/// The registered memory, the same in every ring.
pub(crate) struct Buffers {
    rings: Vec<Arc<KernelRing>>,
    /// Slots of each ring's table.
    slots: u16,
    /// Held during registration, in which the kernel may take long.
    changing: Mutex<()>,
    /// Held briefly, by every request. Taken after `changing`.
    table: Mutex<Table>,
}

impl std::fmt::Debug for Buffers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffers").field("table", &self.table).finish_non_exhaustive()
    }
}

impl Buffers {
    /// Creates a table in each ring. If the kernel refuses (before 5.19), the tables have no slots, and the
    /// error is returned too.
    pub(crate) fn new(rings: &[Arc<KernelRing>]) -> (Self, Option<io::Error>) {
        let register = |ring: &Arc<KernelRing>| {
            most_slots(|slots| ring.submitter().register_buffers_sparse(slots.into()))
        };
        let fewest =
            rings.iter().try_fold(SLOTS_MAX[0], |fewest, ring| Ok(register(ring)?.min(fewest)));
        let (slots, refused) = fewest.map_or_else(|e| (0, Some(e)), |slots| (slots, None));
        let table = Mutex::new(Table { pieces: BTreeMap::new(), free: (0..slots).rev().collect() });
        (Self { rings: rings.to_vec(), slots, changing: Mutex::new(()), table }, refused)
    }

    /// Registers memory until it is taken back. After an error the memory can be used unregistered.
    pub(crate) fn lend(&self, memory: &IoMemory) -> Result<(), Unlent> {
        let _one_at_a_time = lock(&self.changing);
        // It may be registered already.
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
        if let Err(e) = self.rings.iter().try_for_each(|ring| put(ring, slot, piece)) {
            self.clear(slot);
            lock(&self.table).free.push(slot);
            return Err(e.into());
        }
        let end = piece.address() + piece.bytes();
        lock(&self.table).pieces.insert(piece.address(), (end, slot));
        Ok(())
    }

    /// Deregisters memory that is not in use. No later request can reach it. (A kernel before 6.4 may hold
    /// its pages until earlier requests are over.)
    pub(crate) fn take_back(&self, memory: &IoMemory) {
        let _one_at_a_time = lock(&self.changing);
        self.remove(memory);
    }

    /// Returns the slot that contains all of `memory`.
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
        for ring in self.rings.iter().filter(|ring| ring.check().is_ok()) {
            // After an error the ring holds the pages until it is dropped. No request can reach them: the
            // slot is overwritten before it is used again.
            // SAFETY: no memory is passed.
            let _ =
                unsafe { ring.submitter().register_buffers_update(slot.into(), &[nothing], None) };
        }
    }
}

/// Returns the first of `SLOTS_MAX` for which `make` succeeds.
fn most_slots(mut make: impl FnMut(u16) -> io::Result<()>) -> io::Result<u16> {
    let [most, fewer] = SLOTS_MAX;
    make(most).map(|()| most).or_else(|_| make(fewer).map(|()| fewer))
}

fn put(ring: &KernelRing, slot: u16, piece: &IoMemory) -> io::Result<()> {
    ring.check()?;
    let named = libc::iovec { iov_base: piece.address() as *mut _, iov_len: piece.bytes() };
    // SAFETY: `IoMemory::new`'s contract, until the slot is cleared (U3).
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
    use crate::testing::{disk_dir, refused_here};
    use crate::{Aligned, DirectFile, UNIT_BYTES};

    #[test]
    fn a_small_table_is_the_fallback() {
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

    /// Without rings: the table alone counts the slots.
    #[test]
    fn a_full_table_is_an_error_with_the_number_of_slots() {
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

    /// The table of a ring has the same number of slots.
    #[test]
    fn a_ring_accepts_the_last_slot() {
        let file = Arc::new(DirectFile::create(&disk_dir(), 64 * UNIT_BYTES as u64).unwrap());
        let ring = match set_up(&file, 4) {
            Ok(ring) => Arc::new(ring),
            Err(refusal) => return refused_here(&refusal.error),
        };
        let (buffers, refused) = Buffers::new(&[Arc::clone(&ring)]);
        assert!(refused.is_none(), "{refused:?}");
        assert_eq!(buffers.slots, SLOTS_MAX[0]);
        let mut data = Aligned::zeroed(UNIT_BYTES).unwrap();
        put(&ring, buffers.slots - 1, &data.memory()).unwrap();
        put(&ring, buffers.slots, &data.memory()).unwrap_err();
        buffers.clear(buffers.slots - 1);
    }

    /// The slot is empty, but the table does not know: every request fails in the ring, not in the file.
    #[test]
    fn requests_that_the_ring_refuses_go_to_the_file() {
        let file = Arc::new(DirectFile::create(&disk_dir(), 64 * UNIT_BYTES as u64).unwrap());
        let ring = match set_up(&file, 4) {
            Ok(ring) => ring,
            Err(refusal) => return refused_here(&refusal.error),
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
