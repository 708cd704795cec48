//! Parked pages: they stay in place when a range is unmapped, and are moved to the next range that is
//! mapped.
//!
//! A new page costs a fault and zeroing by the kernel, about five times as much as moving an existing
//! page. Pages move in *pieces*, runs of pages of one mapping. A moved piece never merges with its
//! neighbours again, so the ends of moved pieces are recorded (*edges*), and their number is limited.
//!
//! - **P1** A page of the space that is neither mapped nor staged has memory only if it is parked.
//! - **P2** Parked pages are inaccessible.
//!
//! Pages that cannot be parked are returned to the system, and missing ones come from it. The lock is
//! held during system calls that neither wait nor allocate.

use std::sync::atomic::{AtomicU64, Ordering};

use super::edges::Edges;
use super::system;
use crate::sync::Mutex;
use crate::{AddressRange, DeviceError, Fill, Operation};

/// Limit of the parked bytes: what falls asleep while one layer of a model computes.
pub const PARKED_BYTES_MAX: usize = 64 << 20;
/// Limit of the parked pieces.
const PIECES_MAX: usize = 64;
/// Shorter pieces are not worth their system calls.
const PIECE_BYTES_MIN: usize = 256 << 10;
/// A longer run is parked as several pieces, so that a part of it fits.
const PIECE_BYTES_MAX: usize = 16 << 20;
/// An unused entry.
const VACANT: AddressRange = AddressRange::new(0, 0);
/// Limit of the edges in a space: a quarter of the mappings that Linux allows a process (65,530).
const EDGES_MAX: usize = 1 << 14;

/// The parked pages of a space.
#[derive(Debug)]
pub(super) struct Parked {
    inner: Mutex<Inner>,
    /// Bytes of the pieces. Relaxed: a count.
    bytes: AtomicU64,
}

#[derive(Debug)]
struct Inner {
    /// Their addresses, or [`VACANT`].
    pieces: [AddressRange; PIECES_MAX],
    edges: Edges,
}

