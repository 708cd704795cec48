//! Errors of the simulator.

use dormouse_residency::{LinkDirection, Tier};
use dormouse_schedule::PlanError;

/// An error of the simulator.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SimulateError {
    /// A number is out of range.
    #[error(transparent)]
    Count(#[from] PlanError),
    /// A step uses a block that does not exist, or allocates one that does.
    #[error("rank {rank}, step {step}: block {block} {problem}")]
    Block {
        /// Rank number.
        rank: usize,
        /// Step number.
        step: usize,
        /// Block number.
        block: u32,
        /// Description of the problem.
        problem: &'static str,
    },
    /// An exchange is not sent exactly once and received exactly once.
    #[error("exchange {exchange} {problem}")]
    Exchange {
        /// Exchange number.
        exchange: u32,
        /// Description of the problem.
        problem: &'static str,
    },
    /// A copy needs a link whose rate is unknown.
    #[error("rank {rank}: the {link:?} link has rate 0; accepted: 1 byte/s or more")]
    Rate {
        /// Rank number.
        rank: usize,
        /// The link.
        link: LinkDirection,
    },
    /// A block exceeds the capacity of a tier it must be in.
    #[error(
        "rank {rank}: block {block} has {seen} bytes; accepted: at most {most}, the capacity of {tier:?}"
    )]
    TooLarge {
        /// Rank number.
        rank: usize,
        /// Block number.
        block: u32,
        /// Size in bytes.
        seen: u64,
        /// The tier.
        tier: Tier,
        /// Capacity of the tier in bytes.
        most: u64,
    },
    /// Deadlock: no event is left and a rank has not finished.
    #[error(
        "deadlock: rank {rank} waits for {waits_for} before step {step} with {device_bytes} bytes on \
         the device and {host_bytes} on the host"
    )]
    Stuck {
        /// First rank that has not finished.
        rank: usize,
        /// Step it waits for.
        step: usize,
        /// `exchanges`, `room` or `wakes`.
        waits_for: &'static str,
        /// Bytes on the device.
        device_bytes: u64,
        /// Bytes on the host.
        host_bytes: u64,
    },
}
