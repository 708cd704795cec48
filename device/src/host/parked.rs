//! Pages between two owners: left where they were when a range is vacated, moved behind the next
//! range that is filled.
//!
//! A fresh page costs a fault and the kernel's zeroing of it, about five times as much as moving
//! a page that is there. Moving goes by *pieces*, runs of pages that are one mapping to the kernel:
//! a piece that was moved never merges with its neighbours again, so where pieces meet is noted
//! (an *edge*), and their number is limited.
//!
//! - **P1** A page of the space that is neither mapped nor staged has memory only if it is parked.
//! - **P2** Parked pages are shut: nobody reaches them.
//!
//! All best effort: what cannot be parked is given back to the system, what is not there comes
//! from it. The lock is held for system calls that neither wait nor allocate.

use std::sync::atomic::{AtomicU64, Ordering};

use super::edges::Edges;
use super::system;
use crate::sync::{Mutex, MutexGuard};
use crate::{AddressRange, DeviceError, Fill, Operation};

/// The most bytes parked: enough for what falls asleep while one layer of a model computes, and
/// little beside what sleeping gives back.
pub const PARKED_BYTES_MAX: usize = 64 << 20;
/// The most pieces parked.
const PIECES_MAX: usize = 64;
/// Shorter pieces are not worth their system calls.
const PIECE_BYTES_MIN: usize = 256 << 10;
/// A longer run is parked as several pieces, so that a part of it finds room.
const PIECE_BYTES_MAX: usize = 16 << 20;
/// An entry with no piece.
const VACANT: AddressRange = AddressRange::new(0, 0);
/// The most edges in a space: a quarter of the mappings Linux gives a process (65,530).
const EDGES_MAX: usize = 1 << 14;

/// The parked pages of a space.
#[derive(Debug)]
pub(super) struct Parked {
    inner: Mutex<Inner>,
    /// What the pieces come to. Relaxed: it guards no memory.
    bytes: AtomicU64,
}

#[derive(Debug)]
struct Inner {
    /// Where they are, or [`VACANT`].
    pieces: [AddressRange; PIECES_MAX],
    edges: Edges,
}

impl Parked {
    pub(super) fn new(space: AddressRange, page_bytes: usize) -> Result<Self, DeviceError> {
        let edges = Edges::new(space, page_bytes)?;
        let pieces = [VACANT; PIECES_MAX];
        Ok(Self { inner: Mutex::new(Inner { pieces, edges }), bytes: AtomicU64::new(0) })
    }

    /// Bytes parked now.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Takes access to `range` away, and its pages: other threads see the owner's bytes until
    /// then, and nothing after (I2). On an error the range is as it was, read-only where
    /// `is_frozen`.
    ///
    /// # Safety
    /// `range` is a part of our space, mapped, and its bytes are not wanted.
    pub(super) unsafe fn vacate(
        &self,
        range: AddressRange,
        is_frozen: bool,
        operation: Operation,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's.
        unsafe {
            if range.bytes < PIECE_BYTES_MIN || system::shut(range, operation).is_err() {
                let Err(error) = system::close(range, operation) else { return Ok(()) };
                // The shut may have come half-way.
                let restored = if is_frozen {
                    system::write_protect(range, operation)
                } else {
                    system::open(range, operation)
                };
                if restored.is_ok() {
                    return Err(error);
                }
                // Neither back nor forth: forth is what was asked for, and nobody waits at a half.
                system::clear(range);
                return Ok(());
            }
        }
        // From here nothing can fail: nobody reaches the pages, wherever they are.
        let mut inner = self.lock();
        let mut rest = range;
        while rest.bytes > 0 {
            let (piece, after) = rest.split_at(inner.edges.run_bytes(rest).min(PIECE_BYTES_MAX));
            inner.edges.cut(piece);
            if !self.park(&mut inner, piece) {
                // SAFETY: the caller's; it is shut.
                unsafe { system::clear(piece) };
            }
            rest = after;
        }
        Ok(())
    }

    /// Makes `range` ready to be opened: with parked pages behind it as far as there are any, or,
    /// where they are to be zero, with none.
    ///
    /// # Errors
    /// `Refused` where pages with old bytes cannot be taken away: `range` must not be used then.
    ///
    /// # Safety
    /// `range` is a part of our space, neither mapped nor in a span, and the caller's.
    pub(super) unsafe fn fill(&self, range: AddressRange, fill: Fill) -> Result<(), DeviceError> {
        // Always under the lock: a piece in `range` may be on its way to somebody else just now.
        let mut inner = self.lock();
        if fill == Fill::Zero {
            while let Some(piece) = self.take_first(&mut inner, range) {
                // Not merely dropped: a page that is locked into memory stays, and says so nowhere.
                // SAFETY: the caller's; P1, P2.
                unsafe { system::close(piece, Operation::Map) }?;
            }
            return Ok(());
        }
        // What is there already stays, and the gaps before, between and after are filled.
        let mut gap = range;
        while let Some(here) = self.take_first(&mut inner, gap) {
            // SAFETY: the caller's: a part of `range` with no pages.
            unsafe { self.fill_gap(&mut inner, gap.split_at(here.start - gap.start).0) };
            gap = gap.split_at(here.end() - gap.start).1;
        }
        // SAFETY: as above.
        unsafe { self.fill_gap(&mut inner, gap) };
        Ok(())
    }

