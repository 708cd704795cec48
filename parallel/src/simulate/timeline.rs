//! Timeline of all ranks.

use serde::{Deserialize, Serialize};

use dormouse_residency::LinkDirection;

/// Start and end of an op or a transfer, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeSpan {
    /// Start.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
}

/// A step's times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTime {
    /// End of the previous step.
    pub reached_ns: u64,
    /// Start.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
}

/// A copy's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyTime {
    /// The link.
    pub link: LinkDirection,
    /// Block number.
    pub block: u32,
    /// Start.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
}

/// Time a rank waited, by reason, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// For exchanges from other ranks.
    pub exchanges_ns: u64,
    /// For room on the device.
    pub room_ns: u64,
    /// For blocks to wake.
    pub wakes_ns: u64,
}

/// Bytes in each tier from a time on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySample {
    /// The time, in nanoseconds.
    pub ns: u64,
    /// On the device.
    pub device_bytes: u64,
    /// On the host.
    pub host_bytes: u64,
    /// In the NVMe file.
    pub nvme_bytes: u64,
}

/// Timeline of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankTimeline {
    /// Times of its steps, in their order.
    pub steps: Vec<StepTime>,
    /// Its copies, by end time.
    pub copies: Vec<CopyTime>,
    /// Bytes over time, one sample per change.
    pub bytes: Vec<MemorySample>,
    /// Peak bytes of each tier; `ns` is 0.
    pub peak: MemorySample,
    /// Compute time of its steps, in nanoseconds.
    pub compute_ns: u64,
    /// Wait time between steps, in nanoseconds.
    pub waits: Waits,
    /// Busy time of each link in nanoseconds, in the order of [`LinkDirection::ALL`].
    pub link_busy_ns: [u64; 4],
    /// Number of blocks woken only when a step needed them.
    pub demand_wakes: u64,
    /// End of its last step.
    pub end_ns: u64,
}

/// Timeline of all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// Each rank.
    pub ranks: Vec<RankTimeline>,
    /// Each exchange.
    pub exchanges: Vec<TimeSpan>,
    /// The final reduction; empty if there is none.
    pub collective: TimeSpan,
    /// End of the simulation: the slowest rank and the reduction.
    pub total_ns: u64,
}
