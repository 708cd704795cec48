//! What one prefix did, in figures.

use super::order::Phase;
use dormouse_residency::LinkRates;

/// One layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerReport {
    /// Bytes named dormant and accepted.
    pub dormant_bytes: u64,
    /// Bytes of them asleep (or on their way) when waking began.
    pub asleep_bytes_at_b: u64,
    /// Its forward, between its marks: as its stream came to them, on a GPU.
    pub forward_ns: u64,
    /// Its backward, the same.
    pub backward_ns: u64,
    /// Time its backward's begin waited for copies.
    pub stall_ns: u64,
}

/// What a prefix's plan made of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Planned {
    /// Bytes to stay awake.
    pub kept_bytes: u64,
    /// To sleep in pinned memory.
    pub host_bytes: u64,
    /// To sleep in the file.
    pub nvme_bytes: u64,
    /// The time it expects to wait for copies, at the rates measured.
    pub stall_ns: u64,
}

/// One prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixReport {
    /// Layers.
    pub layers: u32,
    /// Bytes named dormant and accepted.
    pub dormant_bytes: u64,
    /// Bytes of boundary tensors.
    pub boundary_bytes: u64,
    /// Bytes of their accumulators.
    pub accumulator_bytes: u64,
    /// Dormant bytes asleep when waking began (the end of B).
    pub asleep_bytes_at_b: u64,
    /// The most bytes asleep at a time.
    pub asleep_bytes_peak: u64,
    /// The most of them in pinned memory.
    pub host_bytes_peak: u64,
    /// The most of them in the file.
    pub nvme_bytes_peak: u64,
    /// Bytes written to the file.
    pub written_bytes: u64,
    /// Bytes read from the file.
    pub read_bytes: u64,
    /// While anything was written; 0 where nothing was.
    pub write_bytes_per_s: u64,
    /// While anything was read; 0 where nothing was.
    pub read_bytes_per_s: u64,
    /// What the engine's links carry, as measured and seen so far.
    pub link_rates: LinkRates,
    /// Time the trainer's work waited for copies: that of its threads, and on a GPU that of its
    /// streams at the begin of backwards, whether for threads or for copies.
    pub stall_ns: u64,
    /// What it must have waited at the best rates measured and seen, with unlimited memory: for the
    /// link from the file or that from host memory, whichever took longer.
    pub stall_bound_ns: u64,
    /// What its plan says, where it has one.
    pub planned: Option<Planned>,
    /// Each layer.
    pub layer: Vec<LayerReport>,
    /// Why something stayed awake: each reason once, whatever its figures, and how often.
    pub declined: Vec<String>,
    /// The phase with the highest use of device memory, as seen at the marks.
    pub peak_phase: Option<Phase>,
    /// The highest use seen in each phase, by [`Phase::index`].
    pub phase_peak_bytes: [u64; 3],
    /// Bytes still asleep after `close`: they could not be woken, and wait for their owner's free.
    pub left_asleep_bytes: u64,
}
