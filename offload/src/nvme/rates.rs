//! How fast the file is, measured once.

use std::time::Instant;

use super::error::NvmeError;
use super::file::Aligned;
use super::storage::Storage;
use super::transfer::{CHUNK_BYTES, read_chunk, write_chunk};

/// Bytes each way per round, and rounds: enough to see past a drive's first burst, small enough
/// to cost a tenth of a second.
const ROUND_BYTES: u64 = 32 << 20;
const ROUNDS: u64 = 2;

/// Measured rates; 0 where nothing was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Bytes per second into the file.
    pub write_bytes_per_s: u64,
    /// Bytes per second out of the file.
    pub read_bytes_per_s: u64,
}

/// Writes and reads the first part of the file. A file too small to tell is not measured.
pub(super) fn measure(storage: &dyn Storage, file_bytes: u64) -> Result<Rates, NvmeError> {
    if file_bytes < ROUNDS * ROUND_BYTES {
        return Ok(Rates::default());
    }
    let Some(mut buffer) = Aligned::zeroed(CHUNK_BYTES) else { return Ok(Rates::default()) };
    let memory = buffer.memory();
    let offsets = || (0..ROUNDS * ROUND_BYTES).step_by(CHUNK_BYTES);
    let started = Instant::now();
    for offset in offsets() {
        write_chunk(storage, offset, &memory)?;
    }
    let write_bytes_per_s = rate(ROUNDS * ROUND_BYTES, started);
    let started = Instant::now();
    for offset in offsets() {
        read_chunk(storage, 0, offset, &memory, None)?;
    }
    Ok(Rates { write_bytes_per_s, read_bytes_per_s: rate(ROUNDS * ROUND_BYTES, started) })
}

fn rate(bytes: u64, started: Instant) -> u64 {
    let ns = started.elapsed().as_nanos().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000_000 / ns).unwrap_or(u64::MAX)
}
