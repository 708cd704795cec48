//! One chunk on its way: what to ask the system for next, and what its answer means. Pure.

use std::io;

use super::error::{IoOperation, NvmeError};
use super::file::{IoMemory, UNIT_BYTES};
use super::queue::Request;
use super::storage::Storage;

/// Longest single read or write: long enough for a disk's full speed, short enough that a wake
/// waits little behind a write, and a cancelled write stops soon.
pub const CHUNK_BYTES: usize = 4 << 20;
/// Times one chunk may come back shorter than asked, or interrupted, before it is an error.
pub const SHORT_ATTEMPTS_MAX: u32 = 64;

/// What an answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkStep {
    /// The rest is to be asked for.
    Again,
    /// All of it has gone over.
    Whole,
}

/// A chunk that goes over whole or not at all, however little the system does at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attempt {
    operation: IoOperation,
    offset: u64,
    memory: IoMemory,
    done: usize,
    stuck: u32,
    attempts: u32,
}

impl Attempt {
    pub(super) const fn new(operation: IoOperation, offset: u64, memory: IoMemory) -> Self {
        Self { operation, offset, memory, done: 0, stuck: 0, attempts: 0 }
    }

    pub(super) const fn memory(&self) -> &IoMemory {
        &self.memory
    }

    pub(super) const fn offset(&self) -> u64 {
        self.offset
    }

    /// What to ask for: all that has not gone over.
    pub(super) fn request(&self) -> Request {
        Request {
            operation: self.operation,
            offset: self.offset + self.done as u64,
            memory: self.memory.part(self.done, self.memory.bytes() - self.done),
        }
    }

    /// The system's answer to [`Attempt::request`].
    pub(super) fn answer(&mut self, result: io::Result<usize>) -> Result<ChunkStep, NvmeError> {
        let asked = self.request();
        self.attempts += 1;
        let n = match result {
            Ok(n) => n.min(asked.memory.bytes()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => return self.again(),
            Err(e) => {
                let bytes = asked.memory.bytes();
                return Err(NvmeError::failed(self.operation, asked.offset, bytes, &e));
            }
        };
        if n == asked.memory.bytes() {
            return Ok(ChunkStep::Whole);
        }
        // Direct I/O goes on at a unit boundary; a part of a unit is transferred again.
        let whole = (self.done + n) / UNIT_BYTES * UNIT_BYTES;
        self.stuck = if whole == self.done { self.stuck + 1 } else { 0 };
        // Nothing, or twice less than a unit where one should be: that is the end of the file.
        if self.operation == IoOperation::Read && (n == 0 || self.stuck == 2) {
            return Err(NvmeError::Truncated {
                offset: self.offset,
                expected_bytes: self.memory.bytes() as u64,
                seen_bytes: (self.done + n) as u64,
            });
        }
        self.done = whole;
        self.again()
    }

    fn again(&self) -> Result<ChunkStep, NvmeError> {
        if self.attempts < SHORT_ATTEMPTS_MAX {
            let (operation, attempts) = (self.operation, self.attempts);
            tracing::debug!(target: "storage", ?operation, offset = self.offset, done_bytes = self.done, attempts, "short I/O continued");
            return Ok(ChunkStep::Again);
        }
        Err(NvmeError::Short {
            operation: self.operation,
            offset: self.offset,
            bytes: self.memory.bytes() as u64,
            done_bytes: self.done as u64,
            attempts: self.attempts,
        })
    }
}

/// Writes all of `memory` at `offset`, on the calling thread, and adds what went over to
/// `moved_bytes`, also where it was not all.
///
/// # Errors
/// `Failed` or `Short`; what is on the disk is then meaningless.
pub(super) fn write_chunk(
    storage: &dyn Storage,
    offset: u64,
    memory: &IoMemory,
    moved_bytes: &mut u64,
) -> Result<(), NvmeError> {
    transfer(storage, Attempt::new(IoOperation::Write, offset, *memory), moved_bytes)
}

/// Fills all of `memory` from `offset` on the calling thread and, where `expected` is given, checks
/// its CRC-32C. A mismatch is read once more: a bad cable or DMA is gone then, a bad disk is not.
///
/// True where the second reading was needed.
///
/// # Errors
/// `Failed`, `Short`, `Truncated`, `Corrupted`.
pub fn read_chunk(
    storage: &dyn Storage,
    extent: u64,
    offset: u64,
    memory: &IoMemory,
    expected: Option<u32>,
) -> Result<bool, NvmeError> {
    let mut again = false;
    loop {
        transfer(storage, Attempt::new(IoOperation::Read, offset, *memory), &mut 0)?;
        let Some(expected) = expected else { return Ok(again) };
        let seen = memory.crc32c();
        if seen == expected {
            return Ok(again);
        }
        if again {
            return Err(NvmeError::Corrupted { extent, offset, expected, seen });
        }
        tracing::warn!(target: "storage", extent, offset, expected, seen, "checksum differs; reading again");
        again = true;
    }
}

fn transfer(
    storage: &dyn Storage,
    mut attempt: Attempt,
    moved_bytes: &mut u64,
) -> Result<(), NvmeError> {
    // Ends: an attempt counts its answers, and no more than SHORT_ATTEMPTS_MAX are `Again`.
    loop {
        let result = attempt.request().execute(storage);
        *moved_bytes += *result.as_ref().unwrap_or(&0) as u64;
        if attempt.answer(result)? == ChunkStep::Whole {
            return Ok(());
        }
    }
}
