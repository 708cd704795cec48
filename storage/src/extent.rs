//! A piece of the file and the checksums of its content.

use super::file::{IoMemory, UNIT_BYTES};
use super::transfer::Transfer;

/// A piece of the file. Not `Clone`: its holder releases it once.
#[derive(Debug)]
#[must_use = "a dropped extent is never released"]
pub struct Extent {
    piece: dormouse_alloc::core::Extent,
    bytes: u64,
    sums: Vec<u32>,
    /// Bytes of the write budget that are reserved and not written yet.
    pub(super) reserved_bytes: u64,
}

impl Extent {
    pub(super) const fn new(piece: dormouse_alloc::core::Extent, bytes: u64) -> Self {
        let reserved_bytes = piece.units() as u64 * UNIT_BYTES as u64;
        Self { piece, bytes, sums: Vec::new(), reserved_bytes }
    }

    pub(super) fn into_piece(self) -> dormouse_alloc::core::Extent {
        self.piece
    }

    /// Returns its bytes in the file, in whole units.
    #[must_use]
    pub const fn whole_bytes(&self) -> u64 {
        self.piece.units() as u64 * UNIT_BYTES as u64
    }

    /// Returns the bytes requested.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the offset of its first byte in the file.
    #[must_use]
    pub const fn offset(&self) -> u64 {
        self.piece.start_units() as u64 * UNIT_BYTES as u64
    }

    /// Sets the checksums of the content, one per chunk; none if they are off.
    pub fn set_sums(&mut self, sums: Vec<u32>) {
        self.sums = sums;
    }

    pub(super) fn sum(&self, chunk: usize) -> Option<u32> {
        self.sums.get(chunk).copied()
    }

    /// Returns a transfer that writes `memory` and, if `takes_sums`, computes checksums.
    #[must_use]
    pub fn writer(&self, memory: IoMemory, takes_sums: bool) -> Transfer {
        Transfer::writer(self.offset(), memory, takes_sums)
    }

    /// Returns a transfer that reads into `memory` and verifies the checksums.
    #[must_use]
    pub fn reader(&self, memory: IoMemory) -> Transfer {
        Transfer::reader(self.offset(), memory, self.sums.clone())
    }
}
