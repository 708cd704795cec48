//! What a CRC-32C costs, ours and the crate's in turn: prints one line of JSON, seconds per GB.
//!
//! Over memory that no cache holds, a chunk at a time as the file tier takes sums, and over one
//! piece that stays in a core's cache.
#![allow(clippy::print_stdout, reason = "its output")]

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use dormouse_storage::{Aligned, CHUNK_BYTES, IoMemory};

/// Several times what any cache holds.
const MEMORY_BYTES: usize = 1 << 30;
const CACHED_BYTES: usize = 256 << 10;
const ROUNDS: usize = 9;

fn main() -> Result<(), Box<dyn Error>> {
    let mut buffer = Aligned::zeroed(MEMORY_BYTES).ok_or("a GiB of memory is needed")?;
    for (at, byte) in buffer.as_mut_slice().iter_mut().enumerate() {
        *byte = (at ^ (at >> 8)) as u8;
    }
    let memory = buffer.memory();
    let slice = buffer.as_slice();
    let mut times: [Vec<f64>; 4] = Default::default();
    for _ in 0..ROUNDS {
        let [ours, theirs, ours_cached, theirs_cached] = &mut times;
        ours.push(over(CHUNK_BYTES, |at| memory.part(at, CHUNK_BYTES).crc32c()));
        theirs.push(over(CHUNK_BYTES, |at| crc32c::crc32c(&slice[at..at + CHUNK_BYTES])));
        let piece: IoMemory = memory.part(0, CACHED_BYTES);
        ours_cached.push(over(CACHED_BYTES, |_| piece.crc32c()));
        theirs_cached.push(over(CACHED_BYTES, |_| crc32c::crc32c(&slice[..CACHED_BYTES])));
    }
    let [ours, theirs, ours_cached, theirs_cached] = times.map(median);
    println!(
        r#"{{"ours": {ours}, "crate": {theirs}, "ours_cached": {ours_cached}, "crate_cached": {theirs_cached}}}"#
    );
    Ok(())
}

/// Seconds per GB of sums of as many bytes as there are, piece by piece.
fn over(piece_bytes: usize, sum: impl Fn(usize) -> u32) -> f64 {
    let started = Instant::now();
    for at in (0..MEMORY_BYTES).step_by(piece_bytes) {
        black_box(sum(at));
    }
    started.elapsed().as_secs_f64() / (MEMORY_BYTES as f64 / 1e9)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
