//! A piece of the file, with the sums of what was written there.

use super::file::{IoMemory, UNIT_BYTES};
use super::transfer::Transfer;

/// A piece of the file. Not `Clone`: whoever holds it gives it back, once.
#[derive(Debug)]
#[must_use = "an extent that is dropped is never given back"]
pub struct Extent {
    piece: dormouse_alloc::core::Extent,
    bytes: u64,
    sums: Vec<u32>,
    /// Of the day's budget of writes, set aside and not written yet.
    pub(super) reserved_bytes: u64,
}

impl Extent {
    /// All that it takes is set aside to be written.
    pub(super) const fn new(piece: dormouse_alloc::core::Extent, bytes: u64) -> Self {
        let mut it = Self { piece, bytes, sums: Vec::new(), reserved_bytes: 0 };
        it.reserved_bytes = it.whole_bytes();
        it
    }

    pub(super) fn into_piece(self) -> dormouse_alloc::core::Extent {
        self.piece
    }

    /// Bytes it takes in the file.
    #[must_use]
    pub const fn whole_bytes(&self) -> u64 {
        self.piece.units() as u64 * UNIT_BYTES as u64
    }

    /// Bytes asked for.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// First byte in the file.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.piece.start_units() as u64 * UNIT_BYTES as u64
    }

    /// Keeps the sums of what was written, one per chunk (none where sums are off).
    pub fn set_sums(&mut self, sums: Vec<u32>) {
        self.sums = sums;
    }

    /// The sum of one chunk, where there is one.
    #[must_use]
    pub fn sum(&self, chunk: usize) -> Option<u32> {
        self.sums.get(chunk).copied()
    }

    /// Starts writing `memory` here, summing its chunks where `takes_sums`.
    #[must_use]
    pub fn writer(&self, memory: IoMemory, takes_sums: bool) -> Transfer {
        Transfer::writer(self.offset(), memory, takes_sums)
    }

    /// Starts reading into `memory` from here.
    #[must_use]
    pub fn reader(&self, memory: IoMemory) -> Transfer {
        Transfer::reader(self.offset(), memory, self.sums.clone())
    }
}
