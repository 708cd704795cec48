//! Checked transfers: whole or an error, with every length looked at and every chunk summed.

use std::io;

use super::error::{IoOperation, NvmeError};
use super::file::{IoMemory, UNIT_BYTES};
use super::storage::Storage;

/// Longest single read or write: long enough for a disk's full speed, short enough that a wake
/// waits little behind a write, and a cancelled write stops soon.
pub const CHUNK_BYTES: usize = 4 << 20;
/// Times one chunk may come back shorter than asked, or interrupted, before it is an error.
pub const SHORT_ATTEMPTS_MAX: u32 = 64;

/// Writes all of `memory` at `offset`.
///
/// # Errors
/// `Failed` or `Short`; what is on the disk is then meaningless.
pub fn write_chunk(storage: &dyn Storage, offset: u64, memory: &IoMemory) -> Result<(), NvmeError> {
    transfer(IoOperation::Write, offset, memory, &|at, part| storage.write(at, part))?;
    storage.drop_cache(offset, memory.bytes() as u64);
    Ok(())
}

/// Fills all of `memory` from `offset` and, where `expected` is given, checks its CRC-32C. A
/// mismatch is read once more: a bad cable or DMA is gone then, a bad disk is not.
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
        transfer(IoOperation::Read, offset, memory, &|at, part| storage.read(at, part))?;
        storage.drop_cache(offset, memory.bytes() as u64);
        let Some(expected) = expected else { return Ok(again) };
        let seen = memory.crc32c();
        if seen == expected {
            return Ok(again);
        }
        if again {
            return Err(NvmeError::Corrupted { extent, offset, expected, seen });
        }
        again = true;
    }
}

type Once<'a> = &'a dyn Fn(u64, &IoMemory) -> io::Result<usize>;

fn transfer(
    operation: IoOperation,
    offset: u64,
    memory: &IoMemory,
    once: Once<'_>,
) -> Result<(), NvmeError> {
    let bytes = memory.bytes();
    let mut done = 0;
    let mut stuck = 0;
    for _ in 0..SHORT_ATTEMPTS_MAX {
        let part = memory.part(done, bytes - done);
        let n = match once(offset + done as u64, &part) {
            Ok(n) => n.min(part.bytes()),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => {
                return Err(NvmeError::failed(operation, offset + done as u64, part.bytes(), &e));
            }
        };
        if done + n == bytes {
            return Ok(());
        }
        // Direct I/O goes on at a unit boundary; a part of a unit is transferred again.
        let whole = (done + n) / UNIT_BYTES * UNIT_BYTES;
        stuck = if whole == done { stuck + 1 } else { 0 };
        // Nothing, or twice less than a unit where one should be: that is the end of the file.
        if operation == IoOperation::Read && (n == 0 || stuck == 2) {
            return Err(NvmeError::Truncated {
                offset,
                expected_bytes: bytes as u64,
                seen_bytes: (done + n) as u64,
            });
        }
        done = whole;
    }
    Err(NvmeError::Short {
        operation,
        offset,
        bytes: bytes as u64,
        done_bytes: done as u64,
        attempts: SHORT_ATTEMPTS_MAX,
    })
}