    /// Moves parked pages behind `range` from its start on; they are shut. The pieces' lengths.
    ///
    /// # Safety
    /// `range` is a fresh mapping of the caller's, outside of the space.
    pub(super) unsafe fn fill_aside(&self, range: AddressRange) -> Vec<usize> {
        let mut lengths = Vec::new();
        let mut rest = range;
        let mut inner = self.lock();
        // Their edges come into the space when they are published.
        while inner.edges.count() + 2 * (lengths.len() + 1) <= EDGES_MAX {
            // SAFETY: the caller's.
            let Some(bytes) = (unsafe { self.unpark(&mut inner, rest) }) else { break };
            lengths.push(bytes);
            rest = rest.split_at(bytes).1;
        }
        lengths
    }

    /// A piece is about to be moved to `range` of the space: what is parked there goes.
    pub(super) fn expect_piece(&self, range: AddressRange) {
        let mut inner = self.lock();
        // The move takes them away as well, unless it is refused.
        while let Some(piece) = self.take_first(&mut inner, range) {
            // SAFETY: P1, P2: nobody's, and reached by nobody.
            unsafe { system::clear(piece) };
        }
        inner.edges.cut(range);
    }

    /// Gives pages back to the system until no more than `keep_bytes` are parked. Returns the
    /// bytes given back.
    pub(super) fn shrink(&self, keep_bytes: u64) -> u64 {
        if self.bytes() <= keep_bytes {
            return 0;
        }
        let mut inner = self.lock();
        let mut given_bytes = 0;
        for index in 0..PIECES_MAX {
            if self.bytes() <= keep_bytes {
                break;
            }
            given_bytes += self.give_up(&mut inner, index);
        }
        given_bytes
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// Puts `piece` into entry `index`; what was there before.
    fn set(&self, inner: &mut Inner, index: usize, piece: AddressRange) -> AddressRange {
        let before = std::mem::replace(&mut inner.pieces[index], piece);
        self.bytes.fetch_add(piece.bytes as u64, Ordering::Relaxed);
        self.bytes.fetch_sub(before.bytes as u64, Ordering::Relaxed);
        before
    }

    /// Enters `piece`, in the place of smaller ones if need be. Whether it was entered.
    fn park(&self, inner: &mut Inner, piece: AddressRange) -> bool {
        // Past the limit of edges nothing is moved, so nothing is kept for it either.
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

    /// Gives the pages of entry `index` to the system.
    fn give_up(&self, inner: &mut Inner, index: usize) -> u64 {
        let piece = self.set(inner, index, VACANT);
        if piece.bytes > 0 {
            // SAFETY: P1, P2: nobody's, and reached by nobody.
            unsafe { system::clear(piece) };
        }
        piece.bytes as u64
    }

    /// Takes the lowest parked part of `range` out. What its piece has beyond stays parked, as far
    /// as there are entries for it.
    fn take_first(&self, inner: &mut Inner, range: AddressRange) -> Option<AddressRange> {
        let overlaps = |piece: &AddressRange| {
            piece.bytes > 0 && piece.start < range.end() && range.start < piece.end()
        };
        let found = inner.pieces.iter().enumerate().filter(|(_, piece)| overlaps(piece));
        let (index, &piece) = found.min_by_key(|(_, piece)| piece.start)?;
        let start = piece.start.max(range.start);
        let (before, rest) = piece.split_at(start - piece.start);
        let (inside, after) = rest.split_at(range.end() - start);
        inner.edges.cut(inside);
        self.set(inner, index, before);
        if after.bytes > 0 {
            match inner.pieces.iter().position(|entry| entry.bytes == 0) {
                Some(vacant) => {
                    self.set(inner, vacant, after);
                }
                // SAFETY: P1, P2: nobody's, and reached by nobody.
                None => unsafe { system::clear(after) },
            }
        }
        Some(inside)
    }

    /// Moves pieces behind `gap` from its start on, as long as there are any.
    ///
    /// # Safety
    /// `gap` is a part of our space, has no pages, and is the caller's.
    unsafe fn fill_gap(&self, inner: &mut Inner, mut gap: AddressRange) {
        while inner.edges.count() + 2 <= EDGES_MAX {
            // SAFETY: the caller's.
            let Some(bytes) = (unsafe { self.unpark(inner, gap) }) else { break };
            let (piece, rest) = gap.split_at(bytes);
            inner.edges.cut(piece);
            gap = rest;
        }
    }

    /// Moves one piece behind the start of `range`; its length, or `None` where that is not to be.
    ///
    /// # Safety
    /// `range` is the caller's, and nothing in it is wanted.
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
        inner.edges.cut(piece);
        // SAFETY: the caller's; P1, P2: the pages are nobody's, and reached by nobody.
        let moved = unsafe { system::move_leaving(piece, range.split_at(bytes).0) };
        // One mapping with the rest of the reservation again, in either case.
        // SAFETY: as above.
        unsafe { system::clear(piece) };
        moved.then_some(bytes)
    }
}

/// The piece to take `bytes` from: the one nearest in size, from half to twice; else the shortest of
/// those that are longer, else the longest. A block of many small pieces stays one for good.
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

    #[test]
    fn the_piece_nearest_in_size_is_taken() {
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
