//! Input of the simulator.

use serde::{Deserialize, Serialize};

use dormouse_residency::{LinkRates, Tier};
use dormouse_schedule::Machine;

/// Maximum steps of all ranks together.
pub const STEPS_MAX: usize = 1 << 24;
/// Maximum blocks of all ranks together; also the maximum number of exchanges.
pub const BLOCKS_MAX: usize = 1 << 26;

/// A request that a block sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockSleep {
    /// Block number.
    pub block: u32,
    /// The tier it sleeps in; NVMe is reached through the host.
    pub tier: Tier,
}

/// One step of a rank. Blocks are numbers into [`SimulatedRank::block_bytes`], exchanges into
/// [`World::exchanges`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SimulatedStep {
    /// Compute time including overhead, in nanoseconds.
    pub compute_ns: u64,
    /// Blocks of earlier steps that must be on the device while it runs.
    pub needs: Vec<u32>,
    /// Blocks allocated on the device when it starts; each block is allocated once.
    pub allocates: Vec<u32>,
    /// Blocks freed after it, in whichever tier they are.
    pub frees: Vec<u32>,
    /// Blocks that sleep after it.
    pub sleeps: Vec<BlockSleep>,
    /// Blocks that wake when it is reached.
    pub wakes: Vec<u32>,
    /// Exchanges sent after it.
    pub sends: Vec<u32>,
    /// Exchanges that must arrive before it starts.
    pub receives: Vec<u32>,
}

/// The program of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SimulatedRank {
    /// Rates of its links and capacities of its tiers; 0 bytes means unbounded, a link of rate 0 must
    /// not be used. Compute rates are ignored: steps have times.
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
    /// Size in bytes.
    pub bytes: u64,
}

/// Ranks and the exchanges between them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct World {
    /// The ranks.
    pub ranks: Vec<SimulatedRank>,
    /// All exchanges.
    pub exchanges: Vec<StepExchange>,
    /// Link rate per pair of ranks and direction, in bytes/s; 0 means unlimited.
    pub link_bytes_per_s: u64,
    /// Latency per exchange, in nanoseconds.
    pub link_latency_ns: u64,
    /// Bytes reduced by a ring when all ranks are done: each of n ranks sends 2·(n−1)/n of them.
    pub collective_bytes: u64,
}

/// Returns the rates of a machine's links.
pub(super) const fn link_rates(machine: &Machine) -> LinkRates {
    LinkRates {
        device_to_nvme_bytes_per_s: machine.nvme_write_bytes_per_s,
        nvme_to_device_bytes_per_s: machine.nvme_read_bytes_per_s,
        device_to_host_bytes_per_s: machine.sleep_bytes_per_s,
        host_to_device_bytes_per_s: machine.wake_bytes_per_s,
    }
}

/// Returns the capacity of a tier in bytes; `None` if unbounded.
pub(super) fn capacity_bytes(machine: &Machine, tier: Tier) -> Option<u64> {
    let bytes = match tier {
        Tier::Device => machine.device_bytes,
        Tier::Host => machine.host_bytes,
        Tier::Nvme => 0,
    };
    (bytes > 0).then_some(bytes)
}
