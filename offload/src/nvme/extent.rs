//! A piece of the file, with the sums of what was written there.

use super::file::{IoMemory, UNIT_BYTES};
use super::transfer::CHUNK_BYTES;
use super::{Nvme, NvmeError, read_chunk, write_chunk};

/// A piece of the file. Not `Clone`: whoever holds it gives it back, once.
#[derive(Debug)]
#[must_use = "an extent that is dropped is never given back"]
pub struct Extent {
    piece: dormouse_alloc::core::Extent,
    bytes: u64,
    sums: Vec<u32>,
}

impl Extent {
    pub(super) const fn new(piece: dormouse_alloc::core::Extent, bytes: u64) -> Self {
        Self { piece, bytes, sums: Vec::new() }
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

    /// Starts writing `memory` here.
    #[must_use]
    pub fn writer(&self, memory: IoMemory) -> Transfer {
        Transfer { extent: self.offset(), memory, done: 0, sums: Vec::new(), reread: 0 }
    }

    /// Starts reading into `memory` from here.
    #[must_use]
    pub fn reader(&self, memory: IoMemory) -> Transfer {
        let sums = self.sums.clone();
        Transfer { extent: self.offset(), memory, done: 0, sums, reread: 0 }
    }
}

/// A transfer between an extent and memory, a chunk at a time.
#[derive(Debug)]
pub struct Transfer {
    extent: u64,
    memory: IoMemory,
    done: usize,
    sums: Vec<u32>,
    reread: u64,
}

impl Transfer {
    /// Whether everything has gone over.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        self.done >= self.memory.bytes()
    }

    /// Bytes to go over in all.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }

    /// The sums taken so far, leaving none.
    pub fn take_sums(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.sums)
    }

    /// Chunks that had to be read twice.
    #[must_use]
    pub const fn reread(&self) -> u64 {
        self.reread
    }

    /// Writes the next chunk.
    ///
    /// # Errors
    /// See [`write_chunk`].
    pub fn write_next(&mut self, nvme: &Nvme) -> Result<(), NvmeError> {
        let part = self.memory.part(self.done, CHUNK_BYTES);
        if nvme.checksums() {
            self.sums.push(part.crc32c());
        }
        write_chunk(nvme.storage(), self.extent + self.done as u64, &part)?;
        self.done += part.bytes();
        Ok(())
    }

    /// Reads and verifies the next chunk.
    ///
    /// # Errors
    /// See [`read_chunk`].
    pub fn read_next(&mut self, nvme: &Nvme) -> Result<(), NvmeError> {
        let part = self.memory.part(self.done, CHUNK_BYTES);
        let expected = self.sums.get(self.done / CHUNK_BYTES).copied();
        let offset = self.extent + self.done as u64;
        if read_chunk(nvme.storage(), self.extent, offset, &part, expected)? {
            self.reread += 1;
        }
        self.done += part.bytes();
        Ok(())
    }
}