impl Parked {
    pub(super) fn new(space: AddressRange, page_bytes: usize) -> Result<Self, DeviceError> {
        let edges = Edges::new(space, page_bytes)?;
        let pieces = [VACANT; PIECES_MAX];
        Ok(Self { inner: Mutex::new(Inner { pieces, edges }), bytes: AtomicU64::new(0) })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Removes access to `range` and its pages, in one step for other threads (I2). After an error the
    /// range is unchanged, read-only if `is_frozen`.
    ///
    /// # Safety
    /// `range` is a mapped part of our space, and its contents are no longer needed.
    pub(super) unsafe fn vacate(
        &self,
        range: AddressRange,
        is_frozen: bool,
        operation: Operation,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's contract.
        unsafe {
            if range.bytes < PIECE_BYTES_MIN
                || system::protect(range, system::NO_ACCESS, operation).is_err()
            {
                let Err(error) = system::close(range, operation) else {
                    self.inner.lock().edges.erase(range);
                    return Ok(());
                };
                // Access may be removed partly.
                let access = if is_frozen { system::READ_ONLY } else { system::READ_WRITE };
                if system::protect(range, access, operation).is_ok() {
                    return Err(error);
                }
                // Not restorable: completed instead.
                system::clear(range);
                return Ok(());
            }
        }
        // From here nothing can fail: the pages are inaccessible.
        let mut inner = self.inner.lock();
        let (mut rest, mut unparked) = (range, AddressRange::new(range.start, 0));
        while rest.bytes > 0 {
            let (piece, after) = rest.split_at(inner.edges.run_bytes(rest).min(PIECE_BYTES_MAX));
            if self.park(&mut inner, piece) {
                // SAFETY: the caller's contract; it is inaccessible.
                unsafe { inner.clear(unparked) };
                unparked = AddressRange::new(after.start, 0);
            } else {
                unparked.bytes += piece.bytes;
            }
            rest = after;
        }
        // SAFETY: as above.
        unsafe { inner.clear(unparked) };
        Ok(())
    }

    /// Prepares `range` for access: with the available parked pages, or without pages for zeroed
    /// contents.
    ///
    /// # Errors
    /// `Refused` if pages with old bytes cannot be removed: they stay parked.
    ///
    /// # Safety
    /// `range` is a part of our space, neither mapped nor in a span, and used by the caller only.
    pub(super) unsafe fn fill(&self, range: AddressRange, fill: Fill) -> Result<(), DeviceError> {
        // Always with the lock: another thread may be moving a piece in `range`.
        let mut inner = self.inner.lock();
        if fill == Fill::Zero {
            while let Some((index, inside)) = inner.first_inside(range) {
                // `MADV_DONTNEED` would silently keep pages that are locked in memory.
                // SAFETY: the caller's contract; P1, P2.
                unsafe { system::close(inside, Operation::Map) }?;
                inner.edges.erase(inside);
                self.take(&mut inner, index, inside);
            }
            return Ok(());
        }
        // Pages already there stay; the gaps between them are filled.
        let mut gap = range;
        while let Some(here) = self.take_first(&mut inner, gap) {
            // SAFETY: the caller's contract: a part of `range` without pages.
            unsafe { self.fill_gap(&mut inner, gap.split_at(here.start - gap.start).0) };
            gap = gap.split_at(here.end() - gap.start).1;
        }
        // SAFETY: as above.
        unsafe { self.fill_gap(&mut inner, gap) };
        Ok(())
    }

    /// Moves parked pages to the start of `range`, inaccessible. Returns the lengths of the pieces.
    ///
    /// # Safety
    /// `range` is a new mapping of the caller's, outside of the space.
    pub(super) unsafe fn fill_aside(&self, range: AddressRange) -> Vec<usize> {
        let mut lengths = Vec::new();
        let mut rest = range;
        let mut inner = self.inner.lock();
        // Their edges enter the space when they are published.
        while inner.edges.count() + 2 * (lengths.len() + 1) <= EDGES_MAX {
            // SAFETY: the caller's contract.
            let Some(bytes) = (unsafe { self.unpark(&mut inner, rest) }) else { break };
            lengths.push(bytes);
            rest = rest.split_at(bytes).1;
        }
        lengths
    }

    /// Removes parked pages from `range`, to which a piece is about to be moved.
    pub(super) fn expect_piece(&self, range: AddressRange) {
        // The move replaces them too, unless it is refused.
        self.give_up_in(range);
        self.inner.lock().edges.add(range);
    }

    /// Returns the parked pages of `range` to the system.
    pub(super) fn give_up_in(&self, range: AddressRange) {
        let mut inner = self.inner.lock();
        while let Some(piece) = self.take_first(&mut inner, range) {
            // SAFETY: P1, P2: unused and inaccessible.
            unsafe { inner.clear(piece) };
        }
    }

    /// Returns parked pages beyond `keep_bytes` to the system. Returns their bytes.
    pub(super) fn shrink(&self, keep_bytes: u64) -> u64 {
        if self.bytes() <= keep_bytes {
            return 0;
        }
        let mut inner = self.inner.lock();
        let mut given_bytes = 0;
        for index in 0..PIECES_MAX {
            if self.bytes() <= keep_bytes {
                break;
            }
            given_bytes += self.give_up(&mut inner, index);
        }
        given_bytes
    }

    /// Replaces entry `index`. Returns the old one.
    fn set(&self, inner: &mut Inner, index: usize, piece: AddressRange) -> AddressRange {
        let before = std::mem::replace(&mut inner.pieces[index], piece);
        self.bytes.fetch_add(piece.bytes as u64, Ordering::Relaxed);
        self.bytes.fetch_sub(before.bytes as u64, Ordering::Relaxed);
        before
    }

    /// Parks `piece`, in place of smaller ones if necessary. Returns whether it is parked.
    fn park(&self, inner: &mut Inner, piece: AddressRange) -> bool {
        // Beyond the limit of edges pieces cannot be moved.
        if piece.bytes < PIECE_BYTES_MIN || inner.edges.count() > EDGES_MAX {
            return false;
        }
        for _ in 0..=PIECES_MAX {
            let vacant = inner.pieces.iter().position(|entry| entry.bytes == 0);
            let fits = self.bytes() + piece.bytes as u64 <= PARKED_BYTES_MAX as u64;
            if let Some(index) = vacant.filter(|_| fits) {
                self.set(inner, index, piece);
                return true;
            }
            let held = inner.pieces.iter().enumerate().filter(|(_, entry)| entry.bytes > 0);
            let smallest = held.min_by_key(|(_, entry)| entry.bytes).map(|(index, _)| index);
            let Some(index) = smallest.filter(|&it| inner.pieces[it].bytes < piece.bytes) else {
                return false;
            };
            self.give_up(inner, index);
        }
        false
    }

    /// Returns the pages of entry `index` to the system.
    fn give_up(&self, inner: &mut Inner, index: usize) -> u64 {
        let piece = self.set(inner, index, VACANT);
        // SAFETY: P1, P2: unused and inaccessible.
        unsafe { inner.clear(piece) };
        piece.bytes as u64
    }

    /// Removes the lowest parked part of `range`. The rest of its piece stays parked, if there is an entry
    /// for it.
    fn take_first(&self, inner: &mut Inner, range: AddressRange) -> Option<AddressRange> {
        let (index, inside) = inner.first_inside(range)?;
        self.take(inner, index, inside);
        Some(inside)
    }

    /// Removes `inside` from entry `index`.
    fn take(&self, inner: &mut Inner, index: usize, inside: AddressRange) {
        let piece = inner.pieces[index];
        let (before, rest) = piece.split_at(inside.start - piece.start);
        let (_, after) = rest.split_at(inside.bytes);
        self.set(inner, index, before);
        if after.bytes > 0 {
            match inner.pieces.iter().position(|entry| entry.bytes == 0) {
                Some(vacant) => {
                    self.set(inner, vacant, after);
                }
                // SAFETY: P1, P2: unused and inaccessible.
                None => unsafe { inner.clear(after) },
            }
        }
    }

    /// Moves pieces to the start of `gap`.
    ///
    /// # Safety
    /// `gap` is a part of our space without pages, used by the caller only.
    unsafe fn fill_gap(&self, inner: &mut Inner, mut gap: AddressRange) {
        while inner.edges.count() + 2 <= EDGES_MAX {
            // SAFETY: the caller's contract.
            let Some(bytes) = (unsafe { self.unpark(inner, gap) }) else { break };
            let (piece, rest) = gap.split_at(bytes);
            inner.edges.add(piece);
            gap = rest;
        }
    }

    /// Moves one piece to the start of `range`. Returns its length, or `None` if none was moved.
    ///
    /// # Safety
    /// `range` is used by the caller only, and its contents are not needed.
    unsafe fn unpark(&self, inner: &mut Inner, range: AddressRange) -> Option<usize> {
        if range.bytes < PIECE_BYTES_MIN {
            return None;
        }
        let index = choose(&inner.pieces, range.bytes)?;
        let held = inner.pieces[index];
        let bytes = held.bytes.min(range.bytes);
        let (kept, piece) = held.split_at(held.bytes - bytes);
        self.set(inner, index, kept);
        if kept.bytes < PIECE_BYTES_MIN {
            self.give_up(inner, index);
        }
        // SAFETY: the caller's contract; P1, P2: the pages are unused and inaccessible.
        let moved = unsafe { system::move_leaving(piece, range.split_at(bytes).0) };
        // In either case it merges with the rest of the reservation again.
        // SAFETY: as above.
        unsafe { inner.clear(piece) };
        moved.then_some(bytes)
    }
}

impl Inner {
    /// Returns the lowest parked part of `range`, and the entry that it lies in.
    fn first_inside(&self, range: AddressRange) -> Option<(usize, AddressRange)> {
        let overlaps = |piece: &AddressRange| {
            piece.bytes > 0 && piece.start < range.end() && range.start < piece.end()
        };
        let found = self.pieces.iter().enumerate().filter(|(_, piece)| overlaps(piece));
        let (index, piece) = found.min_by_key(|(_, piece)| piece.start)?;
        let start = piece.start.max(range.start);
        Some((index, AddressRange::new(start, piece.end().min(range.end()) - start)))
    }

