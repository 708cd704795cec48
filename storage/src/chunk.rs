//! One chunk in flight: the next request to the system, and the meaning of its answer. Pure.

use std::io;

use super::error::{IoOperation, NvmeError};
use super::file::{IoMemory, UNIT_BYTES};
use super::queue::Request;

/// Longest single read or write: long enough for a disk's full speed, short enough that a wake waits
/// little behind a write.
pub const CHUNK_BYTES: usize = 4 << 20;
/// Limit on short or interrupted answers for one chunk.
pub const SHORT_ATTEMPTS_MAX: u32 = 64;

/// The state of a chunk after an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChunkStep {
    /// The rest must be requested.
    Again,
    /// The chunk is complete.
    Whole,
}

/// A chunk that is transferred whole or not at all, in as many requests as the system needs.
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

    /// Returns the request for the bytes that are still missing.
    pub(super) fn request(&self) -> Request {
        Request {
            operation: self.operation,
            offset: self.offset + self.done as u64,
            memory: self.memory.part(self.done, self.memory.bytes() - self.done),
        }
    }

    /// Takes the system's answer to [`Attempt::request`].
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
        // Direct I/O continues at a unit boundary; a part of a unit is transferred again.
        let whole = (self.done + n) / UNIT_BYTES * UNIT_BYTES;
        self.stuck = if whole == self.done { self.stuck + 1 } else { 0 };
        // No bytes, or twice less than a unit: the end of the file.
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
