//! What is to be simulated.

use serde::{Deserialize, Serialize};

use dormouse_schedule::Machine;

/// Steps of all ranks together.
pub const STEPS_MAX: usize = 1 << 24;
/// Blocks of all ranks together, and exchanges.
pub const BLOCKS_MAX: usize = 1 << 26;

/// A memory tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// Device memory.
    Device,
    /// Pinned host memory.
    Host,
    /// The file.
    File,
}

/// The tier a block sleeps in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SleepTier {
    /// Pinned host memory.
    #[default]
    Host,
    /// The file, through the host.
    File,
}

/// A rank's links.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyLink {
    /// Device to host.
    Sleep,
    /// Host to file.
    Write,
    /// File to host.
    Read,
    /// Host to device.
    Wake,
}

impl CopyLink {
    /// In the order in which those that may start at one time take room.
    pub const ALL: [Self; 4] = [Self::Sleep, Self::Write, Self::Read, Self::Wake];

    /// Where its copies come from and go to.
    pub(super) const fn ends(self) -> [Tier; 2] {
        match self {
            Self::Sleep => [Tier::Device, Tier::Host],
            Self::Write => [Tier::Host, Tier::File],
            Self::Read => [Tier::File, Tier::Host],
            Self::Wake => [Tier::Host, Tier::Device],
        }
    }

    /// Its rate; 0 where unknown.
    pub(super) const fn bytes_per_s(self, machine: &Machine) -> u64 {
        match self {
            Self::Sleep => machine.sleep_bytes_per_s,
            Self::Write => machine.nvme_write_bytes_per_s,
            Self::Read => machine.nvme_read_bytes_per_s,
            Self::Wake => machine.wake_bytes_per_s,
        }
    }
}

/// A block told to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockSleep {
    /// Name of the value.
    pub block: u32,
    /// Where.
    pub tier: SleepTier,
}

/// One step of a rank. Blocks are numbers into [`SimulatedRank::block_bytes`], exchanges into
/// [`World::exchanges`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SimulatedStep {
    /// Compute time including overhead, in nanoseconds.
    pub compute_ns: u64,
    /// On the device while it runs, made by an earlier step.
    pub needs: Vec<u32>,
    /// Made by it, on the device. A block is made once.
    pub allocates: Vec<u32>,
    /// Gone after it, wherever they are.
    pub frees: Vec<u32>,
    /// Told to sleep after it.
    pub sleeps: Vec<BlockSleep>,
    /// Told to wake when it is reached.
    pub wakes: Vec<u32>,
    /// Sent after it.
    pub sends: Vec<u32>,
    /// Arrived before it starts.
    pub receives: Vec<u32>,
}

/// The program of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SimulatedRank {
    /// Rates of its links and bytes of its tiers; 0 bytes set no bound, a rate of 0 may not be used.
    /// Rates of compute are not read: steps say how long they take.
    pub machine: Machine,
    /// Bytes of each block.
    pub block_bytes: Vec<u64>,
    /// Its steps, in order.
    pub steps: Vec<SimulatedStep>,
}

/// A transfer between two ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepExchange {
    /// The sender.
    pub from: u32,
    /// The receiver.
    pub to: u32,
    /// How much.
    pub bytes: u64,
}

/// Ranks, and what is between them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct World {
    /// The ranks.
    pub ranks: Vec<SimulatedRank>,
    /// All exchanges.
    pub exchanges: Vec<StepExchange>,
    /// From one rank to another, each pair and direction for itself. Bytes per second; 0 is endless.
    pub link_bytes_per_s: u64,
    /// Every exchange, whatever its size. Nanoseconds.
    pub link_latency_ns: u64,
    /// Bytes a ring reduces when all ranks are done: each sends 2·(n−1)/n of them over one link.
    pub collective_bytes: u64,
}

/// Nanoseconds of a copy, rounded up; 0 where the link is endless.
pub(super) fn copy_ns(bytes: u128, bytes_per_s: u64) -> u64 {
    dormouse_residency::copy_ns(bytes, bytes_per_s).unwrap_or(0)
}
