//! The report of a prefix.

use crate::engine::StrayWakes;
use crate::places::Phase;
use dormouse_residency::LinkRates;

/// Report of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerReport {
    /// Bytes named dormant and accepted.
    pub dormant_bytes: u64,
    /// Dormant bytes asleep or falling asleep when waking began.
    pub asleep_bytes_at_b: u64,
    /// Forward time between its marks in nanoseconds; stream time on a GPU.
    pub forward_ns: u64,
    /// Backward time in nanoseconds, measured the same way.
    pub backward_ns: u64,
    /// Time its backward waited for copies, in nanoseconds.
    pub stall_ns: u64,
}

/// The residency plan of a prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Planned {
    /// Bytes that stay awake.
    pub kept_bytes: u64,
    /// Bytes that sleep in pinned memory.
    pub host_bytes: u64,
    /// Bytes that sleep in the file.
    pub nvme_bytes: u64,
    /// Predicted stall time in nanoseconds, at the measured rates.
    pub stall_ns: u64,
}

/// Report of one prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PrefixReport {
    /// Number of layers.
    pub layers: u32,
    /// Bytes named dormant and accepted.
    pub dormant_bytes: u64,
    /// Bytes of boundary tensors.
    pub boundary_bytes: u64,
    /// Bytes of their accumulators.
    pub accumulator_bytes: u64,
    /// Dormant bytes asleep when waking began (the end of B).
    pub asleep_bytes_at_b: u64,
    /// Peak of bytes asleep.
    pub asleep_bytes_peak: u64,
    /// Peak of bytes asleep in pinned memory.
    pub host_bytes_peak: u64,
    /// Peak of bytes asleep in the file.
    pub nvme_bytes_peak: u64,
    /// Bytes written to the file.
    pub written_bytes: u64,
    /// Bytes read from the file.
    pub read_bytes: u64,
    /// Write throughput while busy, in bytes/s; 0 if nothing was written.
    pub write_bytes_per_s: u64,
    /// Read throughput while busy, in bytes/s; 0 if nothing was read.
    pub read_bytes_per_s: u64,
    /// Recent throughput of the engine's links in bytes/s; 0 if unknown.
    pub link_rates: LinkRates,
    /// Time the trainer waited for copies, in nanoseconds: its threads, and on a GPU its streams before each
    /// backward.
    pub stall_ns: u64,
    /// Lower bound of the stall in nanoseconds, at the best rates seen and with unlimited memory: the larger of
    /// the bounds of the file link and the host link.
    pub stall_bound_ns: u64,
    /// The residency plan, if there is one.
    pub planned: Option<Planned>,
    /// Reports of the layers.
    pub layer: Vec<LayerReport>,
    /// Reasons that memory stayed awake, each once with its count.
    pub declined: Vec<String>,
    /// The phase with the highest device memory use.
    pub peak_phase: Option<Phase>,
    /// Peak device memory use in bytes per phase, by [`Phase::index`].
    pub phase_peak_bytes: [u64; 3],
    /// Bytes still asleep after `close` because their wake failed. They stay valid until freed.
    pub left_asleep_bytes: u64,
    /// Wakes by accesses to sleeping memory that no mark had announced.
    pub stray: StrayWakes,
}
