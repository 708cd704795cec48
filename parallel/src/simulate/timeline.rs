//! Timeline of all ranks.

use serde::{Deserialize, Serialize};

use super::world::{CopyLink, Tier};

/// From when to when.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenStep {
    /// It starts.
    pub start_ns: u64,
    /// It ends.
    pub end_ns: u64,
}

/// A step's times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTime {
    /// The step before has ended.
    pub reached_ns: u64,
    /// It starts.
    pub start_ns: u64,
    /// It ends.
    pub end_ns: u64,
}

/// A copy's times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyTime {
    /// Over which link.
    pub link: CopyLink,
    /// Of which block.
    pub block: u32,
    /// It starts.
    pub start_ns: u64,
    /// It ends.
    pub end_ns: u64,
}

/// Reason of a wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waits {
    /// Exchanges of other ranks.
    pub exchanges_ns: u64,
    /// Room on the device.
    pub room_ns: u64,
    /// Blocks that sleep.
    pub wakes_ns: u64,
}

/// Bytes of each tier from a time on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySample {
    /// From when.
    pub ns: u64,
    /// On the device.
    pub device_bytes: u64,
    /// On the host.
    pub host_bytes: u64,
    /// In the file.
    pub file_bytes: u64,
}

impl MemorySample {
    /// Bytes of one tier.
    #[must_use]
    pub const fn bytes(&self, tier: Tier) -> u64 {
        match tier {
            Tier::Device => self.device_bytes,
            Tier::Host => self.host_bytes,
            Tier::File => self.file_bytes,
        }
    }
}

/// Timeline of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankTimeline {
    /// Its steps, as given.
    pub steps: Vec<StepTime>,
    /// Its copies, by end.
    pub copies: Vec<CopyTime>,
    /// Bytes over time: a sample where they change.
    pub bytes: Vec<MemorySample>,
    /// The most each tier held; `ns` is 0.
    pub peak: MemorySample,
    /// Compute time of its steps, in nanoseconds.
    pub compute_ns: u64,
    /// Wait time between steps, in nanoseconds.
    pub waits: Waits,
    /// How long each link was busy, in the order of [`CopyLink::ALL`].
    pub link_busy_ns: [u64; 4],
    /// Blocks woken only when they were needed.
    pub demand_wakes: u64,
    /// Its last step's end.
    pub end_ns: u64,
}

impl RankTimeline {
    /// What memory cost in time: waits for room and for blocks that sleep.
    #[must_use]
    pub const fn stall_ns(&self) -> u64 {
        self.waits.room_ns.saturating_add(self.waits.wakes_ns)
    }

    /// Part of the rank's time that a link was busy, 0 to 1.
    #[must_use]
    pub fn utilisation(&self, link: CopyLink) -> f64 {
        self.link_busy_ns[link as usize] as f64 / self.end_ns.max(1) as f64
    }
}

/// Timeline of all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// Each rank.
    pub ranks: Vec<RankTimeline>,
    /// Each exchange.
    pub exchanges: Vec<OpenStep>,
    /// The reduction at the end; empty where there is none.
    pub collective: OpenStep,
    /// The slowest rank and the reduction.
    pub total_ns: u64,
}
