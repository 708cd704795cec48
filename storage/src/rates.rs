//! The throughput of the file, measured once.

use std::time::Instant;

use super::error::NvmeError;
use super::file::{Aligned, UNIT_BYTES};
use super::queue::Queue;
use super::transfer::Transfer;
use super::write_budget::WriteBudget;

/// Bytes of each direction per round, and rounds: more than a drive's first burst, at a cost of a tenth
/// of a second.
const ROUND_BYTES: usize = 32 << 20;
const ROUNDS: usize = 2;
/// Reads of one unit, each far from the last.
const UNIT_READS: usize = 4;

/// Measured rates; 0 if not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Bytes written per second.
    pub write_bytes_per_s: u64,
    /// Bytes read per second.
    pub read_bytes_per_s: u64,
    /// The least time of a read of one unit, in nanoseconds.
    pub read_latency_ns: u64,
}

/// Writes and reads the first part of the file. A file that is too small, or whose write budget is too
/// small, is not measured.
pub(super) fn measure(
    queue: &mut dyn Queue,
    file_bytes: u64,
    writes: &mut WriteBudget,
) -> Result<Rates, NvmeError> {
    let mut reserved_bytes = (ROUNDS * ROUND_BYTES) as u64;
    if file_bytes < reserved_bytes {
        return Ok(Rates::default());
    }
    let Some(mut buffer) = Aligned::zeroed(ROUND_BYTES) else { return Ok(Rates::default()) };
    // At time 0, the start of the write budget.
    if writes.reserve(reserved_bytes, 0).is_err() {
        return Ok(Rates::default());
    }
    // Untouched pages would all be the same page of zeroes.
    buffer.as_mut_slice().fill(1);
    let memory = buffer.memory();
    let offsets = || (0..ROUNDS).map(|round| (round * ROUND_BYTES) as u64);
    let started = Instant::now();
    for offset in offsets() {
        let mut transfer = Transfer::writer(offset, memory, false);
        transfer.run(queue)?;
        writes.wrote(&mut reserved_bytes, transfer.moved_bytes(), 0);
    }
    let write_bytes_per_s = rate((ROUNDS * ROUND_BYTES) as u64, started);
    let started = Instant::now();
    for offset in offsets() {
        Transfer::reader(offset, memory, Vec::new()).run(queue)?;
    }
    let read_bytes_per_s = rate((ROUNDS * ROUND_BYTES) as u64, started);
    let mut read_latency_ns = u64::MAX;
    for at in 0..UNIT_READS {
        let offset = (at * ROUNDS * ROUND_BYTES / UNIT_READS) as u64;
        let started = Instant::now();
        Transfer::reader(offset, memory.part(0, UNIT_BYTES), Vec::new()).run(queue)?;
        read_latency_ns = read_latency_ns.min(started.elapsed().as_nanos() as u64);
    }
    Ok(Rates { write_bytes_per_s, read_bytes_per_s, read_latency_ns })
}

fn rate(bytes: u64, started: Instant) -> u64 {
    let ns = started.elapsed().as_nanos().max(1);
    u64::try_from(u128::from(bytes) * 1_000_000_000 / ns).unwrap_or(u64::MAX)
}
