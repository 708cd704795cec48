//! What the owner of the memory adds to a snapshot: facts that no ring of events holds.

use crate::event::{LANES, Lane};

/// Limit of the blocks in [`Facts`]: a page shows the largest.
pub const BLOCKS_MAX: usize = 20;

/// What the owner of the memory knows when a dump is written. All fields may be empty: a dump leaves out
/// what it is not told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Why the dump was written, in one sentence or more lines; empty if somebody asked for it.
    pub reason: String,
    /// Limit of the mapped device bytes; 0 if unknown.
    pub budget_bytes: u64,
    /// The most device bytes that were handed out and awake at once so far, in the window or before it; 0 if unknown.
    pub peak_bytes: u64,
    /// The best rate that each lane of copies has shown, in bytes/s, in the order of [`Lane::ALL`]; 0 if
    /// unknown.
    pub bytes_per_s: [u64; LANES],
    /// When `blocks` were alive, `CLOCK_MONOTONIC` in nanoseconds.
    pub blocks_at_ns: u64,
    /// The largest live blocks of that moment, largest first, at most [`BLOCKS_MAX`].
    pub blocks: Vec<LiveBlock>,
    /// The number and bytes of all live blocks of that moment.
    pub blocks_total: (u64, u64),
}

impl Facts {
    /// Returns the best rate of `lane`, if known.
    pub(crate) fn rate(&self, lane: Lane) -> Option<u64> {
        Some(self.bytes_per_s[lane as usize]).filter(|rate| *rate > 0)
    }
}

/// A block of device memory that is in use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveBlock {
    /// Its address.
    pub address: u64,
    /// Its size in bytes.
    pub bytes: u64,
    /// What it is: "K and V", "saved activations", …
    pub role: String,
    /// Its tag, or the name of its prefix; may be empty.
    pub tag: String,
    /// The stream that allocated it, by its handle; 0 is the default stream.
    pub stream: u64,
    /// Its layer, if known.
    pub layer: Option<u32>,
}