    /// Returns the pages of `range` to the system. It merges with the rest of the reservation again.
    ///
    /// # Safety
    /// `range` lies in our space, is inaccessible, and its contents are not needed.
    unsafe fn clear(&mut self, range: AddressRange) {
        if range.bytes > 0 {
            // SAFETY: the caller's contract.
            unsafe { system::clear(range) };
            self.edges.erase(range);
        }
    }
}

/// Chooses the piece for `bytes`: the nearest in size, from half to twice; else the shortest longer one, else
/// the longest. A block of many small pieces stays fragmented.
fn choose(pieces: &[AddressRange; PIECES_MAX], bytes: usize) -> Option<usize> {
    let rank = |held: usize| match held {
        _ if held < bytes / 2 => (2, bytes - held),
        _ if held / 2 > bytes => (1, held),
        _ => (0, held.abs_diff(bytes)),
    };
    let held = pieces.iter().map(|piece| piece.bytes).enumerate().filter(|(_, held)| *held > 0);
    held.min_by_key(|&(_, held)| rank(held)).map(|(index, _)| index)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Device;
    use crate::host::{HostConfig, HostDevice, os_page_bytes};

    /// Ranges that a process of some age has mapped and unmapped, at other offsets each time.
    const RANGES: usize = 9_000;

    #[test]
    fn edges_of_pages_that_are_gone_are_forgotten() {
        let page_bytes = os_page_bytes();
        // Ranges that are disjoint, and such that overlap the ones before.
        for step_bytes in [PIECE_BYTES_MIN + page_bytes, page_bytes] {
            let bytes = RANGES * step_bytes + (2 << 20);
            let device = HostDevice::new(HostConfig::new(bytes, bytes as u64)).unwrap();
            let range = |index: usize, bytes| {
                AddressRange::new(device.address_space().start + index * step_bytes, bytes)
            };
            let edges = || device.space.parked.inner.lock().edges.count();
            let held = range(RANGES, 1 << 20);
            for index in 0..RANGES {
                // Every other one gets its pages from the one before, so they are moved.
                if index % 2 == 0 {
                    device.release_parked();
                }
                let here = range(index, PIECE_BYTES_MIN);
                device.map(here, Fill::Any).unwrap();
                device.unmap(here).unwrap();
                assert!(edges() <= 2 * PIECES_MAX, "{} edges after {index}", edges());
            }
            device.release_parked();
            assert_eq!(edges(), 0);
            device.map(held, Fill::Any).unwrap();
            device.unmap(held).unwrap();
            assert_eq!(device.memory_info().parked_bytes, held.bytes as u64);
        }
    }

    /// A block of many short pieces is given back by one call.
    #[test]
    fn neighbours_that_do_not_park_are_cleared_together() {
        let page_bytes = os_page_bytes();
        let device = HostDevice::new(HostConfig::new(8 << 20, 8 << 20)).unwrap();
        let range = device.address_space().split_at(2 * PIECE_BYTES_MIN).0;
        device.map(range, Fill::Any).unwrap();
        let edges = || device.space.parked.inner.lock().edges.count();
        let mut rest = range;
        while rest.bytes > 0 {
            let (piece, after) = rest.split_at(page_bytes);
            device.space.parked.inner.lock().edges.add(piece);
            rest = after;
        }
        assert_eq!(edges(), range.bytes / page_bytes + 1);
        device.unmap(range).unwrap();
        assert_eq!((edges(), device.memory_info().parked_bytes), (0, 0));
        device.map(range, Fill::Any).unwrap();
        device.unmap(range).unwrap();
        assert_eq!(device.memory_info().parked_bytes, range.bytes as u64);
    }

    #[test]
    fn chooses_the_piece_nearest_in_size() {
        let mut pieces = [VACANT; PIECES_MAX];
        assert_eq!(choose(&pieces, 1 << 20), None);
        for (index, bytes) in [(3, 700), (5, 500), (9, 300), (11, 900)] {
            pieces[index] = AddressRange::new(index << 20, bytes);
        }
        assert_eq!(choose(&pieces, 500), Some(5), "exactly");
        assert_eq!(choose(&pieces, 590), Some(5), "too short by the least");
        assert_eq!(choose(&pieces, 610), Some(3), "too long by the least");
        assert_eq!(choose(&pieces, 1800), Some(11), "half of it");
        assert_eq!(choose(&pieces, 150), Some(9), "twice of it");
        assert_eq!(choose(&pieces, 149), Some(9), "the shortest of the longer ones");
        assert_eq!(choose(&pieces, 1802), Some(11), "the longest of the shorter ones");
    }
}
